"""What goes over the wire, and what a failure of it is called."""

from __future__ import annotations

import re
import socket
import threading
from contextlib import nullcontext
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from redis.cluster import RedisCluster

from ballast_queue import functions as stubs
from ballast_queue.connection import Connection
from ballast_queue.errors import (
    CommandForbidden,
    CommandMissing,
    HostNotAdmitted,
    JobNotFound,
    LibraryUnfit,
    QueueError,
    QueueForbidden,
    QueueFull,
    QueueUnavailable,
    RefusedCall,
    ServerUnfit,
)
from ballast_queue.fitness import inspect
from ballast_queue.function_library import REVISION, SOURCE
from ballast_queue.functions import FIELDS, HEAD, Line
from ballast_queue.keys import Keys
from ballast_queue.leases import MAX_ITEMS, by_job
from ballast_queue.redis_store import Queue
from ballast_queue.settings import QueueSettings
from ballast_queue.settings_store import NUMBERS

LIBRARY = (23, "cdd890f903dcce6893582a95a6c6eeac79a2a489f19ceacdbc4f45c06f5750bb")
"""The revision of the function library, and the SHA-256 of its text."""


class Recorder:
    """A client that writes down what it is asked to read, or fails."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.asked: list[dict[str, Any]] = []
        self.failure = failure

    def xread(self, streams: dict[bytes, bytes], **options: Any) -> list[Any]:
        if self.failure:
            raise self.failure
        self.asked.append({"streams": streams} | options)
        return []


@pytest.mark.parametrize(
    ("seconds", "milliseconds"), [(1, 1000), (60, 2500), (0.0001, 1), (0, 1)], ids=["as asked", "timeout", "least", "0"]
)
def test_a_wait_for_an_entry_ends_before_the_socket_gives_up(seconds: float, milliseconds: int):
    client = Recorder()
    Connection(client, socket_timeout=5).wait_for_entry(b"k", b"7-0", seconds)

    assert client.asked == [{"streams": {b"k": b"7-0"}, "count": 1, "block": milliseconds}]


UNAVAILABLE: dict[str, tuple[Exception, str]] = {
    "no answer": (redis.TimeoutError("Timeout reading from db.example:6379"), "no answer in time"),
    "a broken connection": (redis.ConnectionError("reset by peer"), "the connection broke"),
    "a failure of the system": (OSError("db.example"), "the connection broke"),
    "a passing condition": (redis.ResponseError("BUSY Redis is busy running a script"), "it runs a long script"),
    "a start": (redis.BusyLoadingError("Redis is loading"), "it loads its data"),
    "another protocol": (redis.InvalidResponse("Protocol Error: b'HTTP/1.0 400'"), "the answer is not one of Redis"),
    "a parser that fails": (ValueError("invalid literal: b'SSH-2.0'"), "the answer is not one of Redis"),
    "words like those of a reply": (OSError("READONLY file system"), "the connection broke"),
    "a cluster without a node": (redis.exceptions.RedisClusterException("10.0.0.1"), "the cluster is not complete"),
}


@pytest.mark.parametrize("name", UNAVAILABLE)
def test_a_server_that_cannot_serve_is_described_by_a_fixed_reason(name: str):
    error, reason = UNAVAILABLE[name]
    with pytest.raises(QueueUnavailable) as caught:
        Connection(Recorder(error), socket_timeout=5).wait_for_entry(b"k", b"0", 1)

    assert str(caught.value).startswith(f"Redis is unavailable ({reason}): check")


def after(context: Exception, error: Exception) -> Exception:
    """Return an error that was raised while another one was handled."""
    error.__context__ = context
    return error


NOT_ALLOWED = "refused a command to this user: check the ACL rules of the user"
NOT_KNOWN = "does not know a command that Ballast needs: check that the server does not disable or rename it"
FULL = "has no memory left: raise maxmemory, delete jobs, or wait until the results of old jobs expire"
REFUSED = "refused a call ({}): check that only Ballast writes to the keys of the queue"
REFUSALS = {
    "a wrong password": (
        redis.AuthenticationError("no such user"),
        QueueForbidden,
        "refused this user: check user name and password",
    ),
    "no right": (redis.exceptions.NoPermissionError("no FCALL"), CommandForbidden, NOT_ALLOWED),
    "a key that is not allowed": (
        redis.ResponseError("ACL failure in script: No permissions to access a key"),
        CommandForbidden,
        NOT_ALLOWED,
    ),
    "no right in a function": (redis.ResponseError("user_script:7: NOPERM hunter2"), CommandForbidden, NOT_ALLOWED),
    "a command that the server disables": (
        redis.ResponseError("unknown command 'ACL', with args beginning with: 'SETUSER' 'hunter2'"),
        CommandMissing,
        NOT_KNOWN,
    ),
    "a part of a command that the server lacks": (
        redis.ResponseError("Unknown subcommand or wrong number of arguments for 'SETUSER'. Try ACL HELP."),
        CommandMissing,
        NOT_KNOWN,
    ),
    "no memory": (redis.exceptions.OutOfMemoryError("not now"), QueueFull, FULL),
    "another type": (redis.ResponseError("WRONGTYPE hunter2"), RefusedCall, REFUSED.format("a key has another type")),
    "an answer after a broken connection": (
        after(ConnectionRefusedError(), redis.ResponseError("hunter2")),
        RefusedCall,
        REFUSED.format("another error"),
    ),
    "anything else": (redis.ResponseError("hunter2"), RefusedCall, REFUSED.format("another error")),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_states_what_to_do(name: str):
    error, kind, sentence = REFUSALS[name]
    with pytest.raises(QueueError) as caught:
        Connection(Recorder(error), socket_timeout=5).wait_for_entry(b"k", b"0", 1)

    assert type(caught.value) is kind
    assert str(caught.value) == f"Redis {sentence}"


@pytest.mark.parametrize(
    ("failure", "before", "after"),
    [
        (redis.ResponseError("WRONGTYPE"), "Redis cannot be used", "Redis refused a call (a key has another type)"),
        (ServerUnfit(["Redis: found a server"]), "Redis cannot be used", "Redis: found a server"),
        (redis.ConnectionError("reset by peer"), "Redis cannot be used", "Redis cannot be used"),
        (redis.exceptions.NoPermissionError("no"), "Redis refused a command", "Redis refused a command"),
        (HostNotAdmitted(), "Redis URL: the host is not admitted", "Redis URL: the host is not admitted"),
    ],
    ids=["a reply", "another server", "a broken connection", "a missing right", "another host"],
)
def test_a_strict_connection_names_the_reason_only_after_a_user_was_known(failure: Exception, before: str, after: str):
    client = Recorder()
    connection = Connection(client, socket_timeout=5, is_strict=True)
    said = []
    for client.failure in (failure, None, failure):
        try:
            connection.wait_for_entry(b"k", b"0", 1)
        except QueueError as error:
            said.append(str(error))

    assert [text.startswith(begin) for text, begin in zip(said, (before, after), strict=True)] == [True, True]


def test_a_call_that_the_server_refuses_is_named(queue: Queue):
    with pytest.raises(QueueError, match="Redis refused a call"):
        queue.store.connection.call("claim", (), ("job", 1, "w1"))


def test_one_call_that_fails_does_not_undo_the_others(queue: Queue, line):
    job_id = queue.submissions.submit([line("a")]).job_id
    with pytest.raises(QueueError, match="refused a call"):
        queue.store.connection.call_many([("claim", (), ()), queue.store.functions.claim(job_id, 1, "w1")])

    assert queue.jobs.get(job_id).counts.leased == 1


class Flushed:
    """A client whose server lost the functions after some calls, and has them again when it is asked for them."""

    def __init__(self, num_known: int) -> None:
        self.num_known = num_known
        self.queued: list[int] = []
        self.trips: list[Any] = []

    def pipeline(self, *, transaction: bool) -> Any:
        self.queued.clear()
        return SimpleNamespace(execute_command=lambda *words: self.queued.append(words[-1]), execute=self._execute)

    def _execute(self, *, raise_on_error: bool) -> list[Any]:
        assert not raise_on_error, "one failure would hide the replies of the other calls"
        self.trips.append([*self.queued])
        return [self._reply(number) for number in self.queued]

    def _reply(self, number: int) -> Any:
        return number if number < self.num_known else redis.ResponseError("Function not found")

    def execute_command(self, *words: Any) -> Any:
        if words[1] == "ballast1_revision":
            self.trips.append("revision")
            self.num_known = 3
            return REVISION
        self.trips.append(words[-1])
        reply = self._reply(words[-1])
        if isinstance(reply, Exception):
            raise reply
        return reply


@pytest.mark.parametrize(
    ("num_calls", "num_known", "trips"),
    [
        (3, 3, [[0, 1, 2]]),
        (3, 1, [[0, 1, 2], "revision", 1, 2]),
        (3, 0, [[0, 1, 2], "revision", [0, 1, 2]]),
        (1, 0, [[0], "revision", [0]]),
    ],
    ids=["known", "the last ones", "all", "a single one"],
)
def test_only_the_calls_that_the_server_did_not_know_are_repeated(num_calls: int, num_known: int, trips: list[Any]):
    client = Flushed(num_known)
    calls = [("claim", (b"k",), (number,)) for number in range(num_calls)]

    assert Connection(client, socket_timeout=5).call_many(calls) == list(range(num_calls))
    assert client.trips == trips


class Shards(RedisCluster):
    """A client of a cluster whose shards have these revisions, or do not answer. A call finds its function later."""

    def __init__(self, *revisions: int | Exception) -> None:
        self.revisions, self.num_calls = revisions, 0

    def close(self) -> None:
        pass

    def get_primaries(self) -> list[int]:
        return [*range(len(self.revisions))]

    def get_node_from_key(self, key: bytes) -> int:
        return 0

    def execute_command(self, command: str, function: str, *_: Any, target_nodes: int) -> int:
        found = self.revisions[target_nodes]
        if "revision" not in function:
            self.num_calls += 1
            found = redis.ResponseError("Function not found") if self.num_calls == 1 else 7
        if isinstance(found, Exception):
            raise found
        return found


AWAY = redis.ConnectionError("no route to host")


@pytest.mark.parametrize(
    ("revisions", "is_newer", "is_fit"),
    [
        ((REVISION - 1, REVISION - 2), False, False),
        ((REVISION, REVISION - 1), False, True),
        ((REVISION - 1, REVISION + 1), True, True),
        ((AWAY, REVISION + 1), True, True),
    ],
    ids=["older ones", "an older one", "both", "a shard is away"],
)
def test_a_worker_goes_on_if_one_shard_has_the_functions_of_this_version(revisions, is_newer: bool, is_fit: bool):
    connection = Connection(Shards(*revisions), socket_timeout=5)
    with nullcontext() if is_fit else pytest.raises(LibraryUnfit):
        assert connection.call("claim", (b"k",)) == 7

    assert connection.has_newer_library() is is_newer


class Resized(redis.Redis):
    """A client whose server repeats a field of a hash, as it does while it resizes the table."""

    def hscan(self, name: bytes, cursor: Any = 0, **_: Any) -> Any:
        return {0: (7, {b"a": b"1", b"b": b"2"}), 7: (0, {b"b": b"2", b"c": b"3"})}[int(cursor)]


def test_each_field_of_a_hash_comes_once():
    pairs = Connection(Resized(), socket_timeout=5).hash_pairs(b"k")

    assert list(pairs) == [(b"a", b"1"), (b"b", b"2"), (b"c", b"3")]


def test_no_calls_are_no_round_trip():
    assert Connection(None, socket_timeout=5).call_many([]) == []


def test_a_broken_connection_is_not_tried_again():
    """A call whose reply is lost may have counted. Whether to repeat it is for the caller to decide."""
    accepted = []

    def serve(listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            accepted.append(client)
            client.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        with pytest.raises(QueueUnavailable, match="the connection broke"):
            Queue.connect(f"redis://127.0.0.1:{port}", "a/b")
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()

    assert len(accepted) == 1


def test_every_key_is_in_the_schema_and_every_key_of_the_schema_is_built():
    header = SOURCE.partition("local REVISION")[0]
    keys = Keys("q")
    built = {value for value in vars(keys).values() if isinstance(value, bytes)} | set(keys.of_queue)

    assert built == {
        f"ballast:{{q}}:{name}".encode()
        for name in re.findall(r"^--   ballast:\{<queue>\}:(\w+)", header, re.MULTILINE)
    }
    assert {key for key in keys.of_job("j") if b":job:" in key} == {
        f"ballast:{{q}}:job:j{part}".encode() for part in ("", *re.findall(r"^--   (:\w+)", header, re.MULTILINE))
    }


KEYS = (
    *("totals", "jobs", "ready", "backlog", "timers", "settings", "keys", "inbox", "groups", "active", "held"),
    *("job", "items", "live", "returned", "delayed", "leases", "prefixes", "dead", "results", "ids"),
    "shortened",
)
RECORD = (
    *("id", "tenant", "state", "rank", "source", "key", "ending", "reason", "outlook", "because"),
    *("priority", "created", "deadline", "finished", "closed", "lines", "stored", "next", "delayed", "prefix_key"),
    *("asked_out", "unbounded", "appraised", "tokens_in", "tokens_out"),
    *("total", "waiting", "leased", "succeeded", "failed", "cancelled", "expired", "dead"),
)
HEADED = (
    *("tenant", "priority", "created", "deadline", "waiting", "delayed", "leased", "prefix_key"),
    *("stored", "asked_out", "unbounded", "succeeded", "tokens_out"),
)


def lua_list(name: str) -> tuple[str, ...]:
    """The texts in a list of the function library."""
    found = re.search(rf"^local {name} = {{(.*?)^}}", SOURCE, re.MULTILINE | re.DOTALL)
    assert found is not None
    return tuple(re.findall(r"'(\w+)'", found[1]))


def test_workers_of_older_versions_find_each_key_and_field_in_its_place():
    """They share a queue with this version during an upgrade. Add further ones at the end, never before these."""
    body = SOURCE.partition("local function bind(keys)")[2].partition("\nend\n")[0]
    bound = sorted(re.findall(r"(\w+) = keys\[(\d+)\]", body), key=lambda pair: int(pair[1]))
    calls = stubs.Functions(Keys("q"))
    _, of_claim, _ = calls.claim("j", 1, "w1")
    _, of_store, _ = calls.store("j", [], prefix_key=0, closes=False, tenant="t")
    names = [*KEYS[:11], "job:j", *(f"job:j:{part}" for part in KEYS[12:21]), *KEYS[21:]]
    of_tenant = [f"{name}:t" if name in {"inbox", "shortened"} else name for name in names]

    assert bound == [(name, str(place)) for place, name in enumerate(KEYS, 1)]
    assert [key.decode().removeprefix("ballast:{q}:") for key in of_claim] == names
    assert [key.decode().removeprefix("ballast:{q}:") for key in of_store] == of_tenant
    assert (FIELDS[:33], lua_list("FIELDS")[:33]) == (RECORD, RECORD)
    assert (HEAD[:13], lua_list("HEAD")[:13]) == (HEADED, HEADED)


def test_workers_of_older_versions_get_replies_of_the_length_that_they_expect(queue: Queue, line):
    functions, call = queue.store.functions, queue.store.call
    job = {"tenant": "t", "priority": 0, "deadline": None, "key": "", "source": "submit"}
    lines = [Line("a", "a", line("a")), Line("a", "b", line("b"))]
    replies = {
        "open": call(functions.open("j", **job)),
        "append": call(functions.append("j", 0, lines, digest="0" * 64, prefix_key=0, closes=True)),
        "store": call(functions.store("j", [], prefix_key=0, closes=False)),
        "demand": call(functions.demand()),
        "claim": call(functions.claim("j", 2, "w1")),
        "renew_settings": call(functions.renew_settings("a")),
        "hold": call(functions.hold("j", "resumed")),
        "redrive": call(functions.redrive("j", 1, b"0", takes_all=True)),
        "stats": call(functions.stats(())),
    }
    texts = {"read": call(functions.read(["j"])), "heads": call(functions.heads(["j"]))}

    assert {name: len(reply) for name, reply in replies.items()} == {
        "open": 8,
        "append": 5,
        "store": 1,
        "demand": 2,
        "claim": 3 + 2 * 5,
        "renew_settings": 3,
        "hold": 2,
        "redrive": 4,
        "stats": 5,
    }
    assert {name: text.count(b"\x1f") + 1 for name, (text,) in texts.items()} == {"read": 33, "heads": 13}


def test_each_change_of_the_functions_has_its_revision():
    found = (REVISION, sha256(SOURCE.encode()).hexdigest())

    assert found == LIBRARY, f"ballast.lua changed: increment REVISION, and then set LIBRARY = {found}"


def test_every_function_that_is_called_is_registered_and_every_registered_one_is_called():
    called = set(re.findall(r'(?:return |_of_job\()"(\w+)", ', Path(stubs.__file__).read_text()))

    assert called | {"revision"} == set(re.findall(r"^register\('(\w+)'", SOURCE, re.MULTILINE))


def test_the_functions_read_each_number_of_the_settings_with_the_default_of_python():
    read = {name: float(default) for name, default in re.findall(r"setting\(.*?, '(\w+)', (\d+)\)", SOURCE)}

    assert read == {name: getattr(QueueSettings(), name) for name in NUMBERS}


def test_items_go_in_one_call_for_each_job_with_a_limit_for_each_call():
    assert by_job([]) == []
    assert by_job(["a", "b", "a", "c", "b"]) == [("a", [0, 2]), ("b", [1, 4]), ("c", [3])]
    assert by_job(["a"] * MAX_ITEMS) == [("a", [*range(MAX_ITEMS)])]
    assert by_job(["a"] * (MAX_ITEMS + 1)) == [("a", [*range(MAX_ITEMS)]), ("a", [MAX_ITEMS])]


class Server:
    """What INFO gives of a server."""

    def __init__(self, **server: str) -> None:
        self.sections = {
            "server": {"redis_version": "7.2.4"} | server,
            "memory": {"maxmemory_policy": "noeviction"},
            "persistence": {"aof_enabled": 1},
        }

    def info(self, section: str) -> dict[str, Any]:
        return self.sections[section]

    def has_newer_library(self) -> bool:
        return False


class Closed(Server):
    """A server that keeps INFO from this user."""

    def info(self, section: str) -> dict[str, Any]:
        raise QueueForbidden(f"no {section}")


def test_a_server_that_cannot_be_looked_at_is_only_warned_of():
    assert inspect(Closed()) == ([], ["Redis could not be checked: this user may not run INFO; allow +info"])


@pytest.mark.parametrize(
    ("server", "problem"),
    [
        *(({"redis_version": version}, None) for version in ("7.0.0", "7.2.4", "8.0", "10.1.2")),
        *(({"redis_version": version}, "found an older version, wanted 7") for version in ("6.2.14", "6.9", "5")),
        ({"redis_mode": "sentinel"}, "found a sentinel, wanted the server that it monitors"),
    ],
)
def test_a_server_of_another_kind_or_before_version_7_is_a_problem(server: dict[str, str], problem: str | None):
    problems, warnings = inspect(Server(**server))

    assert [text.startswith(f"Redis: {problem}") for text in problems] == [True] * (problem is not None)
    assert warnings == []


def test_a_job_that_is_not_there_is_named_with_its_queue(queue: Queue):
    for call in (queue.jobs.get, queue.jobs.cancel, queue.jobs.pause, queue.jobs.resume, queue.jobs.redrive):
        with pytest.raises(JobNotFound, match=f"found no job 'job-none' in queue '{queue.name}'"):
            call("job-none")
    assert queue.leases.claim("job-none", 1, "w1") == []
