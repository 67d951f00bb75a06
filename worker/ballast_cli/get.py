"""`ballast get`: the InferenceDeployments of a cluster."""

from __future__ import annotations

from typing import Annotated

import typer

from ballast_api.conditions import ConditionType
from ballast_cli.cluster import Context, Json, Namespace, resources
from ballast_cli.connection import AsJson
from ballast_cli.console import examples, print_json, print_table, say

EXAMPLES = examples(
    "ballast get", "ballast get -A", "ballast get -n inference --json | jq '.resources[].metadata.name'"
)
COLUMNS = ("NAMESPACE", "NAME", "READY", "WHY", "REPLICAS", "ONLINE", "OFFLINE", "MODEL")
RIGHT = ("REPLICAS", "ONLINE", "OFFLINE")


def get(
    *,
    namespace: Namespace = None,
    context: Context = None,
    everywhere: Annotated[
        bool, typer.Option("--all-namespaces", "-A", help="List the resources of all namespaces.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List InferenceDeployments, whether they are ready, and their slots for online and offline work."""
    found = resources(namespace, context, everywhere=everywhere)
    if as_json:
        print_json({"version": 1, "resources": found})
    elif not found:
        say("No InferenceDeployments found" + (" in the cluster." if everywhere else "; -A lists all namespaces."))
    else:
        print_table(COLUMNS, [row(each) for each in found], right=RIGHT)


def row(manifest: Json) -> tuple[str, ...]:
    """Return the table row of a resource."""
    spec, status = manifest["spec"], manifest.get("status", {})
    slots = status.get("slots", {})
    ready = condition(manifest, ConditionType.READY)
    return (
        manifest["metadata"]["namespace"],
        manifest["metadata"]["name"],
        ready.get("status", "Unknown"),
        ready.get("reason", "-"),
        f"{status.get('readyReplicas', 0)}/{spec.get('replicas', 1)}",
        str(slots.get("online", "-")),
        str(slots.get("offline", "-")),
        spec["model"]["uri"],
    )


def condition(manifest: Json, kind: ConditionType) -> Json:
    """Return a condition of the status; empty if the operator has not reported it."""
    reported = manifest.get("status", {}).get("conditions", ())
    return next((each for each in reported if each["type"] == kind), {})
