"""Why a failed online request of a run on a cluster is not a fault of Ballast, from what the run has recorded."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

NOTICED_SECONDS = 5
"""The Service sends requests to a killed container until the kubelet notices."""
WATCH_SECONDS = 1
"""Two watches show the same moment at different times."""


@dataclass
class Recorded:
    """What was broken, and what the cluster made of it. All times are Unix times."""

    broken: list[tuple[float, float, str]] = field(default_factory=list)
    """Begin and end of each fault, with its name."""
    kills: list[tuple[float, float]] = field(default_factory=list)
    """Begin and end of each kill of a worker. A busy machine needs seconds for a kill."""
    endpoints: list[tuple[float, int]] = field(default_factory=list)
    """How many endpoints of the Service were ready from each time on."""
    nodes: dict[str, list[tuple[float, bool]]] = field(default_factory=dict)
    """Whether each node counted as ready from each time on."""

    def see_node(self, name: str, *, is_known: bool) -> None:
        """Record the present state of a node."""
        states = self.nodes.setdefault(name, [])
        if not states or states[-1][1] != is_known:
            states.append((time.time(), is_known))

    def excuse(self, failure: Mapping[str, Any]) -> str:
        """Return why Ballast is not responsible for a failed request; empty if it is.

        After a restart of the API server, the control plane may hear nothing of a kubelet for some seconds. Its node
        then counts as lost, and its pods are no endpoints. If no endpoint is ready, kube-proxy refuses requests,
        although the workers serve.
        """
        at, end = failure["at"], failure["at"] + failure["seconds"] + 1
        if any(began <= end and at <= ended + NOTICED_SECONDS for began, ended in self.kills):
            return "lost with a killed worker"
        if "ConnectionRefused" not in failure["failure"] or self._is_any_ready(at):
            return ""
        is_lost = any(began - WATCH_SECONDS <= at <= ended + WATCH_SECONDS for began, ended in self._lost())
        return "refused while the node counted as lost" if is_lost else ""

    def timeline(self, failures: list[dict[str, Any]]) -> list[str]:
        """Return the faults, the ready endpoints, the nodes and the failed requests, in the order of time."""
        lines = [(began, f"{name} (until {_clock(ended)})") for began, ended, name in self.broken]
        lines += [(at, f"    {ready} endpoints ready") for at, ready in self.endpoints]
        for name, states in self.nodes.items():
            lines += [(at, f"    {name} {'is ready' if is_known else 'counts as lost'}") for at, is_known in states]
        for each in failures:
            said = f"{self.excuse(each) or 'FAILED'}, {each['seconds']:.1f} s: {each['failure']}"
            lines.append((each["at"], f"    {said}"))
        return [f"{_clock(at)} {text}" for at, text in sorted(lines)]

    def _is_any_ready(self, at: float) -> bool:
        """Return whether an endpoint was ready. Before the first event, all were."""
        return next((ready > 0 for seen, ready in reversed(self.endpoints) if seen <= at), True)

    def _lost(self) -> Iterator[tuple[float, float]]:
        """Yield when nodes counted as lost."""
        for states in self.nodes.values():
            for (began, is_known), (ended, _) in pairwise([*states, (float("inf"), True)]):
                if not is_known:
                    yield began, ended


def _clock(at: float) -> str:
    """Return a Unix time as hours, minutes and seconds in UTC."""
    return f"{time.strftime('%H:%M:%S', time.gmtime(at))}.{int(10 * at) % 10}"
