"""Items on their way to vLLM, without vLLM; `tests/vllm/server/test_items.py` sends them to a real one."""

from __future__ import annotations

from typing import Any

import pytest

from ballast_queue.job import Claimed
from ballast_vllm.items import HttpReader
from ballast_worker.errors import Refused


@pytest.mark.parametrize("field", ["chat_template_kwargs", "prompt"])
def test_a_body_that_is_nested_too_deeply_is_refused(field):
    nested: list[Any] = []
    for _ in range(200_000):
        nested = [nested]
    body = {"model": "m", "prompt": "Once", field: {"a": nested}}
    url = "/v1/completions"
    claimed = Claimed(job_id="j", index=0, custom_id="a", url=url, body=body, tenant="t", token=1, seed=1)
    reader = HttpReader("revision", [url], lambda: ["m"], lambda _: None)

    with pytest.raises(Refused, match="nested too deeply") as caught:
        reader.prepare("r", claimed, 0.0)

    assert (caught.value.status, caught.value.code) == (400, "invalid_json")
