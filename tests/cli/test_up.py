"""`ballast up` as a process of its own, with the real worker and the small model."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import redis
from tls import LOOPBACK
from waiting import until_gone

import ballast_cli
from ballast_cli.worker_file import DEMO_MODEL_NAME

DEMO_MODEL = Path(ballast_cli.__file__).parent / "demo" / "model"

pytestmark = pytest.mark.slow
WAIT_SECONDS = 120


@dataclass
class Up:
    """A running `ballast up`, its note, and what it said on stderr."""

    process: subprocess.Popen[str]
    directory: Path
    said: list[str] = field(default_factory=list)

    @property
    def note(self) -> dict:
        return json.loads((self.directory / ".ballast" / "up.json").read_text())

    def read_until(self, text: str) -> None:
        for line in self.process.stderr:
            self.said.append(line)
            if text in line:
                return
        pytest.fail(f"no {text!r} in:\n{''.join(self.said)}")

    def end(self) -> int:
        self.said += self.process.stderr.readlines()
        return self.process.wait(timeout=WAIT_SECONDS)

    def pids(self) -> list[int]:
        with redis.Redis.from_url(self.note["redis_url"]) as client:
            valkey = client.info("server")["process_id"]
        return [self.note["pid"], self.note["worker_pid"], valkey]


def start(directory: Path, *options: str) -> Up:
    command = [sys.executable, "-m", "ballast_cli", "up", "--port", "0", "--slots", "8", *options]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BALLAST_")}
    process = subprocess.Popen(command, cwd=directory, stderr=subprocess.PIPE, text=True, env=environment)
    return Up(process, directory)


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    running = start(tmp_path)
    try:
        running.read_until("Ctrl-C stops everything")
        yield running
    finally:
        if running.process.poll() is None:
            running.process.send_signal(signal.SIGINT)
            running.process.wait(timeout=WAIT_SECONDS)
        running.process.stderr.close()


def ballast(directory: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ballast_cli", *map(str, arguments)]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=WAIT_SECONDS, check=False)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_up_runs_a_job_and_leaves_nothing_behind(up: Up, make_line, number: signal.Signals):
    lines = [make_line(f"item-{i}", model=DEMO_MODEL_NAME, max_tokens=8) for i in range(20)]
    (up.directory / "items.jsonl").write_text("\n".join(lines))
    pids = up.pids()

    submitted = ballast(up.directory, "submit", "items.jsonl", "--watch")
    assert submitted.returncode == 0, submitted.stderr
    assert "20 of 20 items succeeded" in submitted.stderr
    written = ballast(up.directory, "results", submitted.stdout.strip(), "-o", "out.jsonl", "--follow")
    assert written.returncode == 0, written.stderr
    results = [json.loads(line) for line in (up.directory / "out.jsonl").read_text().splitlines()]
    assert sorted(line["custom_id"] for line in results) == sorted(f"item-{i}" for i in range(20))
    assert all(line["response"]["body"]["usage"]["completion_tokens"] <= 8 for line in results)
    seen = json.loads(ballast(up.directory, "top", "--json").stdout)
    assert [worker["slots"] for worker in seen["workers"]] == [8]

    up.process.send_signal(number)
    assert up.end() == 0, "".join(up.said)
    until_gone(*pids)
    assert not (up.directory / ".ballast" / "up.json").exists()


def test_what_was_submitted_before_a_stop_is_done_after_the_next_start(up: Up, make_line, tmp_path: Path):
    lines = [make_line(f"item-{i}", model=DEMO_MODEL_NAME, max_tokens=200, ignore_eos=True) for i in range(200)]
    (tmp_path / "items.jsonl").write_text("\n".join(lines))
    job_id = ballast(tmp_path, "submit", "items.jsonl").stdout.strip()
    up.process.send_signal(signal.SIGINT)
    assert up.end() == 0, "".join(up.said)

    again = start(tmp_path)
    try:
        again.read_until("Ctrl-C stops everything")
        written = ballast(tmp_path, "results", job_id, "-o", "out.jsonl", "--follow")
    finally:
        again.process.send_signal(signal.SIGINT)
        assert again.end() == 0, "".join(again.said)
        again.process.stderr.close()

    assert written.returncode == 0, written.stderr
    results = [json.loads(line)["custom_id"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert sorted(results) == sorted(f"item-{i}" for i in range(200))


def test_a_dead_worker_is_reported_and_everything_stops(up: Up):
    pids = up.pids()
    os.kill(up.note["worker_pid"], signal.SIGKILL)

    assert up.end() == 1
    assert "The worker was killed by SIGKILL. Its last log lines" in "".join(up.said)
    until_gone(*pids)


def test_an_up_whose_terminal_is_gone_drains_its_worker(up: Up):
    pids = up.pids()
    up.process.stderr.close()
    up.process.send_signal(signal.SIGHUP)

    assert up.process.wait(timeout=WAIT_SECONDS) == 0
    assert "worker stopped" in (up.directory / ".ballast" / "worker.log").read_text()
    until_gone(*pids)


def test_worker_and_valkey_end_with_a_killed_up(up: Up):
    pids = up.pids()
    up.process.kill()
    up.end()

    until_gone(*pids)


def test_the_password_of_a_url_is_neither_shown_nor_readable_by_others(tmp_path: Path):
    running = start(tmp_path, "--redis-url", "redis://:secret@127.0.0.1:1")
    running.read_until("Ctrl-C stops everything")
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / ".ballast").iterdir()}
    running.process.send_signal(signal.SIGINT)
    running.end()
    running.process.stderr.close()

    assert "secret" not in "".join(running.said)
    assert modes["up.json"] == modes["worker.yaml"] == 0o600


@pytest.mark.parametrize("field", ["redisCaFile", "redisPasswordFile", "redisUrlFile"])
def test_a_file_for_redis_that_cannot_be_read_is_named(tmp_path: Path, field: str):
    address = "" if field == "redisUrlFile" else 'redisUrl: "rediss://127.0.0.1:1", '
    (tmp_path / "worker.yaml").write_text(
        f"model: {{uri: {DEMO_MODEL}}}\nruntime: {{{address}{field}: /nowhere/file}}\n"
    )

    done = ballast(tmp_path, "up", "--config", "worker.yaml", "--port", 0)

    assert (done.returncode, done.stderr) == (
        2,
        f"ballast: runtime.{field} /nowhere/file cannot be read: No such file or directory.\n",
    )


def test_a_second_up_in_the_same_directory_is_refused(up: Up):
    second = start(up.directory)

    assert second.end() == 5
    assert "already running" in "".join(second.said)
    second.process.stderr.close()


def test_a_changed_file_takes_effect_and_a_bad_one_does_not(tmp_path: Path):
    file = tmp_path / "mine.yaml"
    tls = f"runtime: {{tlsCertFile: {LOOPBACK}, tlsKeyFile: {LOOPBACK}"
    file.write_text(f"slo: {{ttftMilliseconds: 500}}\n{tls}}}\n")
    running = start(tmp_path, "--config", "mine.yaml")
    try:
        running.read_until("Ctrl-C stops everything")
        assert running.note["address"].startswith("https://")
        file.write_text("slo: {ttftMilliseconds: -1}\n")
        running.read_until("keeps its current configuration")
        file.write_text(f"model: {{uri: hf://org/name}}\n{tls}}}\n")
        running.read_until("hf://org/name@main waits for a restart")
        file.write_text(f"slo: {{ttftMilliseconds: 250}}\n{tls}, unreadySeconds: 0.5, drainSeconds: 6.5}}\n")
        running.read_until("was passed to the worker")
    finally:
        running.process.send_signal(signal.SIGINT)
        assert running.end() == 0, "".join(running.said)
        running.process.stderr.close()

    assert "250" in (tmp_path / ".ballast" / "worker.yaml").read_text()
    assert "(at most 7 s)" in "".join(running.said)


def test_the_error_of_a_broken_model_quotes_the_worker(tmp_path: Path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{}")
    running = start(tmp_path, "--model", "broken")

    assert running.end() == 1
    said = "".join(running.said)
    assert "The worker ended with exit code" in said
    assert "broken" in said.split("Its last log lines")[1]
    running.process.stderr.close()
