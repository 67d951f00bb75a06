"""The operator's log has a traceback for defects, and none for generators that Kopf leaves open when it stops."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest

from ballast_operator.process import report_error


async def left_open() -> AsyncIterator[int]:
    """Fails when it is closed, as a watch does within another generator."""
    try:
        yield 1
    finally:
        raise RuntimeError("not closed in order")


async def leave_a_generator_open() -> None:
    asyncio.get_running_loop().set_exception_handler(report_error)
    generator = left_open()
    await anext(generator)
    OPEN.append(generator)


OPEN: list[AsyncIterator[int]] = []


def test_a_generator_that_cannot_be_closed_leaves_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        asyncio.run(leave_a_generator_open())

    OPEN.clear()
    assert caplog.records == []


def test_a_callback_that_fails_leaves_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    async def fail_in_a_callback() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(report_error)
        loop.call_soon(lambda: 1 // 0)
        await asyncio.sleep(0)

    asyncio.run(fail_in_a_callback())

    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ZeroDivisionError]
