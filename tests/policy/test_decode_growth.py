"""Blocks for the next tokens of decodes: who gives them up, and how many are set aside for the reservation."""

from __future__ import annotations

import pytest
from engine_snapshot import Engine

from ballast_policy.plan import Reason
from ballast_policy.request import OFFLINE, ONLINE
from ballast_policy.step.decode_growth import grow, reclaim_from_offline
from ballast_policy.step.draft import StepDraft


def draft_of(
    num_online: int, num_offline: int, free: int, num_blocks: int = 20, share: float = 0.25
) -> tuple[StepDraft, dict[object, str]]:
    """Decodes that hold two full blocks each, and begin a third one; two slots are reserved."""
    engine = Engine(num_blocks=num_blocks, offline_share=share)
    engine.extra["free_blocks"] = free
    names = {engine.decoding(ONLINE, tokens=9): f"online {number}" for number in range(num_online)}
    names |= {engine.decoding(OFFLINE, tokens=9): f"offline {number}" for number in range(num_offline)}
    return StepDraft(engine.snapshot()), names


@pytest.mark.parametrize(
    ("fields", "preempted", "left"),
    [
        pytest.param((1, 2, 3), [], (0, 2), id="enough blocks"),
        pytest.param((1, 2, 2), ["offline 1"], (2, 1), id="offline gives up KV beyond its reservation"),
        pytest.param((1, 2, 1), ["offline 1"], (1, 1), id="two blocks of it suffice"),
        pytest.param((2, 1, 1), ["online 1"], (1, 1), id="nothing is lent: the last online request yields"),
        pytest.param((2, 1, 0), ["online 1"], (0, 1), id="the last online request yields two blocks"),
        pytest.param((3, 0, 0), ["online 2"], (0, 0), id="online alone"),
        pytest.param((1, 3, 0, 8, 0.99), ["offline 2", "offline 1"], (2, 1), id="one of each is left"),
        pytest.param((0, 3, 0, 12), ["offline 2"], (0, 2), id="offline alone"),
    ],
)
def test_blocks_for_the_next_tokens_come_from_the_last(fields: tuple, preempted: list[str], left: tuple[int, int]):
    step, names = draft_of(*fields)
    set_aside = grow(step)

    assert (step.blocks.free, set_aside) == left
    assert [names[request] for request in step.draft.preempt] == preempted
    reasons = {because.reason for because in step.draft.because}
    assert reasons == ({Reason.NO_KV if "online" in preempted[0] else Reason.KV_RECLAIMED} if preempted else set())


@pytest.mark.parametrize("share", [0.25, 0.99], ids=["beyond the reservation", "within it"])
@pytest.mark.parametrize(("beside", "preempted"), [((), ["offline 2"]), ((1,), ["offline 2", "offline 1"])])
def test_offline_gives_up_no_more_than_its_decodes_need_and_never_the_first(share, beside, preempted):
    step, names = draft_of(0, 3, 0, 12, share)
    reclaim_from_offline(step, step.offline.growing, *beside)

    assert [names[request] for request in step.draft.preempt] == preempted


def test_kv_beyond_the_reservation_goes_before_cheaper_kv_within_it():
    engine = Engine(num_blocks=20)
    *_, beyond = (engine.decoding(OFFLINE, tokens=tokens) for tokens in (9, 9, 13))
    engine.extra["free_blocks"] = 0
    step = StepDraft(engine.snapshot())
    reclaim_from_offline(step, step.offline.growing)

    assert step.draft.preempt == [beyond], "4 of the 5 reserved blocks hold the others"


def test_a_decode_that_the_reserved_blocks_do_not_cover_is_parked_and_no_online_request_yields():
    step, names = draft_of(2, 1, 2, 8)

    assert grow(step) == 0
    assert [names[request] for request in step.draft.park] == ["offline 0"]
    assert not step.draft.preempt
