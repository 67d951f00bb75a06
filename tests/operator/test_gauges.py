"""The gauges of the operator show what is, and nothing that was."""

from __future__ import annotations

from typing import cast

from reconciled import make_operator

from ballast_operator.kinds import INFERENCE_DEPLOYMENT, Key
from ballast_operator.metrics import Figures, Metrics


def test_former_conditions_and_parts_and_deleted_resources_are_not_exported() -> None:
    """An alert that follows them would never end."""
    metrics = Metrics()
    operator = make_operator(None, metrics=metrics)

    def show(*figures: Figures) -> str:
        """Return the gauges of a resource with these figures, or without a resource."""
        known = cast(dict[Key, Figures], operator.reconciler.figures)
        known.clear()
        known.update({Key(INFERENCE_DEPLOYMENT, "ns", "llm"): each for each in figures})
        operator.refresh()
        return metrics.text().decode()

    before = show(Figures("NotReady", 1, 0, (("Ready", "False", "SchedulingGated"),), {"head": False}))
    after = show(Figures("Ready", 1, 1, (("Ready", "True", "Serving"),), {}))
    operator.poller.close()

    assert "SchedulingGated" in before
    assert "ballast_operator_ray_ready{" in before
    assert 'status="True"' in after
    assert "SchedulingGated" not in after
    assert "ballast_operator_ray_ready{" not in after
    assert 'name="llm"' not in show()
