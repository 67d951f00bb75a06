"""Why a process of vLLM ended reaches the last line of `ballast-vllm`."""

from __future__ import annotations

import logging
import resource
from logging.config import dictConfig
from os import environ

import pytest

from ballast_vllm.core_failure import FILE_VARIABLE, MOST_SHOWN, STREAM, STREAM_VARIABLE, noted


@pytest.fixture
def fail(monkeypatch, capsys):
    """`fail(sentence, error)` logs an error as a process of vLLM does, with the stream of its variable."""
    for name in (STREAM_VARIABLE, FILE_VARIABLE):
        monkeypatch.setenv(name, "")  # undone after the test
        monkeypatch.delenv(name)
    logger = logging.getLogger("vllm.process")

    def failed(sentence: str, error: Exception) -> None:
        handler = {"class": "logging.StreamHandler", "stream": environ[STREAM_VARIABLE]}
        own = {"handlers": ["own"], "propagate": False}
        dictConfig({"version": 1, "handlers": {"own": handler}, "loggers": {logger.name: own},
                    "disable_existing_loggers": False})  # fmt: skip
        try:
            raise error  # noqa: TRY301 -- vLLM logs in the block that caught it
        except Exception:
            logger.exception(sentence)
        assert sentence in capsys.readouterr().out

    yield failed
    logger.handlers.clear()


def test_the_first_process_that_fails_states_the_reason(fail):
    with noted() as reason:
        fail("Could not tune a kernel.", ValueError("tried without"))
        before = reason()
        fail("WorkerProc failed to start.", MemoryError("CUDA out of memory. GPU 0 is full.\nCompile with DSA."))
        fail("EngineCore failed to start.", RuntimeError("WorkerProc initialization failed"))
        after = reason()

    assert before is None
    assert after == "MemoryError: CUDA out of memory. GPU 0 is full. Compile with DSA."


def test_a_long_reason_leaves_the_rest_of_the_output_in_the_condition(fail):
    with noted() as reason:
        fail("EngineCore encountered a fatal error.", ValueError("x" * 5000))
        found = reason()

    assert found is not None
    assert len(found) == MOST_SHOWN


class Unreadable(Exception):
    def __str__(self) -> str:
        raise LookupError


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("no file \udcff"), r"ValueError: no file \udcff"),
        (ValueError("  \n"), "ValueError: no message"),
        (ValueError("1 error\na\n  must be above 0"), "ValueError: 1 error a must be above 0"),
        (OSError("no https://me:pw@hub/x?sig=S&t=hf_a, or /x?a=b"), "OSError: no https://…@hub/x?… or /x?…"),
        (OSError("is it there? a=b@c"), "OSError: is it there? a=b@c"),
        (Unreadable(), None),
    ],
)
def test_a_reason_is_one_line_without_secrets_and_no_line_of_the_log_is_lost(fail, capsys, error, reason):
    with noted() as found:
        fail("Could not tune a kernel.", ValueError("tried without"))
        try:
            raise error
        except type(error):
            STREAM.write("EngineCore failed to start.\n")

        assert (found(), capsys.readouterr().out) == (reason, "EngineCore failed to start.\n")


def test_no_part_of_a_reason_is_shown_if_the_disk_is_full(fail):
    with noted() as reason:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (5, before[1]))
        try:
            fail("EngineCore failed to start.", ValueError("too little KV"))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        found = reason()

    assert found is None


def test_a_stream_that_the_user_names_stays(monkeypatch, fail):
    monkeypatch.setenv(STREAM_VARIABLE, "ext://sys.stdout")
    with noted() as reason:
        fail("EngineCore failed to start.", ValueError("too little KV"))
        found = reason()

    assert (environ[STREAM_VARIABLE], found) == ("ext://sys.stdout", None)
