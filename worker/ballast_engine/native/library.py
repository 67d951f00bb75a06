"""The compiled kernels as Python functions. The structures mirror `step.h` and `decoder.c` field by field."""

from __future__ import annotations

import ctypes
import platform
import weakref
from ctypes import POINTER, Structure, byref, c_double, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ballast_engine.batch import Ints
from ballast_engine.native import prebuilt
from ballast_engine.native.compiler import NoCompiler, compiled, cpuinfo
from ballast_engine.suspension import Interrupt
from ballast_log import Log

log = Log(__name__)

MAX_HEAD_DIM = 256
MAX_TILE = 48


def _fields(kind: type[c_int64 | c_void_p], *names: str) -> list[tuple[str, type[c_int64 | c_void_p]]]:
    """Return consecutive fields of one type."""
    return [(name, kind) for name in names]


class CStep(Structure):
    """`step` of step.h."""

    _fields_: ClassVar = [
        *_fields(c_int64, "num_rows", "num_requests", "table_width"),
        *_fields(c_void_p, "token_ids", "positions", "slots", "query_start", "table", "tile_start", "cosines", "sines"),
    ]


class CAttention(Structure):
    """`attention` of step.h."""

    _fields_: ClassVar = [
        *_fields(
            c_int64, "num_heads", "num_kv_heads", "head_dim", "block_tokens", "window", "tile_rows", "is_bfloat16"
        ),
        *_fields(c_void_p, "keys", "values"),
    ]


DRAW = np.dtype(
    [
        ("temperature", np.float32),
        ("min_p", np.float32),
        ("top_p", np.float64),
        ("uniform", np.float64),
        ("top_k", np.int64),
    ]
)
"""`draw` of sampling.c."""

LAYER_TENSORS = (
    "input_norm", "qkv", "qkv_bias", "q_norm", "k_norm", "output", "output_bias",
    "mlp_norm", "gate_up", "gate_up_bias", "down", "down_bias",
)  # fmt: skip


class CLayer(Structure):
    """`layer` of decoder.c."""

    _fields_: ClassVar = [*_fields(c_void_p, *LAYER_TENSORS), ("attention", CAttention)]


class CDecoder(Structure):
    """`decoder` of decoder.c."""

    _fields_: ClassVar = [
        *_fields(c_int64, "num_layers", "hidden", "inner", "vocabulary"),
        ("norm_eps", c_double),
        *_fields(c_void_p, "embedding", "norm", "head"),
        ("layers", POINTER(CLayer)),
    ]


class Team:
    """The caller's thread and its helper threads. One thread uses a team at a time. The helpers end with the team."""

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        self.handle: int | None = library.ballast_pool_open(threads)
        self._end = weakref.finalize(self, library.ballast_pool_close, self.handle)


@dataclass(frozen=True, slots=True)
class Kernels:
    """The functions of the library. Calls release the interpreter lock."""

    library: ctypes.CDLL
    lanes: int
    """Floats in a vector of this processor. Weights are packed into panels of twice as many columns."""

    def team(self, threads: int) -> Team:
        """Start the helper threads for an engine with `threads` threads."""
        return Team(self.library, threads)

    def layers(
        self,
        decoder: CDecoder,
        step: CStep,
        x: Tensor,
        scratch: Tensor,
        *,
        first: int,
        interrupt: Interrupt | None,
        team: Team,
    ) -> int:
        """Compute layers from `first` on (before layer 0 the step's tokens are looked up) until interrupted.

        `x` has the hidden states. Return the first layer that was not computed: the number of layers at the end.
        """
        end = None if interrupt is None else byref(interrupt.layer)
        pointers = (x.data_ptr(), scratch.data_ptr())
        return int(self.library.ballast_layers(byref(decoder), byref(step), *pointers, first, end, team.handle))

    def head(self, decoder: CDecoder, x: Tensor, rows: Ints, scratch: Tensor, *, team: Team) -> Tensor:
        """Return the logits of some rows of `x`, after the final norm."""
        logits = torch.empty(len(rows), decoder.vocabulary)
        pointers = (scratch.data_ptr(), logits.data_ptr())
        self.library.ballast_head(byref(decoder), x.data_ptr(), rows.ctypes.data, len(rows), *pointers, team.handle)
        return logits

    def attention(
        self, attention: CAttention, step: CStep, qkv: tuple[Tensor, Tensor, Tensor], out: Tensor, *, team: Team
    ) -> None:
        """Compute the attention of one layer, on contiguous float32 tensors."""
        pointers = (*(tensor.data_ptr() for tensor in qkv), out.data_ptr())
        self.library.ballast_attention(byref(attention), byref(step), *pointers, team.handle)

    def sample(self, logits: Tensor, how: NDArray[np.void]) -> Ints:
        """Sample one token for each row of contiguous float32 `logits`; `how` is an array of DRAW."""
        rows, vocabulary = logits.shape
        tokens = np.empty(rows, dtype=np.int64)
        scratch = np.empty(2 * (vocabulary + self.lanes), dtype=np.float32)
        pointers = (how.ctypes.data, scratch.ctypes.data, tokens.ctypes.data)
        self.library.ballast_sample(logits.data_ptr(), rows, vocabulary, *pointers)
        return tokens

    def multiply(self, x: Tensor, packed: Tensor, columns: int, *, team: Team) -> Tensor:
        """Multiply `x` by a packed matrix, for tests and benchmarks."""
        out = torch.empty(x.shape[0], columns)
        pointers = (x.data_ptr(), packed.data_ptr(), out.data_ptr())
        self.library.ballast_multiply(x.shape[0], x.shape[1], columns, *pointers, team.handle)
        return out


@cache
def kernels() -> Kernels:
    """Load the prebuilt kernels of this installation for this processor. If there are none, compile and load them.

    Raises:
        NoCompiler: there are no prebuilt kernels, and the kernels cannot be compiled here.
    """
    path = prebuilt.find(prebuilt.FOLDER, platform.machine(), cpuinfo()) or compiled()
    try:
        loaded = load(path)
    except OSError as error:  # a cut file, or a file system without execution
        raise NoCompiler(f"the kernels in {path} cannot be loaded ({error})") from error
    log.info("kernels loaded", path=path)
    return loaded


def load(path: Path) -> Kernels:
    """Load kernels from a shared library that was compiled from the present sources."""
    library = ctypes.CDLL(str(path))
    n, p = c_int64, c_void_p
    for name, result, *arguments in (
        ("lanes", n),
        ("pool_open", p, n),
        ("pool_close", None, p),
        ("layers", n, p, p, p, p, n, p, p),
        ("head", None, p, p, p, n, p, p, p),
        ("attention", None, p, p, p, p, p, p, p),
        ("sample", None, p, n, n, p, p, p),
        ("multiply", None, n, n, n, p, p, p, p),
    ):
        function = getattr(library, f"ballast_{name}")
        function.restype, function.argtypes = result, arguments
    return Kernels(library=library, lanes=int(library.ballast_lanes()))
