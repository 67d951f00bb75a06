"""Two tensor-parallel ranks: the scheduler runs in EngineCore's process, and the answers are those of plain vLLM."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, sys
from random import Random
from vllm import LLM, SamplingParams

def answers(model, **arguments):
    llm = LLM(model, dtype="float32", max_model_len=256, max_num_seqs=4, max_num_batched_tokens=260, enforce_eager=True,
              tensor_parallel_size=2, seed=0, disable_log_stats=True, **arguments)
    rng = Random(1)
    prompts = [{"prompt_token_ids": [rng.randrange(256) for _ in range(rng.randint(8, 90))]} for _ in range(6)]
    classes = ["offline" if i % 3 else "online" for i in range(6)]
    params = [SamplingParams(max_tokens=8, ignore_eos=True, temperature=0, detokenize=False,
                             extra_args={"ballast": {"class": c}}) for c in classes]
    found = [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]
    figures = llm.llm_engine.engine_core.call_utility("ballast_stats", 0) if arguments else None
    llm.llm_engine.engine_core.shutdown()
    return found, figures

if __name__ == "__main__":
    arguments = json.loads(sys.argv[2])
    print("FOUND", json.dumps(answers(sys.argv[1], **arguments)))
"""


def run(program: Path, model: Path, arguments: str) -> tuple[list[list[int]], dict]:
    import json

    environment = os.environ | {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    done = subprocess.run(
        [sys.executable, str(program), str(model), arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    return tuple(json.loads(line.removeprefix("FOUND ")))


@pytest.mark.slow
@pytest.mark.timeout(1900)
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores")
def test_answers_with_two_ranks_are_those_of_plain_vllm(wandering_model, tmp_path):
    program = tmp_path / "two_ranks.py"
    program.write_text(PROGRAM)

    plain, _ = run(program, wandering_model, "{}")
    policy = '{"ttft": 1.0, "tpot": 0.2, "chunk_tokens": 24}'
    scheduler = "ballast_vllm.scheduler.BallastScheduler"
    found, figures = run(
        program, wandering_model, f'{{"scheduler_cls": "{scheduler}", "additional_config": {{"ballast": {policy}}}}}'
    )

    assert found == plain
    assert figures["exact_steps"] == figures["steps"] > 0
    assert {name: of["decode_tokens"] for name, of in figures["classes"].items()} == {"online": 16, "offline": 32}
