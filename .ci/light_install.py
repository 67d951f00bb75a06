"""Check the light install: contracts import, commands answer, and the worker names the extra that it needs."""

import subprocess
import sys
from pathlib import Path

import typer

import ballast_api.worker_config
import ballast_log
import ballast_openai.body
import ballast_queue.redis_store
from ballast_cli.app import app

BIN = Path(sys.executable).parent


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run one of this environment's programs."""
    return subprocess.run(
        [str(BIN / command[0]), *command[1:]], capture_output=True, text=True, timeout=60, check=False
    )


assert ballast_api.worker_config.WorkerConfig
assert ballast_log.Log
assert ballast_openai.body.parse_body
assert ballast_queue.redis_store.Queue
for verb in typer.main.get_command(app).commands:
    done = run("ballast", verb, "--help")
    assert done.returncode == 0, (verb, done.stderr)
mains = (("ballast-operator",), ("ballast-worker", "--config", "x.yaml"), ("ballast", "up"), ("ballast", "demo"))
for program in mains:
    done = run(*program)
    assert done.returncode != 0, program
    assert "pip install 'ballast[" in done.stderr, (program, done.stderr)
    assert "Traceback" not in done.stderr, (program, done.stderr)
print("light install: contracts import, commands answer, the worker names its extra")
