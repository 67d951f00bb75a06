"""Shared by the engine's tests: small checkpoints made by transformers, and batches made by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ballast_engine.batch import Batch, Ints, SampleRow
from ballast_engine.request import SamplingParams
from ballast_engine.suspension import Computation, Interrupt, Suspended, advance

SMALL = {
    "vocab_size": 193,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, tied embeddings, one key head": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "llama, llama3 rope": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama, linear rope": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "llama, biases everywhere": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, wide heads": ("Llama", {"head_dim": 128, "num_key_value_heads": 4}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral, sliding window": ("Mistral", {"sliding_window": 11, "head_dim": 16}),
    "qwen2": ("Qwen2", {"num_attention_heads": 6, "num_key_value_heads": 2}),
    "qwen2, tied embeddings, window in the upper layers": (
        "Qwen2",
        {"tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3, tied embeddings, biases": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True, "attention_bias": True}),
}


def make_reference(name: str) -> Any:
    """A tiny random model of transformers, in float32, with norms and biases that matter."""
    import torch
    import transformers

    kind, changes = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **changes})
    config._attn_implementation = "eager"  # noqa: SLF001 -- transformers has no other way
    torch.manual_seed(len(name))
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.normal_(mean=0.0 if key.endswith("bias") else 1.0, std=0.2)
            else:
                parameter.normal_(std=0.15)
    return model


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    """A word-level tokenizer with so many entries: enough for a checkpoint to be complete."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    vocabulary = {f"w{index}": index for index in range(vocab_size)}
    Tokenizer(WordLevel(vocabulary, unk_token="w0")).save(str(directory / "tokenizer.json"))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Torch's threads wait for each other: beside other work on few cores, a hundred times as long as they work."""
    import torch

    torch.set_num_threads(1)


@dataclass
class Checkpoints:
    """Tiny checkpoints on disk, each with the transformers model that it was saved from."""

    root: Path
    made: dict[str, tuple[Path, Any]] = field(default_factory=dict)

    def __call__(self, name: str) -> tuple[Path, Any]:
        if name not in self.made:
            directory = self.root / f"model{len(self.made)}"
            reference = make_reference(name)
            reference.save_pretrained(directory)
            write_tokenizer(directory, reference.config.vocab_size)
            self.made[name] = (directory, reference)
        return self.made[name]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(params=MODELS)
def architecture(request: pytest.FixtureRequest) -> str:
    """The name of each tiny checkpoint, one after the other."""
    return str(request.param)


@dataclass
class Part:
    """What one request contributes to a batch by hand."""

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    sampling: SamplingParams | None = None
    """None samples nothing; otherwise the last row is sampled."""
    every_row: bool = False
    """Sample every row of it."""


def make_batch(parts: Sequence[Part], block_tokens: int) -> Batch:
    """A batch of parts; decodes must come first."""
    positions = [np.arange(part.start, part.start + len(part.tokens)) for part in parts]
    slots = [
        np.asarray(part.blocks)[where // block_tokens] * block_tokens + where % block_tokens
        for part, where in zip(parts, positions, strict=True)
    ]
    starts = np.cumsum([0] + [len(part.tokens) for part in parts])
    table = np.zeros((len(parts), max(len(part.blocks) for part in parts)), dtype=np.int64)
    rows: list[int] = []
    samples: list[SampleRow] = []
    for index, part in enumerate(parts):
        table[index, : len(part.blocks)] = part.blocks
        if part.sampling is None:
            continue
        for row in range(0 if part.every_row else len(part.tokens) - 1, len(part.tokens)):
            rows.append(int(starts[index]) + row)
            samples.append(SampleRow(sampling=part.sampling, position=part.start + row + 1))
    is_decode = [len(part.tokens) == 1 for part in parts]
    return Batch(
        token_ids=np.concatenate([np.asarray(part.tokens, dtype=np.int64) for part in parts]),
        positions=np.concatenate(positions).astype(np.int64),
        slot_mapping=np.concatenate(slots).astype(np.int64),
        query_start=starts.astype(np.int64),
        context_lens=np.array([part.start + len(part.tokens) for part in parts], dtype=np.int64),
        block_table=table,
        sample_rows=np.array(rows, dtype=np.int64),
        samples=tuple(samples),
        num_decodes=next((index for index, one in enumerate(is_decode) if not one), len(parts)),
    )


@pytest.fixture(scope="session")
def batch_of() -> Callable[[Sequence[Part], int], Batch]:
    return make_batch


@pytest.fixture(scope="session")
def part() -> type[Part]:
    return Part


class Letters:
    """A vocabulary at the engine's edge: token i is a letter, token 0 ends an answer and has no text."""

    eos_ids = frozenset({0})

    def __init__(self) -> None:
        from tokenizers import Tokenizer, models

        from ballast_engine.token_bytes import TokenBytes

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
        from zlib import crc32

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
            self.engine.check_integrity()

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
    from replay.static_batch import StaticBatch

    from ballast_engine.engine import BallastEngine
    from ballast_engine.options import EngineOptions
    from ballast_policy.snapshot import PolicyConfig
    from ballast_policy.step.planner import plan
    from ballast_policy.step.suspension import plan_nested

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


@pytest.fixture(scope="session")
def bench_of() -> Callable[..., Bench]:
    return make_bench


def make_generation(request_id: str, prompt: Sequence[int] = (1, 2, 3), online: bool = True, **changes: Any) -> Any:
    """A request; sampling parameters and fields of the request by name, greedy unless said."""
    from dataclasses import fields

    from ballast_engine.request import GenerationRequest
    from ballast_policy.request import RequestClass

    names = {f.name for f in fields(SamplingParams)}
    sampling = {"temperature": 0.0, "max_tokens": 8, **{k: v for k, v in changes.items() if k in names}}
    return GenerationRequest(
        request_id=request_id,
        prompt=tuple(prompt),
        sampling=SamplingParams(**sampling),
        request_class=RequestClass.ONLINE if online else RequestClass.OFFLINE,
        **{k: v for k, v in changes.items() if k not in names},
    )


@pytest.fixture(scope="session")
def generation() -> Callable[..., Any]:
    return make_generation
