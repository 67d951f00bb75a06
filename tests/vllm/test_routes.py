"""The routes of vLLM's app: each of them is known to be for clients, or Ballast refuses it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from ballast_vllm.middleware import OPEN_PATHS, SCALING_PATHS

EVERYWHERE = (
    "/docs /docs/oauth2-redirect /redoc /kv_event_sources /load /v1/models /tokenize /detokenize /invocations "
    "/v1/systemone"
)
GENERATING = (
    "/v1/completions /v1/chat/completions /v1/chat/completions/batch /v1/responses /v1/responses/{response_id} "
    "/v1/responses/{response_id}/cancel /v1/messages /v1/messages/count_tokens /generative_scoring "
    "/v1/chat/completions/render /v1/chat/completions/derender /v1/completions/render /v1/completions/derender "
    "/v1/messages/render /v1/responses/render /inference/v1/generate /inference/v1/abort_requests"
)
"""vLLM answers the last two, and those that render, only with `--enable-scale-out`."""
SPEECH = "/v1/audio/transcriptions /v1/audio/translations /v1/realtime"
POOLING = "/pooling /classify /score /rerank /v1/embeddings /v1/score /v1/rerank /v2/embed /v2/rerank"


@pytest.mark.parametrize(
    ("tasks", "expected"),
    [
        (("generate", "render"), GENERATING),
        (("transcription", "realtime"), SPEECH),
        (("embed", "token_embed", "classify"), POOLING),
    ],
)
def test_each_route_of_vllm_is_known(tasks, expected):
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(["model"])
    config = SimpleNamespace(get_pooling_task=lambda tasks: tasks[0], hf_config=SimpleNamespace(num_labels=1))

    found = {route.path for route in build_app(arguments, tasks, config).routes}

    assert found - OPEN_PATHS - set(EVERYWHERE.split()) - SCALING_PATHS == set(expected.split())
    assert (found >= SCALING_PATHS) == ("generate" in tasks)
