"""`ballast bench`: compare the policy with baselines, and validate the simulator."""

from __future__ import annotations

import os

import typer

from ballast_cli.bench import options as given
from ballast_cli.console import examples
from ballast_cli.errors import Usage
from ballast_cli.refusals import refusals
from ballast_cli.sim_options import Json, Lengths, Tpot, Trace, Ttft, check_output, require, write_json

EXAMPLES = examples(
    "ballast bench mixed                                   # all policies at 20, 40 and 60 % online load",
    "ballast bench mixed --policy ballast,greedy --load 40 --minutes 3",
    "ballast bench mixed --gpu h100 --model qwen2.5-7b --tpot-ms 25 --json rows.json --plot pictures",
    "ballast bench mixed --online mooncake.jsonl --offline lengths.csv",
    "ballast bench mixed --setting sparse --every 0.5,2,10     # idle GPUs: a request every few seconds",
    "ballast bench mixed --setting long-prompts                # attainment by prompt length",
)
VALIDATE_EXAMPLES = examples(
    "ballast bench validate                     # five minutes on an idle machine",
    "ballast bench validate --clock cpu         # on a busy machine: processor time of the engine",
    "ballast bench validate --engine vllm       # where vLLM is installed",
)
ENCODER_EXAMPLES = examples(
    "ballast bench encoder                      # bge-large on one A100, P95 of 30 ms, at 20, 40 and 60 % load",
    "ballast bench encoder --gpu h100 --latency-ms 20 --percentile 99 --prompt-tokens 200 --load 30",
)
bench = typer.Typer(
    name="bench",
    help="Compare the policy with other policies on the same traffic, in virtual time.",
    no_args_is_help=True,
    epilog=EXAMPLES,
)


@bench.callback()
def _bench() -> None:
    """Compare the policy with other policies on the same traffic, in virtual time."""


@bench.command("mixed", epilog=EXAMPLES)
def mixed(
    *,
    workload_name: given.WorkloadName = given.TRACE,
    every: given.Every = None,
    online: Trace = None,
    offline: Lengths = None,
    model: given.Model = "llama-3-8b",
    gpu: given.Gpu = "a100",
    load: given.Load = None,
    reservation: given.Reservation = None,
    ttft: Ttft = None,
    tpot: Tpot = None,
    policy: given.PolicyNames = None,
    seed: given.Seed = 0,
    minutes: given.Minutes = None,
    slots: given.Slots = None,
    chunk: given.Chunk = 512,
    step_model: given.StepModelName = "auto",
    noise: given.Noise = 0.0,
    fitted: given.Fitted = False,
    jobs: given.Jobs = None,
    json_file: Json = None,
    plot: given.Plot = None,
) -> None:
    """Compare Ballast with online alone, separate GPUs, priorities, chunked prefill, a rate limit, and AIMD.

    Every row replays the same traffic from the same seed. A load is a share of the SLO-bound throughput: the throughput
    of one GPU with offline work alone and every step within the TPOT. With --setting, a workload other than trace
    brings its own requests, policies, SLO and length of a run. Its reservation is 0 by default.
    """
    traffic = given.TrafficOptions(workload_name, every, online, offline, minutes, seed)
    engine = given.BenchEngineOptions(model, gpu, ttft, tpot, slots, chunk, step_model)
    rows = given.RowOptions(policy, load, reservation, noise, is_fitted=fitted)
    require("ballast bench", numpy="worker")
    check_output("--json", json_file)
    with refusals():
        from ballast_cli.bench.mixed import compare  # noqa: PLC0415  numpy, for this verb only

        options = given.MixedOptions(traffic, engine, rows)
        compare(options, processes=jobs or len(os.sched_getaffinity(0)), json_file=json_file, plot=plot)


@bench.command("validate", epilog=VALIDATE_EXAMPLES)
def validate(
    *,
    online: Trace = None,
    offline: Lengths = None,
    model: given.Checkpoint = None,
    engine: given.Engine = "native",
    clock: given.Clock = "wall",
    load: given.Share = 15.0,
    seconds: given.Seconds = 40.0,
    turns: given.Turns = 2,
    slots: given.ReplaySlots = 16,
    json_file: Json = None,
) -> None:
    """Compare the simulator with the engine on this machine. The exit code is 1 if the simulator is not valid.

    The engine replays two slices of the trace. The step times of the first slice give the coefficients for the
    simulation of the second slice. Lengths are one sixteenth of those in the trace.
    """
    require("ballast bench", numpy="worker", torch="worker")
    if engine not in {"native", "vllm"}:
        raise Usage(f"--engine is {engine!r}; expected native or vllm.")
    if engine == "vllm":
        require("ballast bench --engine vllm", vllm="vllm")
    if clock not in {"wall", "cpu"}:
        raise Usage(f"--clock is {clock!r}; expected wall or cpu.")
    check_output("--json", json_file)
    from ballast_cli.bench import validate as validation  # noqa: PLC0415

    validation.require_idle(clock)
    with refusals():
        found = validation.validate(
            online,
            offline,
            model=model,
            engine=engine,
            clock=clock,
            load=load / 100,
            seconds=seconds,
            turns=turns,
            slots=slots,
        )
    if str(json_file) != "-":
        validation.print_validation(found, clock)
    write_json(json_file, validation.figures(found))
    if not found.is_valid:
        raise typer.Exit(1)


@bench.command("encoder", epilog=ENCODER_EXAMPLES)
def encoder(
    *,
    model: given.Encoder = "bge-large",
    gpu: given.Gpu = "a100",
    latency: given.Latency = 30.0,
    percentile: given.Percentile = 95.0,
    prompt: given.Prompt = 128,
    load: given.EncoderLoad = None,
    reservation: given.Reserved = 0.0,
    window: given.Window = 0.0,
    api_server: given.TextMilliseconds = 1.6,
    slots: given.Slots = None,
    seconds: given.EncoderSeconds = 20.0,
    seed: given.Seed = 0,
    noise: given.Noise = 0.0,
    json_file: Json = None,
) -> None:
    """Compare policies on a model that returns vectors: online requests with a latency SLO beside offline work.

    The first lines show the batch and the requests per second of one GPU within the SLO: computed, and found by trying
    rates. A load is a share of the rate of offline work alone. Requests arrive at random (Poisson). If the API server
    process of a pod is slower than the GPU, a line states it.
    """
    require("ballast bench", numpy="worker")
    check_output("--json", json_file)
    with refusals():
        from ballast_cli.bench.encoder import compare_encoder  # noqa: PLC0415  numpy, for this verb only
        from ballast_sim.planner.encoder import ApiServer, EncoderSlo  # noqa: PLC0415
        from ballast_sim.planner.encoder_runs import EncoderBench  # noqa: PLC0415

        runs = EncoderBench(
            model=model,
            gpu=gpu,
            prompt=prompt,
            slo=EncoderSlo(latency / 1e3, percentile / 100, window / 1e3),
            slots=slots or 256,
            reservation=reservation / 100,
            seconds=seconds,
            seed=seed,
            noise=noise,
        )
        compare_encoder(runs, given.fractions("--load", load or "20,40,60"), ApiServer(api_server), json_file)
