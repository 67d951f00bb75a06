"""The processes that try formats."""

from __future__ import annotations

import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor

import llguidance
import pytest

from ballast_vllm import format_trial
from ballast_vllm.format_trial import Trials

FINE = llguidance.grammar_from("choice", '["yes", "no"]')
WRONG = llguidance.grammar_from("regex", "(a")
DEEP = llguidance.grammar_from(
    "grammar", "start: a0\n" + "".join(f"a{n}: a{n + 1}\n" for n in range(20_000)) + 'a20000: "a"\n'
)


@pytest.fixture
def trials():
    made = Trials()
    yield made
    for process in made.idle:
        if process.poll() is None:
            process.communicate()


def test_a_right_format_has_no_error_and_a_wrong_one_has_a_sentence(trials):
    assert trials.error(FINE) == ""
    assert "invalid regex" in trials.error(WRONG)


def test_a_format_that_ends_its_process_ends_no_other_one(trials):
    formats = [FINE, DEEP, WRONG, DEEP] * 3
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(trials.error, formats))

    assert [error is None for error in found] == [form is DEEP for form in formats]
    assert len(trials.idle) <= 4


def test_the_processes_that_are_alive_are_used_again(trials):
    trials.error(FINE)
    (process,) = trials.idle
    trials.error(FINE)

    assert list(trials.idle) == [process]


def test_a_process_ends_with_its_input(trials):
    trials.error(FINE)
    (process,) = trials.idle
    process.stdin.close()

    assert process.wait() == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_was_killed_is_replaced(trials, number):
    trials.error(FINE)
    os.kill(trials.idle[0].pid, number)

    assert [trials.error(FINE), trials.error(FINE)] == ["", ""]


def test_a_process_that_does_not_answer_is_killed(trials, monkeypatch):
    trials.error(FINE)
    (process,) = trials.idle
    monkeypatch.setattr(format_trial, "MOST_WAIT", 0.2)
    os.kill(process.pid, signal.SIGSTOP)

    with pytest.raises(OSError, match=f"ended with status {-signal.SIGKILL}"):
        trials.error(FINE)
    assert not trials.idle


def test_a_process_that_ends_without_an_answer_is_an_error_of_the_server(trials, monkeypatch):
    monkeypatch.setattr(format_trial, "__name__", "bisect")

    with pytest.raises(OSError, match="ended with status 0"):
        trials.error(FINE)


def test_the_working_directory_holds_no_module_of_a_process(trials, monkeypatch, tmp_path):
    (tmp_path / "llguidance.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)

    assert trials.error(FINE) == ""


def test_a_process_keeps_a_hard_limit_of_the_server(trials, monkeypatch, tmp_path):
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nulimit -t 600\nexec {sys.executable} "$@"\n')
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))

    assert trials.error(FINE) == ""


def test_a_process_that_does_not_start_is_an_error_of_the_server(trials, monkeypatch):
    monkeypatch.setattr(format_trial, "__name__", "ballast_vllm.missing")

    with pytest.raises(OSError, match="ended with status 1"):
        trials.error(FINE)
