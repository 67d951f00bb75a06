"""Full queues, keys, tenants, a failing engine, a changed file: tests that need a worker of their own."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from heapq import heappop, heappush
from math import inf
from random import Random

import pytest
from engine_stats import make_stats
from queue_objects import WrappedRunner
from raw_http import post
from streamed import BODY, ENDLESS, begun

from ballast_api.sections import Limits
from ballast_engine.build import build_engine
from ballast_engine.options import EngineOptions
from ballast_engine.stats import ClassStats
from ballast_engine.tokenizer import Tokenizer
from ballast_openai.body import COMPLETIONS_URL
from ballast_policy.request import RequestClass
from ballast_policy.reservation import Reservation
from ballast_policy.step.planner import plan
from ballast_worker.api import GenerateRoute
from ballast_worker.drain import drain
from ballast_worker.engine import Engine
from ballast_worker.errors import Refused
from ballast_worker.queue_limit import QueueLimit
from ballast_worker.requests import RequestOutcome
from ballast_worker.slot_wait import SlotWait
from ballast_worker.status import SmoothedRates
from ballast_worker.worker import Worker


def occupy(client, stack: ExitStack, count: int) -> None:
    """Start answers that go on until the stack is closed."""
    for _ in range(count):
        stack.enter_context(begun(client))


def waiting_by_tenant(serving) -> dict[str, int]:
    async def read() -> dict[str, int]:
        return serving.worker.loop.waiting_by_tenant(RequestClass.ONLINE)

    return serving.run(read())


def test_a_full_queue_is_a_429_with_the_time_to_try_again(serve, make_config, eventually) -> None:
    with (
        serve(make_config(slots=2, offline={"reservedPercent": 0}, limits={"maxQueuedRequests": 1})) as serving,
        serving.client() as client,
        ExitStack() as stack,
    ):
        worker = serving.worker
        occupy(client, stack, 2)
        worker.served = replace(worker.served, vocab_size=2**31)  # as if the tokenizer had more tokens than the model
        invalid = client.post("/v1/completions", json=BODY | {"prompt": [2**31 - 1]})
        with serving.connect() as raw:
            raw.sendall(post(json.dumps(BODY).encode()))
            eventually(lambda: worker.engine.stats().online.waiting == 1, "the third request to wait")
            response = client.post("/v1/completions", json=BODY)
        eventually(lambda: waiting_by_tenant(serving) == {}, "the client that hung up, and its tenant, to be forgotten")
        eventually(lambda: worker.loop.num_waiting(RequestClass.ONLINE) == 0, "the class to count neither of them")
        waiting = threading.Thread(target=lambda: client.post("/v1/completions", json=BODY))
        waiting.start()
        eventually(lambda: worker.engine.stats().online.waiting == 1, "another request to wait")
        again = client.post("/v1/completions", json=BODY)
        offline = client.post("/v1/completions", json=BODY | {"model": "?"}, headers={"x-ballast-class": "offline"})
        stack.close()
        waiting.join()
        accepted = client.post("/v1/completions", json=BODY)

    assert (invalid.status_code, response.status_code, again.status_code) == (400, 429, 429)
    assert int(response.headers["retry-after"]) >= 1
    assert response.json()["error"]["code"] == "queue_full"
    assert response.json()["error"]["type"] == "rate_limit_error"
    assert "The waiting queue is full: 1 online request waits, the limit is 1" in response.json()["error"]["message"]
    assert offline.status_code == 404, "the offline class has a queue of its own"
    assert accepted.status_code == 200


def test_with_no_queue_allowed_a_request_needs_a_free_slot(serve, make_config) -> None:
    with (
        serve(make_config(slots=2, offline={"reservedPercent": 0}, limits={"maxQueuedRequests": 0})) as serving,
        serving.client() as client,
        ExitStack() as stack,
    ):
        statuses = [client.post("/v1/completions", json=BODY).status_code for _ in range(3)]
        occupy(client, stack, 2)
        full = client.post("/v1/completions", json=BODY).status_code

    assert statuses == [200, 200, 200]
    assert full == 429


def test_a_tenant_that_fills_the_queue_leaves_the_others_their_share(serve, make_config, tmp_path, eventually) -> None:
    (tmp_path / "keys.yaml").write_text("a: a\nb: b\nc: c\nd: d\n")
    config = make_config(
        slots=1,
        offline={"reservedPercent": 0},
        limits={"maxQueuedRequests": 2},
        runtime={"apiKeysFile": str(tmp_path / "keys.yaml")},
    )
    served: list[str] = []

    def decide(snapshot):
        found = plan(snapshot)
        served.extend(request.tenant for request in found.admit)
        return found

    build = partial(build_engine, planner=decide)
    with serve(config, build=build) as serving, ThreadPoolExecutor(4) as pool, ExitStack() as stack:
        tenants = {
            name: stack.enter_context(serving.client(headers={"authorization": f"Bearer {name}"})) for name in "abcd"
        }

        def ask(name: str) -> int:
            body = BODY | {"max_tokens": 64, "ignore_eos": True}
            return tenants[name].post("/v1/completions", json=body).status_code

        with ExitStack() as endless:
            occupy(tenants["a"], endless, 1)
            waiting, refused = [], []
            for name, other in (("a", ""), ("a", "a"), ("b", "b"), ("c", "d")):
                waiting.append(pool.submit(ask, name))
                eventually(lambda: serving.worker.loop.num_waiting(RequestClass.ONLINE) == len(waiting), name)
                refused += [ask(other)] if other else []
        statuses = [request.result() for request in waiting]

    assert refused == [429] * 3, "the last one has no other request, but all together have twice the limit"
    assert statuses == [200] * 4
    assert (sorted(served[-4:-2]), served[-2:]) == (["b", "c"], ["a", "a"])


def test_a_request_that_would_wait_too_long_is_a_429(serve, make_config, eventually) -> None:
    config = make_config(slots=1, offline={"reservedPercent": 0}, limits={"maxQueueMilliseconds": 1})
    stop = threading.Event()
    with serve(config) as serving, serving.client() as client, ThreadPoolExecutor(6) as pool:

        def ask(_: int) -> list:
            found = []
            while not stop.is_set():
                found.append(client.post("/v1/completions", json=BODY | {"max_tokens": 16, "ignore_eos": True}))
            return found

        lanes = pool.map(ask, range(6))
        try:
            eventually(lambda: refused_so_far(serving) > 0, "a refusal")
        finally:
            stop.set()
        responses = [response for lane in lanes for response in lane]
        eventually(lambda: serving.worker.loop.num_waiting(RequestClass.ONLINE) == 0, "no request waits")
        after = client.post("/v1/completions", json=BODY)

    refused = [response for response in responses if response.status_code == 429]
    assert {response.status_code for response in responses} == {200, 429}
    assert all(int(response.headers["retry-after"]) >= 1 for response in refused)
    assert "the limit is 1 ms (limits.maxQueueMilliseconds)" in refused[0].json()["error"]["message"]
    assert after.status_code == 200


def refused_so_far(serving) -> int:
    return serving.worker.recorder.outcomes[RequestClass.ONLINE, RequestOutcome.QUEUE_FULL]


def test_before_all_slots_were_taken_the_last_answers_bound_the_wait() -> None:
    wait = SlotWait()
    before_any_answer = wait.expected(100, slots=4)
    wait.add_answer(0.2)
    wait.sample(0, 0.0, slots=4, is_full=True)
    wait.sample(1, 1.0, slots=4, is_full=True)
    wait.sample(2, 2.0, slots=4, is_full=False)
    while_free = wait.expected(100, slots=4)
    assert wait.expected(-3, slots=4) == 0.0
    wait.sample(3, 3.0, slots=4, is_full=True)

    assert before_any_answer == 0.0
    assert while_free == wait.expected(100, slots=4) == pytest.approx(5.0)


@pytest.mark.parametrize("spread", [0.0, 0.2, 1.0], ids=["all end together", "in a fifth of the time", "evenly"])
@pytest.mark.parametrize(("slots", "seconds"), [(1, 60), (2, 60), (8, 5), (8, 60), (64, 30), (4, 1)])
@pytest.mark.parametrize("prefill", [0.0, 0.8])
def test_the_expected_wait_for_a_slot_with_long_answers_is_steady(slots, seconds, spread, prefill) -> None:
    """`prefill` is the share of its time in a slot that an answer needs for its first token."""
    wait = SlotWait()
    wait.add_answer((1 - prefill) * seconds)
    found = []
    ages = [spread * seconds * slot / slots for slot in range(slots)]
    for now in range(20 * seconds):
        started = sum(int((age + now) / seconds) for age in ages)
        wait.sample(started, float(now), slots=slots, is_full=True)
        if now > 8 * seconds:
            found.append(wait.expected(1, slots))

    each = seconds / slots
    assert 0.7 * each < min(found)
    assert max(found) < 1.4 * each


@pytest.mark.parametrize("request_class", RequestClass)
def test_a_burst_after_an_idle_time_is_told_when_the_queue_has_gone(request_class) -> None:
    rates = SmoothedRates()
    limit = QueueLimit(rates)
    limit.add_answer(2.0)  # eight slots: four requests get one each second
    for second in range(100):  # items waited for the first half, in which four got a slot each second
        waiting = ClassStats(running=8, waiting=12 if second < 50 else 0)
        stats = make_stats(offline=waiting) if request_class is RequestClass.OFFLINE else make_stats()
        rates.sample(stats, {RequestClass.ONLINE: 1, RequestClass.OFFLINE: 4 * min(second, 50)}, float(second))
    of_each, reserved = ClassStats(running=3), Reservation(slots=4, in_use=3)
    full = make_stats(online=of_each, offline=of_each, reservation=reserved)  # either class may take two slots
    limits = Limits(max_queued_requests=20)
    with pytest.raises(Refused) as much_later:
        limit.check(limits, lambda: full, request_class, 2002, lambda: (2000.0, 2000.0))
    with pytest.raises(Refused) as caught:
        limit.check(limits, lambda: full, request_class, 22, lambda: (20.0, 20.0))

    assert much_later.value.headers == {"retry-after": "30"}, "clients do not wait for minutes"
    assert caught.value.headers == {"retry-after": "5"}
    assert f"The waiting queue is full: 20 {request_class} requests wait, the limit is 20" in str(caught.value)


class EncoderTraffic:
    """Calls to an encoder in virtual time. With `per_second`, it answers that many, and each call waits its turn."""

    def __init__(self, longest: float, *, per_second: float | None = None, seconds: float = 0.15) -> None:
        self.limit = QueueLimit(SmoothedRates(), is_encoder=True)
        self.limits = Limits(max_queue_milliseconds=longest, max_queued_requests=100_000)
        self.times: list[float] = []
        """Seconds of the calls that were answered."""
        self._seconds, self._per_second = seconds, per_second
        self._held: list[tuple[float, float, bool]] = []
        """End and arrival of each call in the server, and whether it came alone."""
        self._random, self._now, self._free_at, self._sampled_at = Random(1), 0.0, 0.0, 0.0

    def send(self, number: int, rate: float) -> int:
        """Send some calls, and return how many are refused."""
        refused = 0
        for _ in range(number):
            self._now += self._random.expovariate(rate)
            self._answer()
            try:
                self.limit.check(self.limits, make_stats, RequestClass.ONLINE, len(self._held), lambda: (inf, inf))
            except Refused:
                refused += 1
                continue
            self._free_at = max(self._now, self._free_at) + (1 / self._per_second if self._per_second else 0.0)
            start = self._free_at if self._per_second else self._now
            heappush(self._held, (start + self._seconds * self._random.uniform(0.5, 1.5), self._now, not self._held))
        return refused

    def _answer(self) -> None:
        while min(self._sampled_at + 1, self._held[0][0] if self._held else inf) <= self._now:
            if self._held and self._held[0][0] <= self._sampled_at + 1:
                end, arrival, was_alone = heappop(self._held)
                self.times.append(end - arrival)
                self.limit.add_call(end - arrival, 128, was_alone=was_alone)
                self.limit.add_step(0.02)
            else:
                self._sampled_at += 1
                self.limit.sample(make_stats(), len(self.times), len(self._held), self._sampled_at)


@pytest.mark.parametrize("rate", [1, 3, 8, 20])
def test_no_call_to_an_encoder_with_little_load_is_refused(rate) -> None:
    traffic = EncoderTraffic(200)

    assert traffic.send(2000, rate) == 0


def test_calls_to_an_encoder_are_refused_in_an_overload_only() -> None:
    traffic = EncoderTraffic(200, per_second=150, seconds=0.02)
    before, during = traffic.send(500, 15), traffic.send(100_000, 225)
    waits = sorted(traffic.times[-5000:])
    after = traffic.send(20, 15), traffic.send(2000, 15)

    assert before == 0
    assert during == pytest.approx(100_000 / 3, rel=0.1)
    assert 0.15 < waits[2500] < waits[4950] < 0.5, "the median and the 99th percentile of the times"
    assert after[1] == 0


def test_a_burst_to_an_encoder_after_little_load_is_accepted() -> None:
    traffic = EncoderTraffic(20, per_second=600, seconds=0.01)
    traffic.send(100, 3)

    assert traffic.send(50, 1e6) == 0


def test_keys_name_the_tenant_and_strangers_get_401(serve, make_config, tmp_path) -> None:
    (tmp_path / "keys.yaml").write_text("sk-good: team-a\nsk-other: team-b\n")
    config = make_config(
        runtime={"apiKeysFile": str(tmp_path / "keys.yaml")}, offline={"tenants": [{"name": "team-a"}]}
    )
    with serve(config) as serving, serving.client() as client:

        def ask(key: str | None, path: str = "/v1/completions"):
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            if path == "/v1/models":
                return client.get(path, headers=headers)
            return client.post(path, json=BODY, headers=headers | {"x-llm-d-inference-fairness-id": "team-b"})

        good, none, wrong, undeclared = ask("sk-good"), ask(None), ask("sk-bad"), ask("sk-other")
        listed, unlisted = ask("sk-good", "/v1/models"), ask(None, "/v1/models")
        hidden = client.get("/v1/models/tiny")
        two_keys = [("authorization", "Bearer sk-bad"), ("authorization", "Bearer sk-good")]
        differing = client.get("/v1/models", headers=two_keys)
        service = serving.worker.engine.stats().service

    assert [r.status_code for r in (good, none, wrong, undeclared)] == [200, 401, 401, 403]
    assert [r.status_code for r in (listed, unlisted, hidden, differing)] == [200, 401, 401, 401]
    assert none.headers["www-authenticate"] == "Bearer"
    assert none.json()["error"]["code"] == "invalid_api_key"
    assert undeclared.json()["error"]["code"] == "unknown_tenant"
    assert {tenant for _, tenant in service} == {"team-a"}, "the key beats the header"


class FailingRunner(WrappedRunner):
    """An executor, until it is told to fail."""

    fails = False

    def run(self, batch, interrupt):
        if self.fails:
            raise RuntimeError("the device is gone")
        return self.inner.run(batch, interrupt)


class StalledRunner(WrappedRunner):
    """An executor that waits until the test lets it continue."""

    def __init__(self) -> None:
        self.may_run = threading.Event()
        self.may_run.set()

    def run(self, batch, interrupt):
        assert self.may_run.wait(60)
        return self.inner.run(batch, interrupt)


def test_a_missed_ttft_is_in_the_metrics_while_the_request_still_waits(serve, make_config, eventually) -> None:
    runner = StalledRunner()
    config = make_config(slo={"ttftMilliseconds": 1})
    with serve(config, build=partial(build_engine, wrap=runner.around)) as serving, serving.client() as client:
        missed = partial(serving.worker.recorder.slo.get, (RequestClass.ONLINE, "ttft", False))
        runner.may_run.clear()
        waiting = threading.Thread(target=lambda: client.post("/v1/completions", json=BODY))
        waiting.start()
        try:
            eventually(lambda: missed() == 1, "the late request to count")
            scraped = client.get("/metrics").text
        finally:
            runner.may_run.set()
        waiting.join()

        assert 'ballast_slo_requests_total{class="online",met="false",slo="ttft"} 1.0' in scraped
        assert missed() == 1


def test_a_client_that_asks_for_less_time_than_promised_causes_no_miss(serving) -> None:
    recorder = serving.worker.recorder
    before = dict(recorder.slo)
    with serving.client(headers={"x-llm-d-slo-ttft-ms": "0.001", "x-llm-d-slo-tpot-ms": "0.001"}) as client:
        client.post("/v1/completions", json=BODY)
    added = {key[1:]: count - before[key] for key, count in recorder.slo.items() if count > before[key]}

    assert added == {("ttft", True): 1, ("tpot", True): 1}


async def generate(worker: Worker, parts: list[bytes], send) -> float:
    """Send a body in parts to the route itself, and return when its last part was complete."""
    complete_at = 0.0

    async def receive():
        nonlocal complete_at
        if not parts:
            await asyncio.Event().wait()
        part, complete_at = parts.pop(0), time.monotonic()
        return {"type": "http.request", "body": part, "more_body": bool(parts)}

    await GenerateRoute(worker, COMPLETIONS_URL)({"type": "http", "method": "POST", "headers": []}, receive, send)
    return complete_at


def test_a_drain_waits_for_an_answer_that_is_being_sent_and_no_latency_counts_this_time(serve, make_config) -> None:
    async def main(worker: Worker) -> tuple[bool, bool]:
        is_sending, may_read, sent_at = asyncio.Event(), asyncio.Event(), []

        async def send(_message) -> None:
            sent_at.append(time.monotonic())
            is_sending.set()
            await may_read.wait()

        answer = asyncio.create_task(generate(worker, [json.dumps(BODY).encode()], send))
        await is_sending.wait()
        draining = asyncio.create_task(drain(worker, hang_up=lambda: None))
        await asyncio.wait({draining}, timeout=0.2)
        is_over_before = draining.done()
        may_read.set()
        await asyncio.gather(answer, draining)
        return is_over_before, worker.recorder.recent[-1][0] <= sent_at[0]

    with serve(make_config()) as serving:
        found = serving.run(main(serving.worker))

    assert found == (False, True)


def test_a_request_arrives_with_the_end_of_its_body(serve, make_config) -> None:
    arrivals: list[float] = []

    def decide(snapshot):
        arrivals.extend(request.arrival for request in snapshot.waiting)
        return plan(snapshot)

    async def main(worker: Worker) -> tuple[float, float]:
        async def send(_message) -> None:
            pass

        body = json.dumps(BODY).encode()
        complete_at = await generate(worker, [body[:10], body[10:]], send)
        ended, _, _, latency = worker.recorder.recent[-1]
        return complete_at, ended - latency

    with serve(make_config(), build=partial(build_engine, planner=decide)) as serving:
        complete_at, arrival = serving.run(main(serving.worker))

    assert complete_at <= arrivals[-1]
    assert arrival == pytest.approx(arrivals[-1], abs=1e-6), "metrics and policy count from the same moment"


def test_a_request_that_is_read_while_the_drain_ends_gets_a_503(serve, make_config) -> None:
    class Closing:
        def __getattr__(self, name):
            return getattr(served, name)

        def tokens(self, body):
            serving.worker.is_closed = True
            return served.tokens(body)

    with serve(make_config()) as serving, serving.client() as client:
        served, serving.worker.served = serving.worker.served, Closing()
        answer = client.post("/v1/completions", json=BODY)

    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")


def test_a_request_that_fails_by_a_defect_before_the_engine_has_it_counts_as_failed(serve, make_config) -> None:
    with serve(make_config()) as serving, serving.client() as client:
        serving.worker.readers.close()
        answer = client.post("/v1/completions", json=BODY | {"prompt": "a" * 10_000})
        num_failed = serving.worker.recorder.outcomes[RequestClass.ONLINE, RequestOutcome.FAILED]

    assert (answer.status_code, num_failed) == (500, 1)
    said = "The worker failed while it handled the request. Its log has the reason."
    assert answer.json()["error"]["message"] == said, "the text of an error is for the log only"


def test_a_failed_step_is_a_500_with_a_sentence_and_many_make_the_worker_unhealthy(serve, make_config) -> None:
    runner = FailingRunner()
    with serve(make_config(), build=partial(build_engine, wrap=runner.around)) as serving, serving.client() as client:
        runner.fails = True
        codes = [client.post("/v1/completions", json=BODY).status_code for _ in range(2)]
        runner.fails = False
        with begun(client) as lines:  # a step that succeeds: failures are counted from here
            runner.fails = True
            rest = [line for line in lines if line]
        whole = client.post("/v1/completions", json=BODY)
        codes.append(client.get("/health").status_code)
        client.post("/v1/completions", json=BODY)
        health, ready, metrics = client.get("/health"), client.get("/ready"), client.get("/metrics").text
        refused = client.post("/v1/completions", json=BODY)
        runner.fails = False

    assert codes == [500, 500, 200]
    assert '"code": "engine_failed"' in rest[-2]
    assert rest[-1] == "data: [DONE]"
    assert whole.status_code == 500
    assert "the device is gone" in whole.json()["error"]["message"]
    assert whole.json()["error"]["type"] == "server_error"
    assert [health.status_code, ready.status_code] == [503, 503]
    assert "ballast_engine_healthy 0.0" in metrics
    assert refused.status_code == 500


def test_the_engine_loop_that_dies_tells_everybody_who_waits(serve, make_config, eventually) -> None:
    broken = threading.Event()

    def decide(snapshot):
        if broken.is_set():
            raise ZeroDivisionError
        return plan(snapshot)

    with serve(make_config(), build=partial(build_engine, planner=decide)) as serving, serving.client() as client:
        with begun(client) as lines:
            broken.set()
            rest = [line for line in lines if line]
        health = client.get("/health")
        whole = client.post("/v1/completions", json=BODY)

    assert "The engine of this worker failed" in rest[-2]
    assert health.status_code == 503
    assert "ZeroDivisionError" in health.json()["reason"]
    assert whole.status_code == 500


def test_a_key_that_is_added_while_the_model_loads_takes_effect(serve, make_config, tmp_path, eventually) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("sk-first: team-a\n")
    config = make_config(runtime={"apiKeysFile": str(keys)})

    def build(options: EngineOptions, *, tokenizer: Tokenizer) -> Engine:
        keys.write_text("sk-first: team-a\nsk-second: team-a\n")
        return build_engine(options, tokenizer=tokenizer)

    with serve(config, tmp_path / "config.yaml", build=build) as serving, serving.client() as client:
        headers = {"authorization": "Bearer sk-second"}
        eventually(lambda: client.get("/v1/models", headers=headers).status_code == 200, "the second key")


def test_keys_and_tenants_each_stay_in_force_when_the_other_file_changes(
    serve, make_config, tmp_path, eventually
) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("sk-revoked: team-a\nsk-other: team-b\n")
    changes = {"runtime": {"apiKeysFile": str(keys)}, "offline": {"tenants": [{"name": "team-a"}]}}
    with serve(make_config(**changes), tmp_path / "config.yaml") as serving, serving.client() as client:

        def ask(key: str) -> int:
            return client.post("/v1/completions", json=BODY, headers={"authorization": f"Bearer {key}"}).status_code

        keys.write_text("sk-new: team-a\nsk-other: team-b\n")
        eventually(lambda: ask("sk-new") == 200, "the new key")
        undeclared = ask("sk-other")
        serving.reconfigure(make_config(**changes, limits={"maxQueuedRequests": 9}))
        eventually(lambda: serving.worker.config.limits.max_queued_requests == 9, "the changed limit")
        found = [ask(key) for key in ("sk-revoked", "sk-none", "sk-other", "sk-new")]

    assert undeclared == 403
    assert found == [401, 401, 403, 200]


def test_a_changed_file_takes_effect_without_a_restart(serve, make_config, tmp_path, eventually) -> None:
    limits = {"maxQueuedRequests": 1}
    with serve(make_config(limits=limits), tmp_path / "config.yaml") as serving, serving.client() as client:
        worker = serving.worker
        before = worker.connections.limits.connections
        limits = {"maxQueuedRequests": 101, "maxBodyKibibytes": 1}
        serving.reconfigure(make_config(offline={"reservedPercent": 50}, limits=limits, runtime={"generation": 7}))
        eventually(lambda: client.get("/ballast/status").json()["generation"] == 7, "the new generation")
        eventually(lambda: worker.engine.stats().offline.reserved == 2, "the new reservation")
        large = client.post("/v1/completions", json=BODY | {"prompt": "a" * 2000})
        after = worker.connections.limits.connections
        serving.reconfigure(make_config(limits={"maxBodyKibibytes": 200 * 1024}))
        eventually(lambda: worker.bodies.limit == 800 * 1024 * 1024, "the memory for four of the largest bodies")

    assert large.status_code == 413
    assert after == before + 400, "two queues, each of up to twice the limit"


def test_silence_is_broken_by_comments_that_clients_skip(serving) -> None:
    import openai

    with serving.client() as client, client.stream("POST", "/v1/completions", json=ENDLESS) as response:
        worker = serving.worker
        for line in response.iter_lines():
            if line.startswith(":"):
                comment = line
                break
            worker.loop.events.call_soon_threadsafe(worker.loop.wake_streams)  # as every 15 s

    assert comment == ": keepalive"
    decoder = openai._streaming.SSEDecoder()  # noqa: SLF001 -- how the client reads
    assert decoder.decode(comment) is None
