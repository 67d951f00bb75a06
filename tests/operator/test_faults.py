"""Whatever is killed, refused or away, the cluster ends as the resource says, with nothing made twice."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import yaml
from control_plane import ControlPlane, control_plane
from faults import Answer, Call, Proxy, proxy
from operated import Cluster, Operator, installed, optional_kinds, running, until

from ballast_api.base import VALIDATIONS
from ballast_api.names import API_VERSION, KIND

pytestmark = pytest.mark.envtest

CRD = Path(__file__).parent.parent.parent / "crds" / "ballast.dev_inferencedeployments.yaml"
CHILDREN = ("deployments", "services", "poddisruptionbudgets", "networkpolicies")
ERRORS = "ballast_operator_reconcile_errors_total{"


def is_right(cluster: Cluster, name: str = "llm") -> bool:
    """Every child is there, once, and the status speaks of this generation."""
    if not all(cluster.names(kind) == [name] for kind in CHILDREN) or not cluster.get(
        "configmaps", f"{name}-ballast-config"
    ):
        return False
    resource = cluster.resource(name)
    return resource.get("status", {}).get("observedGeneration") == resource["metadata"]["generation"]


def ends_right(cluster: Cluster) -> None:
    until(lambda: is_right(cluster), said="all children and the status")
    until(cluster.pods, said="a pod")


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
def test_the_operator_may_be_killed_at_every_step(between: Proxy, cluster: Cluster, tmp_path: Path, when: str) -> None:
    """A new operator each time, killed before or after its n-th write, until one lives to the end."""
    cluster.make()
    lease = f"lease-{cluster.namespace}"
    for step in range(1, 12):
        operator = Operator(between.kubeconfig, tmp_path, lease=lease)
        killer = Killer(operator, cluster.namespace, step)
        between.before = killer.before if when == "before" else lambda _: None
        between.after = killer.after if when == "after" else lambda _: None
        operator.start()
        until(lambda k=killer: k.is_done or is_right(cluster), said="killed, or done")
        between.before, between.after = lambda _: None, lambda _: None
        operator.kill()
        operator.delete_lease()
        if not killer.is_done:
            break
        for kind in CHILDREN:  # the next one begins from nothing
            cluster.delete(kind, "llm")
        cluster.delete("configmaps", "llm-ballast-config")
        cluster.patch("inferencedeployments", "llm", {"spec": {"slots": step}})

    assert step == 7, "five children and the status, and one that lives"
    with running(between.kubeconfig, tmp_path):
        ends_right(cluster)


class Killer:
    """Kills an operator at one of its writes."""

    def __init__(self, operator: Operator, namespace: str, step: int) -> None:
        self.is_done = False
        self._operator = operator
        self._namespace = namespace
        self._left = step

    def before(self, call: Call) -> Answer | None:
        return (503, {}) if self._is_it(call) else None

    def after(self, call: Call) -> None:
        self._is_it(call)

    def _is_it(self, call: Call) -> bool:
        if call.is_write and self._namespace in call.path:
            self._left -= 1
        if self._left == 0 and not self.is_done and self._operator.process is not None:
            self._operator.process.kill()
            self.is_done = True
        return self.is_done


FAULTS: dict[str, Answer] = {
    "409": (409, {}),
    "429": (429, {"Retry-After": "1"}),
    "500": (500, {}),
    "503": (503, {}),
    "401": (401, {}),
}


@pytest.mark.parametrize("name", FAULTS)
def test_every_write_may_be_refused_once(between: Proxy, cluster: Cluster, tmp_path: Path, name: str) -> None:
    """What was refused is tried again; nothing is given up and nothing reported as wrong."""
    refused: set[str] = set()

    def refuse(call: Call) -> Answer | None:
        if call.is_write and cluster.namespace in call.path and call.path not in refused:
            refused.add(call.path)
            return FAULTS[name]
        return None

    between.before = refuse
    with running(between.kubeconfig, tmp_path) as operator:
        cluster.make()
        ends_right(cluster)
        cluster.says("Degraded", "False")
        failed = sum(n for series, n in operator.metrics().items() if series.startswith(ERRORS))
    assert len(refused) >= 6
    assert failed > 0


def test_every_read_and_every_stream_may_be_refused_once(between: Proxy, cluster: Cluster, tmp_path: Path) -> None:
    """At the start, during the first lists and watches: too busy, failed, unavailable, unauthorized, in turn."""
    answers = cycle([FAULTS["429"], FAULTS["500"], FAULTS["503"], FAULTS["401"]])
    refused: set[tuple[str, bool]] = set()

    def refuse(call: Call) -> Answer | None:
        key = call.path, "watch" in call.query
        if call.method == "GET" and key not in refused:
            refused.add(key)
            return next(answers)
        return None

    between.before = refuse
    with running(between.kubeconfig, tmp_path) as operator:
        cluster.make()
        ends_right(cluster)
        until(lambda: ("/api/v1/services", True) in refused, said="a watch that was refused")
        assert operator.is_running


def test_a_deletion_that_no_stream_showed_is_found(between: Proxy, cluster: Cluster, tmp_path: Path) -> None:
    """As after a stream was away for longer than the server's memory."""
    with running(between.kubeconfig, tmp_path, BALLAST_AUDIT_SECONDS="2") as operator:
        cluster.make()
        ends_right(cluster)
        between.mute = lambda call: call.path == "/api/v1/services"
        cluster.delete("services", "llm")
        until(lambda: cluster.get("services", "llm"))

        assert "an audit found a deletion" in operator.text()


def test_watches_that_expired_are_taken_up_anew(between: Proxy, cluster: Cluster, tmp_path: Path) -> None:
    """As after a compaction: each stream is refused once, and whatever it was to bring is listed."""
    expired: set[str] = set()

    def expire(call: Call) -> bool:
        is_first = call.path not in expired
        expired.add(call.path)
        return is_first

    between.expire = expire
    with running(between.kubeconfig, tmp_path) as operator:
        cluster.make()
        ends_right(cluster)
        cluster.delete("services", "llm")
        until(lambda: cluster.get("services", "llm"))
        cluster.patch("inferencedeployments", "llm", {"spec": {"slots": 3}})
        until(lambda: is_right(cluster), said="the change")
        assert operator.is_running
    assert "/apis/ballast.dev/v1alpha1/inferencedeployments" in expired


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A plane that may be broken, for nobody else uses it."""
    with control_plane(tmp_path_factory.mktemp("own-plane")) as plane:
        plane.kubectl("apply", "--server-side", "-f", str(CRD))
        plane.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=30s")
        yield Cluster(plane, "default")


def test_the_api_server_may_restart(own: Cluster, tmp_path: Path) -> None:
    with running(own.plane.kubeconfig, tmp_path):
        own.make("before")
        until(lambda: is_right_among(own, "before"))
        own.plane.kill("kube-apiserver")
        own.plane.start_apiserver()
        own.make("after")
        until(lambda: is_right_among(own, "after"), seconds=60)
        own.delete("deployments", "before")
        until(lambda: is_right_among(own, "before"), seconds=60)


def test_the_crd_may_change_with_objects_present(own: Cluster, tmp_path: Path) -> None:
    """What an older or newer schema let in, and this version cannot take, keeps its pods and says so."""
    crd = yaml.safe_load(CRD.read_text())
    with running(own.plane.kubeconfig, tmp_path):
        own.make("kept")
        until(lambda: is_right_among(own, "kept"))
        spec = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
        spec["properties"]["fromTheFuture"] = {"type": "string"}
        own.plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", manifest=crd)

        def is_taken() -> bool:
            own.patch("inferencedeployments", "kept", {"spec": {"fromTheFuture": "x"}})
            return "fromTheFuture" in own.resource("kept")["spec"]

        until(is_taken, said="the new schema")

        def is_told() -> bool:
            """A watch of the old schema shows changes without the field. One report of it is enough."""
            own.patch("inferencedeployments", "kept", {"metadata": {"annotations": {"tick": str(time.monotonic())}}})
            degraded = own.condition("Degraded", "kept")
            return degraded["reason"] == "InvalidSpec" and "fromTheFuture" in degraded["message"]

        until(is_told, said="the unknown field named")
        assert own.get("deployments", "kept")
        own.patch("inferencedeployments", "kept", {"spec": {"fromTheFuture": None, "replicas": 2}})
        until(lambda: own.get("deployments", "kept")["spec"]["replicas"] == 2)
        own.says("Degraded", "False", name="kept")


def test_a_resource_of_an_older_schema_with_the_native_engine_on_gpus_keeps_its_pods(
    own: Cluster, tmp_path: Path
) -> None:
    text = CRD.read_text()
    older = yaml.safe_load(text)
    spec = older["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    spec["x-kubernetes-validations"] = [
        each for each in spec["x-kubernetes-validations"] if "native engine runs on CPUs" not in each["message"]
    ]
    with running(own.plane.kubeconfig, tmp_path):
        own.make("gpus", gpu={"count": 1})
        until(lambda: own.get("deployments", "gpus"))
        own.plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", manifest=older)

        def is_taken() -> bool:
            with suppress(AssertionError):  # the API server may still refuse it by the newer schema
                own.patch("inferencedeployments", "gpus", {"spec": {"engine": {"backend": "native"}}})
            return own.resource("gpus")["spec"]["engine"].get("backend") == "native"

        until(is_taken, said="the older schema")
        own.plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", manifest=yaml.safe_load(text))
        degraded = own.says("Degraded", "True", name="gpus")
        assert degraded["reason"] == "InvalidSpec"
        assert "gpu.count (1) is above 0, and the native engine runs on CPUs" in degraded["message"]
        assert own.get("deployments", "gpus")

        own.patch("inferencedeployments", "gpus", {"spec": {"engine": {"backend": "vllm"}}})
        own.says("Degraded", "False", name="gpus")


def test_a_resource_of_an_older_schema_goes_on_if_a_later_rule_admits_what_is_stored(
    own: Cluster, tmp_path: Path
) -> None:
    text = CRD.read_text()
    older = yaml.safe_load(text)
    spec = older["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    vllm = spec["properties"]["engine"]["properties"]["vllm"]
    for schema in (spec, spec["properties"]["template"], vllm):
        schema[VALIDATIONS] = [each for each in schema[VALIDATIONS] if not each.get("optionalOldSelf")]
    claim = {"name": "cache", "persistentVolumeClaim": {"claimName": "models"}}
    faults: dict[str, dict[str, Any]] = {
        "gpu": {"template": {"resources": {"limits": {"nvidia.com/gpu": 4}}}},
        "claim": {"template": {"volumes": [claim]}},
        "argument": {"engine": {"backend": "vllm", "vllm": {"args": ["--hf-token=x"]}}},
    }
    others: list[tuple[str, dict[str, Any], str]] = [
        ("gpu", {"template": {"resources": {"limits": {"nvidia.com/gpu": 8}}}}, "template.resources names a GPU"),
        ("gpu", {"gpu": {"resourceName": "example.com/gpu"}}, "template.resources names a GPU"),
        ("claim", {"model": {"adapters": [{"name": "a", "uri": "pvc://c"}]}}, "template.volumes has a claim"),
        ("claim", {"model": {"uri": "pvc://models/b"}}, "template.volumes has a claim"),
        ("argument", {"engine": {"vllm": {"args": ["--hf-token=x", "--seed=1"]}}}, "engine.vllm.args: the section"),
    ]

    def asked(fault: dict[str, Any]) -> str:
        """Return the answer to the creation of a resource, which is dry."""
        new = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "new"}}
        new |= {"spec": {"model": {"uri": "pvc://models/a"}} | fault}
        done = own.plane.kubectl("create", "--dry-run=server", "-f", "-", manifest=new, check=False)
        return done.stdout + done.stderr

    with running(own.plane.kubeconfig, tmp_path):
        own.plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", manifest=older)
        for name, fault in faults.items():
            until(lambda: "created" in asked(fault), said="the older schema")  # noqa: B023 - called at once
            own.make(name, model={"uri": "pvc://models/a"}, **fault)
        own.plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", manifest=yaml.safe_load(text))
        for name, fault in faults.items():
            until(lambda: "is invalid" in asked(fault), said="the newer schema")  # noqa: B023 - called at once
            own.plane.kubectl("scale", "-n", own.namespace, f"infd/{name}", "--replicas=3")
            own.patch(
                "inferencedeployments", name, {"spec": {"slo": {"ttftMilliseconds": 250}, "model": {"servedName": "b"}}}
            )
            until(lambda: own.get("deployments", name)["spec"]["replicas"] == 3)  # noqa: B023 - called at once
            message = own.says("Degraded", "False", name=name)["message"]
            assert ("the section model decides" in message) is (name == "argument")
        for name, change, sentence in others:
            patch = json.dumps({"spec": change})
            done = own.plane.kubectl("patch", f"infd/{name}", "--type=merge", "-p", patch, check=False)
            assert sentence in done.stderr


def test_kinds_of_others_may_come_and_go(own: Cluster, tmp_path: Path) -> None:
    """The prometheus-operator installed and removed while this one runs."""
    kinds = yaml.safe_dump_all(optional_kinds())
    with running(own.plane.kubeconfig, tmp_path) as operator:
        own.make("watched")
        until(lambda: is_right_among(own, "watched"))
        own.plane.kubectl("apply", "--server-side", "-f", "-", manifest=kinds)
        until(lambda: own.get("servicemonitors", "watched") and own.get("prometheusrules", "watched"))
        assert "audit" not in operator.text(), "nobody waits ten minutes for one"
        own.plane.kubectl("delete", "-f", "-", manifest=kinds)
        own.patch("inferencedeployments", "watched", {"spec": {"monitoring": {"scrapeSeconds": 7}, "replicas": 2}})
        until(lambda: is_right_among(own, "watched"))
        assert own.get("deployments", "watched")["spec"]["replicas"] == 2


@pytest.mark.parametrize("asked", ["list", "watch"])
def test_a_watch_survives_a_kind_that_is_gone(own: Cluster, tmp_path: Path, asked: str) -> None:
    """The API server answers 404 before the watch of the CRDs shows a deletion. Here, no CRD is deleted."""
    gone: list[Call] = []

    def refuse_once(call: Call) -> Answer | None:
        is_it = call.path.endswith("/v1/servicemonitors") and ("watch" in call.query) == (asked == "watch")
        if call.method != "GET" or not is_it or gone:
            return None
        gone.append(call)
        return 404, {}

    name = f"gone-at-{asked}"
    with (
        installed(own.plane, optional_kinds()),
        proxy(own.plane) as between,
        running(between.kubeconfig, tmp_path) as operator,
    ):
        between.before = refuse_once
        own.make(name)
        until(lambda: own.get("servicemonitors", name), said="created")
        until(lambda: "its watch waits" in operator.text())
        own.patch("servicemonitors", name, {"spec": {"endpoints": []}})
        until(lambda: own.get("servicemonitors", name)["spec"]["endpoints"], said="the watch shows changes again")
        assert operator.is_running
        own.delete("inferencedeployments", name)


def test_deletion_needs_neither_operator_nor_redis(cluster: Cluster, tmp_path: Path) -> None:
    """Nothing holds a resource up, so an operator that was uninstalled first leaves nothing behind."""
    cluster.secret("redis", url="redis://127.0.0.1:9")
    with running(cluster.plane.kubeconfig, tmp_path):
        cluster.make(redis={"secretName": "redis"})
        ends_right(cluster)
        cluster.says("DeadlineAtRisk", "Unknown", "RedisUnreachable")
    assert "finalizers" not in cluster.resource()["metadata"]
    cluster.delete("inferencedeployments", "llm")

    until(lambda: not [kind for kind in (*CHILDREN, "pods") if cluster.names(kind)], said="nothing is left")


def is_right_among(cluster: Cluster, name: str) -> bool:
    resource = cluster.resource(name)
    is_reported = resource.get("status", {}).get("observedGeneration") == resource["metadata"]["generation"]
    return all(cluster.get(kind, name) for kind in CHILDREN) and is_reported


@pytest.mark.slow
def test_of_two_operators_one_is_active_and_the_other_takes_over(
    controllers: ControlPlane, cluster: Cluster, tmp_path: Path
) -> None:
    first = Operator(controllers.kubeconfig, tmp_path)
    second = Operator(controllers.kubeconfig, tmp_path, lease=first.lease)
    try:
        first.start()
        second.start(active=False)
        cluster.make()
        ends_right(cluster)
        assert second.metrics()["ballast_operator_active"] == 0
        assert first.stop() == 0  # gives its lease up
        cluster.patch("inferencedeployments", "llm", {"spec": {"slots": 3}})
        until(lambda: second.metrics()["ballast_operator_active"] == 1)
        ends_right(cluster)
        first.start(active=False)
        second.kill()  # gives nothing up: the lease has to end
        until(lambda: first.metrics()["ballast_operator_active"] == 1, seconds=40)
        cluster.patch("inferencedeployments", "llm", {"spec": {"slots": 4}})
        until(lambda: is_right(cluster))
    finally:
        for operator in (first, second):
            if operator.is_running:
                operator.kill()


def test_an_operator_whose_lease_was_taken_stops(controllers: ControlPlane, tmp_path: Path) -> None:
    operator = Operator(controllers.kubeconfig, tmp_path)
    operator.start()
    assert operator.process is not None
    lease = f"/apis/coordination.k8s.io/v1/namespaces/default/leases/{operator.lease}"
    merge = {"Content-Type": "application/merge-patch+json"}
    controllers.http.patch(lease, json={"spec": {"holderIdentity": "another"}}, headers=merge)

    assert operator.process.wait(20) == 1
