"""The process of a replica, without Ray."""

from __future__ import annotations

import subprocess
import sys

DUMP = """
from ray import cloudpickle
from ballast_serve.application import worker
print(cloudpickle.dumps(worker.func_or_class).hex())
"""
LOAD = """
import asyncio, sys
from ray import cloudpickle
cloudpickle.loads(bytes.fromhex(sys.stdin.read()))
print(type(asyncio.new_event_loop()).__name__)
"""


def run(program: str, given: str = "") -> str:
    """Return what a program prints, in a process of its own."""
    done = subprocess.run([sys.executable, "-c", program], input=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_event_loop_of_a_replica_is_that_of_a_worker() -> None:
    """Serve reads the class from its pickled form, then makes the event loop."""
    assert run(LOAD, run(DUMP)) == "EventLoop"
