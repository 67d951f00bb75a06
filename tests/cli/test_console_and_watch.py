"""Tables on a terminal, and following a job while Redis is away."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from ballast_cli import console, watch
from ballast_queue.errors import CommandForbidden, LibraryUnfit, QueueError, QueueForbidden, QueueUnavailable
from ballast_queue.job import JobState


@pytest.mark.parametrize("width", [20, 200])
def test_a_table_is_never_cut(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int):
    terminal = Console(file=sys.stdout, force_terminal=True, width=width, highlight=False)
    monkeypatch.setattr(console, "stdout", lambda: terminal)

    console.print_table(("ID", "STATE"), [("job-1a2201b58c0-6d337f", "in_progress")])

    assert "job-1a2201b58c0-6d337f  in_progress" in capsys.readouterr().out
    console.print_table(("ID", "STATE"), [("[red]\x1b[2J[/]", "x\ny")])
    assert "[red]?[2J[/]  x?y" in capsys.readouterr().out


def test_a_message_has_its_lines_and_controls_no_terminal(capsys: pytest.CaptureFixture[str]):
    console.say("Two lines:\n\ta\x1b[2J\u2028b")

    assert capsys.readouterr().err == "Two lines:\n a?[2J?b\n"


def test_json_takes_no_python_call_for_each_character():
    calls = list[str]()
    value = {"text": 1000 * "\N{LATIN SMALL LETTER E WITH ACUTE}t\N{LATIN SMALL LETTER E WITH ACUTE} " + "\xa0!"}
    before = sys.getprofile()
    sys.setprofile(lambda _frame, event, _argument: calls.append(event))
    try:
        text = console.json_text(value)
    finally:
        sys.setprofile(before)

    assert json.loads(text) == value
    assert "\\u00a0" in text
    assert calls.count("call") < 1000


def test_the_title_of_a_bar_is_no_markup(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(watch, "stderr", lambda: Console(file=sys.stderr, force_terminal=True, width=200))
    with watch.progress("hf://a/b@[/]", 1):
        pass

    assert "hf://a/b@[/]" in capsys.readouterr().err


class Away:
    """Jobs whose Redis fails `num` times, from the second call on."""

    def __init__(self, num: int, failure: type[QueueError] = QueueUnavailable) -> None:
        self.left, self.num_calls, self.failure = num, 0, failure
        counts = SimpleNamespace(total=2, done=1, succeeded=2, failed=0, cancelled=0, expired=0)
        self.job = SimpleNamespace(id="job-1", counts=counts, tokens_out=7, reason="", state=JobState.IN_PROGRESS)

    def get(self, job_id: str) -> Any:
        self.num_calls += 1
        if self.num_calls > 1 and self.left:
            self.left -= 1
            raise self.failure("Redis is unavailable")
        if self.num_calls > 1:
            self.job.state = JobState.COMPLETED
        return self.job


def queue_of(jobs: Away) -> Any:
    return SimpleNamespace(jobs=jobs)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_POLL_SECONDS", 0.001)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("failure", [QueueUnavailable, QueueForbidden], ids=["away", "without its users"])
def test_watching_goes_on_when_redis_is_back(capsys: pytest.CaptureFixture[str], failure: type[QueueError]):
    watch.watch(queue_of(Away(3, failure)), "job-1")

    said = capsys.readouterr().err
    assert said.count("Redis does not answer. Waiting for it, at most 60 s ...") == 1
    assert "job-1 is completed: 2 of 2 items succeeded" in said


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("failure", [QueueUnavailable, CommandForbidden, LibraryUnfit])
def test_a_job_that_cannot_be_watched_is_not_submitted_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], failure: type[QueueError]
):
    monkeypatch.setattr(watch, "_AWAY_SECONDS", 0.01)

    with pytest.raises(failure):
        watch.watch(queue_of(Away(1_000_000, failure)), "job-1")

    assert "job-1 is stored and continues: do not submit it again" in capsys.readouterr().err
