"""What the chart permits the operator and the users of a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import yaml
from chart import pod_of

from ballast_operator import permissions

if TYPE_CHECKING:
    from conftest import Helm

pytestmark = pytest.mark.helm


def test_roles_grant_what_the_operator_declares(helm: Helm) -> None:
    objects = helm.objects({})
    own = objects["Role/ballast-operator"]["rules"]
    granted = {(*each["apiGroups"], *each["resources"], verb) for each in own for verb in each["verbs"]}
    declared = {(each.group, *each.resources, verb) for each in permissions.OWN_NAMESPACE for verb in each.verbs}

    assert objects["ClusterRole/ballast-operator-system"]["rules"] == permissions.rules(permissions.CLUSTER)
    assert granted == declared


def test_the_operator_may_update_the_lease_that_it_reads_and_no_other(helm: Helm) -> None:
    objects = helm.objects({"fullnameOverride": "mine"})
    (container,) = pod_of(objects["Deployment/mine-operator"])["containers"]
    (lease,) = (each["value"] for each in container["env"] if each["name"] == "BALLAST_LEASE_NAME")
    updated = [each for each in objects["Role/mine-operator"]["rules"] if "update" in each["verbs"]]

    assert [each.get("resourceNames") for each in updated] == [[lease]]


def test_an_install_for_some_namespaces_has_roles_in_them_and_no_cluster_role(helm: Helm) -> None:
    values = {"operator": {"watchNamespaces": ["chat", "research"]}, "rbac": {"aggregate": False}}
    rendered = helm.template(values | {"crds": {"enabled": False}}).stdout
    objects = [each for each in yaml.safe_load_all(rendered) if each]
    roles = [each for each in objects if each["kind"] == "Role"]
    granted = {each["metadata"]["namespace"]: each["rules"] for each in roles}

    assert not [each for each in objects if each["kind"].startswith("ClusterRole")]
    assert granted["chat"] == granted["research"] == permissions.rules(permissions.NAMESPACES)
    bound = {
        (each["metadata"]["namespace"], each["roleRef"]["name"]): [
            (to["name"], to["namespace"]) for to in each["subjects"]
        ]
        for each in objects
        if each["kind"] == "RoleBinding"
    }
    account = ("ballast-operator", "system")
    assert bound == {(each["metadata"]["namespace"], each["metadata"]["name"]): [account] for each in roles}
    secrets = [rule for rule in granted["system"] if rule["resources"] == ["secrets"]]
    assert secrets == [
        {"apiGroups": [""], "resources": ["secrets"], "resourceNames": names, "verbs": verbs}
        for names, verbs in (
            (["ballast-redis", "ballast-valkey-tls"], ["get"]),
            (["ballast-operator-redis-users"], ["get", "patch"]),
        )
    ] + [{"apiGroups": [""], "resources": ["secrets"], "verbs": ["create"]}]


def test_the_usual_roles_of_kubernetes_get_rights_on_resources_and_not_on_their_status(helm: Helm) -> None:
    roles = [each for each in helm.objects({}).values() if each["kind"] == "ClusterRole"]
    verbs = {
        role: {
            (resource, verb)
            for each in roles
            if each["metadata"]["labels"].get(f"rbac.authorization.k8s.io/aggregate-to-{role}") == "true"
            for rule in each["rules"]
            for resource in rule["resources"]
            for verb in rule["verbs"]
        }
        for role in ("view", "edit", "admin")
    }

    assert verbs["view"] == {("inferencedeployments", verb) for verb in ("get", "list", "watch")}
    assert verbs["edit"] == verbs["admin"]
    assert verbs["edit"] == {
        *(("inferencedeployments", verb) for verb in ("create", "update", "patch", "delete", "deletecollection")),
        *(("inferencedeployments/scale", verb) for verb in ("get", "update", "patch")),
    }
