"""`ballast explain`: why a resource is as it is, in the words of operator and workers."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Annotated

import typer

from ballast_api.conditions import ConditionType
from ballast_cli.cluster import Json, Namespace, events, resource, when
from ballast_cli.connection import AsJson
from ballast_cli.console import examples, print_json
from ballast_cli.get import condition
from ballast_worker.forecast import duration

EXAMPLES = examples("ballast explain chat", "ballast explain chat -n inference --json")
WISHED = {
    ConditionType.READY: "True",
    ConditionType.PROGRESSING: "False",
    ConditionType.DEGRADED: "False",
    ConditionType.CONFIG_APPLIED: "True",
    ConditionType.OFFLINE_RESERVATION_SATISFIED: "True",
    ConditionType.SLO_MET: "True",
    ConditionType.DEADLINE_AT_RISK: "False",
}
"""What each condition says when all is well."""
LAST_EVENTS = 8


def explain(
    *,
    name: Annotated[str, typer.Argument(metavar="NAME", help="An InferenceDeployment.")],
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Say why a resource is not ready, what is not as promised, why it has so many replicas, and what happened to it.

    Why a job waits is answered by `ballast job`.
    """
    found = resource(name, namespace)
    happened = events(found)
    if as_json:
        print_json({"version": 1, "resource": found, "events": happened})
        return
    for line in lines(found, happened, datetime.now(UTC)):
        typer.echo(line)


def lines(manifest: Json, happened: list[Json], now: datetime) -> Iterator[str]:
    """The answer, what is wrong first."""
    metadata, status = manifest["metadata"], manifest.get("status", {})
    yield f"{metadata['namespace']}/{metadata['name']}: {manifest['spec']['model']['uri']}"
    seen, wanted = status.get("observedGeneration", 0), metadata.get("generation", 0)
    if metadata.get("deletionTimestamp"):
        yield f"  is being deleted since {ago(metadata['deletionTimestamp'], now)}"
    if seen < wanted:
        yield f"  The operator has not taken up generation {wanted} (last: {seen or 'none'}). Does it run?"
    reported = [(kind, condition(manifest, kind)) for kind in WISHED]
    wrong = [(kind, each) for kind, each in reported if each and each["status"] != WISHED[kind]]
    well = [(kind, each) for kind, each in reported if each and each["status"] == WISHED[kind]]
    for mark, group in (("!", wrong), (" ", well)):
        for kind, each in group:
            yield f"{mark} {kind}: {each['status']} ({each['reason']}) for {ago(each['lastTransitionTime'], now)}"
            yield f"    {each['message']}"
    scaling = status.get("scaling")
    if scaling:
        yield f"  Scaling: {scaling['replicas']} replicas, because {scaling['because']}"
    if happened:
        yield "  Last events:"
    for event in happened[-LAST_EVENTS:]:
        yield f"    {ago(when(event), now)} ago  {event['reason']}: {event['message']}"


def ago(timestamp: str, now: datetime) -> str:
    """How long since an RFC 3339 time."""
    return duration(max(0.0, (now - datetime.fromisoformat(timestamp)).total_seconds()))
