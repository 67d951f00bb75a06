"""From computed conditions to the status that is reported, which changes as rarely as possible. PURE.

The messages of `Ready` and `Progressing` count pods, as other fields of the status do, and follow them. The message of
`Degraded` follows the present problem. Another message changes only with the status or reason of its condition, or with
the generation. A condition that depends on figures of workers changes only after `SETTLE_SECONDS`, except from Unknown
to good. Pods that become ready one after another are reported every `STEP_SECONDS`, and another message of `Degraded`
every `SETTLE_SECONDS`. So an idle cluster causes no calls, and a busy one causes few.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from ballast_api.conditions import HEALTHY, ConditionReason, ConditionType
from ballast_api.metadata import Metadata
from ballast_api.names import API_VERSION, KIND
from ballast_api.status import Condition, Status
from ballast_operator.conditions.given import ConditionValue
from ballast_operator.kinds import Body
from ballast_operator.poll_result import PollResult

SETTLE_SECONDS = 30.0
STEP_SECONDS, FIRST_SECONDS = 5.0, 1.0
MEASURED = frozenset(
    {ConditionType.OFFLINE_RESERVATION_SATISFIED, ConditionType.SLO_MET, ConditionType.DEADLINE_AT_RISK}
)
"""Conditions that depend on figures, which fluctuate."""
COUNTING = frozenset({ConditionType.READY, ConditionType.PROGRESSING})
"""Conditions whose messages count pods."""
FOLLOWING = COUNTING | {ConditionType.DEGRADED}
"""Conditions whose messages change under the same reason. A message of `Degraded` names the next object when the first
is corrected. Names have digits, so a change of figures alone looks the same, and `delay` limits the writes instead."""
ALARMING = MEASURED | {ConditionType.DEGRADED}
"""Conditions that need attention if they are not healthy. The others are not healthy for a while in each rollout."""
RECONCILING, STALLED = STANDARD = ("Reconciling", "Stalled")
"""Types of the standard conditions."""
PASSING = frozenset(
    {
        ConditionReason.NOT_APPLIED,
        ConditionReason.NO_SECRET,
        ConditionReason.SECRET_NOT_ALLOWED,
        ConditionReason.QUEUE_CONFLICT,
        ConditionReason.QUEUE_NOT_ALLOWED,
    }
)
"""Reasons of a spec that is not applied that end without a change of the resource: the operator tries again, or another
object comes or goes."""
COUNTS = ("replicas", "ready_replicas", "updated_replicas", "workers", "conditions")
"""Fields of a status that change while a rollout proceeds."""


@dataclass(frozen=True, slots=True)
class Differing:
    """The status of a condition that differs from the reported one, or else its reason, and since when."""

    found: str
    since: float


Unsettled = Mapping[ConditionType, Differing]


def settle(
    values: Mapping[ConditionType, ConditionValue], reported: Status, unsettled: Unsettled, now: float
) -> tuple[dict[ConditionType, ConditionValue | None], Unsettled]:
    """Replace values that may be noise by None, which keeps the reported condition."""
    settled: dict[ConditionType, ConditionValue | None] = {}
    still: dict[ConditionType, Differing] = {}
    for kind, value in values.items():
        before = reported.condition(kind)
        if before is None or kind not in MEASURED or not _may_be_noise(kind, before, value):
            settled[kind] = value
            continue
        known = unsettled.get(kind)
        # Reasons of another status may alternate. Another reason of the same status must last itself.
        found = value.status if before.status != value.status else value.reason
        differing = known if known is not None and known.found == found else Differing(found, now)
        if now - differing.since >= SETTLE_SECONDS:
            settled[kind] = value
        else:
            settled[kind] = None
            still[kind] = differing
    return settled, still


def _may_be_noise(kind: ConditionType, before: Condition, value: ConditionValue) -> bool:
    """Return whether the status or reason of a condition may change back at the next poll.

    A poll without any worker is reported at once. One silent worker of several may be noise: a new pod publishes its
    first status a moment after it is ready, and its first claim follows a moment later.
    """
    if before.status == value.status:
        return before.reason != value.reason and value.status != "Unknown"
    if value.status == "Unknown":
        return value.reason is ConditionReason.NOT_REPORTED
    return before.status != "Unknown" or value.status != HEALTHY[kind]


def conditions(
    values: Mapping[ConditionType, ConditionValue | None], reported: Status, *, generation: int, now: float
) -> tuple[Condition, ...]:
    """Return the conditions to report, at `now` in Unix seconds. A value of None keeps the reported condition."""
    found = (_condition(kind, value, reported, generation, now) for kind, value in values.items())
    return tuple(condition for condition in found if condition is not None)


def delay(before: Status, after: Status, poll: PollResult | None, *, seen: float, written: float) -> float:
    """Return the seconds that a status may wait for changes that follow soon; 0 means that it must be written now.

    Args:
        before: the reported status.
        after: the status to report.
        poll: the last poll. The first poll takes a moment and determines most of the first status.
        seen: seconds since the resource was first seen.
        written: seconds since its status was last written.
    """
    if not before.conditions:
        return max(0.0, FIRST_SECONDS - seen) if poll is not None and poll.is_pending else 0.0
    if not _is_step(before, after):
        return 0.0
    return max(0.0, (SETTLE_SECONDS if _is_reworded(before, after) else STEP_SECONDS) - written)


def _is_step(before: Status, after: Status) -> bool:
    """Return whether only a rollout proceeded: the counts of pods differ, and no condition changed its status."""
    counts = {name: getattr(after, name) for name in COUNTS}
    return before.model_copy(update=counts) == after and all(
        (old := before.condition(ConditionType(new.type))) is not None
        and old.status == new.status
        and (old.reason == new.reason or new.type in COUNTING)
        for new in after.conditions
    )


def _is_reworded(before: Status, after: Status) -> bool:
    """Return whether only the message of `Degraded` differs."""
    old = before.condition(ConditionType.DEGRADED)
    kept = tuple(old if old is not None and new.type == old.type else new for new in after.conditions)
    return after.model_copy(update={"conditions": kept}) == before


def is_same_reason(one: str, other: str) -> bool:
    """Return whether two reasons of a number of replicas differ in figures alone, which change at every poll."""
    return _without_figures(one) == _without_figures(other)


def _without_figures(because: str) -> str:
    return re.sub(r"\d[\d.,]*(e[+-]\d+)?|(?<=[a-z])s\b", "", because)


def with_conditions(
    reported: Status, values: Mapping[ConditionType, ConditionValue], *, generation: int, now: float
) -> Status:
    """Return the reported status with some conditions replaced, while the spec of `generation` is not applied.

    Only `Degraded` describes this generation. The others describe that which they described before, or 0: none.
    """
    kept = (condition for condition in reported.conditions if condition.type not in values)
    found: list[Condition] = []
    for kind, value in values.items():
        before = reported.condition(kind)
        applied = before.observed_generation if before is not None else 0
        about = generation if kind is ConditionType.DEGRADED else applied
        found += conditions({kind: value}, reported, generation=about, now=now)
    return reported.model_copy(update={"conditions": (*kept, *found), "observed_generation": generation})


def status_manifest(about: Metadata, wanted: Status) -> Body:
    """Return the manifest by which server-side apply writes a status."""
    metadata = {"name": about.name, "namespace": about.namespace}
    content = wanted.model_dump(mode="json", by_alias=True, exclude_none=True)
    content["conditions"] += _standard_conditions(wanted)
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "status": content}


def has_standard_conditions(content: Body, status: Status) -> bool:
    """Return whether a reported status has the standard conditions of `status`. Other versions may report others."""
    found = [each for each in content.get("conditions") or () if each["type"] in STANDARD]
    return [_identity(each) for each in found] == [_identity(each) for each in _standard_conditions(status)]


def _identity(condition: Body) -> tuple[str, str]:
    return condition["type"], condition["reason"]


def _standard_conditions(status: Status) -> list[Body]:
    """Return the condition by which kstatus, as in Flux and in Helm, judges a resource before it looks at `Ready`.

    While old workers serve, `Ready` shows neither a rollout nor a spec that is not applied. The condition repeats
    another one, so it is not read, and it is absent if it would be False.
    """
    progressing, degraded = status.condition(ConditionType.PROGRESSING), status.condition(ConditionType.DEGRADED)
    if progressing is None or degraded is None:
        return []
    is_of_earlier_spec = progressing.observed_generation != status.observed_generation
    is_held = degraded.status == "True" and (is_of_earlier_spec or progressing.reason == ConditionReason.STALE)
    cause = degraded if is_held or degraded.reason == ConditionReason.NOT_APPLIED else progressing
    if cause is progressing and (progressing.status == "Unknown" or progressing.reason == ConditionReason.COMPLETE):
        return []
    goes_on = cause.reason in PASSING if cause is degraded else progressing.status == "True"
    repeated = cause.model_dump(mode="json", by_alias=True)
    about = {"status": "True", "observedGeneration": status.observed_generation}
    return [repeated | about | {"type": RECONCILING if goes_on else STALLED}]


def news(before: Status, after: Status) -> list[Condition]:
    """Return the conditions whose change becomes an Event: those that became bad or good again, and `Ready`."""
    found = []
    for condition in after.conditions:
        old = before.condition(ConditionType(condition.type))
        if old is not None and (old.status, old.reason) == (condition.status, condition.reason):
            continue
        was_bad = old is not None and is_bad(old)
        comes_up = old is not None and (old.status, condition.status) == ("False", "False")
        is_ready = old is not None and condition.type == ConditionType.READY and not comes_up
        if is_bad(condition) or was_bad or is_ready:
            found.append(condition)
    return found


def is_bad(condition: Condition) -> bool:
    """Return whether a condition needs attention."""
    kind = ConditionType(condition.type)
    is_wrong = condition.status not in {HEALTHY[kind], "Unknown"}
    return (is_wrong and kind in ALARMING) or condition.reason == ConditionReason.ROLLOUT_STUCK


def _condition(
    kind: ConditionType, value: ConditionValue | None, reported: Status, generation: int, now: float
) -> Condition | None:
    before = reported.condition(kind)
    if value is None:
        return before
    if before is not None and (before.status, before.reason) == (value.status, value.reason):
        is_old = kind in FOLLOWING and before.message != value.message
        if before.observed_generation == generation and not is_old:
            return before
        return before.model_copy(update={"message": value.message, "observed_generation": generation})
    moved = before is None or before.status != value.status
    at = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return Condition(
        type=kind,
        status=value.status,
        reason=value.reason,
        message=value.message,
        last_transition_time=at if moved or before is None else before.last_transition_time,
        observed_generation=generation,
    )
