"""Threads that end with the process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ballast_vllm.daemon_threads import DaemonThreads

ENDLESS = """
from threading import Event
from ballast_vllm.daemon_threads import DaemonThreads

begun = Event()
DaemonThreads(1, "t").submit(lambda: (begun.set(), Event().wait()))
begun.wait()
"""


def test_a_process_ends_before_the_work_of_its_threads():
    assert subprocess.run([sys.executable, "-c", ENDLESS], timeout=60, check=True).returncode == 0


def test_work_has_a_result_or_an_error_and_no_more_threads_than_the_limit():
    threads = DaemonThreads(2, "t")
    found = [threads.submit(int, text) for text in ("1", "2", "x", "3")]

    assert [found[place].result() for place in (0, 1, 3)] == [1, 2, 3]
    with pytest.raises(ValueError, match="invalid literal"):
        found[2].result()
    assert len(threads._threads) == 2  # noqa: SLF001 -- nothing else shows it
