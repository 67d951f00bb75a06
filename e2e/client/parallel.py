"""Stream answers in parallel, each over its own connection. Print the tokens, the end and the reason of each as JSON.

Arguments: base URL, model, tokens of an answer, number of answers.
"""

import asyncio
import json
import sys
import time

from openai import AsyncOpenAI

base_url, model, most, count = sys.argv[1:]


async def answer(number: int) -> dict[str, object]:
    tokens, reason = 0, None
    async with AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=600) as client:
        stream = await client.completions.create(
            model=model,
            prompt=f"Chapter {number}. The ship",
            max_tokens=int(most),
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        async for chunk in stream:
            tokens = chunk.usage.completion_tokens if chunk.usage else tokens
            reason = next((choice.finish_reason for choice in chunk.choices if choice.finish_reason), reason)
    return {"tokens": tokens, "reason": reason, "ended": time.time()}


async def main() -> None:
    found = await asyncio.gather(*(answer(number) for number in range(int(count))), return_exceptions=True)
    print(json.dumps([{"error": repr(each)} if isinstance(each, BaseException) else each for each in found]))


asyncio.run(main())
