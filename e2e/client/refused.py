"""Send a request that the worker refuses, and print status and message as JSON. Arguments: base URL, model, prompt."""

import json
import sys

from openai import APIStatusError, OpenAI

base_url, model, prompt = sys.argv[1:]
with OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
    try:
        client.completions.create(model=model, prompt=prompt, max_tokens=4)
        said = {"status": 200, "message": ""}
    except APIStatusError as error:
        said = {"status": error.status_code, "message": str(error)}
print(json.dumps(said))
