"""The options of `ballast bench`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ballast_cli.errors import Usage

if TYPE_CHECKING:
    from ballast_sim.comparison.engine import BenchEngine
    from ballast_sim.replay.traffic import Arrival

TRACE = "trace"
"""The workload that replays a trace at several loads."""
WorkloadName = Annotated[
    str,
    typer.Option(
        "--setting",
        metavar="NAME",
        help="Workload: trace (replays --online at each --load), sparse, long-prompts or bursts-from-silence.",
    ),
]
Every = Annotated[
    str | None,
    typer.Option(
        metavar="SECONDS,...", help="Seconds between two requests of the workload sparse.", show_default="0.5,2,10"
    ),
]
Model = Annotated[str, typer.Option(help="Name of a known model, or path of a model's config.json.")]
Gpu = Annotated[str, typer.Option(help="GPU: a100, h100, h200 or l4.")]
Load = Annotated[
    str | None,
    typer.Option(
        metavar="PERCENT,...",
        help="Online load: tokens per second, in percent of the SLO-bound throughput.",
        show_default="20,40,60",
    ),
]
EncoderLoad = Annotated[
    str | None,
    typer.Option(
        metavar="PERCENT,...",
        help="Online load: requests per second, in percent of the rate of offline work alone.",
        show_default="20,40,60",
    ),
]
Reservation = Annotated[
    str | None,
    typer.Option(
        metavar="PERCENT,...",
        help="Share of slots, KV blocks and prefill that is reserved for offline.",
        show_default="0,10",
    ),
]
PolicyNames = Annotated[
    str | None, typer.Option(metavar="NAME,...", help="Policies to run, or all of them: all.", show_default="all")
]
Seed = Annotated[int, typer.Option(min=0, help="Random seed for the step-time noise and for generated traffic.")]
Minutes = Annotated[
    float | None,
    typer.Option(
        min=0.1,
        max=10_000,
        help="Length of the traffic in each run. The first quarter (at most 1 minute) does not count.",
        show_default="10",
    ),
]
Slots = Annotated[int | None, typer.Option(min=1, max=4096, help="Number of slots of the engine.", show_default="256")]
Chunk = Annotated[int, typer.Option(min=16, max=1_000_000, help="Most prefill tokens in a step.")]
StepModelName = Annotated[str, typer.Option(help="Step times: refit (llama-3-8b on a100 only), roofline, or auto.")]
Noise = Annotated[float, typer.Option(min=0, max=1, help="Noise of step times: standard deviation of their logarithm.")]
Fitted = Annotated[bool, typer.Option("--fitted", help="Make Ballast learn the step times during the run.")]
Jobs = Annotated[int | None, typer.Option("--jobs", min=1, help="Number of processes.", show_default="one per core")]
Plot = Annotated[Path | None, typer.Option(metavar="DIR", help="Draw pictures into DIR.", show_default=False)]
Checkpoint = Annotated[
    Path | None,
    typer.Option("--model", help="Directory of a checkpoint.", show_default="the small model that ships with Ballast"),
]
Engine = Annotated[str, typer.Option(help="Engine: native, or vllm, which must be installed beside Ballast.")]
Clock = Annotated[str, typer.Option(help="Clock: wall, or cpu (the processor time of the engine).")]
Share = Annotated[
    float,
    typer.Option(
        "--load", min=1, max=100, help="Online load, in percent of the maximum throughput of offline work alone."
    ),
]
ReplaySlots = Annotated[int, typer.Option("--slots", min=1, max=4096, help="Number of slots of the engine.")]
Seconds = Annotated[float, typer.Option(min=2, help="Length of each slice of the trace, in seconds.")]
Encoder = Annotated[str, typer.Option("--model", help="Name of a known encoder, or path of a model's config.json.")]
Latency = Annotated[
    float, typer.Option("--latency-ms", min=0.001, max=1e9, help="SLO from arrival to answer, in milliseconds.")
]
Percentile = Annotated[
    float, typer.Option(min=50, max=99.99, help="Share of online requests that must meet the SLO, in percent.")
]
Prompt = Annotated[int, typer.Option("--prompt-tokens", min=2, help="Mean tokens of a prompt (lognormal).")]
Window = Annotated[
    float, typer.Option("--window-ms", min=0, max=1000, help="Batch window of an idle engine, in milliseconds.")
]
Reserved = Annotated[
    float, typer.Option("--reservation", min=0, max=100, help="Share of the ceiling that is reserved for offline.")
]
EncoderSeconds = Annotated[
    float, typer.Option("--seconds", min=1, max=10_000, help="Length of each run. The first quarter does not count.")
]
TextMilliseconds = Annotated[
    float,
    typer.Option(
        "--api-server-ms",
        min=0,
        max=10_000,
        help="CPU time of vLLM's one API server process for a text, in milliseconds. 0 sets no limit.",
    ),
]
Turns = Annotated[int, typer.Option(min=1, help="Number of replays of each slice.")]


@dataclass(frozen=True, slots=True)
class TrafficOptions:
    """Where the requests come from. None is the default of the workload."""

    workload: str
    every: str | None
    online: Path | None
    offline: Path | None
    minutes: float | None
    seed: int


@dataclass(frozen=True, slots=True)
class BenchEngineOptions:
    """The simulated engine and its SLO. None is the default of the workload."""

    model: str
    gpu: str
    ttft_ms: float | None
    tpot_ms: float | None
    slots: int | None
    chunk: int
    step_model: str = "auto"

    def build(
        self,
        online: Sequence[Arrival],
        offline: Sequence[Arrival],
        *,
        ttft: float = 1.0,
        tpot: float = 0.05,
        slots: int = 256,
    ) -> BenchEngine:
        """Return the engine for this traffic. An option replaces the SLO (in seconds) and the slots that are given."""
        from ballast_sim.comparison.engine import BenchEngine  # noqa: PLC0415  numpy, for this verb only

        return BenchEngine.of(
            model=self.model,
            gpu=self.gpu,
            ttft=self.ttft_ms / 1e3 if self.ttft_ms else ttft,
            tpot=self.tpot_ms / 1e3 if self.tpot_ms else tpot,
            slots=self.slots or slots,
            chunk_tokens=self.chunk,
            online=online,
            offline=offline,
            step_model=self.step_model,
        )


@dataclass(frozen=True, slots=True)
class RowOptions:
    """The rows of the table. None is the default of the workload."""

    policies: str | None
    loads: str | None
    reservations: str | None
    noise: float
    is_fitted: bool


@dataclass(frozen=True, slots=True)
class MixedOptions:
    """The options of `ballast bench mixed` that decide its figures."""

    traffic: TrafficOptions
    engine: BenchEngineOptions
    rows: RowOptions

    def refuse_trace_only(self, plot: Path | None) -> None:
        """Refuse the options that apply only to the workload trace.

        Raises:
            Usage: such an option is given.
        """
        for option, value, reason in (
            ("--load", self.rows.loads, "its requests have their own times"),
            ("--online", self.traffic.online, "it makes its own requests"),
            ("--plot", plot, "the pictures show loads of a trace"),
        ):
            if value is not None:
                name = self.traffic.workload
                raise Usage(f"{option} does not apply to the workload {name}: {reason}. Leave it out.")


def names(text: str) -> tuple[str, ...]:
    """Split a text at its commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def fractions(option: str, text: str) -> tuple[float, ...]:
    """Read percentages, separated by commas, as fractions of 1.

    Raises:
        Usage: a part is not a number.
    """
    try:
        return tuple(float(part) / 100 for part in names(text))
    except ValueError:
        raise Usage(f"{option} is {text!r}; expected percentages, separated by commas, such as 20,40,60.") from None
