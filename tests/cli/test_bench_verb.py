"""`ballast bench mixed` as a person runs it."""

from __future__ import annotations

import json

import pytest

from ballast_sim.planner.encoder import ApiServer

HEADER = "arrival_seconds,prompt_tokens,output_tokens\n"


@pytest.fixture
def write(tmp_path):
    def write(name, text):
        (tmp_path / name).write_text(text)

    return write


@pytest.mark.parametrize(
    ("arguments", "code", "found"),
    [
        (["--gpu", "b9000"], 2, "unknown GPU 'b9000'; known are a100"),
        (["--model", "gpt-9"], 2, "unknown model 'gpt-9'"),
        (["--policy", "ballast,magic"], 2, "unknown policy 'magic'; known are all, online-only"),
        (["--step-model", "magic"], 2, "unknown step model 'magic'; known are auto"),
        (["--gpu", "h100", "--step-model", "refit"], 2, "no times are published for llama-3-8b on h100"),
        (["--model", "llama-3-70b"], 1, "llama-3-70b does not fit: 141.1 GB of weights"),
        (["--tpot-ms", "5"], 1, "TPOT of 5 ms is below the fastest step"),
        (["--tpot-ms", "15.4"], 1, "one decode of llama-3-8b takes 15.5 ms on one a100"),
        (["--ttft-ms", "14"], 1, "TTFT of 14 ms is below the fastest"),
        (["--load", "twenty"], 2, "--load is 'twenty'; expected percentages, separated by commas"),
        (["--load", "0"], 2, "a load of 0 % was given"),
        (["--reservation", "110"], 2, "a reservation of 110 % was given; expected 0 to 100 %"),
        (["--online", "nothing.csv"], 2, "nothing.csv: cannot be read"),
        (["--online", "empty.csv"], 2, "empty.csv: holds no request"),
        (["--online", "unsorted.csv"], 2, "unsorted.csv, line 3: the request arrives 2 s before the line above it"),
        (["--online", "negative.csv"], 2, "negative.csv, line 2: prompt_tokens is '-3'; expected a whole number"),
        (["--offline", "negative.csv"], 2, "negative.csv, line 2: prompt_tokens is '-3'; expected a whole number"),
        (["--json", "no/such/rows.json"], 2, "--json: there is no directory no/such"),
        (["--plot", "empty.csv"], 2, "--plot: empty.csv is a file, expected a directory"),
        (
            ["--setting", "busy"],
            2,
            "--setting is 'busy'; expected one of trace, sparse, long-prompts",
        ),
        (
            ["--setting", "sparse", "--load", "40"],
            2,
            "--load does not apply to the workload sparse: its requests",
        ),
        (
            ["--setting", "sparse", "--online", "empty.csv"],
            2,
            "--online does not apply to the workload sparse",
        ),
        (["--setting", "sparse", "--plot", "pictures"], 2, "--plot does not apply to the workload sparse"),
        (["--setting", "sparse", "--every", "often"], 2, "--every is 'often'; expected seconds from 0.05 to 1000"),
        (["--setting", "sparse", "--every", "0"], 2, "--every is '0'; expected seconds from 0.05 to 1000"),
        (["--setting", "sparse", "--tpot-ms", "5"], 1, "TPOT of 5 ms is below the fastest step"),
        (["--setting", "sparse", "--policy", "static-split"], 2, "static-split divides a load among GPUs"),
        (["--setting", "long-prompts", "--every", "2"], 2, "--every sets the spacing of the workload sparse"),
        (["--every", "2"], 2, "--every sets the spacing of sparse requests. Add --setting sparse"),
    ],
)
def test_what_cannot_be_compared_is_one_sentence_and_an_exit_code(ballast, write, arguments, code, found):
    write("empty.csv", HEADER)
    write("unsorted.csv", HEADER + "5,10,10\n3,10,10\n")
    write("negative.csv", HEADER + "0,-3,10\n1,10,10\n")

    ran = ballast("bench", "mixed", *arguments)

    assert (ran.code, ran.out) == (code, "")
    assert found in ran.err
    assert "Traceback" not in ran.err


def test_the_table_the_rows_and_the_pictures_come_from_one_run(ballast, write, tmp_path):
    lengths = [f"{300 + 37 * i % 900},{40 + 11 * i % 200}" for i in range(200)]
    write("online.csv", HEADER + "\n".join(f"{0.5 * i},{line}" for i, line in enumerate(lengths)))
    write("offline.jsonl", '{"prompt_tokens": 900, "output_tokens": 60}\n' * 3)

    ran = ballast(
        *("bench", "mixed", "--online", "online.csv", "--offline", "offline.jsonl", "--load", "30"),
        *("--reservation", "10", "--policy", "online-only,offline-only,ballast", "--minutes", "0.1", "--jobs", "1"),
        *("--slots", "32", "--json", "rows.json", "--plot", "pictures"),
    )

    assert ran.code == 0, ran.err
    assert "the SLO-bound throughput" in ran.out
    assert "best static budget at  30 % load" in ran.out
    assert "Online alone attains 99 % up to" in ran.out
    assert "Load 30 % (" in ran.out
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["policy"] for row in rows] == ["online-only", "offline-only", "ballast"]
    assert rows[1]["ttft_ms"] == {"p50": None, "p95": None, "p99": None}
    pictures = {path.name: path.stat().st_size for path in (tmp_path / "pictures").iterdir()}
    assert set(pictures) == {"harvest.png", "ttft-load-30-reservation-10.png", "slots-load-30-reservation-10.png"}
    assert min(pictures.values()) > 10_000


def test_a_setting_has_one_table_for_each_point_and_holds_ballast_to_the_best_static_budget(ballast, tmp_path):
    ran = ballast(
        *("bench", "mixed", "--setting", "sparse", "--every", "1,4", "--minutes", "0.1", "--jobs", "1"),
        *("--policy", "online-only,ballast,ballast-fitted=25", "--slots", "16", "--json", "rows.json"),
    )

    assert ran.code == 0, ran.err
    assert ran.out.count("best static budget that keeps the same") == 2
    assert "a request every 1 s; SLO 100 ms TTFT, 30 ms TPOT" in ran.out
    assert "a request every 4 s" in ran.out
    assert "In rows with a cap, Ballast has an SLO of 1000 ms TTFT and 50 ms TPOT" in ran.out
    rows = json.loads((tmp_path / "rows.json").read_text())
    asked = [row for row in rows if not row["policy"].startswith("static-budget")]
    assert [(row["point"], row["policy"]) for row in asked] == [
        (f"a request every {spacing} s", policy)
        for spacing in (1, 4)
        for policy in ("online-only", "ballast", "ballast-fitted=25")
    ]
    assert {row["workload"] for row in rows} == {"sparse"}
    assert len(rows) > 2 * len(asked)  # the static budgets that were tried


def test_a_setting_shows_attainment_by_prompt_length(ballast):
    ran = ballast(
        *("bench", "mixed", "--setting", "long-prompts", "--ttft-ms", "1500", "--minutes", "0.8", "--jobs", "1"),
        *("--policy", "online-only,ballast"),
    )

    assert ran.code == 0, ran.err
    (header,) = (line for line in ran.out.splitlines() if line.startswith("by prompt length"))
    assert "400 tokens (" in header
    assert "8,000 tokens (" in header
    assert ran.out.count("by prompt length") == 1  # one SLO, one table


@pytest.mark.parametrize(
    ("arguments", "code", "found"),
    [
        (["--clock", "sundial"], 2, "--clock is 'sundial'; expected wall or cpu"),
        (["--json", "no/such/validation.json"], 2, "--json: there is no directory no/such"),
        ([], 1, "The machine is busy: 900.0 processes share its"),
        (["--clock", "cpu", "--online", "nothing.csv"], 2, "nothing.csv: cannot be read"),
    ],
)
def test_a_validation_that_would_mean_nothing_is_refused(ballast, monkeypatch, arguments, code, found):
    monkeypatch.setattr("os.getloadavg", lambda: (900.0, 0.0, 0.0))

    ran = ballast("bench", "validate", *arguments)

    assert (ran.code, ran.out) == (code, "")
    assert found in ran.err


def test_an_encoder_has_a_rate_within_its_slo_computed_and_found_and_a_table(ballast, tmp_path):
    ran = ballast(*("bench", "encoder", "--load", "30", "--seconds", "2", "--json", "rows.json"))

    assert ran.code == 0, ran.err
    figures = json.loads((tmp_path / "rows.json").read_text())
    assert f"computed: a batch of {figures['computed_batch']} prompts" in ran.out
    assert f"online alone meets it up to {figures['found_per_second']:,.0f} requests/s" in ran.out
    assert [row["policy"] for row in figures["rows"]] == [
        *("online-only", "naive-priority", "fixed-32", "ballast", "ballast-fitted")
    ]
    assert figures["api_server_per_second"] == ApiServer().texts_per_second
    assert "the API server process limits this, not the GPU: with 1.6 ms for each text it serves 625 texts/s" in ran.out


def test_an_api_server_that_is_faster_than_the_gpu_is_not_mentioned(ballast, tmp_path):
    command = ("bench", "encoder", "--load", "30", "--seconds", "2", "--json", "rows.json", "--api-server-ms")
    found = []
    for milliseconds in ("0.1", "0"):
        ran = ballast(*command, milliseconds)
        assert ran.code == 0, ran.err
        assert "API server" not in ran.out
        found.append(json.loads((tmp_path / "rows.json").read_text())["api_server_per_second"])

    assert found == [10_000, None]


@pytest.mark.parametrize("load", ["nan", "-5", "0"])
def test_a_load_of_an_encoder_that_no_run_can_have_is_refused(ballast, load):
    ran = ballast("bench", "encoder", "--load", load)

    assert ran.code == 2
    assert f"a load of {load} % was given; expected 0.1 to 2000 %" in ran.err
    assert "a load is given twice" in ballast("bench", "encoder", "--load", "20,20").err


def test_a_model_that_generates_is_for_the_other_comparison(ballast):
    ran = ballast("bench", "encoder", "--model", "llama-3-8b")

    assert ran.code == 2
    assert "`ballast bench mixed` compares policies on it" in ran.err
