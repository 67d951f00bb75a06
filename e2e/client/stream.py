"""Stream completions of the prompts on the command line with the openai client, and print them as JSON.

Arguments: base URL, model, most tokens, then the prompts. Every request opens its own connection, so that the Service
spreads the requests over the workers.
"""

import json
import sys

from openai import OpenAI

base_url, model, most, *prompts = sys.argv[1:]
answers = []
for prompt in prompts:
    with OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        pieces = [
            chunk.choices[0].text
            for chunk in client.completions.create(
                model=model, prompt=prompt, max_tokens=int(most), temperature=0, stream=True
            )
            if chunk.choices
        ]
    answers.append({"prompt": prompt, "text": "".join(pieces), "pieces": len(pieces)})
print(json.dumps(answers))
