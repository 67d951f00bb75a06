"""Which items a worker claims, and for which slots: priorities, tenants, reservations and models."""

from __future__ import annotations

import json
from functools import partial

import pytest
from queue_objects import SlowRunner, make_line, wait_for

from ballast_cli.explain import scene
from ballast_engine.build import build_engine
from ballast_policy.jobs.choice import LEAST_AHEAD
from ballast_queue.job import JobState
from ballast_worker.claimer import FIRST_COST, MOST_REFUSED
from ballast_worker.waiting_reasons import why


def test_every_slot_is_filled_while_the_queue_has_work_and_little_more_is_claimed(fed, queue, eventually) -> None:
    with fed(slots=4) as serving:
        job_id = queue.submissions.submit([make_line(i, max_tokens=1500, ignore_eos=True) for i in range(40)]).job_id
        stats = eventually(
            lambda: (s := serving.worker.engine.stats()).offline.running == 4 and s, "all slots to be filled"
        )
        held = serving.worker.feeder.num_held
        leased = queue.jobs.get(job_id).counts.leased
        queue.jobs.cancel(job_id)
        eventually(lambda: serving.is_idle() and not serving.worker.feeder.num_held, "the items to be aborted")
        job = wait_for(queue, job_id, eventually)
        results = list(queue.results.read(job_id))
        cost = serving.worker.feeder._claimer._cost  # noqa: SLF001  only the choice of a tenant depends on it

    assert stats.offline.running == 4
    assert cost == FIRST_COST, "an item without an answer shows no cost"
    assert 4 <= held <= 4 + 8
    assert 4 <= leased <= 4 + 8
    assert job.state is JobState.CANCELLED
    assert job.counts.cancelled == 40
    assert [result.error["code"] for result in results] == ["cancelled"] * 40
    assert queue.stats().items.leased == 0


def test_nothing_is_claimed_where_offline_may_hold_no_slot(fed, queue, eventually) -> None:
    with fed(offline={"reservedPercent": 0, "maxPercent": 0}) as serving:
        job_id = queue.submissions.submit([make_line(0)]).job_id
        eventually(lambda: serving.worker.feeder.stats, "the feeder's first look")
        eventually(lambda: serving.worker.feeder.stats.items.waiting == 1, "the feeder to see the item")

        assert queue.jobs.get(job_id).counts.waiting == 1
        assert serving.worker.feeder.num_held == 0
        with serving.client() as client:
            refused = client.post("/v1/completions", json=json.loads(make_line(1))["body"] | {"service_tier": "flex"})
            metrics = client.get("/metrics").text

    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_offline")
    assert refused.headers["retry-after"] == "30"
    assert 'ballast_requests_total{class="offline",outcome="queue_full"} 1.0' in metrics


def test_the_offline_cap_bounds_what_runs(fed, queue, eventually) -> None:
    with fed(offline={"reservedPercent": 25, "maxPercent": 50}) as serving:
        job_id = queue.submissions.submit([make_line(i, max_tokens=60, ignore_eos=True) for i in range(12)]).job_id
        most = 0

        def is_over() -> bool:
            nonlocal most
            most = max(most, serving.worker.engine.stats().offline.running)
            return queue.jobs.get(job_id).state.is_over

        eventually(is_over, "the job to be over")

    assert most == 2


def test_higher_priority_jobs_go_first(fed, queue, eventually) -> None:
    low = queue.submissions.submit([make_line(i, max_tokens=30, ignore_eos=True) for i in range(12)], priority=0).job_id
    high = queue.submissions.submit(
        [make_line(i, max_tokens=30, ignore_eos=True) for i in range(12)], priority=5
    ).job_id
    with fed(slots=2):
        wait_for(queue, low, eventually)

    assert queue.jobs.get(high).finished < queue.jobs.get(low).finished


def test_tenants_take_turns_by_weight(fed, queue, eventually) -> None:
    jobs = {
        tenant: queue.submissions.submit([make_line(i, ignore_eos=True) for i in range(12)], tenant=tenant).job_id
        for tenant in ("a", "b")
    }
    weights = {"tenants": [{"name": "a"}, {"name": "b", "weight": 5}]}
    with fed(partial(build_engine, wrap=SlowRunner().around), slots=2, offline=weights):
        eventually(lambda: queue.jobs.get(jobs["b"]).counts.succeeded >= 10, "the second tenant to be served")
        first = queue.jobs.get(jobs["a"]).counts
        for job_id in jobs.values():
            wait_for(queue, job_id, eventually)
        service = eventually(lambda: len(s := queue.ledger.charge({}).tenants) == 2 and s, "the ledger to be posted")

    assert 0 < first.done < 6, "the first tenant gets a fifth of what the second gets"
    assert set(service) == {"a", "b"}


def test_the_items_of_a_capped_tenant_keep_no_slot_from_the_others(fed, queue, eventually) -> None:
    long = [make_line(index, max_tokens=1500, ignore_eos=True) for index in range(12)]
    with fed(offline={"tenants": [{"name": "capped", "maxSlots": 1}, {"name": "free"}]}) as serving:
        eventually(lambda: queue.settings.read().tenants, "the worker to configure the queue")
        stats = serving.worker.engine.stats
        capped = queue.submissions.submit(long, tenant="capped").job_id
        eventually(lambda: stats().offline.running == 1, "the capped tenant to have its slot")
        free = queue.submissions.submit(long, tenant="free").job_id
        eventually(lambda: stats().offline.running == 4, "the other tenant to have the other slots")
        leased = queue.jobs.get(capped).counts.leased
        for job_id in (capped, free):
            queue.jobs.cancel(job_id)

    assert leased <= 1 + LEAST_AHEAD


def test_a_reservation_holds_over_all_workers(fed, queue, eventually) -> None:
    """Each of two workers sees little of it; together they give the tenant its half of the slots."""
    tenants = [{"name": "small", "reservedPercent": 50, "weight": 0.001}, {"name": "big", "weight": 1000}]
    long = {"max_tokens": 400, "ignore_eos": True}
    with fed(offline={"tenants": tenants}), fed(offline={"tenants": tenants}, runtime={"workerId": "w2"}):
        eventually(lambda: queue.settings.read().tenants, "the workers to configure the queue")
        big = queue.submissions.submit([make_line(i, **long) for i in range(200)], tenant="big").job_id
        eventually(lambda: queue.claimable.demand().held.get("big", 0) >= 8, "the other tenant to have every slot")
        small = queue.submissions.submit([make_line(i, **long) for i in range(200)], tenant="small").job_id
        eventually(
            lambda: 2 * queue.claimable.demand().held.get("small", 0) >= queue.claimable.demand().held["big"],
            "the reservation",
        )
        for job_id in (big, small):
            queue.jobs.cancel(job_id)


def test_the_status_tells_unused_reserved_slots_from_ones_that_nothing_may_use(fed, queue, eventually) -> None:
    """Two of four slots are reserved; the first tenant may hold one slot, so one request meets the reservation."""
    tenants = [{"name": "capped", "maxSlots": 1}, {"name": "free"}]
    long = {"max_tokens": 1500, "ignore_eos": True}
    with fed(offline={"reservedPercent": 50, "maxPercent": 50, "tenants": tenants}):
        eventually(lambda: queue.settings.read().tenants, "the worker's settings in the queue")
        capped = queue.submissions.submit([make_line(i, **long) for i in range(50)], tenant="capped").job_id
        [alone] = eventually(
            lambda: [w for w in queue.workers.statuses() if w.reservation.in_use == 1], "one request to run"
        )
        eventually(lambda: not queue.workers.statuses()[0].can_claim, "the tenant at its cap")
        free = queue.submissions.submit([make_line(i, **long) for i in range(50)], tenant="free").job_id
        [both] = eventually(
            lambda: [w for w in queue.workers.statuses() if w.reservation.in_use == 2], "both slots in use"
        )
        eventually(lambda: queue.workers.statuses()[0].can_claim, "items of the other tenant in the queue")
        for job_id in (capped, free):
            queue.jobs.cancel(job_id)
        eventually(lambda: not queue.workers.statuses()[0].can_claim, "nothing to claim")

    assert (alone.reservation.slots, both.reservation.slots) == (2, 2)
    assert alone.offline.reserved == 2
    assert alone.reservation.is_met
    assert both.reservation.is_met


def test_why_a_job_waits_follows_from_what_a_worker_says(fed, queue, eventually) -> None:
    offline = {"tenants": [{"name": "capped", "maxSlots": 1}, {"name": "free"}], "maxPercent": 50}
    with fed(offline=offline):
        eventually(lambda: queue.settings.read().tenants, "the worker's settings in the queue")
        lines = [make_line(i, max_tokens=1500, ignore_eos=True) for i in range(8)]
        job_id = queue.submissions.submit(lines, tenant="capped").job_id
        eventually(
            lambda: [w.tenant_slots for w in queue.workers.statuses()] == [{"capped": 1}], "the cap in its status"
        )
        eventually(lambda: queue.jobs.get(job_id).counts.leased >= 1, "an item under lease")
        [status], said = queue.workers.statuses(), why(queue.jobs.get(job_id), scene(queue))
        queue.jobs.cancel(job_id)

    assert (status.offline_reserved, status.offline_most) == (1, 2)
    assert any("Tenant capped is at its cap" in sentence for sentence in said), said


def test_items_that_name_another_model_wait_for_a_worker_of_it(fed, queue, eventually) -> None:
    old = queue.submissions.submit([make_line(index, model="tiny") for index in range(6)]).job_id
    with fed(model={"servedName": "renamed"}) as serving:
        eventually(lambda: queue.jobs.get(old).counts.waiting == 6 and serving.worker.feeder.is_up, "the first round")
        new = queue.submissions.submit([make_line(0, model="renamed")]).job_id
        done = wait_for(queue, new, eventually)
        waiting = eventually(
            lambda: (counts := queue.jobs.get(old).counts).waiting == 6 and counts, "all items to be back"
        )
        eventually(lambda: not queue.workers.statuses()[0].can_claim, "nothing that the worker could run")
        depth, said = queue.stats().claimable_depth, why(queue.jobs.get(old), scene(queue))
    with fed():
        finished = wait_for(queue, old, eventually)

    assert done.counts.succeeded == 1
    assert (waiting.waiting, waiting.failed, depth) == (6, 0, 0)
    assert said[0].startswith("It adds no replica, because no worker serves the model that its items name: serve that")
    assert finished.counts.succeeded == 6


def test_each_worker_runs_the_items_of_its_model_behind_any_number_of_others(fed, queue, eventually) -> None:
    names = ["missing"] * 60 + ["tiny", "renamed"] * 20
    job_id = queue.submissions.submit([make_line(index, model=name) for index, name in enumerate(names)]).job_id
    with fed(), fed(model={"servedName": "renamed"}, runtime={"workerId": "w2"}):
        eventually(lambda: queue.jobs.get(job_id).counts.succeeded == 40, "all items of a served model to succeed")
        eventually(lambda: not queue.stats().claimable_depth, "no other item to count as work")
        job = queue.jobs.get(job_id)
        said = why(job, scene(queue))

    assert job.counts.waiting == 60
    assert said[0].startswith("It adds no replica, because no worker serves the model that its items name: serve that")


def test_a_worker_does_not_claim_items_of_many_other_models_again_and_again(fed, queue, eventually) -> None:
    lines = [make_line(index, model=f"missing-{index % (MOST_REFUSED + 9)}") for index in range(2 * MOST_REFUSED)]
    job_id = queue.submissions.submit([*lines, make_line("last")]).job_id
    with fed() as serving:
        eventually(lambda: queue.jobs.get(job_id).counts.succeeded, "the last item to succeed")
        eventually(lambda: queue.jobs.get(job_id).counts.waiting == len(lines), "the others to be back")
        wait_for(queue, queue.submissions.submit([make_line("later")]).job_id, eventually)
        eventually(lambda: not queue.workers.statuses()[0].can_claim, "nothing that the worker could run")
        stats, outcomes = queue.stats(), serving.worker.feeder.outcomes

    assert (stats.items.waiting, stats.claimable_depth) == (len(lines), 0)
    assert outcomes.total() == len(lines) + 2, "each item is claimed once"


@pytest.mark.parametrize("body", [{"model": "other"}, {"max_tokens": 100_000}], ids=["given back", "refused"])
def test_items_that_cannot_run_hold_up_no_item_behind_them(fed, queue, eventually, body) -> None:
    for _ in range(240):
        queue.submissions.submit([make_line(0, **body)])
    new = queue.submissions.submit([make_line(0)]).job_id
    waits: list[float] = []
    with fed(offline={"leaseSeconds": 30}) as serving:
        wait = serving.worker.loop.wait_as_feeder

        def record(seconds: float) -> bool:
            if is_woken := wait(seconds):
                return is_woken
            waits.append(seconds)
            return False

        serving.worker.loop.wait_as_feeder = record
        done = wait_for(queue, new, eventually)

    assert done.counts.succeeded == 1
    assert sum(waits) < 5, "two claims of six items each second take 20 seconds"
