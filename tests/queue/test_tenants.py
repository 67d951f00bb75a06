from __future__ import annotations

from collections import Counter

import pytest
from queue_objects import submit

from ballast_queue.claimable import HEADS_OF_GROUP, MOST_AVOIDED, Group
from ballast_queue.ledger import MOST_IDLE, Service


def test_heads_show_every_tenant_of_a_band_before_a_tenants_second_job(queue, line):
    for i in range(30):
        submit(queue, line, 1, tenant="many", priority=1, deadline=queue.now() + 1000 - i)
    submit(queue, line, 1, tenant="many", priority=1)
    submit(queue, line, 1, tenant="one", priority=1)
    submit(queue, line, 1, tenant="above", priority=2)
    heads = queue.claimable.heads()
    deadlines = [head.deadline for head in heads if head.tenant == "many"]

    assert [head.tenant for head in heads] == ["above"] + ["many"] * 8 + ["one"]
    assert deadlines == sorted(deadlines)
    assert min(deadlines) == pytest.approx(queue.now() + 971, abs=5)


def test_heads_stay_few_however_many_tenants_wait(queue, line):
    for i in range(600):
        queue.submissions.submit([line("a")], tenant=f"t{i:03}", priority=i % 2)
    heads = queue.claimable.heads()
    for i in range(200):
        for _ in range(3):
            queue.submissions.submit([line("a")], tenant=f"u{i:03}", priority=5)
    in_top_band = [head.tenant for head in queue.claimable.heads() if head.priority == 5]

    assert Counter(in_top_band) == {f"u{i:03}": 1 for i in range(200)}
    assert [head.priority for head in heads] == [1] * 300 + [0] * 300
    assert len({head.tenant for head in heads}) == 600


def test_heads_are_read_of_the_groups_that_are_named(queue, line):
    submit(queue, line, 1, tenant="many", deadline=queue.now() + 1000)
    late = submit(queue, line, 1, tenant="late")
    above = submit(queue, line, 1, tenant="late", priority=3)
    everyone = queue.claimable.demand().groups
    queue.jobs.cancel(above)

    assert everyone == (Group(3, "late"), Group(0, "late"), Group(0, "many"))
    assert [head.job_id for head in queue.claimable.heads([Group(0, "late"), Group(9, "nobody")])] == [late]
    assert queue.claimable.demand().groups == everyone[1:]


def test_avoided_jobs_hide_none_of_the_jobs_behind_them(queue, line):
    job_ids = [submit(queue, line, 1, tenant="many") for _ in range(3 * HEADS_OF_GROUP)]
    other = submit(queue, line, 1, tenant="other")
    groups = [Group(0, "many"), Group(0, "other")]
    avoided = {groups[0]: [*job_ids[: HEADS_OF_GROUP + 1], "a-job-that-is-over"], Group(7, "gone"): ["another"]}
    found = [head.job_id for head in queue.claimable.heads(groups, avoided)]

    assert sorted(found) == sorted([*job_ids[HEADS_OF_GROUP + 1 :][:HEADS_OF_GROUP], other])
    assert queue.claimable.heads(groups[:1], {groups[0]: job_ids}) == []


def test_more_avoided_jobs_than_a_reply_has_hide_none_of_the_jobs_behind_them(queue, line):
    job_ids = [submit(queue, line, 1, tenant="many") for _ in range(MOST_AVOIDED + 2 * HEADS_OF_GROUP)]
    group, last = Group(0, "many"), job_ids[-1]
    starts = {}
    found = [queue.claimable.heads([group], {group: job_ids[:-1]}, starts) for _ in range(3)]
    is_begun = group in starts
    end = queue.claimable.heads([group], {group: job_ids}, starts)

    assert [[head.job_id for head in heads] for heads in found] == [[], [last], [last]]
    assert is_begun
    assert (end, starts) == ([], {}), "the next call begins at the first job"


def test_a_tenant_shows_as_many_jobs_as_its_share_of_the_most(queue, line):
    for i in range(70):
        submit(queue, line, 1, tenant=f"t{i:02}")
    for _ in range(8):
        submit(queue, line, 1, tenant="t00")
    shown = Counter(head.tenant for head in queue.claimable.heads())

    assert shown == {"t00": 7} | {f"t{i:02}": 1 for i in range(1, 70)}  # 512 heads for 70 groups: 7 each


def test_the_ledger_adds_up_and_lifts(queue):
    first = queue.ledger.charge({"acme": 1.5, "blue": 2})
    queue.ledger.charge({"acme": 1})
    lifted = queue.ledger.lift(2.25, ["acme", "blue", "green"])
    lower = queue.ledger.lift(1, ["blue"])
    charged = queue.ledger.charge({"green": 1})

    assert (first.level, first.tenants) == (0, {"acme": 1.5, "blue": 2})
    assert (lifted.level, lifted.tenants) == (2.25, {"acme": 2.5, "blue": 2.25})
    assert lower == lifted
    assert (charged.of("green"), charged.of("newcomer")) == (3.25, 2.25)
    assert queue.ledger.charge({}) == charged


def test_the_ledger_forgets_whom_a_return_would_lift_anyway(queue):
    queue.ledger.charge({"poor": 1, "level": 5, "rich": 9, "works": 1})
    service = queue.ledger.lift(5, [])
    needless = service.needless({"works"})
    queue.ledger.charge({"level": 1})
    left = queue.ledger.forget(service, needless)

    assert set(needless) == {"poor", "level"}
    assert left.tenants == {"level": 6, "rich": 9, "works": 1}
    assert left.of("poor") == 5


def test_the_ledger_keeps_a_bounded_number_of_idle_tenants():
    tenants = {f"t{i}": float(i) for i in range(2500)}
    service = Service(level=0, tenants=tenants)
    needless = service.needless({"t3"})

    assert len(needless) == 2500 - 1 - MOST_IDLE
    assert "t3" not in needless
    assert max(tenants[name] for name in needless) < min(tenants[name] for name in set(tenants) - {*needless, "t3"})
