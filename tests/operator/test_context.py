"""What the operator knows of its surroundings: a part that is read slowly does not undo another."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from ballast_operator.context import OperatorContext
from ballast_operator.inference_deployment import RESOURCE_TYPE
from ballast_operator.metrics import Metrics
from ballast_operator.process import Operator
from ballast_operator.settings import OperatorSettings


class SlowCluster:
    """Does not answer which kinds there are before it may."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.is_asked = asyncio.Event()

    async def plurals(self, _: object) -> frozenset[str]:
        self.is_asked.set()
        await self.may_answer.wait()
        return frozenset({"prometheusrules"})


class Bench(Operator):
    """Shows the context."""

    def __init__(self, cluster: SlowCluster) -> None:
        settings = OperatorSettings(namespace="ballast", worker_image="worker:1")
        super().__init__(settings, (RESOURCE_TYPE,), cast(Any, cluster), Metrics(), asyncio.Event())

    @property
    def context(self) -> OperatorContext:
        return self._context

    async def read_kinds(self) -> None:
        await self._read_kinds()

    def refuse_users(self) -> None:
        self._note_refusal(is_refused=True)


def test_what_changes_while_the_kinds_are_read_is_kept() -> None:
    async def read() -> OperatorContext:
        cluster = SlowCluster()
        bench = Bench(cluster)
        reading = asyncio.create_task(bench.read_kinds())
        await cluster.is_asked.wait()
        bench.refuse_users()
        cluster.may_answer.set()
        await reading
        bench.poller.close()
        return bench.context

    context = asyncio.run(read())

    assert context.refuses_users is True
    assert "PrometheusRule" in context.kinds
