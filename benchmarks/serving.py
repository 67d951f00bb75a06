"""Measure the cost of HTTP: requests/s and TTFT of the whole path, compared with direct calls of the same engine.

python benchmarks/serving.py                       the small model that ships with Ballast
python benchmarks/serving.py --concurrency 1 8 32

Both sides keep the same number of requests in flight, and run alternately. `direct` submits to the engine between two
steps, in the thread that steps it; `http` is a worker process with its API, and a client in this process.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median

from replay import MODEL, percentile
from replay.worker import HOST, stream, worker

from ballast_engine.build import build_engine
from ballast_engine.engine import BallastEngine
from ballast_engine.options import EngineOptions
from ballast_engine.request import GenerationRequest, SamplingParams
from ballast_engine.tokenizer import Tokenizer
from ballast_policy.request import RequestClass

PROMPT_TOKENS, OUTPUT_TOKENS = 64, 32
SLOTS = 32


@dataclass
class Side:
    """The result of one side over all its repetitions."""

    ttft: list[float] = field(default_factory=list)
    seconds: float = 0.0
    requests: int = 0

    @property
    def rate(self) -> float:
        return self.requests / self.seconds

    def row(self, name: str) -> str:
        p50, p99 = median(self.ttft), percentile(self.ttft, 99)
        return f"{name:>8}  {self.rate:10.1f}  {1000 * p50:11.2f}  {1000 * p99:11.2f}"


def prompts(tokenizer: Tokenizer, seed: int) -> Iterator[list[int]]:
    """Return prompts without a common prefix, so that the prefix cache helps no side."""
    draw = random.Random(seed)
    while True:
        yield [draw.randrange(300, tokenizer.vocab_size) for _ in range(PROMPT_TOKENS)]


def run_direct(engine: BallastEngine, source: Iterator[list[int]], concurrency: int, count: int, side: Side) -> None:
    """Drive the engine by direct calls."""
    sent: dict[str, float] = {}
    started = time.perf_counter()
    left = count

    def submit() -> None:
        name = f"r{time.perf_counter_ns()}"
        sampling = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
        sent[name] = time.perf_counter()
        engine.submit(GenerationRequest(name, tuple(next(source)), sampling, RequestClass.ONLINE))

    for _ in range(min(concurrency, count)):
        submit()
        left -= 1
    seen: set[str] = set()
    while engine.has_work:
        for output in engine.step():
            if output.request_id not in seen:
                seen.add(output.request_id)
                side.ttft.append(time.perf_counter() - sent[output.request_id])
            if output.finish_reason is not None and left > 0:
                left -= 1
                submit()
    side.seconds += time.perf_counter() - started
    side.requests += count


async def run_http(port: int, source: Iterator[list[int]], concurrency: int, count: int, side: Side) -> None:
    """Drive the worker over kept-alive connections."""
    todo = iter(range(count))

    async def connection() -> None:
        opened = await asyncio.open_connection(HOST, port)
        for _ in todo:
            fields = {"model": "tiny", "prompt": next(source), "max_tokens": OUTPUT_TOKENS}
            side.ttft.append((await stream(opened, fields))[0])
        opened[1].close()

    started = time.perf_counter()
    await asyncio.gather(*(connection() for _ in range(concurrency)))
    side.seconds += time.perf_counter() - started
    side.requests += count


def main() -> None:
    """Print both sides for each concurrency."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--requests", type=int, default=60, help="requests of each repetition")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    tokenizer = Tokenizer(MODEL)
    engine = build_engine(EngineOptions(MODEL, slots=SLOTS, threads=options.threads), tokenizer=tokenizer)
    source = prompts(tokenizer, 1)
    slo = {"ttftMilliseconds": 60000, "tpotMilliseconds": 60000}
    with worker(slots=SLOTS, engine={"threads": options.threads}, slo=slo) as running:
        print(f"{PROMPT_TOKENS} prompt and {OUTPUT_TOKENS} output tokens, {options.turns} repetitions")
        for concurrency in options.concurrency:
            direct, http = Side(), Side()
            for turn in range(options.turns + 1):
                if turn == 1:  # the first repetition is a warm-up
                    direct, http = Side(), Side()
                run_direct(engine, source, concurrency, options.requests, direct)
                asyncio.run(run_http(running.port, source, concurrency, options.requests, http))
            print(f"\nconcurrency {concurrency}: requests/s, TTFT p50 ms, TTFT p99 ms")
            print(direct.row("direct"))
            print(http.row("http"))
            print(f"   http/direct: {http.rate / direct.rate:.2f} of the requests/s")


if __name__ == "__main__":
    main()
