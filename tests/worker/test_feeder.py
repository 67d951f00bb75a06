"""Jobs through a real worker in this process, from a real Valkey."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from functools import partial

import pytest
import redis
import yaml
from queue_objects import SlowRunner, make_line

from ballast_cli.explain import scene
from ballast_engine.build import build_engine
from ballast_engine.request import GenerationRequest
from ballast_policy.jobs.choice import LEAST_AHEAD
from ballast_policy.request import RequestClass
from ballast_policy.step.planner import plan
from ballast_queue import unused
from ballast_queue.claimable import HEADS_OF_GROUP
from ballast_queue.errors import QueueFull, RefusedCall
from ballast_queue.job import JobState
from ballast_queue.redis_store import Queue
from ballast_queue.settings import QueueSettings
from ballast_worker.claimer import FIRST_COST, MOST_REFUSED
from ballast_worker.drain import drain
from ballast_worker.feeder import Feeder
from ballast_worker.feeder_tasks import FULL
from ballast_worker.items import GenerationReader
from ballast_worker.requests import RequestOutcome
from ballast_worker.waiting_reasons import why


@pytest.fixture
def desk(valkey):
    """Redis behind the queue."""
    with redis.Redis.from_url(valkey.url) as raw:
        yield raw


@pytest.fixture
def fed(serve, make_config, valkey, queue_name):
    """A worker that serves the test's queue, with a lease of a second."""

    def start(build=build_engine, path=None, **changes):
        config = {
            "offline": {"queue": queue_name, "leaseSeconds": 1},
            "runtime": {"redisUrl": valkey.url, "workerId": "w1"},
        }
        for section, change in changes.items():
            config[section] = {**config[section], **change} if section in config else change
        made = make_config(**config)
        if path is not None:
            path.write_text(made.dump())
        return serve(made, path, build=build)

    return start


def make_chat(custom_id: str, messages: list[dict], **body: object) -> str:
    """Return a line with a chat of two tokens."""
    body = {"model": "tiny", "messages": messages, "max_tokens": 2} | body
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body})


def wait_for(queue: Queue, job_id: str, eventually):
    return eventually(lambda: (job := queue.jobs.get(job_id)).state.is_over and job, f"job {job_id} to be over")


def texts_of(queue: Queue, job_id: str) -> dict[str, str]:
    results = list(queue.results.read(job_id))
    assert len({result.custom_id for result in results}) == len(results), "a result appears twice"
    return {result.custom_id: result.body["choices"][0]["text"] for result in results if result.body}


def test_a_job_gets_the_answers_that_http_gives(fed, queue, eventually) -> None:
    with fed() as serving, serving.client() as client:
        job_id = queue.submissions.submit([make_line(index) for index in range(10)]).job_id
        job = wait_for(queue, job_id, eventually)
        asked = {
            f"item-{i}": client.post("/v1/completions", json=json.loads(make_line(i))["body"]).json() for i in range(10)
        }
        results = list(queue.results.read(job_id))

    assert job.state is JobState.COMPLETED
    assert (job.counts.succeeded, job.counts.done) == (10, 10)
    assert {r.custom_id: r.body["choices"] for r in results} == {key: a["choices"] for key, a in asked.items()}
    assert job.tokens_out == sum(answer["usage"]["completion_tokens"] for answer in asked.values())
    assert {r.worker for r in results} == {"w1"}


def test_requests_and_items_may_use_each_name_of_the_model_and_answers_have_the_first(fed, queue, eventually) -> None:
    names = ["tiny", "org/Tiny", "old"]
    with fed(model={"aliases": names[1:]}) as serving, serving.client() as client:
        cards = client.get("/v1/models").json()["data"]
        found = [client.get(f"/v1/models/{name}").json() for name in names]
        asked = [client.post("/v1/completions", json=json.loads(make_line(0, model=name))["body"]) for name in names]
        unknown = client.post("/v1/completions", json=json.loads(make_line(0, model="new"))["body"])
        eventually(lambda: queue.settings.read().models == tuple(names), "the worker to configure the queue")
        job_id = queue.submissions.submit([make_line(index, model=name) for index, name in enumerate(names)]).job_id
        wait_for(queue, job_id, eventually)
        labels = set(re.findall('model_name="(.*?)"', client.get("/metrics").text))
    answers = [answer.json() for answer in asked] + [result.body for result in queue.results.read(job_id)]

    assert [(card["id"], card["root"]) for card in cards] == [(name, "tiny") for name in names]
    assert found == cards
    assert [answer["model"] for answer in answers] == ["tiny"] * 6
    assert len({answer["choices"][0]["text"] for answer in answers[:3]}) == 1
    assert unknown.json()["error"]["message"].endswith("This worker serves 'tiny', 'org/Tiny', 'old'.")
    assert labels == {"tiny"}


def test_a_chat_item_gets_a_chat_answer(fed, queue, eventually) -> None:
    with fed():
        job_id = queue.submissions.submit([make_chat("c", [{"role": "user", "content": "Hi"}])]).job_id
        wait_for(queue, job_id, eventually)

    [result] = queue.results.read(job_id)
    assert result.body["object"] == "chat.completion"
    assert result.body["choices"][0]["message"]["role"] == "assistant"


def test_items_may_have_the_fields_that_http_requests_may_have(fed, queue, eventually) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    notes = {"metadata": {"a": "b"}, "store": False, "service_tier": "flex", "prompt_cache_key": "k"}
    chats = {
        "noted": [{"role": "user", "content": "Hi", "name": "bob"}],
        "tools": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None, "tool_calls": [call]}],
    }
    lines = [make_chat(name, messages, chat_template_kwargs={"a": 1}, **notes) for name, messages in chats.items()]
    with fed():
        job_id = queue.submissions.submit([*lines, make_line(0, **notes), make_line(1, store=True)]).job_id
        wait_for(queue, job_id, eventually)
    results = {result.custom_id: result for result in queue.results.read(job_id)}

    assert [results[name].status_code for name in ("noted", "item-0", "tools", "item-1")] == [200, 200, 400, 400]
    assert "cannot render these messages" in results["tools"].error["message"]
    assert "Ballast does not store answers" in results["item-1"].error["message"]


class RecordingEngine:
    """The worker's engine; keeps the requests that it gets."""

    def __init__(self, options, *, tokenizer) -> None:
        self._engine = build_engine(options, tokenizer=tokenizer)
        self.requests: dict[str, GenerationRequest] = {}

    def __getattr__(self, name: str):
        return getattr(self._engine, name)

    def submit(self, request: GenerationRequest) -> None:
        self.requests[request.request_id.rpartition(":")[0].rpartition(":")[0]] = request  # job and index
        self._engine.submit(request)


def test_each_item_has_the_prefix_key_of_its_own_opening(fed, queue, eventually) -> None:
    def chat(index: int, instructions: str) -> str:
        messages = [{"role": "system", "content": instructions}, {"role": "user", "content": str(index)}]
        return make_chat(f"{index}", messages)

    with fed(build=RecordingEngine) as serving, serving.client() as client:
        mixed = queue.submissions.submit(
            [chat(index, "Sum up." if index % 2 else "Translate.") for index in range(4)]
        ).job_id
        other = queue.submissions.submit([chat(0, "Sum up.")]).job_id
        for job_id in (mixed, other):
            wait_for(queue, job_id, eventually)
        client.post("/v1/completions", json={"model": "tiny", "prompt": "Sum up.", "max_tokens": 1})
        requests = serving.worker.engine.requests
    keys = [requests[f"{mixed}:{index}"].prefix_key for index in range(4)]

    assert keys[0] == keys[2] != keys[1] == keys[3]
    assert requests[f"{other}:0"].prefix_key == keys[1]
    assert requests[""].prefix_key is None, "online requests go in the order of their arrival"


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


def test_items_that_cannot_be_served_become_error_results_and_the_rest_goes_on(fed, queue, eventually) -> None:
    lines = [
        make_line(0),
        make_line(1, prompt="word " * 3000),
        make_line(2, model="other"),
        "not json",
        make_line(4, n=3),
        make_line(5, prompt=[4095, 99999]),
        make_line(6),
    ]
    with fed():
        eventually(lambda: queue.settings.read().models, "the worker to configure the queue")
        job_id = queue.submissions.submit(lines).job_id
        job = wait_for(queue, job_id, eventually)

    results = {result.custom_id: result for result in queue.results.read(job_id)}
    assert job.state is JobState.COMPLETED
    assert (job.counts.succeeded, job.counts.failed) == (2, 5)
    assert results["item-1"].error["code"] == "context_length_exceeded"
    assert results["item-1"].status_code == 400
    assert "2048" in results["item-1"].error["message"]
    assert "vocabulary" in results["item-5"].error["message"]
    assert len(results) == 7


def test_a_job_pushed_to_the_inbox_by_xadd_is_done(fed, queue, queue_name, valkey, eventually) -> None:
    import redis

    client = redis.Redis.from_url(valkey.url)
    inbox = f"ballast:{{{queue_name}}}:inbox"
    with fed():
        for index in range(3):
            client.xadd(inbox, {"item": make_line(index), "job": "j1", "tenant": "team-a"})
        client.xadd(inbox, {"job": "j1", "end": "1"})
        eventually(lambda: any(job.id == "j1" for job in queue.jobs.all()), "intake")
        job = wait_for(queue, "j1", eventually)
    client.close()

    assert (job.state, job.counts.succeeded, job.tenant) == (JobState.COMPLETED, 3, "team-a")


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
        cost = serving.worker.feeder._claimer._cost  # noqa: SLF001  only the choice of a tenant depends on it

    assert stats.offline.running == 4
    assert cost == FIRST_COST, "an item without an answer shows no cost"
    assert 4 <= held <= 4 + 8
    assert 4 <= leased <= 4 + 8
    assert job.state is JobState.CANCELLED
    assert job.counts.cancelled == 40
    assert queue.stats().items.leased == 0


def test_nothing_is_claimed_where_offline_may_hold_no_slot(fed, queue, eventually) -> None:
    with fed(offline={"reservedPercent": 0, "maxPercent": 0}) as serving:
        job_id = queue.submissions.submit([make_line(0)]).job_id
        eventually(lambda: serving.worker.feeder.stats, "the feeder's first look")
        eventually(lambda: serving.worker.feeder.stats.items.waiting == 1, "the feeder to see the item")

        assert queue.jobs.get(job_id).counts.waiting == 1
        assert serving.worker.feeder.num_held == 0


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


def test_online_requests_are_served_while_a_job_runs_and_the_job_goes_on(fed, queue, eventually) -> None:
    with fed() as serving, serving.client() as client:
        job_id = queue.submissions.submit([make_line(i, max_tokens=40, ignore_eos=True) for i in range(24)]).job_id
        eventually(lambda: serving.worker.engine.stats().offline.running, "the job to run")
        body = json.loads(make_line(100))["body"]
        answers = [client.post("/v1/completions", json=body) for _ in range(10)]
        job = wait_for(queue, job_id, eventually)

    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1
    assert job.counts.succeeded == 24


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


def test_the_status_says_what_the_worker_does_and_goes_with_it(fed, queue, eventually) -> None:
    with fed() as serving:
        [status] = eventually(queue.workers.statuses, "the worker's status")
        assert (status.worker_id, status.model, status.slots) == ("w1", "tiny", 4)
        assert status.address == serving.url

    assert queue.workers.statuses() == []


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


def test_metrics_show_the_queue(fed, queue, queue_name, eventually) -> None:
    with fed() as serving, serving.client() as client:
        job_id = queue.submissions.submit([make_line(0), make_line(1, prompt="word " * 3000)]).job_id
        wait_for(queue, job_id, eventually)
        wanted = f'ballast_queue_items{{queue="{queue_name}",state="succeeded"}} 1.0'
        text = eventually(lambda: wanted in (t := client.get("/metrics").text) and t, wanted)

    assert "ballast_redis_up 1.0" in text
    assert f'ballast_dead_letters{{queue="{queue_name}"}} 1.0' in text
    assert 'ballast_requests_total{class="offline",outcome="length"} 1.0' in text
    assert 'ballast_time_to_first_token_seconds_count{class="offline"} 1.0' in text


def test_a_worker_that_stops_after_draining_leaves_no_lease_and_spends_no_attempt(fed, queue, eventually) -> None:
    with fed(partial(build_engine, wrap=SlowRunner().around)) as serving:
        worker = serving.worker
        job_id = queue.submissions.submit([make_line(i, max_tokens=1500, ignore_eos=True) for i in range(6)]).job_id
        eventually(lambda: worker.engine.stats().offline.decode_tokens > 40, "some tokens")
        asyncio.run_coroutine_threadsafe(drain(worker, hang_up=lambda: None), worker.loop.events).result(60)
        counts = queue.jobs.get(job_id).counts
    claimed = queue.leases.claim(job_id, 6, "other")
    prefixes = [item.prefix for item in claimed if item.prefix is not None]

    assert (counts.leased, counts.waiting) == (0, 6)
    assert {item.attempt for item in claimed} == {1}
    assert len(prefixes) == 4, "four slots were at work"
    assert all(prefix.token_ids for prefix in prefixes)
    assert {prefix.model_revision for prefix in prefixes} == {serving.worker.served.revision}


def test_a_job_from_the_inbox_is_told_whether_it_meets_its_deadline(fed, queue, desk, eventually) -> None:
    background = queue.submissions.submit([make_line(i, max_tokens=30, ignore_eos=True) for i in range(4000)]).job_id
    with fed() as serving, serving.client() as client:
        eventually(
            lambda: any(worker.offline_items_per_second for worker in queue.workers.statuses()), "a measured rate"
        )
        for name, seconds in (("late", 20), ("fine", 10**7)):
            fields = {"job": name, "deadline": str(queue.now() + seconds), "tenant": name, "end": "1"}
            for i in range(300):
                line = make_line(i, max_tokens=1000, ignore_eos=True)
                desk.xadd(queue.store.keys.inbox, {"item": line, **fields, "end": str(int(i == 299))})
        late, fine = (
            eventually(
                # The first outlook may be that of a part of the items.
                lambda name=name, risky=risky: next(
                    (j for j in queue.jobs.all() if j.id == name and j.outlook and j.is_at_risk is risky), None
                ),
                "an outlook",
            )
            for name, risky in (("late", True), ("fine", False))
        )
        at_risk = eventually(lambda: (n := _at_risk(client, queue.name)) and n, "the metric")
        for job_id in ("late", "fine", background):
            queue.jobs.cancel(job_id)
        calm = eventually(lambda: _at_risk(client, queue.name) == 0, "the risk to go with the job")

    assert late.is_at_risk
    assert "output tokens/s of 1 worker" in late.because
    assert fine.outlook == "yes"
    assert (at_risk, calm) == (1, True)


def _at_risk(client, queue_name) -> float:
    name = f'ballast_jobs_at_risk{{queue="{queue_name}"}} '
    return next(
        float(line.removeprefix(name)) for line in client.get("/metrics").text.splitlines() if line.startswith(name)
    )


def test_an_inbox_is_drained_without_waiting_for_the_next_tick(fed, queue, desk, eventually, monkeypatch) -> None:
    monkeypatch.setattr("ballast_worker.feeder.TICK_SECONDS", 3600.0)
    with desk.pipeline() as pipeline:
        for i in range(1700):
            pipeline.xadd(queue.store.keys.inbox, {"item": make_line(i, max_tokens=1), "job": "big"})
        pipeline.execute()
    with fed():
        eventually(lambda: queue.stats().inbox == 0, "the inbox to be empty")
        eventually(lambda: queue.jobs.get("big").counts.succeeded, "work to go on meanwhile")
        queue.jobs.cancel("big")

    assert queue.jobs.get("big").counts.total == 1700


def test_an_inbox_with_long_entries_is_drained_without_waiting_for_the_next_tick(
    fed, queue, desk, eventually, monkeypatch
) -> None:
    monkeypatch.setattr("ballast_worker.feeder.TICK_SECONDS", 3600.0)
    for _ in range(6):
        desk.xadd(queue.store.keys.inbox, {"item": b"x" * 5_000_000})
    with fed():
        eventually(lambda: queue.stats().inbox == 0, "the inbox to be empty")

    assert queue.stats().jobs[JobState.FAILED] == 6


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


def records_of(queue: Queue, job_id: str) -> tuple[str, str]:
    """Return the keys of a job's record and of its items."""
    keys = queue.store.keys
    return keys.job(job_id), keys.job(job_id) + b":items"


@pytest.mark.parametrize("field", [b"tenant", b"priority", b"waiting", b"created", b"token", b"deadline", b"stored"])
def test_a_job_that_cannot_be_read_stops_no_other_and_runs_when_it_can_be(fed, queue, desk, eventually, field) -> None:
    bad = queue.submissions.submit([make_line(index) for index in range(3)]).job_id
    record, _ = records_of(queue, bad)
    sound = desk.hget(record, field)
    desk.hset(record, field, b"\xff\xfe")
    with fed() as serving, serving.client() as client:
        feeder = serving.worker.feeder
        eventually(lambda: feeder.stats is not None, "the first round")
        good = queue.submissions.submit([make_line(index) for index in range(3)]).job_id
        job = wait_for(queue, good, eventually)
        health = client.get("/health").status_code
        eventually(lambda: "ballast_redis_up 1.0" in client.get("/metrics").text, "the worker to see Redis")
        desk.hdel(record, field) if sound is None else desk.hset(record, field, sound)
        repaired = eventually(lambda: (job := queue.jobs.get(bad)).state.is_over and job, "the repaired job")

    assert job.counts.succeeded == 3
    assert health == 200
    assert repaired.counts.succeeded == 3


def test_an_item_that_cannot_be_read_fails_with_a_sentence_and_the_others_run(fed, queue, desk, eventually) -> None:
    job_id = queue.submissions.submit([make_line(index) for index in range(4)]).job_id
    _, items = records_of(queue, job_id)
    custom_id, _, _ = desk.hget(items, 1).partition(b"\n")
    desk.hset(items, 1, custom_id + b"\n\xff\xfe{")
    with fed():
        job = wait_for(queue, job_id, eventually)
    results = {result.custom_id: result for result in queue.results.read(job_id)}

    assert (job.counts.succeeded, job.counts.failed) == (3, 1)
    assert results["item-1"].error["code"] == "unreadable_item"
    assert "Submit the item again." in results["item-1"].error["message"]


@pytest.mark.parametrize("name", ["held", "service", "statuses", "groups", "ready", "totals"])
def test_a_shared_value_that_cannot_be_read_stops_no_job(fed, queue, desk, eventually, name) -> None:
    keys = queue.store.keys
    match name:
        case "groups":
            desk.sadd(keys.groups, b"\xff\xfe")
        case "ready":
            desk.zadd(keys.ready, {b"1000|t|\xff\xfe": 0})
            desk.sadd(keys.groups, b"1000|t|")
        case "statuses":
            desk.zadd(keys.workers, {b"\xff": 2**40})
            desk.hset(keys.statuses, b"\xff", b"\xff\xfe")
        case _:
            desk.hset(getattr(keys, name), b"\xff\xfe", b"\xff\xfe")
    job_id = queue.submissions.submit([make_line(0)]).job_id
    with fed() as serving:
        job = wait_for(queue, job_id, eventually)
        is_dead = serving.worker.feeder.is_dead
    unused.remove(queue)  # the bytes would not be in balance

    assert job.counts.succeeded == 1
    assert not is_dead


def test_a_defect_in_one_task_is_counted_and_offline_work_goes_on(fed, queue, eventually, monkeypatch) -> None:
    monkeypatch.setattr("ballast_worker.feeder.update_outlooks", lambda *_: 1 / 0)
    with fed() as serving, serving.client() as client:
        feeder = serving.worker.feeder
        feeder.recorder.ended = None  # another defect: every settled item raises
        job_id = queue.submissions.submit([make_line(0)]).job_id
        eventually(lambda: feeder.tasks.failures["outlooks"] > 1, "the failures to be counted")
        eventually(lambda: queue.jobs.get(job_id).counts.succeeded == 1, "the result")
        before = client.get("/metrics").text
        monkeypatch.setattr(Queue, "stats", lambda _: 1 / 0)
        eventually(lambda: feeder.tasks.failures["figures"], "the figures to fail")
        shown = client.get("/metrics").text

    tasks = ("outlooks", "settle", "figures")
    assert all(f'ballast_feeder_failures_total{{task="{task}"}}' in shown for task in tasks)
    assert ("ballast_queue_items" in before, "ballast_queue_items" in shown) == (True, False), "no old figures"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_feeder_that_ended_makes_the_worker_unhealthy(fed, eventually) -> None:
    with fed() as serving, serving.client() as client:
        feeder, loop = serving.worker.feeder, serving.worker.loop
        before = client.get("/health").status_code

        def end(_: float) -> None:
            raise SystemExit

        loop.wait_as_feeder = end  # no handler of errors catches this
        loop.wake_feeder()
        eventually(lambda: feeder.is_dead, "the thread to end")
        health = client.get("/health")

    assert before == 200
    assert health.status_code == 503
    assert "offline" in health.json()["reason"]


def test_items_go_back_to_the_queue_at_once_if_the_engine_dies(fed, queue, eventually) -> None:
    broken = threading.Event()

    def decide(snapshot):
        if broken.is_set():
            raise ZeroDivisionError
        return plan(snapshot)

    job_id = queue.submissions.submit([make_line(index, max_tokens=1900, ignore_eos=True) for index in range(3)]).job_id
    with fed(partial(build_engine, planner=decide), offline={"leaseSeconds": 600}) as serving:
        eventually(lambda: serving.worker.engine.stats().offline.running == 3, "the items to run")
        broken.set()
        counts = eventually(lambda: (found := queue.jobs.get(job_id).counts).leased == 0 and found, "no lease")

    assert (counts.waiting, counts.failed) == (3, 0)


def test_a_feeder_waits_between_its_rounds_while_the_engine_is_unhealthy(fed, eventually) -> None:
    waits: list[float] = []

    with fed() as serving:
        feeder, loop = serving.worker.feeder, serving.worker.loop
        wait = loop.wait_as_feeder

        def record(seconds: float) -> bool:
            if loop.failure is not None:
                waits.append(seconds)
            return wait(seconds)

        eventually(lambda: feeder.stats, "the first look")
        loop.failure = "The engine failed."
        loop.wait_as_feeder = record
        eventually(lambda: len(waits) > 12, "some rounds")

    assert sum(waits[2:12]) > 0.5


def test_prefixes_that_cannot_be_read_keep_no_cancelled_item_in_the_engine(fed, queue, valkey, eventually) -> None:
    with fed(slots=2) as serving, redis.Redis.from_url(valkey.url) as raw:
        kept, cancelled = (
            queue.submissions.submit([make_line(0, max_tokens=1500, ignore_eos=True)]).job_id for _ in range(2)
        )
        prefixes = queue.store.keys.part(kept, "prefixes")
        raw.set(prefixes, "no hash")
        outcomes = serving.worker.feeder.recorder.outcomes
        eventually(lambda: serving.worker.engine.stats().offline.running == 2, "both items to run")
        queue.jobs.cancel(cancelled)
        eventually(lambda: outcomes[RequestClass.OFFLINE, RequestOutcome.ABORTED], "one item to be aborted")
        raw.delete(prefixes)
        queue.jobs.cancel(kept)
        eventually(serving.is_idle, "the other item to be aborted")

    assert outcomes[RequestClass.OFFLINE, RequestOutcome.LENGTH] == 0


def test_a_list_of_declared_tenants_that_cannot_be_read_stops_no_work(fed, queue, valkey, eventually) -> None:
    with redis.Redis.from_url(valkey.url) as raw:
        raw.set(queue.store.keys.declared, "no sorted set")
        job_id = queue.submissions.submit([make_line(0)], tenant="acme").job_id
        with fed(offline={"tenants": [{"name": "acme"}]}) as serving:
            eventually(lambda: queue.jobs.get(job_id).state is JobState.COMPLETED, "the job to complete")
            failures = serving.worker.feeder.tasks.failures

    assert failures["unread inboxes"]


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


def test_jobs_of_another_model_hide_no_job_behind_them(fed, queue, eventually) -> None:
    for _ in range(2 * HEADS_OF_GROUP + 1):
        queue.submissions.submit([make_line(0, model="other")])
    new = queue.submissions.submit([make_line(0)]).job_id
    with fed():
        done = wait_for(queue, new, eventually)

    assert done.counts.succeeded == 1


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


@pytest.mark.parametrize("changer", ["the file of this worker", "another worker"])
def test_a_shorter_lease_is_in_force_at_once_and_returns_no_item(
    fed, queue, desk, eventually, *, tmp_path, changer
) -> None:
    runner, path = SlowRunner(), tmp_path / "config.yaml"
    job_id = queue.submissions.submit([make_line(index, max_tokens=1900, ignore_eos=True) for index in range(3)]).job_id
    leases = queue.store.keys.part(job_id, "leases")

    def is_short() -> bool:
        return all(expires < queue.now() + 100 for _, expires in desk.zrange(leases, 0, -1, withscores=True))

    with fed(partial(build_engine, wrap=runner.around), path, offline={"leaseSeconds": 300}) as serving:
        feeder, stats = serving.worker.feeder, serving.worker.engine.stats
        eventually(lambda: stats().offline.decode_tokens > 150, "the items to be older than the shorter lease")
        if changer == "another worker":
            queue.settings.apply(queue.settings.read().model_copy(update={"lease_seconds": 2.0, "generation": 1}))
        else:
            config = yaml.safe_load(path.read_text())
            config["offline"]["leaseSeconds"], config["runtime"]["generation"] = 2, 1
            (tmp_path / "new").write_text(yaml.safe_dump(config))
            (tmp_path / "new").replace(path)
        eventually(is_short, "the leases to have the shorter time")
        returned = feeder.outcomes.total()
        queue.jobs.cancel(job_id)
        eventually(serving.is_idle, "the items to end")

    assert returned == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_feeder_whose_thread_ended_states_it(serve, make_config, valkey, queue_name, eventually):
    def exits():
        raise SystemExit

    with serve(make_config()) as serving:
        feeder = Feeder(
            connect=exits,
            worker="w",
            loop=serving.worker.loop,
            reader=GenerationReader(serving.worker.served, serving.worker.loop.submit),
            status=serving.worker.status,
            settings=QueueSettings(),
        )
        was_dead = feeder.is_dead
        feeder.start()
        eventually(lambda: feeder.is_dead, "the feeder to end")

    assert not was_dead
    assert not feeder.is_up
    assert feeder.drained.is_set(), "no drain waits for it"


def test_each_time_that_redis_is_full_for_a_task_is_in_the_log(fed, caplog):
    def fails():
        raise QueueFull("no memory left")

    with fed() as serving:
        for task in (fails, fails, bool, fails):
            serving.worker.feeder.tasks.run("some", task)  # no usual task but two meets a full Redis
    full = [record for record in caplog.records if record.message == FULL]

    assert len(full) == 2


def test_the_log_names_a_new_kind_of_error_at_once_and_repeats_each_later(fed, caplog, monkeypatch):
    def refuses():
        raise RefusedCall("a record cannot be read")

    with fed() as serving:
        feeder = serving.worker.feeder
        for task in (refuses, refuses, bool, partial(len, 3)):
            feeder.tasks.run("some", task)  # no usual task fails in two ways
        monkeypatch.setattr("ballast_worker.feeder_tasks.REPEAT_SECONDS", 0.0)
        feeder.tasks.run("some", refuses)
    logged = [bool(record.exc_info) for record in caplog.records if record.message.startswith("feeder task failed")]

    assert logged == [False, True, False], "a trace for a defect"
