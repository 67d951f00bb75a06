"""Pack matrices as the compiled kernels read them: panels of columns, `[panel, depth, 2 * lanes]`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True, slots=True)
class Packing:
    """Pack weights `[columns, depth]` for vectors of `lanes` floats. Zeros fill the last panel."""

    lanes: int

    def matrix(self, weight: Tensor) -> Tensor:
        """Pack a plain projection."""
        return self._panels(weight, 2 * self.lanes)

    def gated(self, gate_up: Tensor) -> Tensor:
        """Pack gate and up. Each panel has the same columns of both, so that one pass multiplies them."""
        gate, up = gate_up.chunk(2)
        return torch.cat((self._panels(gate, self.lanes), self._panels(up, self.lanes)), dim=2).contiguous()

    def bias(self, bias: Tensor) -> Tensor:
        """Pack the bias of a plain projection."""
        return self.matrix(bias[:, None]).flatten()

    def gated_bias(self, bias: Tensor) -> Tensor:
        """Pack the bias of gate and up."""
        return self.gated(bias[:, None]).flatten()

    @staticmethod
    def _panels(weight: Tensor, width: int) -> Tensor:
        columns, depth = weight.shape
        filled = pad(weight, (0, 0, 0, -columns % width))
        return filled.view(-1, width, depth).transpose(1, 2).contiguous()
