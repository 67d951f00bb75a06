from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ballast_cli.demo.load import Sample
from ballast_cli.demo.polling import Block, CounterPoll, SlotPoll
from ballast_cli.demo.report import figures, lines
from ballast_cli.demo.run import DemoPlan, DemoRecord

SLOTS = 8


def make_block(side: str, began: float, *, pair: int = 0, ttft: float = 0.01, offline: int = 0, **more) -> Block:
    block = Block(side, pair, began, began + 10, items_completed=offline, **more)
    for i in range(40):
        block.samples.append(
            Sample(
                at=i / 4, first=ttft * (1 + i / 40), last=ttft * (1 + i / 40) + 0.09, prompt_tokens=10, output_tokens=10
            )
        )
    block.polls = [
        SlotPoll(began + i / 10 + 0.05, SLOTS, online=2, offline=offline, parked=0, waiting=0) for i in range(100)
    ]
    block.counts = [
        CounterPoll(
            began + i, offline_tokens=50 * offline * i, online_tokens=40 * i, prompt_tokens=1000 * i, cached_tokens=i
        )
        for i in range(11)
    ]
    return block


def make_record(*, slowdown: float = 1.1) -> DemoRecord:
    record = DemoRecord(
        DemoPlan(pairs=2, slots=SLOTS), capacity=50, maximum=800, slo={"ttft_ms": 20, "tpot_ms": 15}, reserved=1
    )
    for pair in range(2):
        record.blocks.append(make_block("online_only", 30 * pair, pair=pair))
        record.blocks.append(make_block("mixed", 30 * pair + 15, pair=pair, ttft=0.01 * slowdown, offline=4))
    record.flood = make_block("flood", 70, offline=1)
    record.polls = [(poll.at, poll.online, poll.offline) for block in record.blocks for poll in block.polls]
    return record


def test_the_document_has_the_promised_shape():
    found = json.loads(json.dumps(figures(make_record(), {})))

    for side in ("online_only", "mixed"):
        assert found[side]["requests"] == 80
        assert found[side]["failed"] == 0
        assert set(found[side]["ttft_ms"]) == set(found[side]["tpot_ms"]) == {"p50", "p95", "p99"}
        assert found["slot_utilization"][side] == {"online_only": 0.25, "mixed": 0.75}[side]
    assert found["online_only"]["tpot_ms"]["p50"] == 10, "without the first token"
    assert found["offline"]["items_completed"] == 8
    assert found["offline"]["tokens"] == 2 * 50 * 4 * 10
    assert found["offline"]["tokens_per_second"] == 200
    assert found["offline"]["harvest"] == 0.25
    assert found["prefix_hit_rate"] == 0.001


def test_the_ratio_compares_the_same_segments_of_the_trace():
    found = figures(make_record(slowdown=1.2), {})["ratios"]["ttft_p99"]

    assert found == {"ratio": 1.2, "low": 1.2, "high": 1.2}


def test_each_side_says_how_many_requests_met_the_slo():
    # The slowest request of a block has its first token after 19.75 ms alone, and the SLO is 20 ms.
    found = figures(make_record(slowdown=1.1), {})

    assert found["online_only"]["attainment"] == {"ttft": 1, "tpot": 1}
    assert found["mixed"]["attainment"] == {"ttft": 0.825, "tpot": 1}
    assert found["attainment_lost"]["ttft"]["points"] == 17.5
    assert found["attainment_lost"]["ttft"]["by_pair"] == [17.5, 17.5]
    assert found["attainment_lost"]["tpot"]["points"] == 0
    assert "The promise did not hold:" in found["verdict"]


def test_a_loss_in_one_pair_is_shown_by_pair():
    record = make_record(slowdown=1)
    for sample in record.blocks[3].samples[:10]:
        sample.first = 1
    found = figures(record, {})

    assert found["attainment_lost"]["ttft"]["by_pair"] == [0, 25]
    assert found["attainment_lost"]["ttft"]["points"] == 12.5


def test_a_request_that_failed_missed_both_slos_and_is_counted_and_named():
    record = make_record(slowdown=1)
    record.blocks[1].samples[0].failure = "HTTP 429: full"
    found = figures(record, {})

    assert found["mixed"]["attainment"] == {"ttft": 0.9875, "tpot": 0.9875}
    assert (found["mixed"]["requests"], found["mixed"]["failed"]) == (80, 1)
    assert found["mixed"]["failures"] == ["HTTP 429: full"]
    assert "1 mixed" in found["verdict"]


def test_an_answer_of_one_token_has_no_tpot_to_meet():
    record = make_record(slowdown=1)
    for sample in record.blocks[1].samples[:20]:
        sample.output_tokens = 1
    record.blocks[1].samples[20].last = 1
    found = figures(record, {})

    assert found["mixed"]["attainment"]["tpot"] == round(59 / 60, 5)


def test_a_second_with_free_slots_and_no_offline_token_is_found():
    record = make_record()
    assert figures(record, {})["work_conservation"]["of_those_without_offline_tokens"] == 0

    counts = record.blocks[1].counts
    record.blocks[1].counts = [*counts[:5], *[counts[4]], *counts[5:]]
    record.blocks[1].counts[5] = CounterPoll(counts[5].at - 0.4, counts[4].offline_tokens, 0, 0, 0)
    found = figures(record, {})["work_conservation"]

    assert found["of_those_without_offline_tokens"] == 1


def test_the_flood_is_judged_by_slots_and_by_tokens():
    found = figures(make_record(), {})["flood"]

    assert found["offline_slots_mean"] == 1
    assert found["polls_at_or_above_reservation"] == found["polls"]
    assert found["seconds_without_offline_tokens"] == 0


def test_the_terminal_shows_both_sides_and_the_verdict():
    found = figures(make_record(), {})
    shown = "\n".join(lines(found))

    assert "TTFT p99, ms" in shown
    assert "TTFT within 20.0 ms 100.0% 82.5% 17.5 points lost (" in " ".join(shown.split())
    assert "Points of attainment lost in each pair of blocks: TTFT 17.5, 17.5; TPOT 0.0, 0.0." in shown
    assert "8 items completed" in shown
    assert shown.endswith(found["verdict"])


def test_the_picture_is_drawn(tmp_path: Path):
    from ballast_cli.demo.picture import draw

    record = make_record()
    draw(record, figures(record, {}), tmp_path / "slots.png")

    assert (tmp_path / "slots.png").read_bytes().startswith(b"\x89PNG")


def pool(directory: Path, *records: DemoRecord) -> subprocess.CompletedProcess[str]:
    for i, record in enumerate(records):
        (directory / f"{i}.json").write_text(json.dumps(figures(record, {})))
    program = Path(__file__).parents[2] / "benchmarks" / "demo_pooled.py"
    command = [sys.executable, program, "--figures", *(directory / f"{i}.json" for i in range(len(records)))]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_runs_are_pooled_request_by_request(tmp_path: Path):
    done = pool(tmp_path, make_record(slowdown=1.1), make_record(slowdown=1.3))

    assert done.stderr == ""
    assert "pooled over 2 runs" in done.stdout
    ratio = float(done.stdout.split("TTFT p99")[2].split("ratio ")[1].split()[0])
    assert 1.1 < ratio < 1.3
    assert "points lost 31.25 (" in done.stdout  # 17.5 in the first run and 45 in the second
    assert done.returncode == 1


def test_a_pooled_request_is_judged_by_the_slo_of_its_own_run(tmp_path: Path):
    slower = make_record(slowdown=1.2)
    slower.slo = {"ttft_ms": 24, "tpot_ms": 15}
    done = pool(tmp_path, make_record(slowdown=1), slower)

    assert "TTFT within the SLO  online-only   100.00 %  mixed   100.00 %  points lost 0.00" in done.stdout
    assert done.returncode == 0


@pytest.mark.parametrize("side", ["online_only", "mixed"])
def test_every_request_is_in_the_document(side: str):
    rows = figures(make_record(), {})["requests"][side]

    assert len(rows) == 80
    assert {row[0] // 1000 for row in rows} == {0, 1}
