"""From verdicts and figures to the status, changed as rarely as possible. PURE.

A message changes only with its condition's status or reason, or with the generation; conditions that rest on figures of
workers flip only after they have differed for `SETTLE_SECONDS`, except from Unknown to good; pods that come up one by
one are written down every `STEP_SECONDS`. So a cluster in which nothing happens makes no calls, and one in which much
happens few.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from ballast_api.conditions import ConditionType, Reason
from ballast_api.inference_deployment import Metadata
from ballast_api.names import API_VERSION, HTTP_PORT, KIND, selector
from ballast_api.status import ClassSlots, Condition, ScalingStatus, Status
from ballast_operator.conditions import Input, Verdict
from ballast_operator.kinds import Body
from ballast_operator.load import Load

SETTLE_SECONDS = 30.0
STEP_SECONDS, FIRST_SECONDS = 5.0, 1.0
MEASURED = frozenset(
    {ConditionType.OFFLINE_RESERVATION_SATISFIED, ConditionType.SLO_MET, ConditionType.DEADLINE_AT_RISK}
)
"""Conditions that rest on figures, which come and go."""


@dataclass(frozen=True, slots=True)
class Differing:
    """A condition that says something else than what is reported, and since when."""

    status: str
    since: float


Unsettled = Mapping[ConditionType, Differing]


def settle(
    verdicts: Mapping[ConditionType, Verdict], reported: Status, unsettled: Unsettled, now: float
) -> tuple[dict[ConditionType, Verdict | None], Unsettled]:
    """Hold back verdicts that may be noise: None keeps what is reported."""
    settled: dict[ConditionType, Verdict | None] = {}
    still: dict[ConditionType, Differing] = {}
    for kind, verdict in verdicts.items():
        before = reported.condition(kind)
        if kind not in MEASURED or not _may_be_noise(kind, before, verdict):
            settled[kind] = verdict
            continue
        known = unsettled.get(kind)
        differing = known if known is not None and known.status == verdict.status else Differing(verdict.status, now)
        if now - differing.since >= SETTLE_SECONDS:
            settled[kind] = verdict
        else:
            settled[kind] = None
            still[kind] = differing
    return settled, still


def _may_be_noise(kind: ConditionType, before: Condition | None, verdict: Verdict) -> bool:
    """Return whether the status that a look found may be gone at the next look.

    A look that found nothing is reported at once. One silent worker of several may be noise: a new pod publishes its
    first status a moment after it is ready, and its first claim comes a moment after that.
    """
    if before is None or before.status == verdict.status:
        return False
    if verdict.status == "Unknown":
        return verdict.reason is Reason.NOT_REPORTED
    bad = "True" if kind is ConditionType.DEADLINE_AT_RISK else "False"
    return before.status != "Unknown" or verdict.status == bad


def status(
    world: Input,
    verdicts: Mapping[ConditionType, Verdict | None],
    *,
    config_hash: str,
    scaling: ScalingStatus | None,
    now: float,
) -> Status:
    """What to report, at `now` in Unix seconds; equal to the status of the resource where nothing is new."""
    resource = world.resource
    reported, metadata = resource.status, resource.metadata
    return Status(
        observed_generation=metadata.generation,
        replicas=world.count("replicas"),
        ready_replicas=world.count("readyReplicas"),
        updated_replicas=world.count("updatedReplicas"),
        selector=",".join(f"{name}={value}" for name, value in selector(metadata.name).items()),
        served_name=resource.spec.served_name,
        endpoint=f"http://{metadata.name}.{metadata.namespace}.svc:{HTTP_PORT}",
        config_hash=config_hash,
        slots=_slots(world.load) or reported.slots,
        scaling=_scaling(scaling, reported.scaling),
        conditions=tuple(
            found
            for kind, verdict in verdicts.items()
            if (found := _condition(kind, verdict, reported, metadata.generation, now)) is not None
        ),
    )


def patience(before: Status, after: Status, load: Load | None, *, seen: float, written: float) -> float:
    """How long a status may wait for what is about to follow; 0: it may not.

    Args:
        before: what is reported.
        after: what is to be reported.
        load: the last look; the first one takes a moment, and gives the first status most of its words.
        seen: seconds since the resource was first seen.
        written: seconds since its status was last written.
    """
    if not before.conditions:
        is_looking = load is not None and load.trouble is not None and load.trouble.reason is Reason.PENDING
        return max(0.0, FIRST_SECONDS - seen) if is_looking else 0.0
    return max(0.0, STEP_SECONDS - written) if _is_step(before, after) else 0.0


def _is_step(before: Status, after: Status) -> bool:
    """True where a rollout only got on: other counts of pods, and no other answer to any question."""
    counts = {name: getattr(after, name) for name in ("replicas", "ready_replicas", "updated_replicas", "conditions")}
    return before.model_copy(update=counts) == after and all(
        (old := before.condition(ConditionType(new.type))) is not None
        and old.status == new.status
        and (old.reason == new.reason or new.type in {ConditionType.READY, ConditionType.PROGRESSING})
        for new in after.conditions
    )


def with_condition(reported: Status, kind: ConditionType, verdict: Verdict, *, generation: int, now: float) -> Status:
    """The reported status with one condition as `verdict` says."""
    found = _condition(kind, verdict, reported, generation, now)
    others = [condition for condition in reported.conditions if condition.type != kind]
    kept = tuple(condition for condition in (*others, found) if condition is not None)
    return reported.model_copy(update={"conditions": kept, "observed_generation": generation})


def status_manifest(about: Metadata, wanted: Status) -> Body:
    """`wanted` as server-side apply takes it."""
    metadata = {"name": about.name, "namespace": about.namespace}
    content = wanted.model_dump(mode="json", by_alias=True, exclude_none=True)
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "status": content}


def news(before: Status, after: Status) -> list[Condition]:
    """Conditions whose change people are told by an event: what went wrong, what is well again, and `Ready`."""
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
    """True for news that somebody should look at."""
    kind, says = ConditionType(condition.type), condition.status == "True"
    if kind in {ConditionType.DEGRADED, ConditionType.DEADLINE_AT_RISK}:
        return says
    return (kind in MEASURED and condition.status == "False") or condition.reason == Reason.ROLLOUT_STUCK


def _condition(
    kind: ConditionType, verdict: Verdict | None, reported: Status, generation: int, now: float
) -> Condition | None:
    before = reported.condition(kind)
    if verdict is None:
        return before
    if before is not None and (before.status, before.reason) == (verdict.status, verdict.reason):
        if before.observed_generation == generation:
            return before
        return before.model_copy(update={"message": verdict.message, "observed_generation": generation})
    moved = before is None or before.status != verdict.status
    at = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return Condition(
        type=kind,
        status=verdict.status,
        reason=verdict.reason,
        message=verdict.message,
        last_transition_time=at if moved or before is None else before.last_transition_time,
        observed_generation=generation,
    )


def _slots(load: Load | None) -> ClassSlots | None:
    if load is None or not load.workers:
        return None
    offline = sum(worker.offline.reserved for worker in load.workers)
    return ClassSlots(online=max(0, sum(worker.slots for worker in load.workers) - offline), offline=offline)


def _scaling(wanted: ScalingStatus | None, reported: ScalingStatus | None) -> ScalingStatus | None:
    """The sentence follows the figure: new words for the same replicas are no news."""
    if wanted is not None and reported is not None and wanted.replicas == reported.replicas:
        return reported
    return wanted
