"""Calls that fail so that the work queue tries them again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from control_plane import ControlPlane
from kubernetes.aio.client import ApiException
from operated import Cluster as Operated
from operated import installed, optional_kinds

from ballast_operator import cluster as module
from ballast_operator.cluster import Cluster
from ballast_operator.errors import ClusterUnavailable, Conflict
from ballast_operator.kinds import CONFIG_MAP, INFERENCE_DEPLOYMENT, RAY_CLUSTER, SECRET, Key


class Client:
    """Refuses the token in its first call. Its other calls find the session closed, as aiohttp reports it."""

    def __init__(self, _configuration: object) -> None:
        self.user_agent = ""
        self._closed = asyncio.Event()
        self._num_calls = 0

    async def call_api(self, *_arguments: Any, **_options: Any) -> None:
        self._num_calls += 1
        if self._num_calls == 1:
            await asyncio.sleep(0)
            raise ApiException(status=401, reason="Unauthorized")
        await self._closed.wait()
        raise RuntimeError("Session is closed")

    async def close(self) -> None:
        self._closed.set()


@pytest.mark.usefixtures("unreachable")
def test_a_call_during_the_replacement_of_the_client_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ListingClient", Client)

    async def call_twice() -> list[object]:
        async with Cluster() as found:
            calls = [found.get(Key(SECRET, "team", name)) for name in ("one", "two")]
            return list(await asyncio.gather(*calls, return_exceptions=True))

    refused, closed = asyncio.run(call_twice())

    assert isinstance(refused, ClusterUnavailable)
    assert isinstance(closed, ClusterUnavailable)
    assert "the connection was replaced meanwhile" in str(closed)


class SilentClient(Client):
    """Never answers, except with an error as soon as the timeout of a call is shorter than a second."""

    pending = 0

    async def call_api(self, *_arguments: Any, _request_timeout: float, **_options: Any) -> None:
        SilentClient.pending += 1
        if _request_timeout < 1:
            raise TimeoutError
        await asyncio.Event().wait()


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch, unreachable: None) -> type[SilentClient]:
    """The class of all clients."""
    monkeypatch.setattr(module, "ListingClient", SilentClient)
    monkeypatch.setattr(SilentClient, "pending", 0)
    return SilentClient


def test_events_that_are_not_answered_take_few_connections_and_do_not_delay_the_end(
    monkeypatch: pytest.MonkeyPatch, silent: type[SilentClient], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(module, "LAST_POST_SECONDS", 0.01)
    monkeypatch.setattr(module, "MOST_UNPOSTED", 50)

    async def post() -> tuple[int, int]:
        async with asyncio.timeout(10), Cluster() as found:
            for _ in range(100):
                found.post_event({"metadata": {"namespace": "team"}})
            await asyncio.sleep(0.01)
            num_waiting = len([task for task in asyncio.all_tasks() if "_post_event" in repr(task)])
        return num_waiting, silent.pending

    assert asyncio.run(post()) == (50, module.POSTED_AT_ONCE)
    assert ["not posted until" in record.message for record in caplog.records] == [True]


class BusyClient(Client):
    """Asks for a delay of a day."""

    async def call_api(self, *_arguments: Any, **_options: Any) -> None:
        error = ApiException(status=503, reason="maintenance")
        error.headers = {"Retry-After": "86400"}
        raise error


@pytest.mark.usefixtures("unreachable")
def test_the_api_server_cannot_delay_the_next_try_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even a change of the resource would cut the delay short."""
    monkeypatch.setattr(module, "ListingClient", BusyClient)

    async def get() -> None:
        async with Cluster() as found:
            await found.get(Key(SECRET, "team", "one"))

    with pytest.raises(ClusterUnavailable) as failure:
        asyncio.run(get())

    assert failure.value.retry_after == module.MOST_RETRY_SECONDS


@pytest.mark.usefixtures("silent")
def test_a_write_that_is_not_answered_in_time_fails_alone_and_names_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another write may still succeed, for example because no webhook delays it."""
    monkeypatch.setattr(module, "WRITE_SECONDS", 0.5)

    async def write() -> None:
        async with Cluster() as found:
            await found.annotate(Key(SECRET, "team", "one"), {"a": "b"})

    with pytest.raises(
        ClusterUnavailable, match=r"secrets/one: the API server did not answer within 0\.5 s"
    ) as failure:
        asyncio.run(write())

    assert failure.value.is_about_one


@pytest.mark.envtest
@pytest.mark.parametrize(
    ("before", "change", "after"),
    [
        pytest.param(2, (4, []), 4, id="too few pods"),
        pytest.param(6, (4, []), 6, id="more pods than KubeRay reported"),
        pytest.param(3, (2, ["a"]), 2, id="a pod too many"),
        pytest.param(2, (2, ["a"]), 2, id="the pod leaves already"),
        pytest.param(5, (2, ["a"]), 5, id="a pod too many by an old number"),
    ],
)
def test_a_ray_cluster_is_written_only_if_the_number_of_its_pods_is_the_expected_one(
    controllers: ControlPlane,
    cluster: Operated,
    monkeypatch: pytest.MonkeyPatch,
    *,
    before: int,
    change: tuple[int, list[str]],
    after: int,
) -> None:
    """KubeRay's report of the number follows late."""
    wanted, leaving = change
    monkeypatch.setenv("KUBECONFIG", str(controllers.kubeconfig))
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": "llm"}
    owner |= {"uid": cluster.create("configmaps", {"metadata": {"name": "llm"}})["metadata"]["uid"]}

    async def resize() -> bool:
        async with Cluster() as client:
            key = Key(RAY_CLUSTER, cluster.namespace, "llm-1")
            return await client.resize(key, wanted, leaving, owner=owner["uid"])

    with installed(controllers, [kind for kind in optional_kinds() if kind["spec"]["group"] == "ray.io"]):
        without = asyncio.run(resize())
        cluster.make_ray_cluster(owner, replicas=before)
        changed = asyncio.run(resize())
        (group,) = cluster.get("rayclusters", "llm-1")["spec"]["workerGroupSpecs"]

    assert (without, changed) == (False, after != before)
    assert (group["replicas"], group.get("scaleStrategy", {}).get("workersToDelete", [])) == (
        after,
        leaving if changed else [],
    )


@pytest.mark.envtest
def test_only_the_object_with_the_expected_uid_is_changed_or_deleted(
    controllers: ControlPlane, cluster: Operated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one may have its name by now."""
    monkeypatch.setenv("KUBECONFIG", str(controllers.kubeconfig))
    key = Key(CONFIG_MAP, cluster.namespace, "theirs")
    metadata = {"name": key.name, "namespace": key.namespace}
    uid = cluster.create("configmaps", {"metadata": metadata, "data": {"a": "1"}})["metadata"]["uid"]

    async def write(uid: str) -> list[object]:
        body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"a": "2"}}
        async with Cluster() as client:
            calls = (client.apply(key, body, uid=uid), client.delete(key, uid))
            return [(await asyncio.gather(call, return_exceptions=True))[0] for call in calls]

    assert [type(error) for error in asyncio.run(write("another"))] == [Conflict, Conflict]
    assert cluster.get("configmaps", key.name)["data"] == {"a": "1"}
    asyncio.run(write(uid))
    assert cluster.get("configmaps", key.name) is None


@pytest.mark.envtest
def test_a_decision_about_an_outdated_resource_scales_nothing(
    controllers: ControlPlane, cluster: Operated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(controllers.kubeconfig))
    version = cluster.make()["metadata"]["resourceVersion"]
    cluster.patch("inferencedeployments", "llm", {"spec": {"slots": 3}})

    async def scale(version: str) -> None:
        async with Cluster() as client:
            await client.scale(Key(INFERENCE_DEPLOYMENT, cluster.namespace, "llm"), 3, version=version)

    with pytest.raises(Conflict):
        asyncio.run(scale(version))
    asyncio.run(scale(cluster.resource()["metadata"]["resourceVersion"]))
    assert cluster.resource()["spec"]["replicas"] == 3
