"""Build an engine from options: load the model, size its KV, and warm it up."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ballast_engine.engine import BallastEngine, Runner
from ballast_engine.errors import InvalidOptions
from ballast_engine.executor import Executor, kv_bytes_per_block
from ballast_engine.loader import LoadedModel, load
from ballast_engine.options import EngineOptions
from ballast_engine.request import GenerationRequest, SamplingParams
from ballast_engine.tokenizer import Tokenizer
from ballast_log import Log
from ballast_policy.host import Planner
from ballast_policy.request import RequestClass
from ballast_policy.snapshot import PolicyConfig
from ballast_policy.step.planner import plan

log = Log(__name__)

MOST_SLOTS = 64
MEMORY_SHARE = 0.5
CONTEXT_PER_SLOT = 256
"""If `slots` is not set, each slot gets KV for this many tokens, or for the whole context if that is less."""

_DEFAULT = PolicyConfig(slots=1, num_blocks=1)


def build_engine(
    options: EngineOptions,
    policy: PolicyConfig | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    clock: Callable[[], float] = time.monotonic,
    planner: Planner = plan,
    wrap: Callable[[Runner], Runner] = lambda executor: executor,
) -> BallastEngine:
    """Load the model, allocate its KV pages, and warm it up.

    Args:
        options: how the engine is built
        policy: shares, SLO and tenants; its sizes are replaced by those of the engine
        tokenizer: the tokenizer of the checkpoint, if the caller has read it already
        clock: the engine's clock, seconds, monotonic
        planner: decides each step
        wrap: returns what the engine uses in place of its executor

    Raises:
        InvalidCheckpoint: the directory cannot be loaded.
        InvalidOptions: the options contradict one another or the machine.
    """
    tokenizer = tokenizer or Tokenizer(Path(options.directory))
    if not tokenizer.eos_ids:
        log.warning("model names no end token: answers end at a stop string or at max_tokens")
    loaded = load(
        options.directory,
        dtype=options.dtype,
        load_format=options.load_format,
        attention=options.attention,
        threads=options.threads,
    )
    options, num_blocks = _size(options, loaded)
    slots, block_tokens = options.slots or 1, options.block_tokens
    executor = Executor(loaded, num_blocks=num_blocks, block_tokens=block_tokens)
    policy = replace(policy or _DEFAULT, slots=slots, num_blocks=num_blocks, block_tokens=block_tokens)
    engine = BallastEngine(
        executor=wrap(executor), tokenizer=tokenizer, policy=policy, options=options, clock=clock, planner=planner
    )
    seconds = warm_up(engine)
    num_bytes = num_blocks * kv_bytes_per_block(loaded.config, loaded.dtype, block_tokens)
    kv = {"kv_blocks": num_blocks, "kv_mebibytes": num_bytes >> 20}
    log.info("engine ready", slots=slots, **kv, context=engine.max_tokens, warm_up_seconds=seconds)
    return engine


def _size(options: EngineOptions, loaded: LoadedModel) -> tuple[EngineOptions, int]:
    """Return the options with slots and context set, and the number of KV blocks.

    A value that is not given follows from the others and from the free memory.
    """
    size = options.block_tokens
    longest = loaded.config.max_positions
    if options.max_model_len is not None and options.max_model_len > longest:
        raise InvalidOptions(
            f"maxModelLen is {options.max_model_len} tokens, but the checkpoint supports {longest}: lower maxModelLen."
        )
    context = options.max_model_len or longest
    most_slots = options.slots or MOST_SLOTS
    per_block = kv_bytes_per_block(loaded.config, loaded.dtype, size)
    if options.kv_memory_bytes is None:
        memory = int(free_memory() * MEMORY_SHARE)
        num_blocks = min(memory // per_block, most_slots * -(-context // size))
    else:
        memory = options.kv_memory_bytes
        num_blocks = memory // per_block
    capacity = num_blocks * size
    if capacity < min(context, 2 * size) or (options.max_model_len is not None and capacity < context):
        raise InvalidOptions(
            f"{memory >> 20} MiB of KV memory hold {capacity} tokens, but one request may need {context}: increase "
            "kvMemoryMebibytes or lower maxModelLen."
        )
    if capacity < context:
        log.warning("context shortened because KV memory is too small", wanted=context, context=capacity)
        context = capacity
    slots = options.slots or max(1, min(most_slots, capacity // min(context, CONTEXT_PER_SLOT)))
    return replace(options, slots=slots, max_model_len=context), num_blocks


def free_memory(group: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the free bytes of this machine and its control group.

    The group also counts cached pages of files, such as the checkpoint that was just read. The kernel drops those that
    are inactive if memory is short, so they are free, as `MemAvailable` and Kubernetes count them.
    """
    machine = re.search(r"^MemAvailable: +(\d+) kB$", Path("/proc/meminfo").read_text(encoding="ascii"), re.MULTILINE)
    if machine is None:
        raise InvalidOptions("/proc/meminfo has no MemAvailable: set kvMemoryMebibytes.")
    free = [int(machine[1]) * 1024]
    try:
        limit, used, counts = ((group / f"memory.{name}").read_text("ascii") for name in ("max", "current", "stat"))
        if limit.strip() != "max":
            cached = dict(line.split() for line in counts.splitlines()).get("inactive_file", 0)
            free.append(int(limit) - int(used) + int(cached))
    except OSError:
        pass  # no control group v2: the limit is that of the machine
    return max(0, min(free))


def warm_up(engine: BallastEngine, seconds: float = 2.0) -> float:
    """Run batches of several shapes. The first request is then not slow, and the cost model has its first samples.

    Afterwards, reset the prefix cache and the counters. Return the seconds that it took.
    """
    policy = engine.policy
    started = time.perf_counter()
    longest = engine.max_tokens - 2
    shapes = [(1, 1), (policy.slots, 8), (1, min(longest, policy.chunk_tokens)), (max(1, policy.slots // 4), 64)]
    for batch, (num_requests, wanted) in enumerate(shapes * 3):
        num_prompt = max(1, min(wanted, longest, policy.num_blocks * policy.block_tokens // num_requests - 8))
        for i in range(num_requests):
            engine.submit(
                GenerationRequest(
                    request_id=f"warm-up-{batch}-{i}",
                    prompt=tuple(1 + (i + j) % 7 for j in range(num_prompt)),
                    sampling=SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True),
                    request_class=RequestClass.OFFLINE,
                    stream=False,
                )
            )
        while engine.has_work:
            for output in engine.step():
                if output.error:
                    raise InvalidOptions(f"The engine cannot compute with these options: {output.error}")
        if time.perf_counter() > started + seconds:
            break
    engine.reset()
    return time.perf_counter() - started
