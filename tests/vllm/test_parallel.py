"""Two tensor-parallel ranks: the scheduler runs in EngineCore's process, and the answers are those of plain vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PROGRAM = """
import json, sys
from random import Random
from vllm import EngineArgs, LLMEngine, SamplingParams

LENGTHS = {"online": 8, "offline": 40}

def answers(model, **arguments):
    engine = LLMEngine.from_engine_args(EngineArgs(
        model, dtype="float32", max_model_len=192, max_num_seqs=4, max_num_batched_tokens=196, block_size=32,
        enforce_eager=True, tensor_parallel_size=2, seed=0, disable_log_stats=True, **arguments))
    rng = Random(1)
    prompts = {"online": [], "offline": []}
    for i in range(9):
        prompts["offline" if i % 3 else "online"].append([rng.randrange(256) for _ in range(rng.randint(8, 90))])

    def add(kind):
        params = SamplingParams(max_tokens=LENGTHS[kind], ignore_eos=True, temperature=0, detokenize=False,
                                extra_args={"ballast": {"class": kind}})
        engine.add_request(f"{kind}-{len(prompts[kind])}", {"prompt_token_ids": prompts[kind].pop()}, params)

    while prompts["offline"]:
        add("offline")
    tokens, last = {}, 0
    while engine.has_unfinished_requests() or prompts["online"]:
        num_tokens = sum(map(len, tokens.values()))
        if prompts["online"] and (num_tokens >= last + 12 or not engine.has_unfinished_requests()):
            last = num_tokens
            add("online")
        for output in engine.step():
            tokens[output.request_id] = list(output.outputs[0].token_ids)
    figures = engine.engine_core.call_utility("ballast_stats", 0) if arguments else None
    engine.engine_core.shutdown()
    if figures:
        del figures["stats"]["service"]  # its keys have two parts, which JSON cannot have
    return tokens, figures

if __name__ == "__main__":
    print("FOUND", json.dumps(answers(sys.argv[1], **json.loads(sys.argv[2]))))
"""
POLICY = {"ttft": 1.0, "tpot": 0.2, "chunk_tokens": 24}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1900),
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores"),
]


@pytest.fixture(scope="module")
def run(wandering_model, tmp_path_factory) -> Callable[..., tuple[dict[str, list[int]], dict[str, Any]]]:
    """`run(**arguments)` runs the program in an engine with these arguments; return the answers and the figures."""
    program: Path = tmp_path_factory.mktemp("program") / "two_ranks.py"
    program.write_text(PROGRAM)
    environment = os.environ | {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}

    def run(**arguments):
        done = subprocess.run(
            [sys.executable, str(program), str(wandering_model), json.dumps(arguments)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=900,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
        return tuple(json.loads(line.removeprefix("FOUND ")))

    return run


@pytest.fixture(scope="module")
def plain_answers(run):
    return run()[0]


@pytest.mark.parametrize(
    ("policy", "arguments", "happened"),
    [
        pytest.param({"slots": 3}, {}, lambda of: of["parked_steps"], id="few slots, parked requests"),
        pytest.param(
            {}, {"num_gpu_blocks_override": 11}, lambda of: sum(of["preemptions"].values()), id="few KV blocks"
        ),
    ],
)
def test_answers_with_two_ranks_are_those_of_plain_vllm(run, plain_answers, policy, arguments, happened):
    found, figures = run(
        scheduler_cls="ballast_vllm.scheduler.BallastScheduler",
        additional_config={"ballast": POLICY | policy},
        **arguments,
    )

    assert found == plain_answers
    stats = figures["stats"]
    assert (stats["online"]["decode_tokens"], stats["offline"]["decode_tokens"]) == (24, 240)
    assert happened(stats["offline"]) > 0
