"""The queue against a model of it: workers that interleave, crash, come back late and repeat their calls."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import pytest
import redis
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule
from queue_audit import differences

from ballast_queue.errors import JobStateConflict
from ballast_queue.job import PARTLY_UNSERVED, UNSERVED, Claimed, JobState, Outlook, Prefix, Redriven, Result
from ballast_queue.outcome import Outcome
from ballast_queue.redis_store import Queue
from ballast_queue.settings import QueueSettings

MAX_ATTEMPTS = 3
WORKERS = ("w1", "w2", "w3")
RUNS = {JobState.VALIDATING, JobState.IN_PROGRESS}


@dataclass
class Item:
    """What the queue must know of one item."""

    custom_id: str
    model: str
    state: str = "waiting"
    spent: int = 0
    is_delayed: bool = False
    is_fresh: bool = True
    is_set_aside: bool = False
    """It came back because of its model, and waits, or is leased since."""
    token: int = 0
    """Of the lease; once it is over of the finish that ended it, 0 where nobody did."""
    prefix: Prefix | None = None
    is_dead: bool = False
    is_hopeless: bool = False
    """A dead letter that no attempt can serve."""


@dataclass
class ModelJob:
    id: str
    items: list[Item] = field(default_factory=list)
    num_rejected: int = 0
    is_closed: bool = True
    state: JobState = JobState.IN_PROGRESS
    ending: str = ""
    tenant: str = "default"
    priority: int = 0
    deadline: float | None = None
    outlook: Outlook | None = None
    reason: str = ""

    @property
    def is_at_risk(self) -> bool:
        return not self.state.is_over and not self.ending and self.outlook in {Outlook.AT_RISK, Outlook.NO}

    def claimable(self, skipped: Collection[str] = ()) -> list[int]:
        """Those that came back, those that are set aside for a model that is not skipped, then the others."""
        if self.state not in RUNS:
            return []
        found = [i for i, item in enumerate(self.items) if item.state == "waiting" and not item.is_delayed]
        found = [i for i in found if not (self.items[i].is_set_aside and self.items[i].model in skipped)]

        def place(i: int) -> tuple[bool, int, int]:
            item = self.items[i]
            return item.is_fresh, NUMBERS[item.model] if item.is_set_aside else 0, i

        return sorted(found, key=place)

    @property
    def set_aside(self) -> list[str]:
        """The models of the items that are set aside."""
        return [item.model for item in self.items if item.is_set_aside and item.state == "waiting"]

    def note_served(self, item: Item) -> None:
        others = set(self.set_aside) - ({item.model} if item.is_set_aside else set())
        self.reason = PARTLY_UNSERVED if self.reason and others else ""

    def settle(self) -> None:
        states = Counter(item.state for item in self.items)
        if self.reason and not states["leased"] and 0 < states["waiting"] == len(self.set_aside):
            self.reason = UNSERVED
        if self.state.is_over or not self.is_closed:
            return
        if any(item.state in {"waiting", "leased"} for item in self.items):
            return
        self.state = JobState(self.ending) if self.ending else (JobState.COMPLETED if self.items else JobState.FAILED)
        self.reason = ""

    def let_go(self, item: Item) -> None:
        item.state, item.token, item.is_delayed = self.ending, 0, False

    def release(self, item: Item, *, spent: int, is_delayed: bool = False) -> None:
        item.state, item.spent, item.token, item.is_delayed = "waiting", spent, 0, is_delayed
        item.is_set_aside = False

    def bury(self, item: Item, *, is_hopeless: bool = False) -> None:
        item.state, item.is_dead, item.is_hopeless, item.prefix = "failed", True, is_hopeless, None

    def end(self, ending: str) -> None:
        if self.state.is_over or self.ending:
            return
        self.ending, self.is_closed, self.reason = ending, True, ""
        self.state = JobState.CANCELLING if ending == "cancelled" else JobState.FINALIZING
        for item in self.items:
            if item.state == "waiting":
                self.let_go(item)
        self.settle()

    def loss(self, item: Item, token: int) -> Outcome:
        if item.state in {"succeeded", "failed"} and item.token == token:
            return Outcome.ALREADY_DONE
        if item.state in {"cancelled", "expired"}:
            return Outcome.CANCELLED
        return Outcome.LEASE_LOST


NUMBERS = {
    name: Claimed(
        job_id="j", index=0, custom_id="a", url="/", body={"model": name}, tenant="t", token=1, seed=0
    ).model_number
    for name in "abc"
}
MODELS = st.lists(st.sampled_from([*NUMBERS]), min_size=1, max_size=3)


def make_machine(url: str) -> type[RuleBasedStateMachine]:
    class QueueMachine(RuleBasedStateMachine):
        jobs = Bundle("jobs")
        claims = Bundle("claims")

        @initialize()
        def connect(self) -> None:
            self.queue = Queue.connect(url, f"model/{uuid4().hex}")
            self.of_worker = {name: Queue.connect(url, self.queue.name) for name in WORKERS}
            self.queue.settings.apply(
                QueueSettings(
                    max_attempts=MAX_ATTEMPTS, lease_seconds=9999, backoff_seconds=9999, backoff_max_seconds=9999
                )
            )
            self.raw = redis.Redis.from_url(url)
            self.model: dict[str, ModelJob] = {}

        def teardown(self) -> None:
            if not hasattr(self, "queue"):
                return
            assert differences(self.raw, self.queue.name) == []
            for job in self.model.values():
                visible = Counter(found.custom_id for found in self.queue.results.read(job.id))
                over = [item.custom_id for item in job.items if item.state not in {"waiting", "leased"}]
                assert sorted(visible.elements()) == sorted(over + self._rejected(job))
            self.raw.delete(*self.raw.scan_iter(f"ballast:{{{self.queue.name}}}:*"))
            self.raw.close()
            for queue in (self.queue, *self.of_worker.values()):
                queue.close()

        @staticmethod
        def _rejected(job: ModelJob) -> list[str]:
            # Every job of the machine has its bad lines behind the good ones.
            return [f"line:{len(job.items) + 1 + i}" for i in range(job.num_rejected)]

        @staticmethod
        def _line(item: Item) -> str:
            return (
                f'{{"custom_id":"{item.custom_id}","method":"POST","url":"/v1/completions",'
                f'"body":{{"model":"{item.model}","prompt":"p"}}}}'
            )

        # Submitters

        @rule(
            target=jobs,
            models=st.lists(st.sampled_from([*NUMBERS]), max_size=6),
            bad=st.integers(0, 2),
            tenant=st.sampled_from(["default", "other"]),
            priority=st.integers(0, 1),
            seconds=st.none() | st.integers(5000, 9000),
        )
        def submit(self, models: list[str], bad: int, tenant: str, priority: int, seconds: int | None) -> str:
            items = [Item(f"r{i}", model) for i, model in enumerate(models if models or bad else ["a"])]
            lines = [*map(self._line, items), *["no json"] * bad]
            deadline = None if seconds is None else self.queue.now() + seconds
            job_id = self.queue.submissions.submit(lines, tenant=tenant, priority=priority, deadline=deadline).job_id
            job = ModelJob(job_id, items, bad)
            job.tenant, job.priority, job.deadline = tenant, priority, deadline
            job.settle()
            self.model[job_id] = job
            return job_id

        @rule(target=jobs, models=MODELS)
        def open_through_the_inbox(self, models: list[str]) -> str:
            job_id = f"job-{len(self.model)}"
            self.model[job_id] = ModelJob(job_id, is_closed=False, state=JobState.VALIDATING)
            self._add(self.model[job_id], models)
            return job_id

        def _add(self, job: ModelJob, models: list[str]) -> None:
            for model in models:
                item = Item(f"r{len(job.items)}", model)
                self.raw.xadd(self.queue.store.keys.inbox, {"item": self._line(item), "job": job.id})
                job.items.append(item)
            assert self.queue.inbox.take_in() == len(models)

        @rule(job_id=jobs, models=MODELS)
        def add_through_the_inbox(self, job_id: str, models: list[str]) -> None:
            if not self.model[job_id].is_closed:
                self._add(self.model[job_id], models)

        @rule(job_id=jobs)
        def close_through_the_inbox(self, job_id: str) -> None:
            job = self.model[job_id]
            if job.is_closed:
                return
            self.raw.xadd(self.queue.store.keys.inbox, {"job": job_id, "end": "1"})
            self.queue.inbox.take_in()
            job.is_closed = True
            if job.state is JobState.VALIDATING:
                job.state = JobState.IN_PROGRESS
            job.settle()

        @rule(job_id=jobs)
        def cancel(self, job_id: str) -> None:
            self.model[job_id].end("cancelled")
            assert self.queue.jobs.cancel(job_id).state is self.model[job_id].state

        @rule(job_id=jobs)
        def pass_the_deadline(self, job_id: str) -> None:
            job = self.model[job_id]
            if job.state.is_over or job.ending:
                return
            self.raw.hset(self.queue.store.keys.job(job_id), "deadline", "1")
            # Only the queue may have set the timer of a deadline that it was given.
            had_deadline = job.deadline is not None
            self.raw.zadd(self.queue.store.keys.timers, {f"deadline:{job_id}": 1}, xx=had_deadline)
            while self.queue.timers.run_due():
                pass
            job.deadline = 1
            job.end("expired")

        @rule(job_id=jobs, verb=st.sampled_from(["pause", "resume"]))
        def hold(self, job_id: str, verb: str) -> None:
            job = self.model[job_id]
            if job.ending or job.state.is_over:
                with pytest.raises(JobStateConflict):
                    getattr(self.queue.jobs, verb)(job_id)
                return
            getattr(self.queue.jobs, verb)(job_id)
            if verb == "pause":
                job.state = JobState.PAUSED
                return
            job.reason = ""
            if job.state is JobState.PAUSED:
                job.state = JobState.IN_PROGRESS if job.is_closed else JobState.VALIDATING

        @rule(job_id=jobs, outlook=st.sampled_from(Outlook))
        def appraise(self, job_id: str, outlook: Outlook) -> None:
            self.queue.jobs.record_outlooks([(job_id, outlook, "so say the rates")])
            job = self.model[job_id]
            if not job.state.is_over and not job.ending:
                job.outlook = outlook

        @rule(job_id=jobs, takes_all=st.booleans())
        def redrive(self, job_id: str, takes_all: bool) -> None:
            job = self.model[job_id]
            if job.ending or (job.state.is_over and job.state is not JobState.COMPLETED):
                with pytest.raises(JobStateConflict):
                    self.queue.jobs.redrive(job_id, takes_all=takes_all)
                return
            letters = [item for item in job.items if item.is_dead]
            dead = [item for item in letters if takes_all or not item.is_hopeless]
            wanted = Redriven(returned=len(dead), left=len(letters) - len(dead))
            assert self.queue.jobs.redrive(job_id, takes_all=takes_all) == wanted
            for item in dead:
                item.is_dead = False
                job.release(item, spent=0)
            if dead:
                job.reason = PARTLY_UNSERVED if job.reason and job.set_aside else ""
            if dead and job.state is JobState.COMPLETED:
                job.state = JobState.IN_PROGRESS

        # Workers

        @rule(
            target=claims,
            job_id=jobs,
            n=st.integers(1, 4),
            worker=st.sampled_from(WORKERS),
            skipped=st.none() | st.sets(st.sampled_from([*NUMBERS])),
        )
        def claim(self, job_id: str, n: int, worker: str, skipped: set[str] | None) -> tuple[str, list[Claimed]]:
            """Without a set, the claim skips all items that are set aside."""
            job = self.model[job_id]
            wanted = job.claimable(NUMBERS if skipped is None else skipped)[:n]
            numbers = [0] if skipped is None else [NUMBERS[name] for name in skipped]
            claimed = self.of_worker[worker].leases.claim_served(job_id, n, worker, numbers)
            assert (claimed is None) == (not wanted and bool(job.claimable()))
            if claimed is None:
                if not any(item.state == "leased" for item in job.items):
                    job.reason = job.reason or PARTLY_UNSERVED
                job.settle()
                return worker, []
            assert [c.index for c in claimed] == wanted
            for c in claimed:
                item = job.items[c.index]
                assert (c.custom_id, c.attempt, c.prefix) == (item.custom_id, item.spent + 1, item.prefix)
                item.state, item.token, item.is_fresh = "leased", c.token, False
            return worker, claimed

        def _held(self, c: Claimed) -> tuple[ModelJob, Item, bool]:
            job = self.model[c.job_id]
            item = job.items[c.index]
            return job, item, item.state == "leased" and item.token == c.token

        @rule(claim=claims)
        def finish(self, claim: tuple[str, list[Claimed]]) -> None:
            """Also what a worker does that was thought dead: a claim stays in the bundle for ever."""
            worker, claimed = claim
            wanted = []
            for c in claimed:
                job, item, is_held = self._held(c)
                if not is_held:
                    wanted.append(job.loss(item, c.token))
                    continue
                wanted.append(Outcome.DONE)
                job.note_served(item)
                item.state = "succeeded"
            results = [(c, Result(custom_id=c.custom_id, status_code=200, body={})) for c in claimed]
            assert self.of_worker[worker].leases.finish_many(worker, results) == wanted
            for c in claimed:
                self.model[c.job_id].settle()

        @rule(
            claim=claims,
            tokens=st.none() | st.lists(st.integers(0, 9), max_size=3),
            unserved=st.sets(st.sampled_from([*NUMBERS])),
            sends_numbers=st.booleans(),
        )
        def give_back(
            self, claim: tuple[str, list[Claimed]], tokens: list[int] | None, unserved: set[str], sends_numbers: bool
        ) -> None:
            """A worker of an older version sends no numbers."""
            worker, claimed = claim
            prefix = None if tokens is None else Prefix(token_ids=tuple(tokens))
            for c in claimed:
                job, item, is_held = self._held(c)
                if not is_held:
                    wanted = job.loss(item, c.token)
                elif job.ending:
                    wanted = Outcome.CANCELLED
                    job.let_go(item)
                else:
                    wanted = Outcome.DONE
                    item.prefix = prefix or item.prefix
                    job.release(item, spent=item.spent)
                    if item.model in unserved:
                        job.reason = job.reason if job.reason == PARTLY_UNSERVED else UNSERVED
                        item.is_set_aside = sends_numbers
                queue = self.of_worker[worker]
                name, keys, args = queue.store.functions.give_back(
                    *c.lease,
                    "" if prefix is None else prefix.model_dump_json(),
                    unserved_model=c.model_number if item.model in unserved else 0,
                )
                call = name, keys, args if sends_numbers else args[:-1]
                assert queue.store.call(call).decode() == wanted
                job.settle()

        @rule(claim=claims, is_retryable=st.booleans())
        def retry(self, claim: tuple[str, list[Claimed]], is_retryable: bool) -> None:
            worker, claimed = claim
            for c in claimed:
                job, item, is_held = self._held(c)
                if is_held:
                    job.note_served(item)
                if not is_held:
                    wanted = job.loss(item, c.token)
                elif job.ending:
                    wanted = Outcome.CANCELLED
                    job.let_go(item)
                elif is_retryable and item.spent + 1 < MAX_ATTEMPTS:
                    wanted = Outcome.RETRIED
                    item.prefix = None
                    job.release(item, spent=item.spent + 1, is_delayed=True)
                else:
                    wanted = Outcome.DEAD
                    job.bury(item, is_hopeless=not is_retryable)
                assert self.of_worker[worker].leases.retry(c, "oops", "failed", is_retryable=is_retryable) is wanted
                job.settle()

        @rule(claim=claims)
        def heartbeat(self, claim: tuple[str, list[Claimed]]) -> None:
            worker, claimed = claim
            lost = []
            for c in claimed:
                job, item, is_held = self._held(c)
                if is_held and not job.ending:
                    job.note_served(item)
                    continue
                lost.append(c.lease)
                if is_held:
                    job.let_go(item)
                job.settle()
            assert self.of_worker[worker].leases.heartbeat([c.lease for c in claimed]) == lost

        @rule(claim=claims)
        def lose_the_worker(self, claim: tuple[str, list[Claimed]]) -> None:
            """Its leases expire; some other worker reaps them."""
            self._pass_the_expiry(claim)
            self._reap(claim)

        @rule(claim=claims, worker_lives=st.booleans())
        def leave_the_timers(self, claim: tuple[str, list[Claimed]], worker_lives: bool) -> None:
            """Redis is away for longer than a lease. Other workers return first; this one may be dead."""
            self.queue.timers.run_due()
            self._pass_the_expiry(claim)
            # They ran for longer than the grace after the last gap.
            self.raw.hset(self.queue.store.keys.totals, mapping={"timers_at": "9999000", "spared_at": "1"})
            assert self.queue.timers.run_due() == 0
            if worker_lives:
                self.heartbeat(claim)
            self.raw.hset(self.queue.store.keys.totals, "spared_at", "1")
            for c in claim[1]:
                self.raw.zadd(self.queue.store.keys.timers, {f"lease:{c.job_id}": 1}, xx=True)
            if worker_lives:
                assert self.queue.timers.run_due() == 0
            else:
                self._reap(claim)

        def _pass_the_expiry(self, claim: tuple[str, list[Claimed]]) -> None:
            for c in claim[1]:
                if self._held(c)[2]:
                    self.raw.zadd(self.queue.store.keys.part(c.job_id, "leases"), {str(c.index): 1}, xx=True)
                    self.raw.zadd(self.queue.store.keys.timers, {f"lease:{c.job_id}": 1}, xx=True)

        def _reap(self, claim: tuple[str, list[Claimed]]) -> None:
            num_expired = 0
            for c in claim[1]:
                job, item, is_held = self._held(c)
                if not is_held:
                    continue
                num_expired += 1
                if job.ending:
                    job.let_go(item)
                elif item.spent + 1 < MAX_ATTEMPTS:
                    job.release(item, spent=item.spent + 1)
                else:
                    job.bury(item)
                    item.token = 0
            assert self.queue.timers.run_due() == num_expired
            for c in claim[1]:
                self.model[c.job_id].settle()

        @rule(job_id=jobs)
        def end_the_backoffs(self, job_id: str) -> None:
            job = self.model[job_id]
            delayed = [i for i, item in enumerate(job.items) if item.is_delayed]
            for i in delayed:
                self.raw.zadd(self.queue.store.keys.part(job_id, "delayed"), {str(i): 1}, xx=True)
                self.raw.zadd(self.queue.store.keys.timers, {f"wake:{job_id}": 1}, xx=True)
                job.items[i].is_delayed = False
            assert self.queue.timers.run_due() == len(delayed)

        # What always holds

        @precondition(lambda self: self.model)
        @invariant()
        def every_job_counts_what_the_model_counts(self) -> None:
            for found in self.queue.jobs.all():
                job = self.model[found.id]
                states = Counter(item.state for item in job.items)
                counts = found.counts.model_dump(exclude={"version"})
                wanted = {name: states[name] for name in counts}
                wanted["failed"] += job.num_rejected
                wanted["total"] = len(job.items) + job.num_rejected

                assert (found.state, counts) == (job.state, wanted)
                assert job.state.is_over or job.ending or found.reason == job.reason
                assert (found.outlook, found.deadline is None) == (job.outlook, job.deadline is None)

        @precondition(lambda self: self.model)
        @invariant()
        def the_jobs_that_are_not_over_are_at_hand(self) -> None:
            active = [job for job in self.model.values() if not job.state.is_over]

            assert {job.id for job in self.queue.jobs.active()} == {job.id for job in active}
            runs = [job for job in active if job.state in RUNS and job.reason != UNSERVED]
            waiting = sum(item.state == "waiting" for job in active if job.state in RUNS for item in job.items)
            for job in active:
                if job.state in RUNS and job.reason == UNSERVED:
                    waiting -= sum(item.state == "waiting" for item in job.items)
                elif job.state in RUNS and job.reason:
                    waiting -= len(job.set_aside)
            stats = self.queue.stats()
            assert stats.jobs_at_risk == sum(job.is_at_risk for job in active)
            assert stats.claimable_at_risk == sum(job.is_at_risk for job in runs)
            assert stats.claimable_depth == waiting + stats.inbox

        @precondition(lambda self: self.model)
        @invariant()
        def the_heads_are_the_jobs_with_something_to_claim(self) -> None:
            groups: dict[tuple[int, str], list[ModelJob]] = {}
            for job in self.model.values():  # in the order of submission, which sorting keeps
                if job.claimable():
                    groups.setdefault((-job.priority, job.tenant), []).append(job)
            wanted = [
                (job.id, len(job.claimable()))
                for _, group in sorted(groups.items())
                for job in sorted(group, key=lambda job: job.deadline or math.inf)[:8]
            ]

            assert [(-group.priority, group.tenant) for group in self.queue.claimable.demand().groups] == sorted(groups)
            assert [(head.job_id, head.waiting) for head in self.queue.claimable.heads()] == wanted
            held = Counter(job.tenant for job in self.model.values() for item in job.items if item.state == "leased")
            assert self.queue.claimable.demand().held == held

    QueueMachine.TestCase.settings = settings(max_examples=settings.default.max_examples // 2, stateful_step_count=40)
    return QueueMachine


@pytest.mark.hypothesis  # Hypothesis marks tests of its own alone, and this one starts a state machine
def test_any_interleaving_agrees_with_the_model(valkey: Any) -> None:
    case = make_machine(valkey.url).TestCase()
    case.runTest()
