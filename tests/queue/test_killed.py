"""Workers that are killed in the middle of whatever they do leave a queue that balances and goes on."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from contextlib import suppress

from ballast_queue.errors import JobNotFound, JobStateConflict
from ballast_queue.job import JobState, Outlook, Result
from ballast_queue.redis_store import Queue
from ballast_queue.settings import QueueSettings


def churn(url: str, name: str, seed: int) -> None:
    """Do everything that workers and people do, for ever, and say so after each call."""
    queue, draw = Queue.connect(url, name), random.Random(seed)
    worker, kept = f"w{seed}", []
    line = {"method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "p", "max_tokens": 4}}

    def work() -> None:
        heads = queue.claimable.heads()
        if heads:
            kept.extend(queue.leases.claim(draw.choice(heads).job_id, draw.randint(1, 5), worker))

    def end() -> None:
        done = [kept.pop() for _ in range(min(len(kept), draw.randint(1, 4)))]
        match draw.randrange(4):
            case 0:
                queue.leases.give_back_many([(item, None) for item in done])
            case 1:
                for item in done:
                    queue.leases.retry(item, "oops", "x", is_retryable=draw.random() < 0.5)
            case _:
                queue.leases.finish_many(
                    worker, [(item, Result(custom_id=item.custom_id, status_code=200, body={})) for item in done]
                )

    def submit() -> None:
        lines = [json.dumps({"custom_id": f"r{i}", **line}) for i in range(draw.randint(1, 40))]
        deadline = draw.choice([None, queue.now() + 1000])
        queue.submissions.submit(lines, tenant=draw.choice("abc"), priority=draw.randint(0, 1), deadline=deadline)

    def receive() -> None:
        fields = {"job": f"in-{seed}-{draw.randrange(20)}", "tenant": draw.choice("abc")}
        for _ in range(20):
            item = json.dumps({"custom_id": f"r{draw.getrandbits(60)}", **line})
            queue.store.connection.client.xadd(queue.store.keys.inbox, {"item": item, **fields})
        queue.inbox.take_in(draw.randint(1, 60))

    def judge() -> None:
        jobs = queue.jobs.active(20)
        queue.jobs.record_outlooks([(job.id, draw.choice(list(Outlook)), "so it is") for job in jobs])

    def bother() -> None:
        jobs = queue.jobs.all()
        if not jobs:
            return
        job = draw.choice(jobs)
        with suppress(JobNotFound, JobStateConflict):  # another process may delete it, or redrive it
            if job.state.is_over and draw.random() < 0.3:
                queue.jobs.delete(job.id)
            elif job.state is JobState.COMPLETED:
                queue.jobs.redrive(job.id, takes_all=draw.random() < 0.5)
            elif job.state.is_over or draw.random() < 0.9:
                queue.timers.run_due()
            else:
                queue.jobs.cancel(job.id)

    def account() -> None:
        service = queue.ledger.charge({tenant: draw.random() for tenant in "abc"})
        service = queue.ledger.lift(draw.random() * 10, ["a", f"t{draw.randrange(99)}"])
        queue.ledger.forget(service, service.needless({"a"}))

    while True:
        draw.choices([work, end, submit, receive, judge, bother, account], [6, 6, 1, 1, 1, 2, 1])[0]()
        sys.stdout.write(".\n")
        sys.stdout.flush()


def test_whoever_is_killed_leaves_a_queue_that_balances(queue: Queue, desk, valkey):
    queue.settings.apply(QueueSettings(backoff_seconds=0, lease_seconds=3600, max_attempts=2))
    draw = random.Random(7)
    command = [sys.executable, __file__, valkey.url, queue.name]
    children = [
        subprocess.Popen([*command, str(draw.getrandbits(30))], stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    for child in children:
        with child:
            for _ in range(draw.randint(100, 200)):
                assert child.stdout.readline() == ".\n", "the child failed by itself"
            os.kill(child.pid, signal.SIGKILL)
    broken = desk.differences()
    for job in queue.jobs.all():
        queue.jobs.cancel(job.id)
    while queue.inbox.take_in():
        pass
    twice = [
        job.id
        for job in queue.jobs.all()
        for n in Counter(r.custom_id for r in queue.results.read(job.id)).values()
        if n > 1
    ]

    assert broken == []
    assert twice == []
    assert queue.stats().items.total > 100
    assert queue.stats().jobs_at_risk == 0


def test_an_interrupted_redrive_is_gone_on_with(impatient: Queue, line, monkeypatch):
    queue = impatient
    job_id = queue.submissions.submit([line(f"r{i}") for i in range(1500)]).job_id
    while claimed := queue.leases.claim(job_id, 500, "w1"):
        for c in claimed:
            queue.leases.retry(c, "no", "no", is_retryable=False)
    queue.store.call(queue.store.functions.redrive(job_id, 500, b"0", takes_all=True))
    half = queue.jobs.get(job_id).counts.waiting
    rest = queue.jobs.redrive(job_id, takes_all=True)

    assert 0 < half < 1500
    assert half + rest.returned == 1500
    assert (rest.left, queue.jobs.get(job_id).counts.failed) == (0, 0)


if __name__ == "__main__":
    churn(sys.argv[1], sys.argv[2], int(sys.argv[3]))
