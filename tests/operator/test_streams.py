"""The private functions of Kopf that the operator replaces, and what they survive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from types import SimpleNamespace
from typing import Any, cast

import kopf
import pytest
from kopf._cogs.aiokits import aiotoggles
from kopf._cogs.clients import api, errors, fetching, watching
from kopf._core.reactor import orchestration, processing, queueing

from ballast_operator import streams
from ballast_operator.kinds import CRD, DEPLOYMENT, RULE, Kind


def test_kopf_still_watches_through_the_replaced_function() -> None:
    """`infinite_watch` looks the function up in its module at each call, so that a replacement takes effect."""
    assert "continuous_watch" in watching.infinite_watch.__code__.co_names
    assert streams.continuous_watch.__module__ == watching.__name__
    assert "resource" in streams.continuous_watch.__code__.co_varnames
    assert watching.Bookmark.LISTED


def test_a_start_with_many_objects_wakes_each_task_once(monkeypatch: pytest.MonkeyPatch) -> None:
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

    monkeypatch.setattr(watching, "continuous_watch", watching.continuous_watch)  # restored after the test
    monkeypatch.setattr(aiotoggles, "ToggleSet", aiotoggles.ToggleSet)
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
        resource = cast(Any, SimpleNamespace(group=DEPLOYMENT.group, plural=DEPLOYMENT.plural))
        events = watching.infinite_watch(
            settings=kopf.OperatorSettings(), resource=resource, namespace=None, _iterations=2
        )
        seen = [event async for event in events]
        assert found.missing == ("Deployment",)
        return seen

    monkeypatch.setattr(fetching, "fetch_objs", lists_nothing)
    monkeypatch.setattr(watching, "watch_objs", fails)
    monkeypatch.setattr(watching, "continuous_watch", watching.continuous_watch)  # restored after the test

    assert asyncio.run(watch()) == [watching.Bookmark.LISTED] * 2
    assert relisted == [True, True]


@pytest.mark.parametrize("status", [403, 500])
@pytest.mark.parametrize(("kind", "seen"), [(RULE, [watching.Bookmark.LISTED]), (DEPLOYMENT, [])])
def test_a_list_that_is_refused_is_tried_again_and_only_a_required_kind_holds_up_the_others(
    kind: Kind, seen: list[Any], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class_of = {403: errors.APIForbiddenError, 500: errors.APIServerError}

    async def is_refused(**_options: Any) -> AsyncIterator[Any]:
        if status in class_of:
            raise class_of[status]("cannot list", status=status, headers={})
        yield [], "1"

    async def watch() -> tuple[list[Any], str]:
        found = streams.Streams((kind,), lambda: None, retry_seconds=0.0)
        found.install()
        resource = cast(Any, SimpleNamespace(group=kind.group, plural=kind.plural))
        settings = kopf.OperatorSettings()
        events = watching.infinite_watch(settings=settings, resource=resource, namespace=None, _iterations=1)
        return [event async for event in events], found.unwatched

    monkeypatch.setattr(fetching, "fetch_objs", is_refused)
    monkeypatch.setattr(watching, "continuous_watch", watching.continuous_watch)  # restored after the test
    found, unwatched = asyncio.run(watch())

    assert found == seen
    assert (f"Deployment (the API server answered {status}: cannot list)" in unwatched) != bool(seen)


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
        resource = SimpleNamespace(group=CRD.group, plural=CRD.plural, get_url=lambda **_: "")
        async with asyncio.timeout(10):
            async for _ in watching.infinite_watch(settings=settings, resource=cast(Any, resource), namespace=None):
                if requests == 2:
                    return

    monkeypatch.setattr(fetching, "fetch_objs", lists_nothing)
    monkeypatch.setattr(api, "stream", falls_silent)
    monkeypatch.setattr(watching, "continuous_watch", watching.continuous_watch)  # restored after the test

    asyncio.run(watch())
