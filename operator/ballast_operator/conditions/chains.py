"""All conditions of an InferenceDeployment, each with its chain of checks. PURE."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from ballast_api.conditions import ConditionType
from ballast_operator.conditions.config_applied import CONFIG_APPLIED
from ballast_operator.conditions.degraded import DEGRADED
from ballast_operator.conditions.given import MOST_CHARACTERS, ConditionValue, Given
from ballast_operator.conditions.in_time import DEADLINE_AT_RISK, SLO_MET
from ballast_operator.conditions.progressing import PROGRESSING
from ballast_operator.conditions.ready import READY
from ballast_operator.conditions.reservation import RESERVATION_SATISFIED

Check = Callable[[Given], ConditionValue | None]
CHAINS: Mapping[ConditionType, tuple[Check, ...]] = {
    ConditionType.READY: READY,
    ConditionType.PROGRESSING: PROGRESSING,
    ConditionType.DEGRADED: DEGRADED,
    ConditionType.CONFIG_APPLIED: CONFIG_APPLIED,
    ConditionType.OFFLINE_RESERVATION_SATISFIED: RESERVATION_SATISFIED,
    ConditionType.SLO_MET: SLO_MET,
    ConditionType.DEADLINE_AT_RISK: DEADLINE_AT_RISK,
}


def conditions(given: Given) -> dict[ConditionType, ConditionValue]:
    """Return every condition of the resource."""
    return {kind: first(checks, given) for kind, checks in CHAINS.items()}


def first(checks: Iterable[Check], given: Given) -> ConditionValue:
    """Return the first result of a chain of checks. The last check always has a result."""
    found = next(found for check in checks if (found := check(given)) is not None)
    return found._replace(message=found.message[:MOST_CHARACTERS])
