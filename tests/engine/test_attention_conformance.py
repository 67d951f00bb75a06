"""Every attention backend computes dense attention, for any mix of decodes and chunks over any pages."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from batches import Part, make_batch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ballast_engine.attention.base import AttentionShape
from ballast_engine.attention.cpu import CpuAttention
from ballast_engine.attention.sdpa import SdpaAttention

BACKENDS = {
    "sdpa, float32": (SdpaAttention, torch.float32, 2e-5),
    "sdpa, bfloat16": (SdpaAttention, torch.bfloat16, 4e-2),
    "cpu, float32": (lambda shape: CpuAttention(shape, threads=1), torch.float32, 2e-5),
    "cpu, bfloat16": (lambda shape: CpuAttention(shape, threads=1), torch.bfloat16, 4e-2),
}


@dataclass(frozen=True)
class Case:
    """Requests as (tokens computed before, tokens computed now)."""

    requests: tuple[tuple[int, int], ...]
    block_tokens: int = 16
    group: int = 2
    kv_heads: int = 2
    head_dim: int = 64
    window: int | None = None
    seed: int = 0


requests = st.lists(
    st.tuples(st.integers(0, 150), st.one_of(st.just(1), st.integers(1, 90))), min_size=1, max_size=5
).map(lambda found: tuple(sorted(found, key=lambda one: one[1] > 1)))
cases = st.builds(
    Case,
    requests=requests,
    block_tokens=st.sampled_from([1, 4, 7, 8, 16, 24, 32, 64, 128]),
    group=st.sampled_from([1, 2, 3, 4, 7, 8]),
    kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([12, 16, 32, 40, 64, 80, 96, 128]),
    window=st.one_of(st.none(), st.integers(1, 120)),
    seed=st.integers(0, 1000),
)


@pytest.mark.parametrize("backend", BACKENDS)
@given(case=cases)
@settings(max_examples=60)
@example(case=Case(requests=((0, 1),)))
@example(case=Case(requests=((63, 1), (64, 1), (65, 1), (0, 64), (64, 65))))
@example(case=Case(requests=((5, 1), (0, 3)), window=1))
@example(case=Case(requests=((200, 1),), group=48, kv_heads=1, head_dim=256))
def test_a_mixed_batch_matches_dense_attention(backend, case):
    make, dtype, tolerance = BACKENDS[backend]
    got, wanted = computed_and_dense(make, dtype, case)

    assert float((got - wanted).abs().max()) <= tolerance * max(1.0, float(wanted.abs().max()))


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_other_requests_left_in_a_block_is_never_seen(backend):
    make, dtype, tolerance = BACKENDS[backend]

    def spoiled(shape):
        attention = make(shape)
        attention.keys.fill_(1e4)
        attention.values.fill_(1e4)
        return attention

    case = Case(requests=((19, 1), (0, 5), (3, 40)), block_tokens=24)
    got, wanted = computed_and_dense(spoiled, dtype, case)

    assert float((got - wanted).abs().max()) <= tolerance * max(1.0, float(wanted.abs().max()))


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_overwhelming_score_takes_all_the_weight(backend):
    make, dtype, tolerance = BACKENDS[backend]
    shape = AttentionShape(1, 1, 16, (None,), 8, 16, dtype)
    attention = make(shape)
    k = torch.full((100, 1, 16), -20.0)
    k[37] = 20.0
    v = torch.arange(100.0).view(100, 1, 1).expand(100, 1, 16).contiguous() / 100
    q = torch.full((100, 1, 16), 20.0)
    step = attention.prepare(make_batch([Part([0] * 100, 0, range(7))], 16))
    got = attention.forward(0, q.to(dtype), k.to(dtype), v.to(dtype), step)

    torch.testing.assert_close(got[-1].float(), torch.full((16,), 0.37), atol=tolerance, rtol=0)


def test_threads_change_no_bit():
    case = Case(requests=((70, 1), (300, 1), (12, 1), (0, 130), (50, 61)), group=4)
    alone, _ = computed_and_dense(lambda shape: CpuAttention(shape, threads=1), torch.float32, case)
    together, _ = computed_and_dense(lambda shape: CpuAttention(shape, threads=2), torch.float32, case)

    assert torch.equal(alone, together)


def computed_and_dense(make, dtype, case):
    """What a backend gives for the step of a case, and what dense attention in float64 gives for it."""
    rng = np.random.default_rng(case.seed)
    torch.manual_seed(case.seed)
    num_blocks = [-(-(before + now) // case.block_tokens) for before, now in case.requests]
    order = rng.permutation(sum(num_blocks) + 3)
    tables = np.split(order[: sum(num_blocks)], np.cumsum(num_blocks)[:-1])
    heads = case.kv_heads * case.group
    shape = AttentionShape(
        num_heads=heads,
        num_kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        windows=(None, case.window),
        num_blocks=len(order),
        block_tokens=case.block_tokens,
        dtype=dtype,
    )
    attention = make(shape)
    lengths = [before + now for before, now in case.requests]
    q, k, v = (
        [torch.randn(length, count, case.head_dim).to(dtype) for length in lengths]
        for count in (heads, case.kv_heads, case.kv_heads)
    )
    computed = torch.empty(0)
    for is_step in (False, True):
        chosen = [
            (index, slice(before, before + now) if is_step else slice(0, before))
            for index, (before, now) in enumerate(case.requests)
            if is_step or before
        ]
        if not chosen:
            continue
        chosen.sort(key=lambda one: one[1].stop - one[1].start > 1)
        parts = [Part([0] * (rows.stop - rows.start), rows.start, tables[index].tolist()) for index, rows in chosen]
        flat = [torch.cat([tensor[index][rows] for index, rows in chosen]) for tensor in (q, k, v)]
        computed = attention.forward(1, *flat, attention.prepare(make_batch(parts, case.block_tokens)))
    expected = [
        dense(q[index], k[index], v[index], window=case.window)[before:]
        for index, (before, _) in enumerate(case.requests)
    ]
    return computed.double(), torch.cat(expected)


def dense(q, k, v, window):
    """Softmax attention of one request in float64, `[n, heads * head dim]`."""
    n, heads, dim = q.shape
    k, v = (tensor.double().repeat_interleave(heads // k.shape[1], dim=1) for tensor in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) / dim**0.5
    rows, columns = torch.arange(n)[:, None], torch.arange(n)[None]
    hidden = columns > rows if window is None else (columns > rows) | (columns <= rows - window)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v).reshape(n, heads * dim)
