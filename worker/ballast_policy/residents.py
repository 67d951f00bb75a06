"""The residents of an engine, sorted into who decodes, who prefills and who is parked: one pass over the records."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from ballast_policy.request import ONLINE, PARKED, Request


@dataclass(slots=True)
class Residents:
    """Residents of one class, and what the planner sums up over them."""

    decodes: list[Request] = field(default_factory=list)
    """RUNNING with one token to compute."""
    prefills: list[Request] = field(default_factory=list)
    """RUNNING with more."""
    parked: list[Request] = field(default_factory=list)
    leaving: list[Request] = field(default_factory=list)
    """Parked in this step: they may still have to give up their KV."""
    growing: list[Request] = field(default_factory=list)
    """Decodes whose next token needs a new block."""
    context: int = 0
    """Sum of the contexts of `decodes`, their next token counted."""
    num_started: int = 0
    """Who was admitted or resumed in this step."""
    is_counted: bool = False
    """True once the planner has taken the blocks and the time of `decodes` into account."""
    num_blocks: int = 0
    """KV that the class holds; a block shared by two counts twice."""

    @property
    def num_running(self) -> int:
        """Slots that the class held already."""
        return len(self.decodes) + len(self.prefills)

    @property
    def num_held(self) -> int:
        """Slots that the class holds, those given to it in this step among them."""
        return len(self.decodes) + len(self.prefills) + self.num_started

    @property
    def running(self) -> list[Request]:
        """Who holds a slot."""
        return self.decodes + self.prefills

    @property
    def everyone(self) -> list[Request]:
        """Who holds KV."""
        return self.decodes + self.prefills + self.parked + self.leaving

    def remove(self, gone: set[Request]) -> None:
        """Take out those that take no further part in this step."""
        self.parked = [request for request in self.parked if request not in gone]
        self.prefills = [request for request in self.prefills if request not in gone]
        self.leaving = [request for request in self.leaving if request not in gone]
        self.growing = [request for request in self.growing if request not in gone]
        self.decodes = [request for request in self.decodes if request not in gone]
        self.context = sum([request.num_tokens for request in self.decodes])


def sort_residents(residents: Collection[Request], block_tokens: int) -> tuple[Residents, Residents]:
    """Give the online and the offline residents."""
    online: list[Request] = []
    offline: list[Request] = []
    for request in residents:
        if request.request_class is ONLINE:
            online.append(request)
        else:
            offline.append(request)
    return _sorted(online, block_tokens), _sorted(offline, block_tokens)


def _sorted(requests: Sequence[Request], block_tokens: int) -> Residents:
    """Sort those of one class; the sums are local, for this loop is the longest of a step."""
    decodes: list[Request] = []
    prefills: list[Request] = []
    parked: list[Request] = []
    growing: list[Request] = []
    context = held = 0
    for request in requests:
        num_blocks, num_computed = request.num_blocks, request.num_computed
        held += num_blocks
        if request.phase is PARKED:
            parked.append(request)
        elif request.num_tokens - num_computed > 1:
            prefills.append(request)
        else:
            decodes.append(request)
            context += num_computed
            if num_computed >= num_blocks * block_tokens:
                growing.append(request)
    context += len(decodes)
    return Residents(decodes, prefills, parked, growing=growing, context=context, num_blocks=held)
