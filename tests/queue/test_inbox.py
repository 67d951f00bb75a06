from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ballast_openai.errors import describe
from ballast_queue.batch_lines import CHUNK_LINES, read_line
from ballast_queue.errors import RefusedCall
from ballast_queue.inbox import InboxReader
from ballast_queue.job import JobState
from ballast_queue.redis_store import Queue
from ballast_queue.settings import QueueSettings, TenantSettings


@pytest.fixture
def add(queue, desk):
    def add(item=None, *, of=None, **fields):
        inbox = queue.store.keys.inbox if of is None else queue.store.keys.inbox_of(of)
        return desk.raw.xadd(inbox, ({} if item is None else {"item": item}) | fields)

    return add


def declare(queue, *names):
    queue.settings.apply(QueueSettings(tenants=tuple(TenantSettings(name=name) for name in names)))


def codes(queue, job_id):
    return {found.custom_id: found.error["code"] for found in queue.results.read(job_id)}


def test_entries_become_a_job_that_an_end_mark_closes(queue, add, line, result):
    add(line("a"), job="j", tenant="acme", priority="2", deadline="9999999999")
    add(line("b"), job="j", tenant="acme")
    depth = queue.stats().depth
    taken = queue.inbox.take_in()
    opened = queue.jobs.get("j")
    early = queue.leases.claim("j", 5, "w1")
    queue.leases.finish_many("w1", [(c, result(c)) for c in early])
    still_open = queue.jobs.get("j").state
    add(end="1", job="j")
    queue.inbox.take_in()
    job = queue.jobs.get("j")

    assert (depth, taken, queue.stats().inbox) == (2, 2, 0)
    assert (opened.state, opened.tenant, opened.priority, opened.deadline) == (
        JobState.VALIDATING,
        "acme",
        2,
        9999999999,
    )
    assert [c.custom_id for c in early] == ["a", "b"]
    assert still_open is JobState.VALIDATING
    assert (job.state, job.counts.succeeded) == (JobState.COMPLETED, 2)


@pytest.mark.parametrize("num_lost", range(4))
def test_a_job_whose_entries_a_failover_lost_has_an_error_that_states_their_number(queue, add, desk, line, num_lost):
    entries = [add(item, job="j") for item in (line("a"), line("a"), b"{")]
    add(job="j", end="1", lines="3")
    for entry in entries[:num_lost]:
        desk.raw.xdel(queue.store.keys.inbox, entry)
    queue.inbox.take_in()
    found = {result.custom_id: result.error for result in queue.results.read("j")}
    lost = found.get(f"line:{5 - num_lost}")

    assert (lost is not None) == (num_lost > 0)
    if lost:
        assert lost["code"] == "lines_missing"
        assert lost["message"].startswith(f"lines: found {3 - num_lost} in the job, expected 3")
    assert queue.jobs.get("j").counts.waiting == (num_lost < 2)
    assert queue.jobs.get("j").state is (JobState.IN_PROGRESS if num_lost < 2 else JobState.FAILED)


@pytest.mark.parametrize("tenant", [None, "acme"], ids=["the inbox for all", "the inbox of a tenant"])
def test_an_inbox_whose_last_id_was_used_begins_again_when_it_is_empty(queue, add, desk, line, tenant):
    if tenant is not None:
        declare(queue, tenant)
    inbox = queue.store.keys.inbox if tenant is None else queue.store.keys.inbox_of(tenant)
    last = f"{2**64 - 1}-{2**64 - 1}"
    add(line("a"), of=tenant, job="j")
    desk.raw.xadd(inbox, {"item": line("b"), "job": "k"}, id=last)
    with pytest.raises(redis.ResponseError):
        add(line("c"), of=tenant, job="j")
    partly = queue.inbox.take_in(1), desk.raw.xlen(inbox)
    whole = queue.inbox.take_in(), desk.raw.exists(inbox)
    add(line("c"), of=tenant, job="j")
    queue.inbox.take_in()

    assert (partly, whole) == ((1, 1), (1, 0))
    assert desk.raw.exists(inbox), "an inbox stays, so that it accepts each chosen id once"
    suffix = "" if tenant is None else f"@{tenant}"
    assert [queue.jobs.get(name + suffix).counts.waiting for name in "jk"] == [2, 1]


@pytest.mark.parametrize(("entry", "is_left"), [(f"{2**64 - 1}-7", False), (f"7-{2**64 - 1}", True)])
def test_an_inbox_begins_again_behind_the_last_time_only(queue, desk, line, entry, is_left):
    desk.raw.xadd(queue.store.keys.inbox, {"item": line("a")}, id=entry)
    queue.inbox.take_in()

    assert desk.raw.exists(queue.store.keys.inbox) == is_left


def test_an_item_with_ends_of_lines_in_it_is_claimed_with_the_same_seed_by_every_version(queue, add, line):
    add(json.dumps(json.loads(line("the first")), indent=1), job="j", end="1")
    queue.inbox.take_in()
    (claimed,) = queue.leases.claim("j", 1, "w1")

    assert (claimed.custom_id, claimed.body["prompt"]) == ("the first", "Say the first")
    assert claimed.seed == 8709044997843909330


NO_ITEM = "item: found nothing, expected a line in OpenAI's batch format"
WRONG_ENTRIES = {
    "line:2": ({"item": b"{"}, "invalid_json", None, "found no JSON"),
    "line:3": ({"item": None}, "invalid_entry", "item", NO_ITEM),
    "b": ({"tenant": "blue"}, "wrong_tenant", "tenant", "tenant: found the string 'blue', expected the tenant of the "),
    "c": ({"tenant": "green"}, "unknown_tenant", "tenant", "tenant: found 'green', expected a tenant that this queue "),
    "d": ({"colour": "red"}, "invalid_entry", None, "entry: found an unknown field (the string 'colour'), expected "),
    "e": ({"priority": "high"}, "invalid_entry", None, "priority: found the string 'high', expected an integer"),
    "f": ({"deadline": "soon"}, "invalid_entry", None, "deadline: found the string 'soon', expected Unix seconds"),
    "g": (
        {"end": "maybe"},
        "invalid_entry",
        "end",
        "end: found the string 'maybe', expected 1 in the last entry of a ",
    ),
    "h": ({"lines": "-3"}, "invalid_entry", "lines", "lines: found the string '-3', expected the number of items of "),
}
"""The fields of entries, and the error of each: code, field and a part of its message."""


def test_what_is_wrong_with_an_entry_is_its_error_result(queue, add, line):
    declare(queue, "acme", "blue")
    add(line("a"), of="acme", job="j", tenant="acme")
    for name, (fields, *_) in WRONG_ENTRIES.items():
        add(of="acme", job="j", **{"item": line(name)} | fields)
    add(line("a"), of="acme", job="j")
    queue.inbox.take_in()
    found = {result.custom_id: result.error for result in queue.results.read("j@acme")}

    assert found.pop("line:11")["code"] == "duplicate_custom_id"
    assert found.keys() == WRONG_ENTRIES.keys()
    for name, (_, code, param, message) in WRONG_ENTRIES.items():
        assert (found[name]["code"], found[name]["param"]) == (code, param), name
        assert message in found[name]["message"], name
    assert queue.jobs.get("j@acme").counts.waiting == 1


def test_an_entry_that_is_no_unicode_is_refused_and_holds_up_nothing(queue, desk, add, line):
    desk.raw.xadd(queue.store.keys.inbox, {"item": line("a"), "job": "j", b"\xff": b"\xfe"})
    add(line("b"), job="j", end="1")
    queue.inbox.take_in()

    assert codes(queue, "j") == {"a": "invalid_entry"}
    assert queue.jobs.get("j").counts.waiting == 1


def test_a_job_whose_first_entry_has_wrong_terms_gets_the_usual_ones(queue, add, line):
    add(line("a"), job="j", tenant="acme", priority="high")
    add(line("b"), job="j", tenant="acme")
    add(line("a"), job="k", tenant="a|b", priority="3")
    queue.inbox.take_in()
    first, second = queue.jobs.get("j"), queue.jobs.get("k")

    assert (first.tenant, first.priority, first.deadline, first.counts.waiting) == ("acme", 0, None, 1)
    assert (second.tenant, second.priority) == ("default", 3)
    assert codes(queue, "k") == {"a": "invalid_entry"}


def test_a_tenants_priority_is_taken_down_to_its_limit_in_the_inbox_too(queue, add, line):
    queue.settings.apply(QueueSettings(tenants=(TenantSettings(name="acme", max_priority=5),)))
    add(line("a"), of="acme", job="high", tenant="acme", priority="50")
    add(line("a"), of="acme", job="low", priority="-7")
    queue.inbox.take_in()

    assert (queue.jobs.get("high@acme").priority, queue.jobs.get("low@acme").priority) == (5, -7)


@pytest.mark.parametrize("num_bad", [0, 1, CHUNK_LINES])
def test_what_comes_by_the_inbox_shares_a_prefix_key_with_what_is_submitted(queue, add, line, num_bad):
    queue.submissions.submit([line("r", prompt="Be brief.")])
    for _ in range(num_bad):
        add(b"{", job="j")
    add(line("a", prompt="Be brief."), job="j", end="1")
    queue.inbox.take_in(CHUNK_LINES + 1)
    first, second = (head.prefix_key for head in queue.claimable.heads())

    assert first == second != 0


def test_a_queue_with_tenants_refuses_the_inbox_for_all_whatever_an_entry_claims(queue, add, line):
    declare(queue, "acme", "default")
    add(line("a"), of="acme", job="j")
    entry = add(line("b"), job="j", tenant="acme", end="1").decode()
    queue.inbox.take_in()

    assert queue.jobs.get("j@acme").state is JobState.VALIDATING, "a stranger does not close it"
    assert queue.jobs.get("j@acme").counts.waiting == 1
    (refused,) = queue.results.read(f"inbox-{entry}")
    assert (refused.custom_id, refused.error["code"], refused.error["param"]) == ("b", "unknown_tenant", "tenant")
    assert "found the inbox for all, expected the inbox of a tenant" in refused.error["message"]


def test_the_inbox_of_a_tenant_decides_the_tenant_of_its_entries(queue, add, line):
    declare(queue, "acme", "blue")
    add(line("a"), of="blue", job="mine", tenant="acme")
    add(line("a"), of="acme", job="theirs")
    add(line("b"), of="acme", job="theirs", end="1")
    waiting = queue.stats().inbox
    queue.inbox.take_in()

    assert (waiting, queue.stats().inbox) == (3, 0)
    assert queue.jobs.get("mine@blue").tenant == "blue"
    assert codes(queue, "mine@blue") == {"a": "wrong_tenant"}
    assert (queue.jobs.get("theirs@acme").tenant, queue.jobs.get("theirs@acme").counts.waiting) == ("acme", 2)


def test_no_tenant_takes_the_name_of_anothers_job(queue, add, line):
    declare(queue, "acme", "blue")
    for name in ("nightly", "nightly@acme"):
        stranger = add(line("a"), of="blue", job=name, end="1").decode()
    add(line("a"), of="acme", job="nightly")
    queue.inbox.take_in()

    assert {job.id: job.tenant for job in queue.jobs.all()} == {
        "nightly@blue": "blue",
        f"inbox-blue-{stranger}": "blue",
        "nightly@acme": "acme",
    }
    assert codes(queue, f"inbox-blue-{stranger}") == {"a": "invalid_job"}


def test_no_writer_chooses_the_job_that_an_entry_of_another_tenant_becomes(queue, desk, line):
    declare(queue, "acme", "blue")
    of = queue.store.keys.inbox_of
    desk.raw.xadd(of("blue"), {"item": line("a"), "job": "inbox-acme-9-0"}, id="7-0")
    desk.raw.xadd(of("acme"), {"item": line("b")}, id="9-0")
    queue.inbox.take_in()

    assert codes(queue, "inbox-blue-7-0") == {"a": "invalid_job"}
    assert (queue.jobs.get("inbox-acme-9-0").tenant, queue.jobs.get("inbox-acme-9-0").counts.waiting) == ("acme", 1)


def test_a_full_inbox_leaves_room_for_those_of_other_tenants(queue, add, line):
    declare(queue, "acme", "blue")
    for i in range(30):
        add(line(f"a{i}"), of="acme", job="big")
    for i in range(3):
        add(line(f"b{i}"), of="blue", job="small")
    taken = queue.inbox.take_in(10)

    assert taken == 10
    assert [queue.jobs.get(job_id).counts.waiting for job_id in ("big@acme", "small@blue")] == [7, 3]


def test_a_line_behind_the_end_mark_is_refused_by_name(queue, add, line):
    add(line("a"), job="j", end="1")
    add(line("b"), job="j")
    queue.inbox.take_in()
    queue.jobs.cancel("j")
    add(line("c"), job="j")
    queue.inbox.take_in()

    messages = {found.custom_id: found.error["message"] for found in queue.results.read("j")}

    assert codes(queue, "j") == {"line:2": "job_closed", "a": "cancelled", "line:3": "job_closed"}
    assert messages["line:2"] == "this line came after the end mark of its job: submit it in another job"
    assert messages["line:3"] == "the job was cancelled before this line came: submit it in another job"


def test_a_line_for_a_job_that_has_expired_is_refused_with_the_reason(queue, desk, add, line):
    add(line("a"), job="late", deadline="9999999999")
    add(line("a"), job="left")
    queue.inbox.take_in()
    desk.pass_deadline("late")
    desk.raw.zadd(queue.store.keys.timers, {"abandon:left": 1}, xx=True)
    for _ in range(2):
        queue.timers.run_due()
    for job_id in ("late", "left"):
        add(line("b"), job=job_id)
    queue.inbox.take_in()
    last = [list(queue.results.read(job_id))[-1].error["message"] for job_id in ("late", "left")]

    assert last == [
        f"the job expired before this line came ({reason} 1 of 1 items left): submit it in another job"
        for reason in ("the deadline passed with", "the job was paused or open for too long, with")
    ]


def test_a_job_whose_deadline_has_passed_when_it_is_read_expires(queue, add, line):
    add(line("a"), job="late", deadline="1")
    queue.inbox.take_in()
    while queue.timers.run_due():
        pass

    assert queue.jobs.get("late").state is JobState.EXPIRED
    assert codes(queue, "late") == {"a": "expired"}


def test_nobody_adds_to_a_job_that_was_submitted_another_way(queue, add, line):
    job_id = queue.submissions.submit([line("a")]).job_id
    entry = add(line("b"), job=job_id, tenant="mallory").decode()
    queue.inbox.take_in()

    assert queue.jobs.get(job_id).counts.total == 1
    assert codes(queue, f"inbox-{entry}") == {"b": "invalid_job"}
    assert queue.jobs.get(f"inbox-{entry}").state is JobState.FAILED


@pytest.mark.parametrize("name", ["", "a b", "a|b", "x" * 129, "-a", "ü", "{a}", "a\n", "a:items", "a:results"])
def test_an_unsafe_job_id_is_refused(queue, add, line, name):
    entry = add(line("a"), job=name, end="1", lines="3").decode()
    queue.inbox.take_in()
    (found,) = queue.results.read(f"inbox-{entry}")  # the three lines are those of no job

    assert (found.custom_id, found.error["code"], found.error["param"]) == ("a", "invalid_job", "job")
    assert found.error["message"].startswith(f"job: found {describe(name)}, expected an id of at most 128 letters, ")
    assert found.error["message"].endswith("no job with unreadable values has, and no id of an inbox entry")


def test_a_worker_that_dies_while_it_takes_entries_in_loses_and_doubles_none(queue, add, line, monkeypatch):
    for i in range(6):
        add(line(f"r{i}"), job=f"j{i % 2}")
    connection = queue.store.connection
    call_many = connection.call_many

    def dying(calls):
        if calls[0][0] == "store":
            call_many(calls[:1])
            raise KeyboardInterrupt
        return call_many(calls)

    monkeypatch.setattr(connection, "call_many", dying)
    with pytest.raises(KeyboardInterrupt):
        queue.inbox.take_in()
    monkeypatch.undo()
    left = queue.stats().inbox
    Queue(connection, queue.name).inbox.take_in()

    assert left == 3
    assert [queue.jobs.get(f"j{i}").counts.waiting for i in range(2)] == [3, 3]


@pytest.mark.parametrize("is_one_bad", [False, True])
def test_entries_of_many_jobs_take_no_round_trip_each(queue, desk, add, line, is_one_bad):
    entries = [add(line(f"r{i}")).decode() for i in range(200)]
    if is_one_bad:
        desk.raw.set(queue.store.keys.job("bad"), "text")
        add(line("b"), job="bad")
    before = desk.raw.info("stats")["total_reads_processed"]
    queue.inbox.take_in()
    num_reads = desk.raw.info("stats")["total_reads_processed"] - before
    desk.raw.delete(queue.store.keys.job("bad"))

    assert all(queue.jobs.get(f"inbox-{entry}").counts.waiting == 1 for entry in entries)
    assert num_reads < len(entries)


def test_two_workers_that_read_the_same_entries_store_them_once(queue, desk, add, line):
    for i in range(4):
        add(line(f"r{i}"), job="j")
    other = Queue(queue.store.connection, queue.name)
    real_open = queue.store.functions.open

    def overtaken(*args, **kwargs):
        desk.raw.delete(queue.store.keys.intake)
        other.inbox.take_in()
        desk.raw.set(queue.store.keys.intake, "a third", px=60_000)
        return real_open(*args, **kwargs)

    queue.store.functions.open = overtaken
    queue.inbox.take_in()
    turn = desk.raw.getdel(queue.store.keys.intake)

    assert queue.jobs.get("j").counts.total == 4
    assert turn == b"a third", "a worker ends no turn of another"


def test_only_one_worker_at_a_time_takes_the_inbox_in(queue, desk, add, line):
    add(line("a"), job="j")
    desk.raw.set(queue.store.keys.intake, "somebody", px=60_000)
    nothing = queue.inbox.take_in()
    desk.raw.delete(queue.store.keys.intake)

    assert (nothing, queue.inbox.take_in(), queue.inbox.take_in()) == (0, 1, 0)


def test_a_page_of_the_inbox_is_bounded_by_entries_and_bytes(queue, add, line):
    for i in range(40):
        add(line(f"r{i}", prompt="x" * 500_000), job="j")
    first, second, third = queue.inbox.take_in(10), queue.inbox.take_in(), queue.inbox.take_in()

    assert first == 10
    assert 0 < second <= 30
    assert first + second + third == 40


def page_of(queue, limit=500, most=10**8):
    """What a worker reads of the inbox, and takes in later."""
    functions = queue.store.functions
    call = functions.begin_intake("w", limit, seconds=60, max_bytes=most, tenants=queue.settings.tenants())
    return queue.store.call(call)


def add_pairs(desk, inbox, pairs, entry_id="*"):
    """Add an entry whose fields may have the same name."""
    desk.raw.execute_command("XADD", inbox, entry_id, *(text for pair in pairs for text in pair))


def test_a_page_is_bounded_whatever_the_number_of_inboxes_and_the_size_of_an_entry(queue, desk, add):
    declare(queue, "a", "b", "c")
    add(b"x" * 20_000_000, of="b")
    for tenant in ("a", "b", "c"):
        for _ in range(3):
            add(b"x" * 2_000_000, of=tenant)
    sizes = [sum(len(fields[1]) for _, fields, _ in page_of(queue)) for _ in range(3)]
    left = queue.stats().inbox
    desk.raw.delete(queue.store.keys.intake)
    while queue.inbox.take_in():
        pass

    assert all(0 < size <= 8 * 1024 * 1024 + 20_000_000 for size in sizes)
    assert (left, len(queue.jobs.all())) == (10, 10)


def test_long_lines_of_other_tenants_hold_no_inbox_up(queue, desk, add, line):
    declare(queue, "a", "b", "c")
    for tenant in ("a", "b"):
        add(b"x" * 5_000_000, of=tenant)
    for i in range(3):
        add(line(f"r{i}"), of="c", job="j")
    read = [{position for *_, position in page_of(queue, most=1000)} for _ in range(40)]
    desk.raw.delete(queue.store.keys.intake)

    assert {1, 2} in read
    assert any(3 in positions for positions in read)


def test_a_line_beyond_the_limit_is_cut_before_it_is_read_and_refused(queue, add, line):
    queue.settings.apply(QueueSettings(max_line_bytes=1000))
    long, blank = line("a", prompt="x" * 5000), line("b") + b" " * 5000 + b"{"
    for item in (long, blank, line("c")):
        add(item, job="j")
    sizes = [len(fields[1]) for _, fields in page_of(queue, most=1000)]
    queue.store.call(queue.store.functions.end_intake("w"))
    queue.inbox.take_in()

    assert sizes == [1001, 1001, len(line("c"))]
    assert codes(queue, "j") == {"line:1": "line_too_long", "line:2": "line_too_long"}
    assert queue.jobs.get("j").counts.waiting == 1


def test_no_part_of_a_longer_line_is_accepted_in_its_place(queue, add, line):
    most = len(line("a")) + 10
    queue.settings.apply(QueueSettings(max_line_bytes=most))
    full = line("a").ljust(most)
    for end in (b"\n", b"\r\n"):
        add(full + end)
    for rest in (b"\n{", b"\n" * 3, b"\r\n\n", b"\r\n{", b"\n" * 100 + line("b")):
        for item in (full, line("a")):
            add(item + rest.rjust(most + 3 - len(item), b"\n") + b"more")
    queue.inbox.take_in()
    codes_of_all = [code for job in queue.jobs.all() for code in codes(queue, job.id).values()]

    assert queue.stats().items.waiting == 2
    assert codes_of_all == ["line_too_long"] * 10


def test_a_worker_reads_the_fields_of_an_entry_and_one_other(queue, desk, add, line):
    pairs = [("item", b"first"), *((f"x{i}", b"y") for i in range(61)), ("item", line("a")), ("job", "j")]
    add_pairs(desk, queue.store.keys.inbox, pairs)
    ((_, fields),) = page_of(queue)
    desk.raw.delete(queue.store.keys.intake)
    queue.inbox.take_in()

    assert fields == [b"item", line("a"), b"x60", b"y", b"job", b"j"]
    assert codes(queue, "j") == {"a": "invalid_entry"}


def test_each_call_takes_an_entry_of_many_fields_away_also_if_nobody_gets_the_reply(queue, desk, add, line):
    declare(queue, "a", "b", "c")
    inbox, pairs = queue.store.keys.inbox_of("a"), [("item", line("a")), ("job", "j"), *[("", "")] * 150_000]
    for _ in range(3):
        add_pairs(desk, inbox, pairs)
    add_pairs(desk, inbox, [("item", line("short")), *[("item", line("late"))] * 64])
    add(line("b"), of="b", job="j")
    sizes = [desk.raw.memory_usage(inbox)]
    while sizes[-1] > 100_000:
        read = [fields for _, fields, position in page_of(queue) if position == 1]
        sizes.append(desk.raw.memory_usage(inbox))
        assert [fields for fields in read if fields == [b"item", line("a"), b"job", b"j", b"more than 64 fields", b""]]
    left = desk.raw.xlen(inbox), queue.stats().inbox
    desk.raw.delete(queue.store.keys.intake)
    while queue.inbox.take_in():
        pass

    assert sizes == sorted(sizes, reverse=True)
    assert (len(sizes), left) == (4, (1, 5))
    assert (queue.stats().inbox, desk.raw.exists(queue.store.keys.shortened_of("a"))) == (0, 0)
    assert codes(queue, "j@a") == {"a": "invalid_entry", "line:2": "invalid_entry", "line:3": "invalid_entry"}
    assert [job.counts.failed for job in queue.jobs.all() if job.id.startswith("inbox-a-")] == [1]
    assert queue.jobs.get("j@b").counts.waiting == 1


@pytest.mark.parametrize("num_lost", range(3))
@pytest.mark.parametrize(
    "how", [(None, 500), (None, 1), ("a", 500)], ids=["one page", "pages of one entry", "the inbox of a tenant"]
)
def test_an_entry_of_many_fields_keeps_its_place_and_the_ids_behind_it(queue, desk, line, how, num_lost):
    """`num_lost` replies reach no worker."""
    tenant, page = how
    keys, job = queue.store.keys, ("job", "j")
    inbox = keys.inbox_of(tenant)
    declare(queue, *([tenant] if tenant else []))
    add_pairs(desk, inbox, [("item", line("a")), job], "1-0")
    add_pairs(desk, inbox, [("item", line("b")), job, *[("", "")] * 65], "2-9")
    add_pairs(desk, inbox, [("item", line("c")), job, *[("", "")] * 65], "2-10")
    for _ in range(num_lost):
        page_of(queue)
    desk.raw.delete(keys.intake)
    add_pairs(desk, inbox, [job, ("end", "1"), ("lines", "3"), *[("", "")] * 65], "3-0")
    add_pairs(desk, inbox, [("item", line("late")), job], "3-1")
    while queue.inbox.take_in(page):
        pass
    name = "j@a" if tenant else "j"

    assert [(found.custom_id, found.error["code"]) for found in queue.results.read(name)] == [
        *(("b", "invalid_entry"), ("c", "invalid_entry"), ("line:4", "invalid_entry"), ("line:5", "job_closed")),
    ]
    assert queue.jobs.get(name).counts.waiting == 1
    assert queue.jobs.get(name).state is JobState.IN_PROGRESS


@pytest.mark.parametrize("num_fields", [65, 150_000], ids=["many fields", "fields that fill a page"])
def test_an_entry_of_many_fields_with_the_last_id_is_refused_and_holds_up_nothing(
    queue, desk, add, line, *, num_fields
):
    inbox = queue.store.keys.inbox
    add_pairs(desk, inbox, [("", "")] * num_fields, f"{2**64 - 1}-{2**64 - 1}")
    page_of(queue)
    queue.store.call(queue.store.functions.end_intake("w", [None]))
    left = desk.raw.xlen(inbox), desk.raw.exists(inbox)
    queue.inbox.take_in()
    add(line("a"), job="j")
    queue.inbox.take_in()

    assert left == (0, 1), "smaller ids would come before the entry that waits"
    assert sorted(job.counts.total for job in queue.jobs.all()) == [1, 1]
    assert queue.stats().items.waiting == 1


def test_an_entry_of_many_fields_stays_if_a_later_one_waits_of_an_inbox_that_was_deleted(queue, desk, add, line):
    inbox = queue.store.keys.inbox
    add_pairs(desk, inbox, [("item", line("a")), ("job", "j"), *[("", "")] * 65], "2-0")
    page_of(queue)
    desk.raw.delete(inbox)
    add_pairs(desk, inbox, [("item", line("b")), ("job", "j"), *[("", "")] * 65], "1-0")
    page_of(queue)
    left = desk.raw.xlen(inbox)
    desk.raw.delete(queue.store.keys.intake)
    queue.inbox.take_in()

    assert left == 1
    assert codes(queue, "j") == {"a": "invalid_entry", "b": "invalid_entry"}


def test_a_worker_of_an_older_version_gets_lines_of_any_length(queue, desk, add, line):
    add(line("a", prompt="x" * 5000))
    keys = queue.store.keys
    add_pairs(desk, keys.inbox, [("item", line("b")), *[("", "")] * 65])
    (_, fields), _ = queue.store.connection.call("begin_intake", (keys.inbox, keys.intake), ("w", 10, 60))

    assert fields[1] == line("a", prompt="x" * 5000)
    assert desk.raw.xlen(keys.inbox) == 2, "it finds no entry elsewhere"


def test_the_age_of_the_inbox_is_that_of_the_first_entries_that_a_call_may_read(queue, desk):
    declare(queue, "a", "b", "c")
    for seconds, tenant in ((3, "a"), (2, "b"), (1, "c")):
        desk.raw.xadd(queue.store.keys.inbox_of(tenant), {"item": b"x" * 5_000_000}, id=f"{seconds}000-1")
    long = queue.stats()
    desk.raw.delete(queue.store.keys.inbox_of("a"))
    short = queue.stats()
    desk.raw.delete(*map(queue.store.keys.inbox_of, ("b", "c")))

    assert (long.inbox, short.inbox) == (3, 2)
    assert long.at - long.oldest_waiting_seconds == pytest.approx(2)
    assert short.at - short.oldest_waiting_seconds == pytest.approx(1)


def test_entries_whose_values_nest_as_deep_as_the_stack_hold_up_nothing(queue, add, line):
    queue.settings.apply(QueueSettings(urls=("/v1/embeddings", "/v1/completions")))
    for depth in range(800, 1000):
        inner = '{"a":' * depth + "0" + "}" * depth
        add(f'{{"custom_id":"d","url":"/v1/embeddings","body":{{"model":"m","input":{inner}}}}}', job="j")
    add(line("a"), job="j", end="1")
    queue.inbox.take_in()

    assert queue.stats().inbox == 0
    assert [c.custom_id for c in queue.leases.claim("j", 5, "w1")] == ["a"]
    assert set(codes(queue, "j").values()) == {"invalid_json"}


class Defective(QueueSettings):
    """Settings with a defect that one tenant meets."""

    def priority_of(self, tenant: str, priority: int) -> int:
        if tenant == "unlucky":
            raise ZeroDivisionError
        return super().priority_of(tenant, priority)


@dataclass(frozen=True)
class DefectiveStore:
    """What the reader of an inbox needs of a store of settings."""

    def read(self) -> QueueSettings:
        return Defective()


def test_an_entry_on_which_the_worker_fails_is_refused_and_holds_up_nothing(queue, add, line, caplog):
    add(b"{", job="j")
    entry = add(line("b"), job="j", tenant="unlucky").decode()
    add(line("c"), job="j", end="1")
    InboxReader(queue.store, DefectiveStore()).take_in()
    (head,) = queue.claimable.heads()
    _, refused = queue.results.read("j")

    assert queue.stats().inbox == 0
    assert codes(queue, "j") == {"line:1": "invalid_json", "line:2": "unreadable_entry"}
    assert refused.error["message"].startswith("entry: found values on which the worker failed, expected a line")
    assert head.prefix_key == read_line(line("c"), QueueSettings())[1].prefix_key
    assert [c.custom_id for c in queue.leases.claim("j", 5, "w1")] == ["c"]
    assert [(record.message, record.fields) for record in caplog.records] == [
        ("inbox entry cannot be read, it is rejected", {"entry": entry})
    ]


@pytest.mark.parametrize(
    ("field", "value"),
    [("waiting", "x"), ("total", b"\xff"), ("stored", ""), ("rank", "x"), ("tenant", b"\xff"), (None, "text")],
)
def test_the_entries_of_a_job_that_cannot_be_read_are_refused_and_hold_up_nothing(
    queue, desk, add, line, *, caplog, field, value
):
    record = queue.store.keys.job("bad")
    add(line("a"), job="bad", end="1")
    queue.inbox.take_in()
    sound = desk.raw.hgetall(record)
    if field is None:
        desk.raw.set(record, value)
    else:
        desk.raw.hset(record, field, value)
    entries = [add(line(name), job="bad").decode() for name in "bc"]
    add(line("d"), job="good", end="1")
    queue.inbox.take_in()
    left = queue.stats().inbox
    desk.raw.delete(record)
    desk.raw.hset(record, mapping=sound)

    assert left == 0
    assert [codes(queue, f"inbox-{entry}") for entry in entries] == [{name: "invalid_job"} for name in "bc"]
    assert [c.custom_id for c in queue.leases.claim("good", 5, "w1")] == ["d"]
    assert [(record.message, record.fields) for record in caplog.records] == [
        ("value in redis cannot be read, it is skipped", {"value": "job bad"})
    ]


def test_an_entry_that_can_be_neither_taken_nor_refused_holds_up_no_other(queue, desk, add, line):
    first = add(line("a"), job="-").decode()
    record = queue.store.keys.job(f"inbox-{first}")
    desk.raw.set(record, "text")
    add(line("b"), job="j", end="1")
    with pytest.raises(RefusedCall):
        queue.inbox.take_in()
    left = queue.stats().inbox
    desk.raw.delete(record)
    queue.inbox.take_in()

    assert (left, queue.jobs.get("j").counts.waiting) == (1, 1)
    assert codes(queue, f"inbox-{first}") == {"a": "invalid_job"}


FIELD = st.sampled_from(["item", "job", "tenant", "priority", "deadline", "end", "x"])


@settings(max_examples=settings().max_examples // 2, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fields=st.dictionaries(FIELD, st.binary(max_size=20) | st.sampled_from([b"1", b"a", b"-5", b"inf"]), min_size=1))
def test_any_entry_leaves_the_inbox_and_the_queue_in_balance(queue, desk, fields):
    desk.raw.xadd(queue.store.keys.inbox, fields)
    while queue.inbox.take_in():
        pass

    assert queue.stats().inbox == 0
    assert desk.differences() == []


def test_the_inbox_of_a_tenant_that_is_left_out_keeps_its_entries_and_is_named(queue, desk, add, line):
    declare(queue, "acme", "blue", "gone")
    add(line("a"), of="blue", job="b")
    add(line("c"), of="acme", job="a")
    add_pairs(desk, queue.store.keys.inbox_of("blue"), [("job", "b"), *[("", "")] * 65])
    page_of(queue)  # it takes the last entry away, and its refusal waits
    desk.raw.delete(queue.store.keys.intake)
    before = queue.inbox.unread()
    declare(queue, "acme")
    queue.inbox.take_in()
    left_out = queue.inbox.unread()
    declare(queue)  # no tenant any more: the inbox for all is the only one
    add(line("d"), of="acme", job="a")
    none = queue.inbox.unread()
    declare(queue, "acme", "blue")
    queue.inbox.take_in()

    assert (before, left_out, none) == ({}, {"blue": 2}, {"acme": 1, "blue": 2})
    assert queue.inbox.unread() == {}
    assert queue.jobs.get("b@blue").counts.waiting == 1


def test_settings_that_are_not_in_force_declare_no_tenant(queue, add, line):
    queue.settings.apply(QueueSettings(owner=queue.name, created=1))
    queue.settings.apply(QueueSettings(owner="other/one", created=2, tenants=(TenantSettings(name="acme"),)))
    add(line("a"), of="acme", job="a")

    assert queue.inbox.unread() == {}


def test_only_the_tenants_that_were_declared_last_are_remembered(queue, desk):
    names = [f"t{number}" for number in range(2100)]
    for start in range(0, 2100, 700):
        declare(queue, *names[start : start + 700])
    kept = desk.raw.zrange(queue.store.keys.declared, 0, -1)

    assert len(kept) == 2000
    assert {name.encode() for name in names[700:]} <= set(kept)
