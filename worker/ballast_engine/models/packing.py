"""Pack matrices as the compiled kernels read them: panels of columns, `[panel, depth, 2 * lanes]`."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from ballast_engine.memory import HugePages


@dataclass(frozen=True, slots=True)
class Packing:
    """Pack weights `[columns, depth]` for vectors of `lanes` floats. Zeros fill the last panel."""

    lanes: int
    memory: HugePages = field(default_factory=HugePages)

    def matrix(self, weight: Tensor) -> Tensor:
        """Pack a plain projection."""
        return self._packed(self._panels(weight, 2 * self.lanes))

    def gated(self, gate_up: Tensor) -> Tensor:
        """Pack gate and up. Each panel has the same columns of both, so that one pass multiplies them."""
        gate, up = gate_up.chunk(2)
        return self._packed(self._panels(gate, self.lanes), self._panels(up, self.lanes))

    def bias(self, bias: Tensor) -> Tensor:
        """Pack the bias of a plain projection."""
        return self.matrix(bias[:, None]).flatten()

    def gated_bias(self, bias: Tensor) -> Tensor:
        """Pack the bias of gate and up."""
        return self.gated(bias[:, None]).flatten()

    def _packed(self, *parts: Tensor) -> Tensor:
        num_panels, depth, _ = parts[0].shape
        packed = self.memory.zeros((num_panels, depth, 2 * self.lanes), parts[0].dtype)
        return torch.cat(parts, dim=2, out=packed)

    @staticmethod
    def _panels(weight: Tensor, width: int) -> Tensor:
        columns, depth = weight.shape
        filled = pad(weight, (0, 0, 0, -columns % width))
        return filled.view(-1, width, depth).transpose(1, 2)
