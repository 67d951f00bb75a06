"""KV blocks of a simulated replica (`host.Kv`): counts instead of memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ballast_policy.request import Request
from ballast_sim.errors import PolicyDefect
from ballast_sim.replay.simulated import SimulatedRequest


@dataclass
class SimulatedKv:
    """Counts the blocks of one replica. It has no prefix cache: `benchmarks/llm_d` adds one."""

    num_blocks: int
    block_tokens: int
    items: Mapping[int, SimulatedRequest]
    """Every request of the replica, by `seq`."""
    num_free: int = field(init=False)
    """Blocks that no request uses."""

    def __post_init__(self) -> None:
        self.num_free = self.num_blocks

    def hint(self, request: Request) -> None:
        """Set the number of tokens that a cache holds for a waiting request: none."""

    def admit(self, request: Request) -> None:
        """Assign to a waiting request the blocks that a cache holds for it: none."""

    def extend(self, request: Request, num_tokens: int) -> bool:
        """Allocate the blocks for computing `num_tokens` more; raise PolicyDefect if there are not enough."""
        if not self.take(request, num_tokens):
            raise PolicyDefect(f"{num_tokens} tokens granted to {request}, {self.num_free} KV blocks are free")
        return True

    def take(self, request: Request, num_tokens: int) -> bool:
        """Allocate the blocks for computing `num_tokens` more; return False if there are not enough."""
        end = -(-(request.num_computed + num_tokens) // self.block_tokens)
        needed = max(0, end - request.num_blocks)
        if needed > self.num_free:
            return False
        self.num_free -= needed
        request.num_blocks += needed
        request.num_private_blocks += needed
        return True

    def publish(self, item: SimulatedRequest) -> None:
        """Add the prefix of a request to a cache, if the last step completed it."""

    def release(self, request: Request) -> None:
        """Free all blocks of a preempted request."""
        self.free(request)

    def free(self, request: Request) -> None:
        """Free all blocks of a request that has ended."""
        self.num_free += request.num_private_blocks
        request.num_blocks = request.num_private_blocks = request.num_computed = 0

    def check(self) -> None:
        """Check that every block is counted once (G8); raise PolicyDefect if it is not."""
        held = sum(item.request.num_private_blocks for item in self.items.values())
        if held + self.num_free != self.num_blocks:
            raise PolicyDefect(f"{held} held and {self.num_free} free KV blocks of {self.num_blocks}")
