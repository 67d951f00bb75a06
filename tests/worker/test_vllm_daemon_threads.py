"""Threads that end with the process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ballast_vllm.daemon_threads import DaemonThreads

WORK = """
from threading import Event
from time import sleep
from ballast_vllm import daemon_threads

begun = Event()

def work():
    begun.set()
    {work}
    print("done")

daemon_threads.GRACE_SECONDS = {grace}
threads = daemon_threads.DaemonThreads(1, "t")
threads.submit(work)
threads.submit(print, "next")
begun.wait()
"""


@pytest.mark.parametrize(
    ("work", "grace", "printed"),
    [
        pytest.param("Event().wait()", 0.1, "", id="work without an end"),
        pytest.param("sleep(0.2)", 50, "done\n", id="work that ends soon"),
    ],
)
def test_the_end_of_a_process_waits_a_moment_for_work(work, grace, printed):
    program = WORK.format(work=work, grace=grace)
    ended = subprocess.run([sys.executable, "-c", program], timeout=60, check=True, capture_output=True, text=True)

    assert ended.stdout == printed


def test_work_has_a_result_or_an_error_and_no_more_threads_than_the_limit():
    threads = DaemonThreads(2, "t")
    found = [threads.submit(int, text) for text in ("1", "2", "x", "3")]

    assert [found[place].result() for place in (0, 1, 3)] == [1, 2, 3]
    with pytest.raises(ValueError, match="invalid literal"):
        found[2].result()
    assert len(threads._threads) == 2  # noqa: SLF001 -- nothing else shows it
