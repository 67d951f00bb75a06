"""What the operator knows of its surroundings, and that a part that is read slowly does not undo another."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import get_args

import pytest
from reconciled import make_operator
from resources import make_resource

from ballast_api.names import child_labels
from ballast_api.replicas import STARTUP_SECONDS
from ballast_api.sections import Backend
from ballast_operator.children.backends import BACKENDS
from ballast_operator.context import OperatorContext
from ballast_operator.errors import ClusterUnavailable, Forbidden
from ballast_operator.inference_deployment import plan
from ballast_operator.kinds import INFERENCE_DEPLOYMENT, RAY_SERVICE, SERVICE, SERVICE_MONITOR, Key, Kind
from ballast_operator.metrics import Metrics
from ballast_operator.plan import ClusterSnapshot
from ballast_operator.settings import OperatorSettings
from ballast_operator.web import Web


class SlowCluster:
    """Does not answer which kinds there are before it may."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.is_asked = asyncio.Event()

    async def plurals(self, _: object) -> frozenset[str]:
        self.is_asked.set()
        await self.may_answer.wait()
        return frozenset({"prometheusrules"})


def test_what_changes_while_the_kinds_are_read_is_kept() -> None:
    async def read() -> OperatorContext:
        cluster = SlowCluster()
        operator = make_operator(cluster)
        reading = asyncio.create_task(operator.context.read_kinds())
        await cluster.is_asked.wait()
        operator.context.note_refusal(is_refused=True)
        cluster.may_answer.set()
        await reading
        operator.poller.close()
        return operator.context.present

    context = asyncio.run(read())

    assert context.refuses_users is True
    assert "PrometheusRule" in context.kinds


class HalfCluster:
    """Shows the kinds of the groups in `available`."""

    available = ("ray.io", "monitoring.coreos.com")
    forbidden = SERVICE_MONITOR

    async def plurals(self, kind: Kind) -> frozenset[str]:
        if kind.group not in self.available:
            raise ClusterUnavailable("discover: the API server answered 503", is_about_one=True)
        return frozenset({"rayservices", "prometheusrules"})

    async def uids(self, kind: Kind, _: str) -> dict[Key, str]:
        if kind == self.forbidden:
            raise Forbidden(f"list {kind.path()}", 403, "no verb list")
        return {}


def test_an_audit_leaves_out_an_optional_kind_that_cannot_be_listed_and_no_other() -> None:
    cluster = HalfCluster()
    operator = make_operator(cluster)
    cache = operator.cache
    metadata = {"name": "llm", "namespace": "ns", "uid": "u", "resourceVersion": "1", "labels": child_labels("llm")}
    body = {"metadata": metadata, "spec": {}}
    children = [Key(kind, "ns", "llm") for kind in (SERVICE, SERVICE_MONITOR)]

    async def audit() -> bool:
        for kind in (INFERENCE_DEPLOYMENT, SERVICE, SERVICE_MONITOR):
            cache.put(kind, body)
        await operator.audit.compare()
        return not cache.resources

    assert asyncio.run(audit())
    assert list(cache.children(Key(INFERENCE_DEPLOYMENT, "ns", "llm"))) == children[1:], "it may exist"
    assert "RayService" in operator.context.present.kinds

    cluster.forbidden = INFERENCE_DEPLOYMENT
    with pytest.raises(Forbidden):
        asyncio.run(audit())
    operator.poller.close()


def test_what_namespaces_have_that_cannot_be_listed_is_unknown() -> None:
    """A user or grant of a resource there must not count as one that is gone."""
    operator = make_operator(SlowCluster())
    found = []
    for operator.watchable.unreadable in ((), ("guest",)):
        found.append(operator.has_all(frozenset()))
    operator.poller.close()

    assert found == [True, False]


def test_a_group_of_kinds_that_is_unavailable_does_not_hide_the_others_and_stays_as_it_was() -> None:
    cluster = HalfCluster()
    operator = make_operator(cluster)
    found = []
    for cluster.available in (("monitoring.coreos.com",), ("ray.io",), ()):
        asyncio.run(operator.context.read_kinds())
        found.append(operator.context.present.kinds)
    operator.poller.close()

    both = frozenset({"RayService", "PrometheusRule"})
    assert found == [frozenset({"PrometheusRule"}), both, both]
    assert operator.context.kinds_changed.is_set()


@pytest.mark.parametrize("backend", get_args(Backend))
def test_every_backend_has_a_program_a_time_to_start_and_an_image(backend: str) -> None:
    context = OperatorContext(image="native", vllm_image="vllm", ray_image="native-ray", ray_vllm_image="vllm-ray")
    base = {"gpu": {"count": 0}, "engine": {"backend": backend}}
    images = [context.image_of(make_resource(**base, runtime=runtime)) for runtime in ({}, {"ray": {}})]

    assert backend in BACKENDS
    assert backend in STARTUP_SECONDS
    assert images == [backend, f"{backend}-ray"]


@pytest.mark.parametrize(("pod_ip", "host", "callers"), [("10.0.0.7", "0.0.0.0", ["127.0.0.1"]),
                                                         ("fd00::7", "::", ["127.0.0.1", "::1"])])  # fmt: skip
def test_the_operator_and_the_dashboard_of_ray_listen_where_kubernetes_and_kuberay_call_them(
    pod_ip: str, host: str, callers: list[str]
) -> None:
    async def called() -> OperatorContext:
        settings = OperatorSettings(namespace="ballast", worker_image="worker:1", pod_ip=pod_ip)
        web = Web(Metrics(), is_alive=lambda: True, unready=lambda: "", refresh=lambda: None)
        port = await web.start(settings.listening_host, 0)
        for caller in callers:
            _, writer = await asyncio.open_connection(caller, port)
            writer.close()
            await writer.wait_closed()
        await web.stop()
        operator = make_operator(SlowCluster(), pod_ip=pod_ip)
        operator.poller.close()
        return operator.context.present

    resource = make_resource(gpu={"count": 0}, runtime={"ray": {}})
    context = replace(asyncio.run(called()), kinds=frozenset({"RayService"}), ray_image="ray:1")
    (ray,) = [step.manifest for step in plan(resource, ClusterSnapshot("u"), context).apply
              if step.key.kind == RAY_SERVICE]  # fmt: skip

    assert ray["spec"]["rayClusterConfig"]["headGroupSpec"]["rayStartParams"]["dashboard-host"] == host
