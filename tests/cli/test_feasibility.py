from __future__ import annotations

from ballast_cli.feasibility import Work, assess
from ballast_queue.status import ClassLoad, WorkerStatus


def make_worker(*, tokens: float = 0.0, items: float = 0.0, is_ready: bool = True, is_draining: bool = False):
    return WorkerStatus(
        worker_id="w",
        address="http://127.0.0.1:8000",
        at=0,
        model="m",
        slots=8,
        batch_ceiling=8,
        kv_blocks_total=1,
        kv_blocks_free=1,
        online=ClassLoad(),
        offline=ClassLoad(decode_tokens_per_second=tokens, requests_per_second=items),
        is_ready=is_ready,
        is_draining=is_draining,
    )


def test_no_worker_reads_as_unknown_and_not_as_idle():
    assert assess(Work(1, 1, 0), [], 1e9).verdict == "unknown"


def test_a_worker_that_measured_no_offline_rate_is_unknown():
    found = assess(Work(1, 1, 0), [make_worker()], 1e9)

    assert found.verdict == "unknown"
    assert "no offline rate" in found.because


def test_workers_that_drain_or_are_not_ready_do_not_count():
    workers = [make_worker(tokens=10, is_draining=True), make_worker(tokens=10, is_ready=False)]

    assert assess(Work(1, 1, 0), workers, 1e9).verdict == "unknown"


def test_the_rates_of_all_workers_add_up():
    found = assess(Work(10, 1000, 0), [make_worker(tokens=60), make_worker(tokens=40)], 10)

    assert found.seconds_needed == 10
    assert found.verdict == "yes"


def test_a_second_too_little_is_a_no():
    assert assess(Work(10, 1000, 0), [make_worker(tokens=100)], 9).verdict == "no"


def test_items_ahead_take_their_time_first():
    found = assess(Work(10, 1000, 50), [make_worker(tokens=100, items=5)], 15)

    assert found.seconds_needed == 20
    assert found.verdict == "no"


def test_items_ahead_without_an_item_rate_are_unknown():
    assert assess(Work(10, 1000, 50), [make_worker(tokens=100)], 1e9).verdict == "unknown"


def test_unbounded_output_is_judged_by_items():
    found = assess(Work(10, 0, 10), [make_worker(items=2)], 60)

    assert found.seconds_needed == 10
    assert "items/s" in found.because
