"""Every architecture computes what transformers computes, through paged KV, chunked prefill and mixed batches."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise

import numpy as np
import pytest
import torch

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


def test_logits_of_a_chunked_prompt_agree(architecture, attention, checkpoints, batch_of, part):
    directory, reference = checkpoints(architecture)
    prompt = np.random.default_rng(1).integers(3, 193, 77).tolist()
    executor = make_executor(directory, attention)
    blocks = np.random.default_rng(2).permutation(64)[:10].tolist()
    ours = [
        executor.logits(
            batch_of([part(prompt[start:end], start, blocks, sampling=GREEDY, every_row=True)], BLOCK_TOKENS)
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
def test_an_edited_configuration_means_what_it_means_to_transformers(
    *, edit, attention, checkpoints, batch_of, part, tmp_path
):
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
    whole = batch_of([part(prompt, 0, range(5), sampling=GREEDY, every_row=True)], BLOCK_TOKENS)
    ours = make_executor(directory, attention).logits(whole)

    assert max(relative_errors(ours, theirs)) < 1e-4


def test_greedy_output_agrees_token_for_token_in_a_mixed_batch(architecture, attention, checkpoints, batch_of, part):
    directory, reference = checkpoints(architecture)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, 193, length).tolist() for length in (5, 40)]
    expected = [greedy_of(reference, prompt, 64) for prompt in prompts]
    executor = make_executor(directory, attention)
    tables = rng.permutation(64).reshape(2, -1)[:, :14].tolist()
    texts, computed = [list(prompt) for prompt in prompts], [0, 0]
    while any(len(text) < len(prompt) + 64 for text, prompt in zip(texts, prompts, strict=True)):
        chunks = []
        for index in range(2):
            fresh = texts[index][computed[index] : computed[index] + 16]
            is_last = computed[index] + len(fresh) == len(texts[index])
            chunks.append((part(fresh, computed[index], tables[index], sampling=GREEDY if is_last else None), index))
            computed[index] += len(fresh)
        chunks.sort(key=lambda chunk: len(chunk[0].tokens) > 1)
        owners = [index for one, index in chunks if one.sampling]
        drawn = executor.run(batch_of([one for one, _ in chunks], BLOCK_TOKENS))
        for owner, token in zip(owners, drawn, strict=True):
            texts[owner].append(int(token))

    for text, prompt, wanted in zip(texts, prompts, expected, strict=True):
        assert text[len(prompt) :][:64] == wanted


def greedy_of(reference, prompt, count):
    """Fails where the choice is not clear-cut, so that only the model is compared."""
    tokens, cache = [], None
    with torch.no_grad():
        for _ in range(count):
            answer = reference(torch.tensor([tokens[-1:] or prompt]), past_key_values=cache, use_cache=True)
            logits, cache = answer.logits[0, -1], answer.past_key_values
            best = logits.topk(2).values
            assert best[0] - best[1] > 1e-5 * best[0].abs(), "the two best logits are too close to compare tokens"
            tokens.append(int(logits.argmax()))
    return tokens
