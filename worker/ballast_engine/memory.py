"""Memory in huge pages, for weights and KV.

A step reads hundreds of megabytes once. With pages of 4 KiB, the processor looks up the address of each page again.
"""

from __future__ import annotations

import contextlib
import math
import mmap

import torch
from torch import Tensor

_HUGE = 2 * 1024 * 1024
_CHUNK = 32 * _HUGE
_ALIGNED = 64


class HugePages:
    """Allocates tensors from large mappings. A mapping lives as long as a tensor of it."""

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor of zeros."""
        size = math.prod(shape) * dtype.itemsize
        if size > len(self._left):
            self._left = _mapped(max(_CHUNK, -(-size // _HUGE) * _HUGE))
        found = self._left[:size].view(dtype).view(shape)
        self._left = self._left[-(-size // _ALIGNED) * _ALIGNED :]
        return found


def _mapped(size: int) -> Tensor:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):  # a system without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
