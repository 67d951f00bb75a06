"""The objects that a resource owns in its namespace, and those without an owner."""

from __future__ import annotations

from typing import Any

from cluster import INFD, Cluster, until

KINDS = (
    f"{INFD},deployments,replicasets,statefulsets,pods,services,endpointslices,configmaps,secrets,pdb,networkpolicies"
)
OF_KUBERAY = ",rayservices,rayclusters"
OF_KUBERNETES = {"kube-root-ca.crt"}


def objects(cluster: Cluster, namespace: str) -> list[dict[str, Any]]:
    """Return all objects of these kinds, except those that Kubernetes creates in each namespace."""
    kinds = KINDS + (OF_KUBERAY if cluster.get("crd", "rayclusters.ray.io") else "")
    found = cluster.get(kinds, namespace=namespace)
    return [each for each in found if each["metadata"]["name"] not in OF_KUBERNETES]


def leftovers(cluster: Cluster, namespace: str) -> list[str]:
    """Return the objects without an owner, in deletion, or held by a finalizer."""
    found = objects(cluster, namespace)
    uids = {each["metadata"]["uid"] for each in found}
    said = []
    for each in found:
        meta, kind = each["metadata"], each["kind"]
        name = f"{kind} {meta['name']}"
        owners = {owner["uid"] for owner in meta.get("ownerReferences", ())}
        if kind != "InferenceDeployment" and not owners & uids:
            said.append(f"{name} has no owner")
        if "deletionTimestamp" in meta:
            said.append(f"{name} is still going")
        # KubeRay gives each of its objects a finalizer. One in deletion is listed above.
        held = [each for each in meta.get("finalizers", ()) if not each.startswith("ray.io/")]
        if held:
            said.append(f"{name} is held by {held}")
    return said


def wait_tidy(cluster: Cluster, namespace: str, *, seconds: float = 90) -> None:
    """Wait until no such object is left."""
    left: list[str] = []

    def is_tidy() -> bool:
        left[:] = leftovers(cluster, namespace)
        return not left

    try:
        until(is_tidy, seconds=seconds, said="nothing is left over")
    except AssertionError:
        raise AssertionError(f"left over after {seconds:g} s: {left}") from None
