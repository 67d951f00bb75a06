"""Jobs through a real worker in this process, from a real Valkey."""

from __future__ import annotations

import json
import re
from functools import partial

import pytest
import yaml
from files import swap
from queue_objects import RecordingEngine, SlowRunner, make_chat, make_line, wait_for

from ballast_engine.build import build_engine
from ballast_queue.job import JobState
from ballast_worker.drain import drain


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
    chat = results["noted"].body

    assert [results[name].status_code for name in ("noted", "item-0", "tools", "item-1")] == [200, 200, 400, 400]
    assert (chat["object"], chat["choices"][0]["message"]["role"]) == ("chat.completion", "assistant")
    assert "cannot render these messages" in results["tools"].error["message"]
    assert "Ballast does not store answers" in results["item-1"].error["message"]


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
        found = serving.worker.engine.requests
    requests = {request.request_id.rpartition(":")[0].rpartition(":")[0]: request for request in found}  # job and index
    keys = [requests[f"{mixed}:{index}"].prefix_key for index in range(4)]

    assert keys[0] == keys[2] != keys[1] == keys[3]
    assert requests[f"{other}:0"].prefix_key == keys[1]
    assert requests[""].prefix_key is None, "online requests go in the order of their arrival"


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


def test_a_job_pushed_to_the_inbox_by_xadd_is_done(fed, queue, queue_name, desk, eventually) -> None:
    inbox = f"ballast:{{{queue_name}}}:inbox"
    with fed():
        for index in range(3):
            desk.xadd(inbox, {"item": make_line(index), "job": "j1", "tenant": "team-a"})
        desk.xadd(inbox, {"job": "j1", "end": "1"})
        eventually(lambda: any(job.id == "j1" for job in queue.jobs.all()), "intake")
        job = wait_for(queue, "j1", eventually)

    assert (job.state, job.counts.succeeded, job.tenant) == (JobState.COMPLETED, 3, "team-a")


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


def test_the_status_says_what_the_worker_does_and_goes_with_it(fed, queue, eventually) -> None:
    with fed() as serving:
        [status] = eventually(queue.workers.statuses, "the worker's status")
        assert (status.worker_id, status.model, status.slots) == ("w1", "tiny", 4)
        assert status.address == serving.url

    assert queue.workers.statuses() == []


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
        serving.run(drain(worker, hang_up=lambda: None))
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
            swap(path, yaml.safe_dump(config))
        eventually(is_short, "the leases to have the shorter time")
        returned = feeder.outcomes.total()
        queue.jobs.cancel(job_id)
        eventually(serving.is_idle, "the items to end")

    assert returned == 0
