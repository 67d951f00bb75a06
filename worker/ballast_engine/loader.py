"""Load the weights of a checkpoint directory, or raise an error that states what is wrong with it."""

from __future__ import annotations

import math
import os
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Literal, Protocol, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ballast_engine.attention.cpu import CpuAttention
from ballast_engine.errors import InvalidCheckpoint, InvalidOptions
from ballast_engine.models.config import ModelConfig, parse_config, read_json
from ballast_engine.models.packing import Packing
from ballast_engine.models.weights import DecoderWeights, Shape, Take, assemble, expected_tensors
from ballast_engine.native.compiler import NoCompiler
from ballast_engine.native.library import kernels
from ballast_log import Log

log = Log(__name__)

Backend = Literal["sdpa", "cpu"]
LoadFormat = Literal["auto", "dummy"]
_DTYPES = {"auto": torch.float32, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_HARMLESS = ("rotary_emb.inv_freq", "masked_bias", "attn.bias")
"""Buffers in old checkpoints. The engine computes them itself."""
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_ROWS = 1024


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory, without KV pages."""

    config: ModelConfig
    weights: DecoderWeights
    dtype: torch.dtype
    attention: Backend
    threads: int
    num_params: int
    """Parameters in the checkpoint. A tied head counts once."""


def load(
    directory: Path,
    *,
    dtype: str = "auto",
    load_format: LoadFormat = "auto",
    attention: str = "auto",
    threads: int = 0,
) -> LoadedModel:
    """Load a checkpoint directory. The format `dummy` reads only `config.json` and draws seeded random weights."""
    if not directory.is_dir():
        raise InvalidCheckpoint(
            f"{directory} is not a directory: use a directory with config.json, model.safetensors and tokenizer.json."
        )
    started, file = time.perf_counter(), directory / "config.json"
    config, kind = parse_config(read_json(file), where=str(file)), _dtype(dtype)
    used_threads = set_threads(threads)
    backend = _backend(attention, config, kind)
    packing = Packing(kernels().lanes) if backend == "cpu" and kind == torch.float32 else None
    with ExitStack() as stack:
        found = None if load_format == "dummy" else _Checkpoint(directory, config, stack, dtype=kind)
        config, take = (config, _random(kind)) if found is None else (found.config, found.take)
        weights = assemble(config, take, packing)
    loaded = LoadedModel(
        config=config,
        weights=weights,
        dtype=kind,
        attention=backend,
        threads=used_threads,
        num_params=sum(math.prod(shape) for shape in expected_tensors(config).values()),
    )
    log.info(
        "model loaded",
        directory=directory,
        architecture=config.architecture,
        parameters=loaded.num_params,
        dtype=kind,
        seconds=time.perf_counter() - started,
    )
    return loaded


def set_threads(wanted: int) -> int:
    """Set torch's threads and return their number. 0 uses all cores except one, which is left to other threads.

    With as many threads as cores, any other runnable thread interrupts one of them in the middle of a parallel section,
    and the others wait a time slice of the kernel for it: 12 ms instead of 0.1 ms.
    """
    threads = wanted or max(1, len(os.sched_getaffinity(0)) - 1)
    torch.set_num_threads(threads)
    return threads


def _dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise InvalidOptions(f"{name!r} is not a data type of this engine: use {', '.join(_DTYPES)}.")
    return _DTYPES[name]


def _backend(wanted: str, config: ModelConfig, dtype: torch.dtype) -> Backend:
    """Return the backend: for `auto` the compiled kernel if it can run here, else `sdpa`.

    Raises:
        InvalidOptions: the backend is unknown, or it was asked for by name and cannot run here.
    """
    if wanted not in {"auto", "sdpa", "cpu"}:
        raise InvalidOptions(f"{wanted!r} is not an attention backend of this engine: use auto, sdpa or cpu.")
    if wanted == "sdpa":
        return "sdpa"
    obstacle = _obstacle(config, dtype)
    if obstacle is None:
        return "cpu"
    if wanted == "cpu":
        raise InvalidOptions(f"The attention backend 'cpu' cannot run here: {obstacle}. Choose 'auto' or 'sdpa'.")
    log.warning("compiled kernels not used, the engine runs slower", reason=obstacle)
    return "sdpa"


def _obstacle(config: ModelConfig, dtype: torch.dtype) -> str | None:
    heads = {"num_heads": config.num_heads, "num_kv_heads": config.num_kv_heads, "head_dim": config.head_dim}
    of_model = CpuAttention.obstacle(**heads, dtype=dtype)
    if of_model is not None:
        return of_model
    try:
        kernels()
    except NoCompiler as reason:
        return str(reason)
    return None


class _Slice(Protocol):
    def __getitem__(self, rows: slice) -> Tensor: ...
    def get_shape(self) -> list[int]: ...


class _File(Protocol):
    """The part of safetensors that the loader uses; the library has no types."""

    def keys(self) -> list[str]: ...

    def get_tensor(self, name: str) -> Tensor: ...

    def get_slice(self, name: str) -> _Slice: ...


class _Checkpoint:
    """The safetensors files of a directory. They are checked against the model before a tensor is read."""

    def __init__(self, directory: Path, config: ModelConfig, stack: ExitStack, *, dtype: torch.dtype) -> None:
        self._directory = directory
        self._dtype = dtype
        self._files = {name: self._open(name, stack) for name in self._file_names()}
        self._holder = {tensor: name for name, file in self._files.items() for tensor in list(file.keys())}
        self.config = replace(config, tie_embeddings=config.tie_embeddings and _HEAD not in self._holder)
        """The configuration of these weights: embedding and head are tied if they have equal values."""
        self._check()
        if self.config != config:
            if self._repeats_embedding():
                self.config = config
            else:
                log.warning("lm_head.weight differs from the embedding and is used, although config.json ties both")

    def take(self, name: str, _shape: Shape) -> Tensor:
        """Read one tensor."""
        file_name = self._holder[name]
        try:
            tensor = self._files[file_name].get_tensor(name)
        except (SafetensorError, RuntimeError, ValueError) as error:
            raise InvalidCheckpoint(
                f"{self._directory / file_name}: tensor {name} is not readable ({error}): download the file again."
            ) from error
        if not tensor.is_floating_point():
            raise InvalidCheckpoint(
                f"{self._directory / file_name}: tensor {name} is of type {tensor.dtype}; quantized weights are "
                f"not supported: use the original checkpoint."
            )
        return tensor.to(self._dtype)

    def _file_names(self) -> list[str]:
        directory = self._directory
        if (directory / _SINGLE).is_file():
            return [_SINGLE]
        if not (directory / _INDEX).is_file():
            others = sorted(
                path.name for path in directory.iterdir() if path.suffix in {".bin", ".pt", ".pth", ".gguf"}
            )
            found = f" (found {', '.join(others[:3])}, which this engine does not read)" if others else ""
            raise InvalidCheckpoint(
                f"{directory} has neither {_SINGLE} nor {_INDEX}{found}: use a checkpoint in safetensors format, or "
                f"use the load format 'dummy' for random weights."
            )
        mapping = read_json(directory / _INDEX).get("weight_map")
        if not isinstance(mapping, dict) or not mapping:
            raise InvalidCheckpoint(f"{directory / _INDEX} has no weight_map: download the model again.")
        names = sorted({str(name) for name in mapping.values()})
        outside = [name for name in names if Path(name).name != name]
        if outside:
            raise InvalidCheckpoint(
                f"{directory / _INDEX} names {_some(outside)}, expected files of the checkpoint directory without a "
                f"folder: use the index of the original checkpoint."
            )
        missing = [name for name in names if not (directory / name).is_file()]
        if missing:
            raise InvalidCheckpoint(
                f"{directory} lacks {len(missing)} of {len(names)} weight files ({_some(missing)}): download them."
            )
        return names

    def _open(self, name: str, stack: ExitStack) -> _File:
        path = self._directory / name
        try:
            return cast("_File", stack.enter_context(safe_open(path, framework="pt")))
        except (SafetensorError, OSError) as error:
            raise InvalidCheckpoint(
                f"{path} ({path.stat().st_size} bytes) is not a whole safetensors file ({error}): download it again."
            ) from error

    def _repeats_embedding(self) -> bool:
        """Return whether the head has the values of the embedding, with a few rows of both in memory at a time."""
        head, embedding = (self._files[self._holder[name]].get_slice(name) for name in (_HEAD, _EMBEDDING))
        parts = (slice(start, start + _ROWS) for start in range(0, self.config.vocab_size, _ROWS))
        return all(torch.equal(head[part].to(self._dtype), embedding[part].to(self._dtype)) for part in parts)

    def _check(self) -> None:
        expected = expected_tensors(self.config)
        missing = [name for name in expected if name not in self._holder]
        if missing:
            raise InvalidCheckpoint(
                f"{self._directory} lacks {len(missing)} of the {len(expected)} tensors of a "
                f"{self.config.architecture} ({_some(missing)}): download the weights that belong to this config.json."
            )
        unknown = [name for name in self._holder if name not in expected and not name.endswith(_HARMLESS)]
        if unknown:
            raise InvalidCheckpoint(
                f"{self._directory} holds {len(unknown)} tensors ({_some(unknown)}) that a {self.config.architecture} "
                f"of this config.json does not use, so results would be wrong: use the config.json of these weights."
            )
        for name, shape in expected.items():
            found = tuple(self._files[self._holder[name]].get_slice(name).get_shape())
            if found != shape:
                raise InvalidCheckpoint(
                    f"{self._directory / self._holder[name]}: tensor {name} has shape {list(found)}; config.json asks "
                    f"for {list(shape)}: use the config.json of these weights."
                )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")


def _random(dtype: torch.dtype) -> Take:
    """Return a function that draws seeded weights of unit gain: norms 1, biases 0, matrices uniform."""
    seeds = count()

    def take(name: str, shape: Shape) -> Tensor:
        if len(shape) == 1:
            return torch.full(shape, 0.0 if name.endswith("bias") else 1.0, dtype=dtype)
        generator = torch.Generator().manual_seed(next(seeds))
        bound = math.sqrt(3 / shape[1])
        return torch.empty(shape, dtype=dtype).uniform_(-bound, bound, generator=generator)

    return take
