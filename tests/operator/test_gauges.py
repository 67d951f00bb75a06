"""The gauges of the operator show what is, and nothing that was."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from ballast_operator.kinds import INFERENCE_DEPLOYMENT, Key
from ballast_operator.metrics import Figures, Metrics
from ballast_operator.process import Operator
from ballast_operator.settings import OperatorSettings


class Bench(Operator):
    """Shows the figures of one resource."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        settings = OperatorSettings(namespace="ballast", worker_image="worker:1")
        super().__init__(settings, cast(Any, None), self.metrics, asyncio.Event())

    def show(self, *figures: Figures) -> str:
        """Return the gauges of a resource with these figures, or without a resource."""
        known = cast(dict[Key, Figures], self.reconciler.figures)
        known.clear()
        known.update({Key(INFERENCE_DEPLOYMENT, "ns", "llm"): each for each in figures})
        self.refresh()
        return self.metrics.text().decode()


def test_former_conditions_and_parts_and_deleted_resources_are_not_exported() -> None:
    """An alert that follows them would never end."""
    bench = Bench()
    before = bench.show(Figures("NotReady", 1, 0, (("Ready", "False", "SchedulingGated"),), {"head": False}))
    after = bench.show(Figures("Ready", 1, 1, (("Ready", "True", "Serving"),), {}))
    bench.poller.close()

    assert "SchedulingGated" in before
    assert "ballast_operator_ray_ready{" in before
    assert 'status="True"' in after
    assert "SchedulingGated" not in after
    assert "ballast_operator_ray_ready{" not in after
    assert 'name="llm"' not in bench.show()
