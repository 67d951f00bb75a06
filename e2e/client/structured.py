"""Call a tool and answer by a JSON schema, and print both as JSON. Arguments: base URL, model."""

import json
import sys

from openai import OpenAI

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Lima"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}}

base_url, model = sys.argv[1:]
messages = [{"role": "user", "content": "Where is it warm?"}]
with OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
    called = client.chat.completions.create(
        model=model,
        messages=messages,
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        max_completion_tokens=512,
        temperature=0,
        frequency_penalty=2,  # the grammar of a tool call admits spaces, of which a small model is fond
    )
    stated = client.chat.completions.create(
        model=model,
        messages=messages,
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}},
        max_completion_tokens=64,
    )
(call,) = called.choices[0].message.tool_calls
print(
    json.dumps(
        {
            "tool": call.function.name,
            "arguments": json.loads(call.function.arguments),
            "answer": json.loads(stated.choices[0].message.content),
        }
    )
)
