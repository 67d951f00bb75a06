"""Every architecture computes what transformers computes, through paged KV and chunked prefill."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise

import numpy as np
import pytest
import torch
from batches import Part, logits_of, make_batch

from ballast_engine.executor import Executor
from ballast_engine.loader import load
from ballast_engine.request import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
BLOCK_TOKENS = 8


@pytest.fixture(params=["sdpa", "cpu"])
def attention(request):
    return request.param


def make_executor(directory, attention, **changes):
    loaded = load(directory, dtype="float32", attention=attention, threads=1)
    return Executor(loaded, **{"num_blocks": 64, "block_tokens": BLOCK_TOKENS, **changes})


def relative_errors(ours, theirs):
    """Norm-wise, and the largest deviation over the largest value."""
    difference = ours.double() - theirs.double()
    return float(difference.norm() / theirs.double().norm()), float(difference.abs().max() / theirs.abs().max())


def test_logits_of_a_chunked_prompt_agree(architecture, attention, checkpoints):
    directory, reference = checkpoints(architecture)
    prompt = np.random.default_rng(1).integers(3, 193, 77).tolist()
    executor = make_executor(directory, attention)
    blocks = np.random.default_rng(2).permutation(64)[:10].tolist()
    ours = [
        logits_of(
            executor,
            make_batch([Part(prompt[start:end], start, blocks, sampling=GREEDY, every_row=True)], BLOCK_TOKENS),
        ).clone()
        for start, end in pairwise([0, 20, 21, 64, 77])
    ]
    with torch.no_grad():
        theirs = reference(torch.tensor([prompt])).logits[0]

    assert max(relative_errors(torch.cat(ours), theirs)) < 1e-4


EDITS = {
    "a head of its own beside a configuration that ties it": ("llama", {"tie_word_embeddings": True}),
    "a rope that was scaled after it was saved": ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "a mistral with a window in some layers": (
        "mistral, sliding window",
        {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_configuration_means_what_it_means_to_transformers(*, edit, attention, checkpoints, tmp_path):
    import transformers

    name, changes = EDITS[edit]
    directory = shutil.copytree(checkpoints(name)[0], tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))
    prompt = np.random.default_rng(4).integers(3, 193, 40).tolist()
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        theirs = reference(torch.tensor([prompt])).logits[0]
    whole = make_batch([Part(prompt, 0, range(5), sampling=GREEDY, every_row=True)], BLOCK_TOKENS)
    ours = logits_of(make_executor(directory, attention), whole)

    assert max(relative_errors(ours, theirs)) < 1e-4
