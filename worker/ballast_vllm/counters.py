"""The counters of one EngineCore, beside those that every engine has."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice

from ballast_engine.counters import EngineCounters
from ballast_engine.stats import StepRecord
from ballast_policy.request import RequestClass

MOST_STEPS = 4096
"""Steps that are kept for the next reader. Bounds memory: a reader asks once a second."""


@dataclass(slots=True)
class Counters:
    """Counters since EngineCore started."""

    tokens: EngineCounters = field(default_factory=EngineCounters)
    records: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=MOST_STEPS))
    """The last steps; the last of them has the number `tokens.steps`."""
    in_step: Mapping[RequestClass, int] = field(default_factory=dict)
    """Requests of the last step of an encoder. Each holds a slot within its step only."""

    def note_step(self, record: StepRecord) -> None:
        """Count a step that ended."""
        self.tokens.steps += 1
        self.records.append(record)

    def since(self, number: int) -> list[StepRecord]:
        """Return the kept steps after the step with this number."""
        num_new = min(max(0, self.tokens.steps - number), len(self.records))
        return [*islice(self.records, len(self.records) - num_new, None)]
