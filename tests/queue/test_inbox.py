from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ballast_queue.job import JobState
from ballast_queue.redis_store import Queue
from ballast_queue.settings import QueueSettings, TenantSettings


@pytest.fixture
def add(queue, desk):
    def add(item=None, *, of=None, **fields):
        inbox = queue.store.keys.inbox if of is None else queue.store.keys.inbox_of(of)
        return desk.raw.xadd(inbox, ({} if item is None else {"item": item}) | fields)

    return add


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


def test_the_last_item_may_carry_the_end_mark(queue, add, line):
    add(line("a"), job="j")
    add(line("b"), job="j", end="1")
    queue.inbox.take_in()

    assert (queue.jobs.get("j").state, queue.jobs.get("j").counts.waiting) == (JobState.IN_PROGRESS, 2)


def test_an_entry_without_a_job_is_a_job_of_its_own(queue, add, line):
    entry = add(line("a")).decode()
    queue.inbox.take_in()

    assert queue.jobs.get(f"inbox-{entry}").state is JobState.IN_PROGRESS
    assert [c.custom_id for c in queue.leases.claim(f"inbox-{entry}", 5, "w1")] == ["a"]


def test_what_is_wrong_with_an_entry_is_its_error_result(queue, add, line):
    queue.settings.apply(QueueSettings(tenants=(TenantSettings(name="acme"), TenantSettings(name="blue"))))
    add(line("a"), of="acme", job="j", tenant="acme")
    add(b"{", of="acme", job="j")
    add(of="acme", job="j")
    add(line("b"), of="acme", job="j", tenant="blue")
    add(line("c"), of="acme", job="j", tenant="green")
    add(line("d"), of="acme", job="j", colour="red")
    add(line("e"), of="acme", job="j", priority="high")
    add(line("f"), of="acme", job="j", deadline="soon")
    add(line("g"), of="acme", job="j", end="maybe")
    add(line("a"), of="acme", job="j")
    queue.inbox.take_in()

    assert codes(queue, "j") == {
        "line:2": "invalid_json",
        "line:3": "invalid_entry",
        "b": "wrong_tenant",
        "c": "unknown_tenant",
        "d": "invalid_entry",
        "e": "invalid_entry",
        "f": "invalid_entry",
        "g": "invalid_entry",
        "line:10": "duplicate_custom_id",
    }
    assert queue.jobs.get("j").counts.waiting == 1


def test_what_is_wrong_with_an_entry_names_the_field(queue, add, line):
    queue.settings.apply(QueueSettings(tenants=(TenantSettings(name="acme"), TenantSettings(name="blue"))))
    add(line("a"), of="acme", job="j", tenant="acme")
    add(of="acme", job="j")
    add(line("b"), of="acme", job="j", tenant="blue")
    add(line("c"), of="acme", job="j", tenant="green")
    add(line("d"), of="acme", job="j", end="maybe")
    entry = add(line("e"), of="acme", job="a b", tenant="acme").decode()
    add(line("f"), of="acme", job="j", colour="red")
    add(line("g"), of="acme", job="j", deadline="soon")
    add(line("h"), of="acme", job="j", priority="high")
    queue.inbox.take_in()
    fields = {found.custom_id: (found.error["param"], found.error["message"]) for found in queue.results.read("j")}
    ((param, message),) = [
        (found.error["param"], found.error["message"]) for found in queue.results.read(f"inbox-acme-{entry}")
    ]

    assert {name: param for name, (param, _) in fields.items()} == {
        "line:2": "item",
        "b": "tenant",
        "c": "tenant",
        "d": "end",
        "f": None,
        "g": None,
        "h": None,
    }
    assert fields["g"][1] == "deadline: found the string 'soon', expected Unix seconds"
    assert fields["h"][1] == "priority: found the string 'high', expected an integer"
    assert fields["line:2"][1] == "item: found nothing, expected a line in OpenAI's batch format"
    assert fields["b"][1] == "tenant: found the string 'blue', expected the tenant of the job's first entry"
    assert "tenant: found 'green', expected a tenant that this queue declares: acme, blue" in fields["c"][1]
    assert fields["d"][1] == "end: found the string 'maybe', expected 1 in the last entry of a job"
    assert "the string 'colour'), expected deadline, end, item, job, priority, tenant" in fields["f"][1]
    assert param == "job"
    assert message.startswith("job: found the string 'a b', expected an id of at most 128 letters, digits and . _ / -")
    assert message.endswith("that no submitted job and no job of another tenant has, and no id of an inbox entry")


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


def test_a_tenants_priority_is_taken_down_to_its_limit_in_the_inbox_too(queue, add, line):
    queue.settings.apply(QueueSettings(tenants=(TenantSettings(name="acme", max_priority=5),)))
    add(line("a"), of="acme", job="high", tenant="acme", priority="50")
    add(line("a"), of="acme", job="low", priority="-7")
    queue.inbox.take_in()

    assert (queue.jobs.get("high").priority, queue.jobs.get("low").priority) == (5, -7)


def test_what_comes_by_the_inbox_shares_a_prefix_key_with_what_is_submitted(queue, add, line):
    queue.submissions.submit([line("r", prompt="Be brief.")])
    add(line("a", prompt="Be brief."), job="j", end="1")
    queue.inbox.take_in()
    first, second = (head.prefix_key for head in queue.claimable.heads())

    assert first == second != 0


def test_a_job_of_an_unknown_tenant_fails(queue, add, line):
    queue.settings.apply(QueueSettings(tenants=(TenantSettings(name="acme"),)))
    add(line("a"), of="acme", job="j", tenant="green", end="1")
    queue.inbox.take_in()

    assert queue.jobs.get("j").state is JobState.FAILED
    assert codes(queue, "j") == {"a": "unknown_tenant"}


def test_a_queue_with_tenants_refuses_the_inbox_for_all_whatever_an_entry_claims(queue, add, line):
    queue.settings.apply(QueueSettings(tenants=(TenantSettings(name="acme"), TenantSettings(name="default"))))
    add(line("a"), of="acme", job="j")
    entry = add(line("b"), job="j", tenant="acme", end="1").decode()
    queue.inbox.take_in()

    assert queue.jobs.get("j").state is JobState.VALIDATING, "a stranger does not close it"
    assert queue.jobs.get("j").counts.waiting == 1
    assert codes(queue, f"inbox-{entry}") == {"b": "unknown_tenant"}


def test_the_inbox_of_a_tenant_decides_the_tenant_of_its_entries(queue, add, line):
    queue.settings.apply(QueueSettings(tenants=(TenantSettings(name="acme"), TenantSettings(name="blue"))))
    add(line("a"), of="blue", job="mine", tenant="acme")
    add(line("a"), of="acme", job="theirs")
    stranger = add(line("b"), of="blue", job="theirs", end="1").decode()
    add(line("b"), of="acme", job="theirs", end="1")
    waiting = queue.stats().inbox
    queue.inbox.take_in()

    assert (waiting, queue.stats().inbox) == (4, 0)
    assert queue.jobs.get("mine").tenant == "blue"
    assert codes(queue, "mine") == {"a": "wrong_tenant"}
    assert (queue.jobs.get("theirs").tenant, queue.jobs.get("theirs").counts.waiting) == ("acme", 2)
    assert queue.jobs.get(f"inbox-blue-{stranger}").tenant == "blue"
    assert codes(queue, f"inbox-blue-{stranger}") == {"b": "invalid_job"}


def test_no_writer_chooses_the_job_that_an_entry_of_another_tenant_becomes(queue, desk, line):
    queue.settings.apply(QueueSettings(tenants=(TenantSettings(name="acme"), TenantSettings(name="blue"))))
    of = queue.store.keys.inbox_of
    desk.raw.xadd(of("blue"), {"item": line("a"), "job": "inbox-acme-9-0"}, id="7-0")
    desk.raw.xadd(of("acme"), {"item": line("b")}, id="9-0")
    queue.inbox.take_in()

    assert codes(queue, "inbox-blue-7-0") == {"a": "invalid_job"}
    assert (queue.jobs.get("inbox-acme-9-0").tenant, queue.jobs.get("inbox-acme-9-0").counts.waiting) == ("acme", 1)


def test_a_full_inbox_leaves_room_for_those_of_other_tenants(queue, add, line):
    queue.settings.apply(QueueSettings(tenants=(TenantSettings(name="acme"), TenantSettings(name="blue"))))
    for i in range(30):
        add(line(f"a{i}"), of="acme", job="big")
    for i in range(3):
        add(line(f"b{i}"), of="blue", job="small")
    taken = queue.inbox.take_in(10)

    assert taken == 10
    assert [queue.jobs.get(job_id).counts.waiting for job_id in ("big", "small")] == [7, 3]


def test_a_line_behind_the_end_mark_is_refused_by_name(queue, add, line):
    add(line("a"), job="j", end="1")
    add(line("b"), job="j")
    queue.inbox.take_in()
    queue.jobs.cancel("j")
    add(line("c"), job="j")
    queue.inbox.take_in()

    assert codes(queue, "j") == {"line:2": "job_closed", "a": "cancelled", "line:3": "job_closed"}


def test_nobody_adds_to_a_job_that_was_submitted_another_way(queue, add, line):
    job_id = queue.submissions.submit([line("a")]).job_id
    entry = add(line("b"), job=job_id, tenant="mallory").decode()
    queue.inbox.take_in()

    assert queue.jobs.get(job_id).counts.total == 1
    assert codes(queue, f"inbox-{entry}") == {"b": "invalid_job"}
    assert queue.jobs.get(f"inbox-{entry}").state is JobState.FAILED


@pytest.mark.parametrize("name", ["", "a b", "a|b", "x" * 129, "-a", "ü", "{a}", "a\n", "a:items", "a:results"])
def test_an_unsafe_job_id_is_refused(queue, add, line, name):
    entry = add(line("a"), job=name).decode()
    queue.inbox.take_in()

    assert codes(queue, f"inbox-{entry}") == {"a": "invalid_job"}


def test_a_worker_that_dies_while_it_takes_entries_in_loses_and_doubles_none(queue, desk, add, line):
    for i in range(6):
        add(line(f"r{i}"), job=f"j{i % 2}")
    other = Queue(queue.store.connection, queue.name)
    real_store, stored = queue.store.functions.store, []

    def dying(*args, **kwargs):
        if stored:
            raise KeyboardInterrupt
        stored.append(args)
        return real_store(*args, **kwargs)

    queue.store.functions.store = dying
    with pytest.raises(KeyboardInterrupt):
        queue.inbox.take_in()
    left = queue.stats().inbox
    other.inbox.take_in()

    assert left == 3
    assert [other.jobs.get(f"j{i}").counts.waiting for i in range(2)] == [3, 3]


def test_two_workers_that_read_the_same_entries_store_them_once(queue, desk, add, line):
    for i in range(4):
        add(line(f"r{i}"), job="j")
    other = Queue(queue.store.connection, queue.name)
    real_open = queue.store.functions.open

    def overtaken(*args, **kwargs):
        desk.raw.delete(queue.store.keys.intake)
        other.inbox.take_in()
        return real_open(*args, **kwargs)

    queue.store.functions.open = overtaken
    queue.inbox.take_in()

    assert queue.jobs.get("j").counts.total == 4


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


FIELD = st.sampled_from(["item", "job", "tenant", "priority", "deadline", "end", "x"])


@settings(max_examples=settings().max_examples // 2, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fields=st.dictionaries(FIELD, st.binary(max_size=20) | st.sampled_from([b"1", b"a", b"-5", b"inf"]), min_size=1))
def test_any_entry_leaves_the_inbox_and_the_queue_in_balance(queue, desk, fields):
    desk.raw.xadd(queue.store.keys.inbox, fields)
    while queue.inbox.take_in():
        pass

    assert queue.stats().inbox == 0
    assert queue.check_integrity() == []
