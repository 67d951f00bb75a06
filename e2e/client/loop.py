"""Send online requests, one after the other, until a stop file exists. Write the result of each as a line of JSON.

Four lanes run in parallel. One opens a connection for each request. The others keep their connections, so that each
worker serves some requests. No request is repeated. Arguments: host, port, model, path of the files without suffix,
seconds after which the lanes end, seconds after which a request failed.
"""

import asyncio
import json
import sys
import time
from pathlib import Path

from ballast_cli.demo.load import Client, call
from ballast_sim.replay.traffic import Arrival

host, port, model, stem, longest, answer = sys.argv[1:]
TOKENS, PAUSE, LONGEST, ANSWER = 16, 0.2, float(longest), float(answer)
stop, told = Path(f"{stem}.stop"), Path(f"{stem}.jsonl")


async def lane(name: str, *, keeps: bool) -> None:
    client, number, end = Client(host, int(port)), 0, time.monotonic() + LONGEST
    while not is_stopped() and time.monotonic() < end:
        number += 1
        body = {
            "model": model,
            "prompt": f"{name} {number}: the ship",
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        at, began = time.time(), time.perf_counter()
        (sample,) = await client.replay([call(Arrival(0.0, 0, TOKENS), body)], grace=ANSWER)
        failure = sample.failure or ("" if sample.output_tokens == TOKENS else f"{sample.output_tokens} tokens")
        seconds = time.perf_counter() - began
        note({"lane": name, "at": at, "seconds": seconds, "failure": failure})
        if not keeps:
            client.close()
        await asyncio.sleep(PAUSE)
    client.close()


async def main() -> None:
    kept = [lane(f"kept-{number}", keeps=True) for number in range(3)]
    await asyncio.gather(lane("fresh", keeps=False), *kept)


def is_stopped() -> bool:
    return stop.exists()


def note(sample: dict) -> None:
    with told.open("a") as file:
        file.write(json.dumps(sample) + "\n")


asyncio.run(main())
Path(f"{stem}.end").touch()
