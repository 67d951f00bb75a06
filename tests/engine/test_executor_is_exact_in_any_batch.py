"""In float32 with the compiled kernels, a request's logits are the same bits whatever shares its batch (G7)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from batches import Part, logits_of, make_batch
from hypothesis import given, settings
from hypothesis import strategies as st

from ballast_engine.executor import Executor, kv_bytes_per_block
from ballast_engine.loader import load
from ballast_engine.request import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
BLOCK_TOKENS = 8


@pytest.fixture(scope="module")
def directory(checkpoints):
    return checkpoints("qwen3")[0]


def make_executor(directory, threads=1, attention="cpu"):
    loaded = load(directory, dtype="float32", attention=attention, threads=threads)
    return Executor(loaded, num_blocks=96, block_tokens=BLOCK_TOKENS)


@given(cuts=st.sets(st.integers(1, 59)), company=st.lists(st.integers(1, 40), max_size=6), seed=st.integers(0, 9))
@settings(max_examples=25)
def test_chunks_and_company_change_no_bit(directory, *, cuts, company, seed):
    rng = np.random.default_rng(seed)
    prompt = rng.integers(3, 193, 60).tolist()
    executor = make_executor(directory)
    whole = logits_of(executor, make_batch([Part(prompt, 0, range(8), sampling=GREEDY, every_row=True)], BLOCK_TOKENS))
    blocks = rng.permutation(np.arange(8, 96))
    rows = []
    for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), 60], strict=True):
        others = [
            Part(rng.integers(3, 193, length).tolist(), 0, blocks[8 + 5 * index : 13 + 5 * index].tolist())
            for index, length in enumerate(company)
        ]
        own = Part(prompt[start:end], start, blocks[:8].tolist(), sampling=GREEDY, every_row=True)
        parts = sorted([*others, own], key=lambda one: len(one.tokens) > 1)
        rows.append(logits_of(executor, make_batch(parts, BLOCK_TOKENS)))

    assert torch.equal(torch.cat(rows), whole)


def test_threads_change_no_bit(directory):
    prompt = np.random.default_rng(5).integers(3, 193, 50).tolist()
    batch = make_batch([Part([7], 0, [9]), Part(prompt, 0, range(7), sampling=GREEDY, every_row=True)], BLOCK_TOKENS)

    assert torch.equal(logits_of(make_executor(directory, 1), batch), logits_of(make_executor(directory, 2), batch))


def test_the_shipped_model_agrees_with_transformers(model_dir):
    import transformers

    reference = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    prompt = np.random.default_rng(6).integers(0, reference.config.vocab_size, 200).tolist()
    loaded = load(model_dir, dtype="float32", attention="auto", threads=1)
    executor = Executor(loaded, num_blocks=16, block_tokens=16)
    ours = logits_of(executor, make_batch([Part(prompt, 0, range(13), sampling=GREEDY, every_row=True)], 16))
    with torch.no_grad():
        theirs = reference(torch.tensor([prompt])).logits[0]

    assert float((ours - theirs).norm() / theirs.norm()) < 1e-4
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < 1e-4


@pytest.mark.parametrize(("dtype", "attention"), [("bfloat16", "cpu"), ("bfloat16", "sdpa"), ("float16", "sdpa")])
def test_half_precision_stays_near_float32(directory, dtype, attention):
    prompt = np.random.default_rng(7).integers(3, 193, 50).tolist()
    batch = make_batch([Part(prompt, 0, range(7), sampling=GREEDY, every_row=True)], BLOCK_TOKENS)
    exact = logits_of(make_executor(directory), batch)
    loaded = load(directory, dtype=dtype, attention=attention, threads=1)
    rounded = logits_of(Executor(loaded, num_blocks=96, block_tokens=BLOCK_TOKENS), batch).float()

    assert float((rounded - exact).norm() / exact.norm()) < 0.05


def test_run_samples_only_the_rows_asked_for(directory):
    executor = make_executor(directory)
    prompt = np.random.default_rng(8).integers(3, 193, 20).tolist()
    silent = make_batch([Part(prompt, 0, range(3))], BLOCK_TOKENS)
    speaking = make_batch([Part(prompt, 0, range(3), sampling=GREEDY)], BLOCK_TOKENS)

    assert executor.run(silent).tolist() == []
    assert executor.run(speaking).tolist() == [int(logits_of(executor, speaking)[0].argmax())]


def test_a_block_costs_what_its_pages_hold(directory):
    executor = make_executor(directory)
    loaded = load(directory, dtype="float32")
    pages = executor.model.attention
    held = (pages.keys.numel() + pages.values.numel()) * 4

    assert kv_bytes_per_block(loaded.config, torch.float32, BLOCK_TOKENS) * 96 == held


@pytest.mark.parametrize("token", [-1, 193])
def test_a_token_outside_the_vocabulary_is_refused(directory, token):
    with pytest.raises(ValueError, match="the model has 193 tokens"):
        make_executor(directory).run(make_batch([Part([5, token], 0, [0], sampling=GREEDY)], BLOCK_TOKENS))
