"""What the native engine refuses in favor of vLLM exists in vLLM."""

from __future__ import annotations

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from ballast_openai.body import CHAT_URL, COMPLETIONS_URL
from ballast_openai.refused import IN_VLLM, REFUSED_BY_URL

REQUESTS = {COMPLETIONS_URL: CompletionRequest, CHAT_URL: ChatCompletionRequest}


@pytest.mark.parametrize("field", sorted(IN_VLLM))
def test_vllm_has_the_fields_for_which_a_refusal_names_it(field: str) -> None:
    urls = [
        url for url, refused in REFUSED_BY_URL.items() if field in refused and "belongs to" not in refused[field][1]
    ]

    assert urls
    for url in urls:
        assert field in REQUESTS[url].model_fields, url
