"""Check and measure Ballast inside vLLM on a GPU. It needs vLLM, and nothing else beyond a machine with a GPU.

    python -m benchmarks.gpu [--only answers,decode,mixed] [--json FILE]

* `answers`: greedy answers in float32 with Ballast on the GPU; how far each token is from the most likely token that
  transformers computes on the CPU.
* `decode`: seconds of a decode step at batch sizes 1 to 256, with plain vLLM and with Ballast, for a model with the
  shape of Llama 3 8B and random weights; with the share of the peak bandwidth (MBU) and of the peak rate (MFU).
* `mixed`: the table of `benchmarks/vllm_mixed.py`, by the time of the wall, for a model of 1.2 billion parameters.

Each part runs in a process of its own. On a machine without a GPU, `--tiny` runs the same code with a tiny model.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from ballast_sim.replay.hardware import GPUS, Accelerator
from benchmarks.replay.random_llama import LlamaShape, make_model

HERE = Path(__file__).resolve().parent
PARTS = ("answers", "decode", "mixed")
LLAMA_8B = LlamaShape(hidden=4096, layers=32, heads=32, kv_heads=8, intermediate=14336, vocabulary=128_256)
ONE_BILLION = LlamaShape(hidden=2048, layers=16, heads=32, kv_heads=8, intermediate=8192, vocabulary=128_256)
TINY = LlamaShape(hidden=256, layers=4, heads=4, kv_heads=2, intermediate=688, vocabulary=258)
BATCHES = (1, 8, 32, 64, 128, 256)
CONTEXT, STEPS = 512, 64
PREFILL = 1024
"""Tokens of prompts that each step computes at least, beside decodes: half of vLLM's smallest default."""
DEVICES = {
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA L4": "l4",
}
"""The GPUs of `GPUS` by the name that the driver reports. GPUs with similar names, and MIG slices, have other peaks."""
SCHEDULER = {
    "scheduler_cls": "ballast_vllm.scheduler.BallastScheduler",
    "additional_config": {"ballast": {"ttft": 100.0, "tpot": 10.0, "offline_share": 0.0}},
}


def make_engine(model: Path, *, slots: int, dtype: str, is_ballast: bool, **options: Any) -> Any:
    """Return an engine of vLLM in this process."""
    from vllm import EngineArgs, LLMEngine  # noqa: PLC0415 - heavy

    options |= SCHEDULER if is_ballast else {}
    return LLMEngine.from_engine_args(
        EngineArgs(model=str(model), dtype=dtype, max_num_seqs=slots, disable_log_stats=True, seed=0, **options)
    )


def sampling(length: int) -> Any:
    """Return greedy sampling of a fixed number of tokens."""
    from vllm import SamplingParams  # noqa: PLC0415

    return SamplingParams(max_tokens=length, ignore_eos=True, temperature=0.0, detokenize=False)


def answers(*, is_tiny: bool) -> dict[str, Any]:
    """Compare greedy answers with transformers on the CPU. A wide spread of the weights makes them wander."""
    import torch  # noqa: PLC0415
    from transformers import LlamaForCausalLM  # noqa: PLC0415

    prompts = [Random(seed).choices(range(5, 255), k=Random(seed).randint(8, 200)) for seed in range(32)]
    length = 16 if is_tiny else 64
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder), TINY, spread=0.3)
        engine = make_engine(model, slots=8, dtype="float32", is_ballast=True, max_model_len=512, enforce_eager=True)
        for i, prompt in enumerate(prompts):
            engine.add_request(str(i), {"prompt_token_ids": prompt}, sampling(length))
        found: dict[int, list[int]] = {}
        while engine.has_unfinished_requests():
            found |= {int(out.request_id): list(out.outputs[0].token_ids) for out in engine.step() if out.finished}
        reference = LlamaForCausalLM.from_pretrained(model, torch_dtype=torch.float32)
        gaps = []
        for i, prompt in enumerate(prompts):
            with torch.no_grad():
                logits = reference(torch.tensor([[*prompt, *found[i]]])).logits[0, len(prompt) - 1 : -1]
            best, taken = logits.max(dim=1).values, logits[range(length), found[i]]
            gaps.append(float((best - taken).max()))
    distinct = sum(len(set(tokens)) for tokens in found.values()) / len(found)
    print(
        f"{len(prompts)} answers of {length} tokens, {distinct:.0f} distinct: in {sum(gap > 0 for gap in gaps)} a "
        f"token was not the most likely one of transformers, by at most {max(gaps):.2g} in the logit"
    )
    return {"answers": len(prompts), "differ": sum(gap > 0 for gap in gaps), "largest_gap": max(gaps)}


def decode(peak: Accelerator, *, is_tiny: bool) -> dict[str, Any]:
    """Measure decode steps of plain vLLM and of Ballast."""
    shape, dtype = (TINY, "float32") if is_tiny else (LLAMA_8B, "bfloat16")
    batches, num_steps = ((1, 8), 8) if is_tiny else (BATCHES, STEPS)
    width = 4 if is_tiny else 2
    parameters = shape.computed_parameters
    kv_bytes = 2 * width * shape.layers * shape.kv_size
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder), shape, longest=8192, has_weights=False)
        for is_ballast in (False, True):
            engine = make_engine(
                model, slots=max(batches), dtype=dtype, is_ballast=is_ballast, load_format="dummy",
                max_model_len=CONTEXT + longest(max(batches), num_steps), enforce_eager=is_tiny,
            )  # fmt: skip
            for batch in batches:
                seconds, fewest = timed(engine, batch, num_steps)
                if fewest < batch:  # the others wait, such as for KV blocks
                    print(f"batch {batch} is left out: a step computed only {fewest} of its requests", flush=True)
                    continue
                moved = parameters * width + batch * kv_bytes * (CONTEXT + num_steps // 2)
                rows.append({
                    "side": "Ballast" if is_ballast else "vLLM", "batch": batch, "step_ms": 1e3 * seconds,
                    "mbu": moved / seconds / peak.bandwidth, "mfu": 2 * parameters * batch / seconds / peak.flops,
                })  # fmt: skip
            engine.engine_core.shutdown()
            del engine
    print(f"{'side':10}{'batch':>6}{'step':>12}{'MBU':>7}{'MFU':>7}")
    for row in rows:
        print(f"{row['side']:10}{row['batch']:6}{row['step_ms']:9.2f} ms{row['mbu']:7.0%}{row['mfu']:7.1%}", flush=True)
    return {"gpu": peak.name, "rows": rows}


def check_peak(found: dict[str, Any]) -> None:
    """Raise if a step moves more bytes than the peak of the device allows."""
    if any(row["mbu"] > 1 for row in found["rows"]):
        name = found["gpu"]
        raise SystemExit(f"An MBU is above 100 %, so the device has another peak than {name}. Name another --gpu.")


def longest(batch: int, num_steps: int) -> int:
    """Return the most tokens of an answer: all requests decode until the last step, also while others are prefilled."""
    return num_steps + batch * CONTEXT // PREFILL + 32


def timed(engine: Any, batch: int, num_steps: int) -> tuple[float, int]:
    """Return the median seconds of a step that decodes `batch` requests, and the fewest requests of a step."""
    for i in range(batch):
        prompt = Random(f"{batch} {i}").choices(range(5, 255), k=CONTEXT)
        engine.add_request(f"{batch}-{i}", {"prompt_token_ids": prompt}, sampling(longest(batch, num_steps)))
    began: set[str] = set()
    while len(began) < batch:
        began |= {out.request_id for out in engine.step()}
    times, sizes = [], []
    for _ in range(num_steps):
        begin = time.perf_counter()
        sizes.append(len(engine.step()))
        times.append(time.perf_counter() - begin)
    engine.abort_request([f"{batch}-{i}" for i in range(batch)])
    while engine.has_unfinished_requests():
        engine.step()
    return median(times), min(sizes)


def mixed(*, is_tiny: bool) -> dict[str, Any]:
    """Run the comparison of policies."""
    shape = TINY if is_tiny else ONE_BILLION
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        model = make_model(Path(folder), shape, longest=8192)
        options = ["--quick", "--load", "40"] if is_tiny else ["--dtype", "bfloat16", "--slots", "128", "--scale", "2"]
        command = [sys.executable, str(HERE.parent / "vllm_mixed.py"), "--clock", "wall", "--model", str(model)]
        subprocess.run([*command, "--json", str(found), *options], check=True)
        rows: dict[str, Any] = json.loads(found.read_text())
    return rows


def accelerator(name: str | None) -> Accelerator:
    """Return the peak rates of the GPU of this machine, or of the named one."""
    if name is not None:
        return GPUS[name]
    import torch  # noqa: PLC0415

    return peak_of(torch.cuda.get_device_name() if torch.cuda.is_available() else "none")


def peak_of(device: str) -> Accelerator:
    """Return the peak rates of a device by its name."""
    if device not in DEVICES:
        raise SystemExit(f"The device is {device!r}. Name one with the same peak: --gpu {'|'.join(GPUS)}")
    return GPUS[DEVICES[device]]


def main() -> int:
    """Run the parts that were asked for, each in a process of its own."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", default=",".join(PARTS), help="the parts, separated by commas")
    options.add_argument(
        "--gpu", choices=tuple(GPUS), help="the GPU with the same peak, if the name of the device is not known"
    )
    options.add_argument("--tiny", action="store_true", help="tiny models, to try the script without a GPU")
    options.add_argument("--json", type=Path, help="write the figures there")
    options.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    asked = options.parse_args()
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    match asked.part:
        case "answers":
            found = answers(is_tiny=asked.tiny)
        case "decode":
            found = decode(accelerator(asked.gpu), is_tiny=asked.tiny)
        case "mixed":
            found = mixed(is_tiny=asked.tiny)
        case _:
            return run_parts(asked)
    asked.json.write_text(json.dumps(found, indent=2) + "\n")
    if asked.part == "decode":
        check_peak(found)
    return 0


def run_parts(asked: argparse.Namespace) -> int:
    """Run each part, also after another failed, and write all figures to one file."""
    figures, failed = {}, []
    with tempfile.TemporaryDirectory() as folder:
        for part in asked.only.split(","):
            found = Path(folder) / f"{part}.json"
            command = [sys.executable, "-m", "benchmarks.gpu", "--part", part, "--json", str(found)]
            command += ["--tiny"] if asked.tiny else []
            command += ["--gpu", asked.gpu] if asked.gpu else []
            print(f"== {part}", flush=True)
            if subprocess.run(command, check=False).returncode:
                failed.append(part)
            if found.exists():
                figures[part] = json.loads(found.read_text())
    if asked.json is not None:
        asked.json.write_text(json.dumps(figures, indent=2) + "\n")
    if failed:
        print(f"failed: {', '.join(failed)}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
