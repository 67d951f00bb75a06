"""Run plain jobs with arq, rq and celery on one server, and print how many each enqueues and runs per second as JSON.

python benchmarks/job_queue_peers.py redis://127.0.0.1:6379 --jobs 2000

`job_queue.py --peers PYTHON` calls this file with an interpreter that has some of the three packages. It imports
nothing of Ballast. A job gets a line of 600 bytes, and returns a result of 500 bytes. Each worker is one process that
runs jobs without a child process, and stops when the queue is empty.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import time
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

LINE = json.dumps({"custom_id": "request-0", "body": {"prompt": "Summarize what was said in the meeting. " * 14}})
RESULT = {"choices": [{"text": "word " * 90}]}


def run_line(_line: str) -> dict[str, Any]:
    """Return a result at once."""
    return RESULT


async def run_line_for_arq(_context: dict[Any, Any], line: str) -> dict[str, Any]:
    """Return a result at once."""
    return run_line(line)


def rates(num: int, enqueued: float, ran: float, cpu: float) -> dict[str, float]:
    """Return the jobs per second of wall time, and per second of the worker's processor time."""
    return {
        "enqueued_per_second": num / enqueued,
        "run_per_second": num / ran,
        "run_per_processor_second_of_the_worker": num / cpu,
    }


def measure_arq(url: str, num: int) -> dict[str, float]:
    """Enqueue jobs, and run them in a worker with 64 jobs at a time."""
    from arq import create_pool  # noqa: PLC0415  each peer is optional
    from arq.connections import RedisSettings  # noqa: PLC0415
    from arq.worker import Worker  # noqa: PLC0415

    async def run() -> dict[str, float]:
        settings = RedisSettings(host=str(urlsplit(url).hostname), port=int(urlsplit(url).port or 6379))
        pool = await create_pool(settings)
        start = time.perf_counter()
        for _ in range(num):
            await pool.enqueue_job("run_line_for_arq", LINE)
        enqueued = time.perf_counter() - start
        worker = Worker(
            [run_line_for_arq],
            redis_settings=settings,
            burst=True,
            max_jobs=64,
            poll_delay=0.01,
            queue_read_limit=320,
            handle_signals=False,
        )
        start, cpu = time.perf_counter(), time.process_time()
        await worker.main()
        ran, cpu = time.perf_counter() - start, time.process_time() - cpu
        assert worker.jobs_complete == num, worker.jobs_complete
        await worker.close()
        await pool.aclose()
        return rates(num, enqueued, ran, cpu)

    return asyncio.run(run())


def measure_rq(url: str, num: int) -> dict[str, float]:
    """Enqueue jobs in one round trip for each 64, and run them in a `SimpleWorker`."""
    from redis import Redis  # noqa: PLC0415  each peer is optional
    from rq import Queue, SimpleWorker  # noqa: PLC0415

    connection = Redis.from_url(url)
    queue = Queue("plain", connection=connection)
    start = time.perf_counter()
    for at in range(0, num, 64):
        queue.enqueue_many([Queue.prepare_data(run_line, (LINE,)) for _ in range(min(64, num - at))])
    enqueued = time.perf_counter() - start
    worker = SimpleWorker([queue], connection=connection)
    start, cpu = time.perf_counter(), time.process_time()
    worker.work(burst=True, logging_level="ERROR")
    ran, cpu = time.perf_counter() - start, time.process_time() - cpu
    assert len(queue.finished_job_registry) == num
    return rates(num, enqueued, ran, cpu)


def measure_celery(url: str, num: int) -> dict[str, float]:
    """Enqueue jobs, and run them in a worker with the solo pool, which prefetches 64."""
    from celery import Celery  # noqa: PLC0415  each peer is optional
    from celery.contrib.testing.worker import start_worker  # noqa: PLC0415
    from celery.signals import task_postrun  # noqa: PLC0415

    app = Celery("plain", broker=url, backend=url)
    app.conf.update(worker_prefetch_multiplier=64, task_default_queue="plain-celery", worker_hijack_root_logger=False)
    task = app.task(run_line, name="run_line")
    start = time.perf_counter()
    for _ in range(num):
        task.delay(LINE)
    enqueued = time.perf_counter() - start
    times: list[float] = []
    task_postrun.connect(lambda **_: times.append(time.perf_counter()), weak=False)
    start, cpu = time.perf_counter(), time.process_time()
    with start_worker(app, pool="solo", perform_ping_check=False, loglevel="ERROR", shutdown_timeout=60):
        while len(times) < num:
            time.sleep(0.01)
    return rates(num, enqueued, times[num - 1] - start, time.process_time() - cpu)


PEERS = {"arq": measure_arq, "rq": measure_rq, "celery": measure_celery}


def main() -> None:
    """Print one JSON object with the figures of each peer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--jobs", type=int, default=2000)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    figures = {name: run(options.url, options.jobs) for name, run in PEERS.items() if find_spec(name)}
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    sys.modules["job_queue_peers"] = sys.modules["__main__"]  # rq imports the function of a job by this name
    run_line.__module__ = "job_queue_peers"
    main()
