"""Models whose layers have different block tables, for example sliding windows beside full attention.

vLLM on a CPU gives such a model only one kind of table, so these tests give the tables to vLLM's scheduler.
"""

from __future__ import annotations

import random

import pytest
import torch
from bare_core import FULL, BareCore
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec, MambaSpec, SlidingWindowSpec

from ballast_vllm.internals import PlannedBatch
from ballast_vllm.private_blocks import TIGHT
from ballast_vllm.scheduler import BallastScheduler

LAYER = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
STATE = MambaSpec(block_size=2048 + 64, shapes=((8,),), dtypes=(torch.float32,))
MOST_STEPS = 4000


def window(tokens, block=16):
    return SlidingWindowSpec(block_size=block, sliding_window=tokens, **LAYER)


def chunked(tokens):
    return ChunkedLocalAttentionSpec(block_size=16, attention_chunk_size=tokens, **LAYER)


def full(block):
    return FullAttentionSpec(block_size=block, **LAYER)


SHAPES = {
    "as Gemma 3": [*[window(100)] * 6, FULL],
    "as gpt-oss": [window(16), FULL],
    "as Qwen3-Next": [*[STATE] * 3, FULL],
    "as Llama 4": [*[chunked(128)] * 3, FULL],
    "windows only": [window(100), window(17)],
    "states only": [STATE],
    "two block sizes": [full(32), FULL, window(40, 32)],
}


def make_core(model, tables, **options):
    return BareCore(model, tables=tables, **{"step_tokens": 128, "enable_prefix_caching": False, **options})


def least_blocks(core, tokens):
    """Return the free blocks for which vLLM admits a prompt of this length."""
    manager = core.scheduler.kv_cache_manager
    nothing = manager.empty_kv_cache_blocks.blocks
    return manager.coordinator.get_num_blocks_to_allocate("none", tokens, nothing, 0, 0, 0, tokens, True)


def run(core, most_steps=MOST_STEPS):
    """Run a core until it is idle. Return whether that happened, and the most requests that ran at a time."""
    running = 0
    while not core.is_idle and core.num_steps < most_steps:
        core.step()
        running = max(running, len(core.scheduler.running))
        if isinstance(core.scheduler, PlannedBatch):
            core.check()
    return core.is_idle, running


@pytest.mark.parametrize("kind", ["online", "offline"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_prompt_for_which_vllm_has_just_enough_kv_starts_before_others(tiny_model, shape, is_async, kind):
    tables = SHAPES[shape]
    blocks = 1 + least_blocks(make_core(tiny_model, tables, is_async=is_async), 1500)
    core = make_core(tiny_model, tables, is_async=is_async, blocks=blocks)

    first = core.add(kind, prompt=1500, output=1)
    others = [core.add(other, prompt=20, output=4) for other in ("online", "offline") * 3]

    assert run(core)[0]
    assert core.answers == {first: 1, **dict.fromkeys(others, 4)}
    assert core.deviations.num_preempted == 0
    core.check_idle()


@pytest.mark.parametrize(("shape", "fewer"), [("as Gemma 3", 0), ("as Qwen3-Next", 1), ("windows only", 0)])
def test_about_as_many_requests_run_as_in_vllm(tiny_model, shape, fewer):
    most = []
    for scheduler in (Scheduler, BallastScheduler):
        core = make_core(tiny_model, SHAPES[shape], scheduler=scheduler, blocks=450, slots=16, step_tokens=256)
        for _ in range(12):
            core.add("offline", prompt=800, output=200)
        most.append(run(core)[1])

    assert most[1] >= most[0] - fewer > 1


@pytest.mark.parametrize("shape", ["as Gemma 3", "as Qwen3-Next", "as Llama 4"])
def test_online_takes_the_kv_that_offline_borrows_in_one_step(tiny_model, shape):
    core = make_core(tiny_model, SHAPES[shape], blocks=450, slots=16, step_tokens=256)
    for _ in range(12):
        core.add("offline", prompt=600, output=900)
    for _ in range(150):
        core.step()

    online = core.add("online", prompt=1200)
    core.step()

    assert core.scheduler.requests[online] in core.scheduler.running
    assert core.scheduler.driver.counters.tokens.deferred_grants == 0
    core.check()


def test_a_preemption_counts_the_blocks_of_a_prompt_as_private_unless_another_request_uses_them(tiny_model):
    tables, options = [*[window(100)] * 3, FULL], {"step_tokens": 64, "enable_prefix_caching": True}
    core = make_core(tiny_model, tables, blocks=76, max_tokens=2048, **options)
    driver = core.scheduler.driver
    for _ in range(2):
        core.add("offline", prompt=[7] * 80, output=3)
        run(core)
    assert driver.blocks.num_shared_blocks
    core.add("offline", prompt=500, output=100)

    num_tight = 0
    while not core.is_idle:
        core.step()
        num_tight += driver.blocks.num_free * TIGHT < driver.blocks.num_blocks
        assert all(record.num_private_blocks >= record.num_blocks for record in driver.host.residents.values())
    assert num_tight > 9


def random_tables(rng, *, has_cache):
    sizes = rng.choice([(16,), (16, 32)])
    found = [full(rng.choice(sizes)) for _ in range(rng.choice([0, 1, 1, 2]))]
    makers = [lambda: window(tokens, rng.choice(sizes))]
    if len(sizes) == 1:
        makers.append(lambda: chunked(max(16, tokens // 16 * 16)))
    if not has_cache:
        makers.append(lambda: STATE)
    for make in rng.sample(makers, rng.randint(1, len(makers))):
        tokens = rng.choice([1, 15, 16, 17, 100, 300])
        found += [make()] * rng.randint(1, 4)
    return rng.sample(found, len(found))


@pytest.mark.parametrize("seed", [*range(12), 125, 136, 152, 189, 1085, 2086])
def test_each_request_ends_that_vllm_would_compute_alone(tiny_model, seed):
    rng = random.Random(seed)
    has_cache, is_async, longest = rng.random() < 0.5, rng.random() < 0.5, rng.randint(100, 480)
    tables = random_tables(rng, has_cache=has_cache)
    options = {"enable_prefix_caching": has_cache, "is_async": is_async, "max_tokens": 544}
    options |= {"slots": rng.choice([1, 3, 8]), "step_tokens": rng.choice([64, 256])}
    blocks = int(least_blocks(make_core(tiny_model, tables, **options), longest + 30) * rng.uniform(0.9, 2))
    shared = [rng.randrange(256) for _ in range(longest // 2)]
    requests = []
    for _ in range(12):
        length = rng.choice([rng.randint(1, longest), longest])
        prompt = shared[: length * rng.randint(0, 1)] + [rng.randrange(256) for _ in range(length)]
        request = {"kind": rng.choice(["online", "offline"]), "prompt": prompt[:length], "output": rng.randint(1, 60)}
        scheduler = AsyncScheduler if is_async else Scheduler
        alone = make_core(tiny_model, tables, blocks=blocks, scheduler=scheduler, **options)
        alone.add(**request)
        if run(alone, 200)[0]:
            requests.append(request)

    core = make_core(tiny_model, tables, blocks=blocks, policy={"offline_share": rng.choice([0.1, 0.5])}, **options)
    for request in requests:
        core.add(**request)
        core.step()

    assert run(core)[0]
    assert core.deviations.num_preempted == 0
    core.check_idle()
