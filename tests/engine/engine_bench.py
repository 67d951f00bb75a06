"""An engine without a model, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from engine_integrity import check_integrity
from replay.static_batch import StaticBatch
from tokenizers import Tokenizer, models

from ballast_engine.batch import Batch, Ints
from ballast_engine.engine import BallastEngine
from ballast_engine.options import EngineOptions
from ballast_engine.request import GenerationRequest, SamplingParams
from ballast_engine.suspension import Computation, Interrupt, Suspended, advance
from ballast_engine.token_bytes import TokenBytes
from ballast_policy.request import RequestClass
from ballast_policy.snapshot import PolicyConfig
from ballast_policy.step.planner import plan
from ballast_policy.step.suspension import plan_nested


class Letters:
    """A vocabulary at the engine's edge: token i is a letter, token 0 ends an answer and has no text."""

    eos_ids = frozenset({0})

    def __init__(self) -> None:
        letters = {"<end>": 0} | {chr(ord("a") + i): i + 1 for i in range(24)}
        backend = Tokenizer(models.WordLevel(letters, unk_token="<end>"))
        backend.add_special_tokens(["<end>"])
        self.token_bytes = TokenBytes(backend)


@dataclass
class Answer:
    """What a request must get, whatever happens around it."""

    tokens: list[int]
    text: str
    reason: str


class TokenMemory:
    """An executor without a model: it writes token ids where a model writes K and V, reads them back through the block
    tables, and draws the next token from a hash of what it read. A wrong table, slot or length gives a wrong token.
    """

    vocab_size = 25

    def __init__(self, num_blocks: int, block_tokens: int = 4, max_model_len: int = 64) -> None:
        self.num_blocks, self.block_tokens, self.max_model_len = num_blocks, block_tokens, max_model_len
        self.fails = 0
        """How many of the next steps raise, after having spoilt what they would have written."""
        self.batches: list[Batch] = []
        self.meanwhile: list[Callable[[], object]] = []
        """What other threads do, one thing before each layer that is computed."""
        self.in_flight: set[int] = set()
        """Where a suspended step writes."""
        self.num_suspended = 0
        self.tokens = np.full(num_blocks * block_tokens, -1)
        self.positions = np.full(num_blocks * block_tokens, -1)

    def run(self, batch: Batch, interrupt: Interrupt | None) -> Ints | Suspended:
        return advance(self.course(batch, interrupt))

    def resume(self, suspended: Suspended, interrupt: Interrupt | None) -> Ints | Suspended:
        return advance(suspended.computation, interrupt)

    def course(self, batch: Batch, interrupt: Interrupt | None) -> Computation[Ints]:
        """Three layers. What a step will write is spoilt until the last one, and nobody else may write it."""
        self.batches.append(batch)
        self.check_shape(batch)
        assert not set(batch.slot_mapping.tolist()) & self.in_flight
        for layer in range(3):
            if self.meanwhile:
                self.meanwhile.pop(0)()
            while interrupt is not None and interrupt.is_raised_at(layer):
                assert not self.in_flight, "suspended two levels deep"
                self.tokens[batch.slot_mapping] = self.positions[batch.slot_mapping] = -2
                self.in_flight = set(batch.slot_mapping.tolist())
                self.num_suspended += 1
                interrupt = yield
                assert (self.tokens[batch.slot_mapping] == -2).all()
                self.in_flight = set()
        if self.fails:
            self.fails -= 1
            self.tokens[batch.slot_mapping] = -1
            raise RuntimeError("the device is gone")
        self.tokens[batch.slot_mapping] = batch.token_ids
        self.positions[batch.slot_mapping] = batch.positions
        drawn = []
        for row, sample in zip(batch.sample_rows.tolist(), batch.samples, strict=True):
            request = int(np.searchsorted(batch.query_start, row, side="right")) - 1
            assert row == batch.query_start[request + 1] - 1
            at = np.arange(batch.context_lens[request])
            slots = batch.block_table[request][at // self.block_tokens] * self.block_tokens + at % self.block_tokens
            assert (self.positions[slots] == at).all()
            assert sample.position == len(at)
            drawn.append(self.draw(self.tokens[slots].tolist(), sample.sampling))
        return np.array(drawn, np.int64)

    def check_shape(self, batch: Batch) -> None:
        counts = np.diff(batch.query_start)
        assert batch.query_start[0] == 0
        assert batch.query_start[-1] == len(batch.token_ids) == len(batch.positions) == len(batch.slot_mapping)
        assert (counts >= 1).all()
        assert (counts[: batch.num_decodes] == 1).all()
        assert (counts[batch.num_decodes :] > 1).all()
        assert len(set(batch.slot_mapping.tolist())) == len(batch.slot_mapping)
        ends = batch.positions[batch.query_start[1:] - 1] + 1
        assert (ends == batch.context_lens).all()
        assert batch.block_table.shape == (len(counts), -(-int(batch.context_lens.max()) // self.block_tokens))

    def draw(self, tokens: list[int], sampling: SamplingParams) -> int:
        luck = f"{sampling.seed},{len(tokens)}" if sampling.temperature else ""
        return crc32(f"{tokens}{luck}".encode()) % self.vocab_size

    def answer(self, prompt: Sequence[int], sampling: SamplingParams, limit: int) -> Answer:
        """Generate alone, in the plainest way."""
        tokens: list[int] = []
        text = ""
        while True:
            token = self.draw([*prompt, *tokens], sampling)
            tokens.append(token)
            is_end = token in sampling.stop_token_ids or (token == 0 and not sampling.ignore_eos)
            if token and not (is_end and not sampling.include_stop):
                text += chr(ord("a") + token - 1)
            if is_end:
                return Answer(tokens, text, "stop")
            begins = [len(text) - len(stop) for stop in sampling.stop if text.endswith(stop)]
            if begins:
                return Answer(tokens, text if sampling.include_stop else text[: min(begins)], "stop")
            if len(tokens) == min(sampling.max_tokens, limit - len(prompt)):
                return Answer(tokens, text, "length")


class Ticks:
    """A clock that goes on by a millisecond whenever somebody looks."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


@dataclass
class Bench:
    """An engine over a TokenMemory, and everything that came out of it by request. Tests may exchange its planners."""

    engine: Any
    executor: TokenMemory
    clock: Ticks
    planner: Callable[..., Any]
    nested_planner: Callable[..., Any]
    outputs: dict[str, list[Any]] = field(default_factory=dict)
    admissions: list[Any] = field(default_factory=list)

    def submit(self, request_id: str, prompt: Sequence[int] = (1, 2, 3), online: bool = True, **changes: Any) -> None:
        self.engine.submit(make_generation(request_id, prompt, online, **changes))

    def alone(self, prompt: Sequence[int] = (1, 2, 3), **changes: Any) -> Answer:
        """What a request must get."""
        return self.executor.answer(prompt, make_generation("", prompt, **changes).sampling, self.engine.max_tokens)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            last = self.engine.last_step
            outputs = self.engine.step()
            if self.engine.last_step is not last:
                self.admissions += self.engine.last_step.admissions
            assert len({output.request_id for output in outputs}) == len(outputs)
            if not outputs and self.engine.is_stalled:
                self.clock.now += 1.0  # a stalled engine sleeps
            for output in outputs:
                before = self.outputs.setdefault(output.request_id, [])
                assert not before or before[-1].finish_reason is None, "an output behind the last one"
                before.append(output)
            check_integrity(self.engine)

    def run(self, most: int = 2000) -> None:
        """Step until everything has ended."""
        for _ in range(most):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError(f"requests did not end within {most} steps: {self.engine.stats()}")

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs.get(request_id, []) for token in output.token_ids]

    def text(self, request_id: str) -> str:
        return "".join(output.text for output in self.outputs.get(request_id, []))

    def last(self, request_id: str) -> Any:
        return self.outputs[request_id][-1]


def make_bench(
    *,
    num_blocks: int = 64,
    block_tokens: int = 4,
    max_model_len: int = 64,
    is_static: bool = False,
    options: Any = None,
    **policy: Any,
) -> Bench:
    """An engine whose policy is told what matters, with 8 slots and small chunks unless said."""
    told = {"slots": 8, "chunk_tokens": 16, "num_blocks": num_blocks, "block_tokens": block_tokens, **policy}
    spare = -(-told["slots"] // block_tokens) if is_static else 0
    executor, clock = TokenMemory(num_blocks + spare, block_tokens, max_model_len), Ticks()
    bench = Bench(None, executor, clock, plan, plan_nested)
    runner: Any = executor
    if is_static:
        runner = StaticBatch(executor, told["slots"])
        bench.planner = runner.plan
    bench.engine = BallastEngine(
        executor=runner,
        tokenizer=Letters(),
        policy=PolicyConfig(**told),
        options=EngineOptions(directory=Path(), **(options or {})),
        clock=clock,
        planner=lambda snapshot: bench.planner(snapshot),  # noqa: PLW0108 -- a test may exchange it
        nested_planner=lambda *seen: bench.nested_planner(*seen),  # noqa: PLW0108 -- as above
    )
    return bench


def make_generation(request_id: str, prompt: Sequence[int] = (1, 2, 3), online: bool = True, **changes: Any) -> Any:
    """A request; sampling parameters and fields of the request by name, greedy unless said."""
    names = {f.name for f in fields(SamplingParams)}
    sampling = {"temperature": 0.0, "max_tokens": 8, **{k: v for k, v in changes.items() if k in names}}
    return GenerationRequest(
        request_id=request_id,
        prompt=tuple(prompt),
        sampling=SamplingParams(**sampling),
        request_class=RequestClass.ONLINE if online else RequestClass.OFFLINE,
        **{k: v for k, v in changes.items() if k not in names},
    )
