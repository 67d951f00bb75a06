"""The private functions of Kopf that the operator replaces, and what they survive."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import kopf
import pytest
from aiohttp import web
from aiohttp.test_utils import RawTestServer
from kopf._cogs.aiokits import aiotoggles
from kopf._cogs.clients import api, auth, errors, fetching, watching
from kopf._cogs.structs import credentials
from kopf._core.reactor import orchestration, processing, queueing

from ballast_operator import streams
from ballast_operator.content import LEFT_OUT, MEBIBYTE, trimmed, weight
from ballast_operator.kinds import CRD, DEPLOYMENT, INFERENCE_DEPLOYMENT, POD, RULE, Kind


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore after each test what the operator replaces in Kopf."""
    replaced = ((watching, "continuous_watch"), (aiotoggles, "ToggleSet"), (fetching, "api"), (api, "json"))
    for module, name in replaced:
        monkeypatch.setattr(module, name, getattr(module, name))


def watch_of(
    kind: Kind,
    settings: kopf.OperatorSettings | None = None,
    *,
    namespace: str | None = None,
    times: int | None = None,
    url: str = "",
) -> AsyncIterator[Any]:
    """Return the events of Kopf's watch of a kind, which lists its objects a number of times."""
    resource = cast(Any, SimpleNamespace(group=kind.group, plural=kind.plural, get_url=lambda **_: url))
    settings = settings or kopf.OperatorSettings()
    return watching.infinite_watch(settings=settings, resource=resource, namespace=namespace, _iterations=times)


def test_kopf_still_watches_through_the_replaced_function() -> None:
    """`infinite_watch` looks the function up in its module at each call, so that a replacement takes effect."""
    assert "continuous_watch" in watching.infinite_watch.__code__.co_names
    assert streams.continuous_watch.__module__ == watching.__name__
    assert "resource" in streams.continuous_watch.__code__.co_varnames
    assert watching.Bookmark.LISTED


def test_a_start_with_many_objects_wakes_each_task_once() -> None:
    """Kopf has a task for each object, and each waits until all objects were seen once."""
    num_objects, num_checks = 100, 0

    def all_counted(states: Iterable[bool]) -> bool:
        nonlocal num_checks
        num_checks += 1
        return all(states)

    async def start() -> None:
        objects = aiotoggles.ToggleSet(all_counted)
        listed = await objects.make_toggle()
        waiting = []
        for _ in range(num_objects):
            await objects.drop_toggle(await objects.make_toggle())
            waiting.append(asyncio.create_task(objects.wait_for(True)))
            await asyncio.sleep(0)
        assert not any(task.done() for task in waiting)
        await objects.drop_toggle(listed)
        async with asyncio.timeout(10):
            await asyncio.gather(*waiting)

    assert "ToggleSet" in orchestration.orchestrator.__code__.co_names
    assert "make_toggle" in queueing.watcher.__code__.co_names
    assert "drop_toggle" in processing.process_resource_event.__code__.co_names
    streams.Streams((), lambda: None).install()
    asyncio.run(start())

    assert num_checks < 10 * num_objects


async def lists_nothing(**_options: Any) -> AsyncIterator[Any]:
    yield [], "1"


NO_LEADER = {"type": "ERROR", "object": {"code": 500, "message": "etcdserver: no leader"}}
EXPIRED = {"type": "ERROR", "object": {"code": 410, "message": "too old resource version"}}


@pytest.mark.parametrize("error", [NO_LEADER, EXPIRED], ids=["no leader", "expired"])
def test_an_error_of_a_watch_makes_it_list_again(error: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The lists are empty, and show no deletion. So each one causes an audit."""
    relisted: list[bool] = []

    async def fails(**_options: Any) -> AsyncIterator[Any]:
        yield error

    async def watch() -> list[Any]:
        found = streams.Streams((DEPLOYMENT,), lambda: relisted.append(True), retry_seconds=0.0)
        found.install()
        seen = [event async for event in watch_of(DEPLOYMENT, times=2)]
        assert found.unwatched.startswith("not watched: Deployment")
        assert ("(its watch failed: " in found.unwatched) == (error == NO_LEADER)
        assert found.missing == ("Deployment",)
        return seen

    monkeypatch.setattr(fetching, "fetch_objs", lists_nothing)
    monkeypatch.setattr(watching, "watch_objs", fails)

    assert asyncio.run(watch()) == [watching.Bookmark.LISTED] * 2
    assert relisted == [True, True]


@pytest.mark.parametrize("is_gone", [True, False], ids=["gone", "cancelled"])
def test_a_watch_whose_kind_goes_causes_an_audit(is_gone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its objects went too, and no event shows that. Kopf cancels the watch, unless a list is refused before."""
    relisted: list[bool] = []

    async def gone(**_options: Any) -> AsyncIterator[Any]:
        raise errors.APINotFoundError("not found", status=404, headers={})
        yield

    async def waits(**_options: Any) -> AsyncIterator[Any]:
        await asyncio.Event().wait()
        yield

    async def watch() -> int:
        found = streams.Streams((DEPLOYMENT,), lambda: relisted.append(True), retry_seconds=0.0)
        found.install()
        events = watch_of(DEPLOYMENT, times=1)
        assert await anext(events) == watching.Bookmark.LISTED
        before, following = len(relisted), asyncio.create_task(anext(events, None))
        await asyncio.sleep(0)
        if not is_gone:
            following.cancel()
        await asyncio.wait([following])
        return len(relisted) - before

    monkeypatch.setattr(fetching, "fetch_objs", gone if is_gone else lists_nothing)
    monkeypatch.setattr(watching, "watch_objs", waits)

    assert asyncio.run(watch()) == 1


@asynccontextmanager
async def serving(
    answer: Callable[[], Awaitable[web.StreamResponse]], watched: str | None = None
) -> AsyncIterator[None]:
    """Let Kopf call an API server with one answer to lists, and one to watches."""

    async def respond(request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(text=watched) if watched is not None and "watch" in request.query else await answer()

    async with RawTestServer(respond) as server:
        vault = credentials.Vault({"me": kopf.ConnectionInfo(server=str(server.make_url("")))})
        token = auth.vault_var.set(vault)
        try:
            yield
        finally:
            auth.vault_var.reset(token)
            await vault.close()


@pytest.mark.parametrize("status", [403, 500, 0])
@pytest.mark.parametrize(
    ("kind", "seen", "num_tries"), [(RULE, [watching.Bookmark.LISTED], 2), (DEPLOYMENT, [], 4)], ids=["optional", "not"]
)
def test_a_list_that_fails_is_tried_again_and_only_a_required_kind_holds_up_the_others(
    kind: Kind, seen: list[Any], num_tries: int, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kopf itself repeats each list, up to nine times for five minutes."""
    asked: list[bool] = []

    async def answer() -> web.Response:
        asked.append(True)
        if not status:
            await asyncio.sleep(10)
        return web.json_response({"kind": "Status", "message": "cannot list", "code": status}, status=status)

    async def watch() -> tuple[list[Any], str]:
        found = streams.Streams((kind,), lambda: None, retry_seconds=0.0)
        found.install()
        settings = kopf.OperatorSettings()
        settings.networking.error_backoffs = [0.0] * 3
        settings.networking.request_timeout = 0.05
        async with serving(answer):
            return [event async for event in watch_of(kind, settings, times=1, url="/list")], found.unwatched

    monkeypatch.setattr(streams, "LIST_SECONDS", 0.05)
    found, unwatched = asyncio.run(watch())

    assert (found, len(asked)) == (seen, num_tries)
    assert ("Deployment" in unwatched) != bool(seen)
    assert (f"(the API server answered {status}: cannot list)" in unwatched) == (not seen and status > 0)


def test_a_kind_is_watched_when_each_of_its_watches_is_and_without_a_watch_of_the_crds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kopf holds the objects of a start, so it gets them without what the cache would remove."""
    refused = {("pods", "b"), (CRD.plural, None)}
    pod = {"metadata": {"name": "p", "namespace": "a"}, "spec": {"containers": []}}

    async def fetch(*, resource: Any, namespace: str | None, **_options: Any) -> AsyncIterator[Any]:
        if (resource.plural, namespace) in refused:
            raise errors.APIForbiddenError("cannot list", status=403, headers={})
        yield [pod], "1"

    async def silent(**_options: Any) -> AsyncIterator[Any]:
        await asyncio.Event().wait()
        yield

    async def watch() -> tuple[list[Any], list[str]]:
        found = streams.Streams((POD,), lambda: None, retry_seconds=0.0)
        found.install()
        for kind, namespace in ((CRD, None), (POD, "b")):
            assert [event async for event in watch_of(kind, namespace=namespace, times=1)] == []
        first, second = watch_of(POD, namespace="a"), watch_of(POD, namespace="b")
        seen = [await anext(first), await anext(first)]
        unwatched = [found.unwatched]
        refused.remove(("pods", "b"))
        seen += [await anext(second), await anext(second)]
        unwatched.append(found.unwatched)
        for stream in (first, second):
            await cast(Any, stream).aclose()
        return seen, unwatched

    monkeypatch.setattr(fetching, "fetch_objs", fetch)
    monkeypatch.setattr(watching, "watch_objs", silent)
    seen, (before, after) = asyncio.run(watch())

    event = {"type": None, "object": pod | {"spec": {}}}
    assert seen == [event, watching.Bookmark.LISTED] * 2
    assert "Pod (the API server answered 403: cannot list)" in before
    assert after == ""


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_silent_or_closed_watch_of_the_crds_is_asked_again(monkeypatch: pytest.MonkeyPatch, is_closed: bool) -> None:
    """An API server that lost its power closes no connection. Kopf closes all of them after an answer 401."""
    requests = 0

    async def falls_silent(**_options: Any) -> AsyncIterator[Any]:
        nonlocal requests
        requests += 1
        for _ in range(2):
            yield {"type": "BOOKMARK", "object": {}}
            if is_closed:
                raise RuntimeError("Connection closed.")  # as aiohttp does
            await asyncio.sleep(0.3)

    async def watch() -> None:
        streams.Streams((), lambda: None, retry_seconds=0.01).install()
        settings = kopf.OperatorSettings()
        settings.watching.inactivity_timeout = 0.1
        async with asyncio.timeout(10):
            async for _ in watch_of(CRD, settings):
                if requests == 2:
                    return

    monkeypatch.setattr(fetching, "fetch_objs", lists_nothing)
    monkeypatch.setattr(api, "stream", falls_silent)

    asyncio.run(watch())


def test_kopf_gets_the_objects_of_a_page_within_their_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that was decoded as a whole would take 30 times its size. The Lease is renewed in the meantime."""
    threads: set[int] = set()

    def noted(kind: Kind, body: Any) -> Any:
        threads.add(threading.get_ident())
        return trimmed(kind, body)

    large = {"metadata": {"name": "a", "namespace": "n"}, "spec": {"template": {"affinity": {"x": [{}] * 60_000}}}}

    async def answer() -> web.Response:
        return web.json_response({"items": [large] * 3, "kind": "L", "metadata": {"resourceVersion": "7"}})

    async def fetch() -> list[Any]:
        streams.Streams((INFERENCE_DEPLOYMENT,), lambda: None).install()
        path = INFERENCE_DEPLOYMENT.path("n")
        resource = cast(Any, SimpleNamespace(group="", plural="", get_url=lambda **_: f"{path}?limit=3"))
        settings, logger = kopf.OperatorSettings(), logging.getLogger(__name__)
        async with serving(answer):
            pages = fetching.fetch_objs(settings=settings, resource=resource, namespace="n", logger=logger)
            return [page async for page in pages]

    monkeypatch.setattr(streams, "trimmed", noted)
    ((items, version),) = asyncio.run(fetch())

    assert threading.get_ident() not in threads
    assert (len(items), version) == (3, "7")
    assert weight(items, 2**40) < MEBIBYTE


def test_an_object_that_is_nested_deep_ends_no_list_and_no_watch() -> None:
    """Python's decoder fails on it. Whoever may create one resource could stop the operator for all of them."""
    deep = "[" * 9900 + "]" * 9900
    hostile = f'{{"metadata":{{"name":"hostile","namespace":"n"}},"spec":{{"template":{{"affinity":{deep}}}}}}}'
    other = '{"metadata":{"name":"other","namespace":"m"}}'
    listed = f'{{"items":[{hostile},{other}],"metadata":{{"resourceVersion":"7"}}}}'
    watched = "".join(f'{{"type":"MODIFIED","object":{each}}}\n' for each in (hostile, other))

    async def answer() -> web.Response:
        return web.Response(text=listed, content_type="application/json")

    async def watch() -> tuple[list[Any], str]:
        found = streams.Streams((INFERENCE_DEPLOYMENT,), lambda: None)
        found.install()
        path = INFERENCE_DEPLOYMENT.path()
        resource = SimpleNamespace(
            group=INFERENCE_DEPLOYMENT.group,
            plural=INFERENCE_DEPLOYMENT.plural,
            get_url=lambda params, **_: f"{path}?watch=true" if "watch" in params else path,
        )
        async with serving(answer, watched):
            events = watching.infinite_watch(
                settings=kopf.OperatorSettings(), resource=cast(Any, resource), namespace=None
            )
            seen = [await anext(events) for _ in range(5)]
            unwatched = found.unwatched
            await cast(Any, events).aclose()
        return seen, unwatched

    assert "json" in api.stream.__code__.co_names
    seen, unwatched = asyncio.run(watch())

    names = [event if event == watching.Bookmark.LISTED else event["object"]["metadata"]["name"] for event in seen]
    assert names == ["hostile", "other", watching.Bookmark.LISTED, "hostile", "other"]
    assert seen[0]["object"][LEFT_OUT] == seen[3]["object"][LEFT_OUT] == ["spec.template"]
    assert unwatched == ""
