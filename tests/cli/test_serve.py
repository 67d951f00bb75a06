from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from ballast_cli.worker_file import DEMO_MODEL

FILE = f"model: {{uri: {DEMO_MODEL}}}\noffline: {{queue: x/y}}\nruntime: {{port: 0}}\n"


class Became(Exception):
    """The command turned into this one."""


@pytest.fixture
def became(ballast, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Runs `ballast serve` up to where it becomes the worker; gives the worker's file and what was said."""

    def become(_: str, command: list[str]) -> None:
        raise Became(command[-1])

    monkeypatch.setattr(os, "execv", become)
    (tmp_path / "mine.yaml").write_text(FILE)

    def run(*options: object) -> tuple[str, str]:
        with pytest.raises(Became) as ended:
            ballast("serve", *options)
        return str(ended.value), capsys.readouterr().err

    return run


def test_a_worker_of_a_file_alone_reads_that_file(became):
    assert became("--config", "mine.yaml") == ("mine.yaml", "")


def test_a_file_that_names_no_model_is_completed(became, tmp_path):
    (tmp_path / "mine.yaml").write_text("offline: {queue: x/y}\nruntime: {port: 0}\n")
    file, said = became("--config", "mine.yaml")
    written = yaml.safe_load(Path(file).read_text())

    assert "made from mine.yaml" in said
    assert (written["model"]["uri"], written["offline"]["queue"]) == (str(DEMO_MODEL), "x/y")


def test_with_options_the_file_to_change_is_named(became):
    file, said = became("--config", "mine.yaml", "--port", "0", "--slots", "3")
    written = yaml.safe_load(Path(file).read_text())

    assert file in said
    assert (written["slots"], written["offline"]["queue"]) == (3, "x/y")


def test_two_workers_that_take_free_ports_share_no_file(became):
    files = {became("--port", "0")[0] for _ in range(4)}

    assert len(files) > 1
    for file in files:
        assert f"serve-{yaml.safe_load(Path(file).read_text())['runtime']['port']}.yaml" == Path(file).name


@pytest.mark.parametrize("verb", ["serve", "up"])
def test_the_help_states_where_a_worker_takes_its_queue_and_its_password_from(ballast, verb: str):
    shown = " ".join(ballast(verb, "--help").out.replace("│", " ").split())

    assert "By default, offline.queue of the file" in shown
    assert "BALLAST_REDIS_PASSWORD has no effect here" in shown
