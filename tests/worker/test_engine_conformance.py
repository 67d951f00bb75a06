"""What the worker relies on, for each engine: Ballast's own, the static baseline, and one that shares no scheduling."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replay.static_batch import StaticBatch

from ballast_engine.batch import Batch, SampleRow
from ballast_engine.engine import BallastEngine
from ballast_engine.errors import DuplicateRequest, InvalidRequest, RequestTooLong
from ballast_engine.executor import Executor
from ballast_engine.inbox import Abort, Configure, GiveBack, Inbox, Submit
from ballast_engine.loader import load
from ballast_engine.options import EngineOptions
from ballast_engine.request import FinishReason, GenerationRequest, Output, SamplingParams
from ballast_engine.sequence import Sequence
from ballast_engine.sequence_builder import SequenceBuilder
from ballast_engine.stats import NO_STEP, AdmissionRecord, ClassStats, EngineStats, StepKind, StepRecord
from ballast_engine.tokenizer import Tokenizer
from ballast_policy.learning.cost import CostModel
from ballast_policy.request import RequestClass
from ballast_policy.snapshot import PolicyConfig
from ballast_queue.redis_store import Queue
from ballast_worker.engine import Suspending

ONLINE, OFFLINE = RequestClass.ONLINE, RequestClass.OFFLINE
BLOCKS, SIZE = 32, 16
PROMPT = tuple(range(5, 25))


class SerialEngine:
    """Computes one request at a time, and all its tokens again for each new one: no batch, no cache, no suspension."""

    def __init__(self, *, executor: Any, tokenizer: Tokenizer, policy: PolicyConfig, options: EngineOptions) -> None:
        self.last_step = NO_STEP
        self.max_tokens = min(executor.max_model_len, executor.num_blocks * executor.block_tokens)
        self._executor = executor
        self._builder = SequenceBuilder(
            tokenizer,
            vocab_size=executor.vocab_size,
            max_tokens=self.max_tokens,
            block_tokens=executor.block_tokens,
            has_prefix_cache=False,
            isolates_tenants=False,
        )
        self._inbox = Inbox()
        self._live: dict[str, Sequence] = {}
        self._begun: set[str] = set()
        self._counts: Counter[str] = Counter()
        self._tokens: Counter[RequestClass] = Counter()
        self._service: Counter[tuple[RequestClass, str]] = Counter()
        self._take_up(policy)

    def _take_up(self, policy: PolicyConfig) -> None:
        executor = self._executor
        self.policy = replace(policy, slots=1, num_blocks=executor.num_blocks, block_tokens=executor.block_tokens)

    @property
    def footprint(self):
        return self._executor.footprint

    @property
    def has_work(self) -> bool:
        return bool(self._inbox.num_ids)

    def submit(self, request: GenerationRequest) -> None:
        sequence = self._builder.make(request, self.policy, time.monotonic())
        self._inbox.claim_id(request.request_id)
        self._inbox.put(Submit(sequence))

    def abort(self, request_id: str) -> None:
        self._inbox.put(Abort(request_id))

    def give_back(self, request_ids) -> None:
        self._inbox.put(GiveBack(tuple(request_ids)))

    def num_computed(self, request_id: str) -> int:
        return self._live[request_id].request.most_computed if request_id in self._live else 0

    def configure(self, policy: PolicyConfig) -> None:
        self._inbox.put(Configure(policy))

    def wait(self, timeout: float) -> None:
        if not self._live and not self._inbox:
            self._inbox.wait(timeout)

    def step(self) -> list[Output]:
        outputs = [output for command in self._inbox.take() for output in self._obey(command)]
        if not self._live:
            return outputs
        sequence = min(self._live.values(), key=lambda s: (s.request.request_class is OFFLINE, s.request.seq))
        began = time.monotonic()
        try:
            sequence.append(self._draw(sequence))
        except RuntimeError as error:
            self._counts["failed"] += 1
            return [*outputs, self._end(sequence, FinishReason.FAILED, f"The engine failed: {error}")]
        return [*outputs, *self._note(sequence, began)]

    def _obey(self, command) -> list[Output]:
        match command:
            case Submit(sequence):
                self._live[sequence.request_id] = sequence
                return [] if sequence.end is None else [self._end(sequence, sequence.end)]
            case Configure(policy):
                self._take_up(policy)
                return []
            case Abort(request_id):
                names, reason = [request_id], FinishReason.ABORTED
            case GiveBack(request_ids):
                names, reason = list(dict.fromkeys(request_ids)), FinishReason.GIVEN_BACK
        return [self._end(self._live[name], reason) for name in names if name in self._live]

    def _draw(self, sequence: Sequence) -> int:
        num = sequence.request.num_tokens
        at = np.arange(num)
        row = SampleRow(sequence.generation.sampling, num)
        table = np.arange(-(-num // self._executor.block_tokens))[None]
        last = np.array([num - 1])
        ends = np.array([num])
        batch = Batch(sequence.tokens[:num], at, at, np.array([0, num]), ends, table, last, (row,), int(num == 1))
        return int(self._executor.run(batch, None)[0])

    def _note(self, sequence: Sequence, began: float) -> list[Output]:
        request, seconds = sequence.request, time.monotonic() - began
        admissions = ()
        if sequence.request_id not in self._begun:
            self._begun.add(sequence.request_id)
            waited = max(0.0, began - request.arrival)
            new = AdmissionRecord(sequence.request_id, request.request_class, waited, 0, request.num_prompt, 0)
            admissions = (new,)
        request.most_computed = max(request.most_computed, request.num_tokens - 1)
        self._counts["steps"] += 1
        self._tokens[request.request_class] += 1
        self._service[request.request_class, request.tenant] += 2
        self.last_step = StepRecord(StepKind.PREFILL, seconds, 0.0, request.num_tokens, 0, admissions)
        reason = sequence.find_end()
        if reason is not None:
            return [self._end(sequence, reason)]
        if sequence.generation.stream:
            sequence.read()
            return [sequence.output(sequence.take_text())]
        return [] if sequence.is_announced else [sequence.output("")]

    def _end(self, sequence: Sequence, reason: FinishReason, error: str = "") -> Output:
        del self._live[sequence.request_id]
        self._inbox.free_id(sequence.request_id)
        text = ""
        if reason in {FinishReason.STOP, FinishReason.LENGTH}:
            sequence.read()
            text = sequence.take_text() + sequence.text.end()
        output = sequence.output(text)
        output.finish_reason, output.error = reason, error
        if reason is FinishReason.GIVEN_BACK:
            output.generated, output.num_computed = sequence.generated, sequence.request.most_computed
        return output

    def stats(self) -> EngineStats:
        live = list(self._live.values())
        running = next((s.request.request_class for s in live if s.request_id in self._begun), None)
        classes = {
            c: ClassStats(
                running=int(running is c),
                waiting=sum(s.request.request_class is c for s in live) - (running is c),
                decode_tokens=self._tokens[c],
            )
            for c in RequestClass
        }
        return EngineStats(
            slots=1,
            online=classes[ONLINE],
            offline=classes[OFFLINE],
            kv_used=0,
            kv_cached=0,
            kv_free=self.policy.num_blocks,
            kv_waste_ratio=0.0,
            kv_waste_mean_ratio=0.0,
            prefix_query_tokens=0,
            prefix_hit_tokens=0,
            steps=self._counts["steps"],
            failed_steps=self._counts["failed"],
            suspended_steps=0,
            deferred_grants=0,
            batch_ceiling=1,
            cost=CostModel(),
            reservation=self.policy.reservation(),
            service=dict(self._service),
        )

    def check_integrity(self) -> None:
        assert self._inbox.num_ids == len(self._live)


class Faulty:
    """An executor that fails as many of its next steps as it is told."""

    def __init__(self, inner: Executor) -> None:
        self.inner, self.failures = inner, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def run(self, batch, interrupt):
        if self.failures:
            self.failures -= 1
            raise RuntimeError("the device is gone")
        return self.inner.run(batch, interrupt)


class Bench:
    """An engine, and everything that came out of it by request."""

    def __init__(self, engine: Any, executor: Faulty) -> None:
        self.engine, self.executor = engine, executor
        self.outputs: dict[str, list[Output]] = {}
        self.records: list[StepRecord] = []

    def step(self) -> None:
        outputs, before = self.engine.step(), self.engine.last_step
        assert len({output.request_id for output in outputs}) == len(outputs)
        for output in outputs:
            told = self.outputs.setdefault(output.request_id, [])
            assert not told or told[-1].finish_reason is None, "an output after the last one"
            told.append(output)
        if not self.records or self.records[-1] is not before:
            self.records.append(before)

    def run(self, *request_ids: str) -> None:
        for _ in range(500):
            if all(self.last(name) is not None for name in request_ids):
                return
            self.engine.wait(0.01)
            self.step()
        pytest.fail(f"requests did not end: {self.engine.stats()}")

    def last(self, request_id: str) -> Output | None:
        """The output with which a request ended."""
        told = self.outputs.get(request_id)
        return told[-1] if told and told[-1].finish_reason is not None else None

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs[request_id] for token in output.token_ids]

    def text(self, request_id: str) -> str:
        return "".join(output.text for output in self.outputs[request_id])


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer(model_dir)


@pytest.fixture(scope="module")
def loaded(model_dir: Path) -> Any:
    return load(model_dir, dtype="float32", threads=1)


def make_static(*, executor: Any, **options: Any) -> BallastEngine:
    """Ballast's engine with the planner and the executor of the static baseline."""
    static = StaticBatch(executor, options["policy"].slots)
    return BallastEngine(executor=static, planner=static.plan, **options)


@pytest.fixture(params=[BallastEngine, make_static, SerialEngine], ids=["ballast", "static", "serial"])
def make_bench(
    request: pytest.FixtureRequest, loaded: Any, tokenizer: Tokenizer, model_dir: Path
) -> Callable[[], Bench]:
    def make(kind: Callable[..., Any] = request.param) -> Bench:
        executor = Faulty(Executor(loaded, num_blocks=BLOCKS, block_tokens=SIZE))
        policy = PolicyConfig(slots=4, num_blocks=1, offline_share=0.25, ttft=1.0, tpot=1.0)
        options = EngineOptions(directory=model_dir)
        return Bench(kind(executor=executor, tokenizer=tokenizer, policy=policy, options=options), executor)

    return make


@pytest.fixture
def bench(make_bench: Callable[[], Bench]) -> Bench:
    return make_bench()


def make_request(request_id: str, prompt: tuple[int, ...] = PROMPT, *, is_online: bool = True, **fields: Any) -> Any:
    """A request for eight tokens, greedy and to the full length unless said."""
    own = {name: fields.pop(name) for name in ("stream", "generated", "num_computed", "tenant") if name in fields}
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "ignore_eos": True} | fields)
    return GenerationRequest(request_id, prompt, sampling, ONLINE if is_online else OFFLINE, **own)


def test_the_facts_do_not_depend_on_requests(bench: Bench) -> None:
    engine = bench.engine

    assert 0 < engine.policy.num_blocks <= BLOCKS
    assert engine.policy.block_tokens == SIZE
    assert engine.max_tokens == engine.policy.num_blocks * SIZE
    assert engine.policy.slots == engine.stats().slots
    assert engine.footprint.weight_bytes > 0
    assert engine.step() == []
    assert engine.last_step is engine.last_step


def test_each_engine_gives_the_answer_that_the_serial_one_gives(make_bench: Callable[..., Bench]) -> None:
    """Greedy and sampled, whoever computes beside it."""
    sampled = {"temperature": 0.8, "top_p": 0.9}
    requests = [
        make_request("greedy"),
        make_request("short", (9,), max_tokens=1),
        make_request("sampled", PROMPT[3:], is_online=False, seed=7, **sampled),
        make_request("another seed", PROMPT[3:], seed=8, **sampled),
    ]
    found = []
    for bench in (make_bench(), make_bench(SerialEngine)):
        for request in requests:
            bench.engine.submit(request)
        bench.run(*(request.request_id for request in requests))
        found.append({name: (bench.tokens(name), bench.text(name)) for name in bench.outputs})

    assert found[0] == found[1]
    assert found[0]["sampled"] != found[0]["another seed"]


def test_a_stream_has_an_output_for_each_token(bench: Bench, tokenizer: Tokenizer) -> None:
    bench.engine.submit(make_request("a"))
    bench.run("a")
    outputs = bench.outputs["a"]

    assert [len(output.token_ids) for output in outputs] == [1] * 8
    assert [output.num_output for output in outputs] == list(range(1, 9))
    assert {output.num_prompt for output in outputs} == {len(PROMPT)}
    assert bench.text("a") == tokenizer.decode([*PROMPT, *bench.tokens("a")])[len(tokenizer.decode(PROMPT)) :]
    assert outputs[-1].finish_reason is FinishReason.LENGTH


def test_without_a_stream_the_text_comes_at_the_end(make_bench: Callable[[], Bench]) -> None:
    streamed, whole = make_bench(), make_bench()
    streamed.engine.submit(make_request("a"))
    whole.engine.submit(make_request("a", stream=False))
    streamed.run("a")
    whole.run("a")
    first, last = whole.outputs["a"]

    assert (first.num_output, first.text) == (1, "")
    assert (last.num_output, last.text) == (8, streamed.text("a"))
    assert whole.tokens("a") == streamed.tokens("a")


def test_a_stop_string_ends_the_answer_before_it(bench: Bench) -> None:
    bench.engine.submit(make_request("a"))
    bench.run("a")
    text = bench.text("a")
    stop = text[3:6]
    bench.engine.submit(make_request("b", stop=(stop,)))
    bench.run("b")

    assert bench.last("b").finish_reason is FinishReason.STOP
    assert bench.text("b") == text[: text.index(stop)]


def test_an_answer_is_cut_where_the_context_ends(bench: Bench) -> None:
    bench.engine.submit(make_request("a", (5,) * (bench.engine.max_tokens - 3), max_tokens=100))
    bench.run("a")

    assert (bench.last("a").finish_reason, len(bench.tokens("a"))) == (FinishReason.LENGTH, 3)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        pytest.param(make_request("a", ()), InvalidRequest, id="no prompt"),
        pytest.param(make_request("a", (5,) * BLOCKS * SIZE), RequestTooLong, id="no room for an answer"),
        pytest.param(make_request("a", (10**6,)), InvalidRequest, id="a token outside the vocabulary"),
        pytest.param(make_request("a", max_tokens=0), InvalidRequest, id="no tokens asked for"),
        pytest.param(make_request("taken"), DuplicateRequest, id="an id in use"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_and_changes_nothing(bench: Bench, wrong: Any, error: Any) -> None:
    bench.engine.submit(make_request("taken"))
    with pytest.raises(error) as refused:
        bench.engine.submit(wrong)
    bench.run("taken")

    assert str(refused.value).endswith(".")
    assert set(bench.outputs) == {"taken"}


def test_an_id_is_free_again_after_the_last_output(bench: Bench) -> None:
    bench.engine.submit(make_request("a"))
    bench.run("a")
    first = bench.outputs.pop("a")
    bench.engine.submit(make_request("a"))
    bench.run("a")

    assert [output.token_ids for output in first] == [output.token_ids for output in bench.outputs["a"]]


@pytest.mark.parametrize("steps", [0, 3], ids=["before its first step", "while it runs"])
def test_an_abort_ends_a_request_and_no_other(bench: Bench, steps: int) -> None:
    for name in ("a", "b"):
        bench.engine.submit(make_request(name))
    for _ in range(steps):
        bench.step()
    bench.engine.abort("a")
    bench.engine.abort("nobody")
    bench.step()
    bench.engine.abort("a")
    bench.run("b")

    assert bench.last("a").finish_reason is FinishReason.ABORTED
    assert len(bench.tokens("a")) <= steps
    assert len(bench.tokens("b")) == 8


@pytest.mark.parametrize("steps", [0, 3, 6])
def test_what_is_given_back_continues_with_the_same_tokens(make_bench: Callable[[], Bench], steps: int) -> None:
    whole, first, second = make_bench(), make_bench(), make_bench()
    request = make_request("a", is_online=False, temperature=0.9, seed=3, stream=False)
    whole.engine.submit(request)
    whole.run("a")
    first.engine.submit(request)
    for _ in range(steps):
        first.step()
    first.engine.give_back(["a", "nobody"])
    first.step()
    last = first.last("a")
    assert last.finish_reason is FinishReason.GIVEN_BACK
    assert last.generated == tuple(whole.tokens("a")[:steps])
    second.engine.submit(replace(request, generated=last.generated))
    second.run("a")

    assert [*last.generated, *second.tokens("a")] == whole.tokens("a")
    assert second.last("a").num_output == 8
    assert second.text("a") == whole.text("a")


def test_a_complete_answer_that_comes_back_ends_at_once(bench: Bench) -> None:
    bench.engine.submit(make_request("a", generated=tuple(range(8, 16))))
    bench.step()

    assert (bench.last("a").finish_reason, bench.last("a").num_output) == (FinishReason.LENGTH, 8)


def test_a_failed_step_ends_its_requests_and_the_next_one_works(bench: Bench) -> None:
    bench.executor.failures = 1
    bench.engine.submit(make_request("a"))
    bench.step()
    record = bench.engine.last_step
    bench.engine.submit(make_request("b"))
    bench.run("b")

    assert bench.last("a").finish_reason is FinishReason.FAILED
    assert "the device is gone" in bench.last("a").error
    assert record is NO_STEP
    assert bench.engine.stats().failed_steps == 1
    assert len(bench.tokens("b")) == 8


def test_each_request_is_admitted_in_exactly_one_record(bench: Bench) -> None:
    names = [f"r{i}" for i in range(6)]
    for name in names:
        bench.engine.submit(make_request(name, is_online=name > "r2"))
    bench.run(*names)
    admissions = [admission for record in bench.records for admission in record.admissions]

    assert sorted(admission.request_id for admission in admissions) == names
    assert {a.request_id for a in admissions if a.request_class is ONLINE} == set(names[3:])
    assert all(record.seconds > 0 for record in bench.records)


def test_counters_follow_requests(bench: Bench) -> None:
    for i in range(6):
        bench.engine.submit(make_request(f"r{i}", is_online=i < 3, tenant=f"t{i % 2}"))
    bench.step()
    during = bench.engine.stats()
    bench.run(*(f"r{i}" for i in range(6)))
    after = bench.engine.stats()

    assert sum(of.running + of.parked + of.waiting for of in (during.online, during.offline)) == 6
    assert during.online.running > 0
    assert (after.online.running, after.offline.running, after.kv_used) == (0, 0, 0)
    assert (after.online.decode_tokens, after.offline.decode_tokens) == (24, 24)
    assert after.steps > during.steps > 0
    assert set(after.service) == {(c, t) for c in RequestClass for t in ("t0", "t1")}
    assert after.kv_used + after.kv_cached + after.kv_free == bench.engine.policy.num_blocks


def test_a_new_policy_keeps_the_sizes_of_the_engine(bench: Bench) -> None:
    engine, before = bench.engine, bench.engine.policy
    engine.configure(replace(before, ttft=9.0, num_blocks=7, block_tokens=3))
    bench.step()

    assert engine.policy == replace(before, ttft=9.0)


def test_an_idle_engine_wakes_when_a_request_comes(bench: Bench) -> None:
    sleeper = threading.Thread(target=bench.engine.wait, args=(60.0,))
    sleeper.start()
    bench.engine.submit(make_request("a"))
    sleeper.join(30)

    assert not sleeper.is_alive()
    bench.run("a")


def test_suspension_is_optional(make_bench: Callable[..., Bench]) -> None:
    assert not isinstance(make_bench(SerialEngine).engine, Suspending)
    assert isinstance(make_bench(BallastEngine).engine, Suspending)


def test_a_worker_serves_and_works_off_a_job_with_another_engine(
    serve, make_config, valkey, queue_name, eventually
) -> None:
    def build(options: EngineOptions, *, tokenizer: Tokenizer) -> SerialEngine:
        executor = Executor(load(options.directory, threads=1), num_blocks=BLOCKS, block_tokens=SIZE)
        policy = PolicyConfig(slots=1, num_blocks=BLOCKS)
        return SerialEngine(executor=executor, tokenizer=tokenizer, policy=policy, options=options)

    config = make_config(offline={"queue": queue_name}, runtime={"redisUrl": valkey.url})
    # Without `ignore_eos`, a sampled answer may end with EOS before its limit, and its outcome would be "stop".
    body = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 4, "ignore_eos": True}
    items = [{"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body} for name in ("a", "b", "c")]
    queue = Queue.connect(valkey.url, queue_name)
    job_id = queue.submissions.submit([json.dumps(item) for item in items]).job_id
    with serve(config, build=build) as serving, serving.client() as client:
        answer = client.post("/v1/completions", json=body)
        job = eventually(lambda: (job := queue.jobs.get(job_id)).state.is_over and job, "the job to be over")
        # The worker counts an item after Redis has its result.
        counted = 'ballast_requests_total{class="offline",outcome="length"} 3.0'
        eventually(lambda: counted in client.get("/metrics").text, counted)

    assert isinstance(serving.worker.engine, SerialEngine)
    assert answer.json()["usage"]["completion_tokens"] == 4
    assert job.counts.succeeded == 3
    queue.close()
