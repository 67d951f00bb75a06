"""Who holds KV and who holds a slot: carries out what a plan says, and keeps the policy's records true."""

from __future__ import annotations

from collections.abc import Iterable, ValuesView
from collections.abc import Sequence as Items

from ballast_engine.batch import Batch
from ballast_engine.errors import IntegrityError
from ballast_engine.kv import BlockPool
from ballast_engine.sequence import Sequence
from ballast_engine.tables import Tables
from ballast_policy.request import Phase, Request, RequestClass


class Residency:
    """The residents of an engine, their blocks and their slots."""

    def __init__(self, pool: BlockPool, tables: Tables) -> None:
        self.pool = pool
        self.held = {c: {Phase.RUNNING: 0, Phase.PARKED: 0} for c in RequestClass}
        """Residents by class and phase."""
        self.num_unused = 0
        """Token positions in the residents' blocks that hold nothing yet."""
        self._tables = tables
        self._residents: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._residents)

    def sequences(self) -> ValuesView[Sequence]:
        """Give every resident, in the order of admission."""
        return self._residents.values()

    def requests(self) -> list[Request]:
        """Give the records of all residents, with their private blocks counted anew."""
        private = self.pool.num_private
        requests = []
        for seq, sequence in self._residents.items():
            request = sequence.request
            request.num_private_blocks = private[seq]
            requests.append(request)
        return requests

    def hint(self, sequence: Sequence) -> None:
        """Tell a waiting request what the prefix cache would give it now."""
        blocks = self._cached_blocks(sequence)
        sequence.request.num_cached = len(blocks) * self.pool.block_tokens
        sequence.request.num_cached_idle = self.pool.num_idle(blocks)

    def _cached_blocks(self, sequence: Sequence) -> list[int]:
        """At least one token is always computed: its logits are what the next one is drawn from."""
        digests = sequence.digests
        most = (sequence.request.num_tokens - 1) // self.pool.block_tokens
        return self.pool.match(digests if len(digests) <= most else digests[:most])

    def admit(self, sequence: Sequence) -> None:
        """Give it a slot and the blocks that the prefix cache has of it."""
        request = sequence.request
        blocks = self._cached_blocks(sequence)
        self.pool.share(request.seq, blocks)
        sequence.blocks = blocks
        sequence.num_registered = len(blocks)
        sequence.row = self._tables.take_row()
        self._tables.write(sequence, 0)
        request.num_blocks = len(blocks)
        request.num_computed = request.num_cached = len(blocks) * self.pool.block_tokens
        self._residents[request.seq] = sequence
        self.held[request.request_class][Phase.RUNNING] += 1
        request.phase = Phase.RUNNING

    def park(self, sequence: Sequence) -> None:
        """Take its slot, leave its KV."""
        self._move(sequence.request, Phase.PARKED)

    def resume(self, sequence: Sequence) -> None:
        """Give a parked request its slot back."""
        self._move(sequence.request, Phase.RUNNING)

    def _move(self, request: Request, phase: Phase) -> None:
        held = self.held[request.request_class]
        held[request.phase] -= 1
        held[phase] += 1
        request.phase = phase

    def extend(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make room for that many more tokens; False, and nothing changed, where blocks are short."""
        request = sequence.request
        size = self.pool.block_tokens
        missing = -(-(request.num_computed + num_tokens) // size) - request.num_blocks
        if missing <= 0:
            return True
        if missing > self.pool.num_available:
            return False
        sequence.blocks += self.pool.allocate(request.seq, missing)
        self._tables.write(sequence, request.num_blocks)
        request.num_blocks += missing
        self.num_unused += missing * size
        return True

    def settle(self, sequence: Sequence, num_tokens: int) -> None:
        """Take note that the step has written that many more tokens: full blocks can be found from now on."""
        request = sequence.request
        request.num_computed += num_tokens
        self.num_unused -= num_tokens
        num_full = request.num_computed // self.pool.block_tokens
        if num_full > sequence.num_registered and self.pool.has_prefix_cache:
            sequence.hash_blocks(request.num_computed)
            for i in range(sequence.num_registered, num_full):
                self.pool.register(sequence.blocks[i], sequence.digests[i])
            sequence.num_registered = num_full

    def release(self, sequence: Sequence) -> None:
        """Take its slot and its KV; what was settled stays in the prefix cache until the blocks are needed."""
        request = sequence.request
        del self._residents[request.seq]
        self.held[request.request_class][request.phase] -= 1
        self.num_unused -= request.num_blocks * self.pool.block_tokens - request.num_computed
        self._tables.give_row(sequence)
        self.pool.release(request.seq, sequence.blocks)
        sequence.blocks = []
        sequence.num_registered = 0
        request.phase = Phase.WAITING
        request.num_computed = request.num_blocks = request.num_private_blocks = 0

    def assemble(self, decodes: Items[Sequence], chunks: Items[tuple[Sequence, int]]) -> Batch:
        """Lay out a step of residents whose room was made with `extend`."""
        return self._tables.assemble(decodes, chunks)

    def check_integrity(self, live: Iterable[Sequence]) -> None:
        """Compare blocks, tables, slots and counts with one another and with the requests that did not end.

        Raises:
            IntegrityError: says what does not balance.
        """
        self.pool.check_integrity({seq: sequence.blocks for seq, sequence in self._residents.items()})
        held = {c: {Phase.RUNNING: 0, Phase.PARKED: 0} for c in RequestClass}
        unused = 0
        for sequence in live:
            request = sequence.request
            if (request.phase is not Phase.WAITING) != (request.seq in self._residents):
                raise IntegrityError(f"request {request.seq} is {request.phase.name}, but the residents say otherwise")
            if request.phase is Phase.WAITING:
                if request.num_blocks or request.num_computed or sequence.blocks or sequence.row != -1:
                    raise IntegrityError(f"request {request.seq} waits and holds KV")
                continue
            held[request.request_class][request.phase] += 1
            self._tables.check(sequence)
            capacity = request.num_blocks * self.pool.block_tokens
            if request.num_blocks != len(sequence.blocks) or not 0 <= request.num_computed <= capacity:
                raise IntegrityError(f"request {request.seq} computed {request.num_computed} of {capacity} positions")
            unused += capacity - request.num_computed
        if held != self.held or unused != self.num_unused:
            raise IntegrityError(f"slots {self.held} and {self.num_unused} unused positions, found {held}, {unused}")
        if self._tables.num_rows != len(self._residents):
            raise IntegrityError(f"{self._tables.num_rows} table rows for {len(self._residents)} residents")
