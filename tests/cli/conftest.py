"""Runs the command as a person does, in this process, against a real Valkey."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ballast_cli.__main__ import main


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Ran]


@pytest.fixture(autouse=True)
def hangup() -> Iterator[None]:
    """Handle SIGHUP as in a terminal. Under `nohup` it is ignored, also by every process that a test starts."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def ballast(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """The command in an empty directory and with nothing of ours in the environment."""
    monkeypatch.chdir(tmp_path)
    for name in ("REDIS_URL", "QUEUE", "REDIS_PASSWORD", "REDIS_PASSWORD_FILE", "REDIS_CA_FILE"):
        monkeypatch.delenv(f"BALLAST_{name}", raising=False)

    def run(*arguments: object) -> Ran:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return Ran(code, out, err)

    return run


@pytest.fixture
def queued(ballast: Run, valkey: Any, queue_name: str, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command with a queue of its own in a real Valkey."""
    monkeypatch.setenv("BALLAST_REDIS_URL", valkey.url)
    monkeypatch.setenv("BALLAST_QUEUE", queue_name)
    return ballast


def make_line(custom_id: str, **body: Any) -> str:
    request = {"model": "m", "prompt": "Once", "max_tokens": 4} | body
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": request})


@pytest.fixture(name="make_line")
def _make_line() -> Callable[..., str]:
    return make_line


@pytest.fixture
def items(tmp_path: Path) -> Path:
    """Three good lines."""
    file = tmp_path / "items.jsonl"
    file.write_text("".join(make_line(name) + "\n" for name in "abc"))
    return file
