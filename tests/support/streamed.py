"""An answer that a worker is sending."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import httpx

BODY = {"model": "tiny", "prompt": "The method returns", "max_tokens": 4, "temperature": 0}
ENDLESS = BODY | {"max_tokens": 2000, "ignore_eos": True, "stream": True}


@contextmanager
def begun(client: httpx.Client, headers: dict[str, str] | None = None, **fields: Any) -> Iterator[Iterator[str]]:
    """Yield the lines of an answer that goes on, without its first one. The client hangs up at the end."""
    with client.stream("POST", "/v1/completions", json=ENDLESS | fields, headers=headers) as response:
        assert response.status_code == 200
        with closing(response.iter_lines()) as lines:
            next(lines)
            yield lines
