"""Request one chat completion of 16 tokens, and print it as JSON. Arguments: base URL, model, question."""

import json
import sys

from openai import OpenAI

base_url, model, question = sys.argv[1:]
with OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_completion_tokens=16,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
print(json.dumps({"model": answer.model, "usage": answer.usage.to_dict(), "text": answer.choices[0].message.content}))
