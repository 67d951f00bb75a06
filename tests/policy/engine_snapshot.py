"""A snapshot of an engine for the planner, and why the plan treats a request as it does."""

from __future__ import annotations

from workloads import EXACT

from ballast_policy.fairness.ledger import Ledger
from ballast_policy.plan import Reason, StepPlan
from ballast_policy.request import OFFLINE, Phase, Request, RequestClass
from ballast_policy.snapshot import EngineSnapshot, PolicyConfig
from ballast_policy.step.planner import plan

BLOCK = 4


class Engine:
    """A snapshot in the making: residents and waiting requests, numbered as they are added."""

    def __init__(self, *, slots: int = 8, num_blocks: int = 1000, now: float = 10.0, **config):
        usual = {"offline_share": 0.25, "chunk_tokens": 64, "tail_tokens": 0, "watermark": 0.0}
        self.config = PolicyConfig(slots=slots, num_blocks=num_blocks, block_tokens=BLOCK, **{**usual, **config})
        self.now = now
        self.cost = EXACT
        self.residents: list[Request] = []
        self.waiting: list[Request] = []
        self.ledgers = {request_class: Ledger() for request_class in RequestClass}
        self.extra: dict[str, object] = {}

    def add(self, request_class: RequestClass, tokens: int, **fields) -> Request:
        usual = {"arrival": self.now, "num_prompt": tokens, "max_output": 100, "num_tokens": tokens}
        seq = len(self.residents) + len(self.waiting)
        request = Request(seq, request_class, **{**usual, **fields})
        (self.waiting if request.phase is Phase.WAITING else self.residents).append(request)
        return request

    def decoding(self, request_class: RequestClass, *, tokens: int = 10, phase: Phase = Phase.RUNNING, **fields):
        blocks = -(-(tokens - 1) // BLOCK)
        kv = {"num_blocks": blocks, "num_private_blocks": blocks, "num_computed": tokens - 1, "num_output": 1}
        return self.add(request_class, tokens, phase=phase, num_prompt=tokens - 1, **{**kv, **fields})

    def prefilling(self, request_class: RequestClass, *, tokens: int, done: int = 0, phase: Phase = Phase.RUNNING):
        kv = {"num_blocks": -(-done // BLOCK), "num_private_blocks": -(-done // BLOCK), "num_computed": done}
        return self.add(request_class, tokens, phase=phase, **kv)

    def snapshot(self) -> EngineSnapshot:
        return EngineSnapshot(
            now=self.now,
            residents=self.residents,
            waiting=sorted(self.waiting, key=lambda r: (r.request_class is OFFLINE, -r.priority)),
            free_blocks=self.extra.pop(
                "free_blocks", self.config.num_blocks - sum(r.num_blocks for r in self.residents)
            ),
            config=self.config,
            cost=self.cost,
            reservation=self.config.reservation(self.extra.pop("ceiling", None)),
            ledgers=self.ledgers,
            **self.extra,
        )

    def plan(self) -> StepPlan:
        return plan(self.snapshot())


def why(decided: StepPlan, request: Request) -> Reason:
    (reason,) = {because.reason for because in decided.because if because.request is request}
    return reason
