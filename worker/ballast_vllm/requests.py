"""The place of a request in the policy: its class, tenant, priority and SLO.

The API server writes it into the parameters of the request, and the scheduler reads it in EngineCore.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

from ballast_policy.request import ONLINE, RequestClass

KEY = "ballast"


@dataclass(frozen=True, slots=True)
class RequestPlace:
    """The place of a request in the policy. The names of the fields are those of the message, except `class`."""

    request_class: RequestClass = ONLINE
    tenant: str = "default"
    priority: int = 0
    ttft: float | None = None
    """SLO in seconds; None is that of the class."""
    tpot: float | None = None
    slack: float = inf
    """Seconds that the job of an item could lose without risk to its deadline."""
    prefix_key: int | None = None
    """Groups requests with the same prompt prefix."""
    num_computed: int = 0
    """Tokens that earlier attempts computed. They count as wasted when they are computed again."""

    def message(self) -> dict[str, Any]:
        """Return the value of `extra_args["ballast"]` that states this place."""
        named = {
            "class": str(self.request_class),
            "tenant": self.tenant,
            "priority": self.priority,
            "ttft": self.ttft,
            "tpot": self.tpot,
            "slack": None if self.slack == inf else self.slack,
            "prefix_key": self.prefix_key,
            "num_computed": self.num_computed or None,
        }
        return {name: value for name, value in named.items() if value is not None}


def place_of(params: Any) -> RequestPlace:
    """Return the place that the sampling or pooling parameters of a request state.

    A value that is malformed counts as absent: an exception would end the engine.
    """
    stated = getattr(params, "extra_args", None) or getattr(params, "extra_kwargs", None)
    found = stated.get(KEY) if isinstance(stated, Mapping) else None
    if not isinstance(found, Mapping):
        return RequestPlace()
    tenant = found.get("tenant")
    return RequestPlace(
        request_class=RequestClass.OFFLINE if found.get("class") == "offline" else ONLINE,
        tenant=tenant if isinstance(tenant, str) and tenant else "default",
        priority=_integer(found.get("priority")) or 0,
        ttft=_seconds(found.get("ttft")),
        tpot=_seconds(found.get("tpot")),
        slack=inf if (slack := _number(found.get("slack"))) is None else slack,
        prefix_key=_integer(found.get("prefix_key")),
        num_computed=max(0, _integer(found.get("num_computed")) or 0),
    )


def _number(value: object) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if isfinite(found) else None


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63 else None


def _seconds(value: object) -> float | None:
    found = _number(value)
    return None if found is None or found <= 0 else found
