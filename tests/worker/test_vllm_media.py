"""The memory of the decoded media of calls in vLLM's API server."""

from __future__ import annotations

import asyncio

import pytest

from ballast_vllm.media import Media, MediaPlaces, NeedsLargePlace

MEBIBYTE = 2**20


@pytest.mark.anyio
async def test_a_call_has_a_quarter_of_the_memory_or_waits_for_the_large_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BALLAST_MEDIA_MEBIBYTES", "8")
    places, first, second = MediaPlaces(2), Media(), Media()
    await places.take(first, is_large=True)
    await asyncio.gather(*(places.take(second) for _ in range(3)))
    waiting = [asyncio.create_task(places.take(second, is_large=True)) for _ in range(3)]
    await asyncio.sleep(0)  # they begin to wait
    await places.take(second)  # an image that fits waits for none

    assert first.add(8 * MEBIBYTE, needs_place=True)
    assert not first.add(1, needs_place=True)
    assert second.add(2 * MEBIBYTE, needs_place=True)
    with pytest.raises(NeedsLargePlace):
        second.add(1, needs_place=True)
    assert not any(task.done() for task in waiting)
    places.leave(first)
    await asyncio.gather(*waiting)
    assert second.add(6 * MEBIBYTE, needs_place=True)
    second.take_back(MEBIBYTE)
    assert second.add(MEBIBYTE, needs_place=True)

    places.leave(second)
    await places.take(second)
    assert second.add(8 * MEBIBYTE, needs_place=True), "each turn of a tool loop has the whole memory"
    second.take_back(9 * MEBIBYTE)
    assert not second.add(9 * MEBIBYTE, needs_place=True), "what counted before a turn is not taken back from it"
    third, fourth = Media(), Media()
    for found in (third, fourth):
        await places.take(found)
    await places.take(fourth, is_large=True)
    assert third.has_place
    assert fourth.has_large_place, "every place returned"
