"""`ballast plan` as a person runs it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ballast_cli.__main__ import main

ROOT = Path(__file__).parents[2]


@pytest.fixture
def ballast(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        capsys.readouterr()
        code = main(["plan", *map(str, arguments)])
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.mark.parametrize(
    ("arguments", "code", "found"),
    [
        (["--gpu", "b9000"], 2, "unknown GPU 'b9000'; known are a100"),
        (["--model", "gpt-9"], 2, "unknown model 'gpt-9'"),
        (["--quantization", "int3"], 2, "--quantization is 'int3'; known are none, fp8"),
        (["--model", "llama-3-70b"], 1, "llama-3-70b does not fit: 141.1 GB of weights"),
        (["--tpot-ms", "5"], 1, "TPOT of 5 ms is below the fastest step"),
        (["--online", "nothing.csv"], 2, "nothing.csv: cannot be read"),
        (["--inputs", "nothing.yaml"], 2, "nothing.yaml is not a valid configuration"),
        (["--plot", "no/such/plan.png"], 2, "--plot: there is no directory no/such"),
        (["--ttft-ms", "300"], 1, "tokens, the longest of 99% of requests, of llama-3-8b takes"),
        (["--online", "one.csv", "--offline", "one.csv"], 2, "a rate needs two requests at different times, found 1"),
        (["--online", "nan.csv"], 2, "nan.csv, line 2: prompt_tokens is 'nan'; expected a whole number"),
        (["--ahead", "--ceilings"], 2, "--ahead and --ceilings are different plans"),
        (["--ahead", "--online", "mine.csv"], 2, "--ahead takes its requests from --inputs"),
        (["--ahead", "--model", "llama-3-8b"], 2, "--model would have no effect: --ahead plans what --inputs lists"),
        (["--ceilings", "--tpot-ms", "9", "--no-tries"], 2, "--tpot-ms and --no-tries would have no effect"),
        (["--ceilings", "--plot", "plan.png"], 2, "--ceilings has no picture"),
        (
            ["--show-inputs", "--json", "x", "--plot", "x.png"],
            2,
            "--json and --plot would have no effect: --show-inputs",
        ),
        (["--tpot-ms", "inf"], 2, "Invalid value for '--tpot-ms'"),
        (["--price", "inf"], 2, "Invalid value for '--price'"),
        (["--inputs", "incomplete.yaml"], 2, "gpus.mine is not a known GPU, so it needs all figures; missing:"),
        (["--plot", "plan.txt"], 2, "plan.txt has no known ending. Expected one of .png, .svg, .pdf"),
    ],
)
def test_what_cannot_be_planned_is_one_sentence_and_an_exit_code(ballast, tmp_path, arguments, code, found):
    for name, times in {"one": "1,5,5", "nan": "0,nan,5"}.items():
        (tmp_path / f"{name}.csv").write_text(f"arrival_seconds,prompt_tokens,output_tokens\n{times}\n")
    (tmp_path / "incomplete.yaml").write_text("gpus: {mine: {teraflops: 100}}\n")

    got, out, err = ballast(*arguments)

    assert (got, out) == (code, "")
    assert found in err
    assert "Traceback" not in err


def test_a_ceiling_that_is_impossible_is_named_among_the_figures(ballast, tmp_path):
    entry = "{{name: {}, model: bge-base, promptTokens: 256, milliseconds: {}, requestsPerSecond: 9}}"
    for name, entries, failed in (("one", [("bad", 1)], 1), ("both", [("ok", 30), ("bad", 1)], 0)):
        listed = ", ".join(entry.format(*values) for values in entries)
        (tmp_path / "plan.yaml").write_text(f"ceilings: [{listed}]\n")
        code, _, err = ballast("--ceilings", "--inputs", "plan.yaml", "--json", f"{name}.json")
        figures = json.loads((tmp_path / f"{name}.json").read_text())

        assert code == failed
        assert "bad: 1 ms is below the fastest answer" in err
        assert {one["version"] for one in figures} == {1}
        assert figures[-1]["name"] == "bad"
        assert figures[-1]["impossible"] in err


def test_options_are_among_the_inputs_it_shows(ballast, tmp_path):
    options = "--gpu h100 --tpot-ms 30 --price 2.5 --tensor-parallel 2 --nodes 2"
    code, shown, _ = ballast("--show-inputs", *options.split())
    (tmp_path / "plan.yaml").write_text(shown)

    again = ballast("--show-inputs", "--inputs", "plan.yaml")

    assert code == 0
    assert again == (0, shown, "")
    assert "tpotMilliseconds: 30\n" in shown
    assert "tensorParallel: 2" in shown
    assert "nodes: 2" in shown
    assert re.search(r"h100:\n(    .*\n)*    dollarsPerHour: 2.5", shown)


def test_a_price_keeps_the_other_figures_of_a_gpu_whatever_the_case_of_its_name(ballast, tmp_path):
    (tmp_path / "plan.yaml").write_text("gpus: {h100: {teraflops: 700}}\n")

    code, shown, err = ballast("--show-inputs", "--inputs", "plan.yaml", "--gpu", "H100", "--price", "2")

    assert code == 0, err
    assert re.search(r"h100:\n    teraflops: 700 .*\n(    .*\n)*    dollarsPerHour: 2 ", shown)
    assert "H100:" not in shown


def test_the_example_of_the_documentation_plans_ahead(ballast, tmp_path):
    page = (ROOT / "docs" / "explanation" / "planner.md").read_text()
    (example,) = re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)
    without_simulations = example[: example.index("    - name: chat")]
    (tmp_path / "plan.yaml").write_text(without_simulations)

    code, out, err = ballast("--ahead", "--inputs", "plan.yaml", "--json", "plan.json", "--plot", "plan.png")

    assert code == 0, err
    assert "dynamic batching" in out
    figures = json.loads((tmp_path / "plan.json").read_text())
    assert len(figures) == 4
    assert {one["version"] for one in figures} == {1}
    assert [len(way["months"]) for way in figures] == [18] * 4
    assert (tmp_path / "plan.png").stat().st_size > 10_000
    assert json.loads(ballast("--ahead", "--inputs", "plan.yaml", "--json", "-")[1]) == figures


@pytest.mark.parametrize(
    ("kind", "output", "found"),
    [
        ("encoder", "", "; int4 weights, as its config.json states ("),
        ("offline", "outputTokens: 0", "; int4 weights, as its config.json states"),
        ("offline", "", "config.json generates: outputTokens is 1 or more, or given as 0 if it serves embeddings"),
    ],
)
def test_a_decoder_serves_embeddings_if_the_service_says_so(ballast, tmp_path, kind, output, found):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_8B | {"quantization_config": GPTQ}))
    (tmp_path / "plan.yaml").write_text(f"""
gpu: h100
ahead:
  months: 1
  services:
    - {{name: bulk, kind: {kind}, model: config.json, requestsPerSecond: [9, 9], promptTokens: 100, {output}}}
""")

    code, out, err = ballast("--ahead", "--inputs", "plan.yaml", "--json", "plan.json")

    assert found in (out or err)
    assert (code == 0) == bool(output or kind == "encoder")
    if code == 0:
        [service] = json.loads((tmp_path / "plan.json").read_text())[1]["services"]
        assert service["unit"] == "embeddings"


TRACE = "\n".join(
    [
        "arrival_seconds,prompt_tokens,output_tokens",
        *(f"{0.5 * i},{300 + 37 * i % 900},{40 + 11 * i % 200}" for i in range(300)),
    ]
)
LLAMA_3_8B = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192,
}  # fmt: skip
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
SMALL_FLEET = "engine: {slots: 48}\nfleet: {onlineGpus: 2, offlineGpus: 1}\ntrafficMinutes: 0.5\nthroughputMinutes: 1\n"


def test_a_fleet_is_planned_with_table_reasons_figures_and_picture(ballast, tmp_path):
    (tmp_path / "online.csv").write_text(TRACE)
    (tmp_path / "plan.yaml").write_text(SMALL_FLEET)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_8B | {"quantization_config": GPTQ}))

    code, out, err = ballast(
        *("--online", "online.csv", "--offline", "online.csv", "--inputs", "plan.yaml", "--no-tries"),
        *("--json", "plan.json", "--plot", "plan.png", "--model", "config.json"),
    )

    assert code == 0, err
    assert "(8.03 billion int4 weights, as its config.json states) on a100" in out
    assert json.loads((tmp_path / "plan.json").read_text())["quantization"] == "int4"
    assert "apart, as it is" in out
    assert "2 GPUs at 20 % and 1 at 30 % are 0.7 GPUs of work" in out
    figures = json.loads((tmp_path / "plan.json").read_text())
    assert figures["options"][0]["gpus"] == 3
    assert figures["because"][0] in out
    assert (tmp_path / "plan.png").stat().st_size > 10_000


def test_a_plan_of_gpus_that_share_a_model_counts_groups(ballast, tmp_path):
    (tmp_path / "online.csv").write_text(TRACE)
    (tmp_path / "plan.yaml").write_text(SMALL_FLEET)

    code, out, err = ballast(
        *("--online", "online.csv", "--offline", "online.csv", "--inputs", "plan.yaml", "--tensor-parallel", "2")
    )

    assert code == 0, err
    assert "2 groups at 20 % and 1 at 30 % are" in out
    assert "of groups of 2 GPUs." in out
    assert "GPU" not in out.replace("of groups of 2 GPUs.", "").replace("Right-size the GPU", "")
