"""Send online requests to a worker's Service, and print their results as JSON.

Arguments: host, port, model, pattern, and the figures of the pattern:
  poisson SEED RATE SECONDS    arrivals at random times, independent of earlier requests
  saturate WIDTH SECONDS       WIDTH requests at a time, each followed by the next
  burst COUNT                  COUNT requests at once
"""

import asyncio
import json
import random
import statistics
import sys
from itertools import count

from ballast_cli.demo.load import Client, Sample, call
from ballast_sim.replay.traffic import Arrival

host, port, model, how, *figures = sys.argv[1:]
TOKENS = 24


def request(number: int, at: float = 0.0):
    body = {
        "model": model,
        "prompt": f"Request {number}: the ship",
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return call(Arrival(at, 0, TOKENS), body)


async def main() -> list[Sample]:
    client = Client(host, int(port))
    try:
        if how == "saturate":
            width, seconds = int(figures[0]), float(figures[1])
            return await client.saturate(map(request, count()), width=width, seconds=seconds)
        times = [0.0] * int(figures[0]) if how == "burst" else list(poisson(*map(float, figures)))
        return await client.replay([request(number, at) for number, at in enumerate(times)], grace=60)
    finally:
        client.close()


def poisson(seed: float, rate: float, seconds: float):
    rng, at = random.Random(seed), 0.0
    while (at := at + rng.expovariate(rate)) < seconds:
        yield at


samples = asyncio.run(main())
ttft = sorted(sample.ttft for sample in samples if sample.ttft is not None)
slowest = sorted((sample for sample in samples if sample.ttft is not None), key=lambda sample: sample.ttft)[-5:]
print(
    json.dumps(
        {
            "sent": len(samples),
            "failures": [sample.failure for sample in samples if sample.failure],
            "tokens": sum(sample.output_tokens for sample in samples),
            "late_most": max((sample.late for sample in samples), default=0.0),
            "ttft_median": statistics.median(ttft) if ttft else None,
            "ttft_p99": ttft[int(0.99 * (len(ttft) - 1))] if ttft else None,
            "slowest": [(round(sample.at, 2), round(sample.late, 2), round(sample.ttft, 2)) for sample in slowest],
        }
    )
)
