"""Reads the cluster through `kubectl`, and so with whatever that logs in with. Writes nothing."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Annotated, Any

import typer

from ballast_api.names import CRD_NAME, KIND
from ballast_cli.errors import NotFound, Unreachable

Namespace = Annotated[
    str | None, typer.Option("--namespace", "-n", help="Namespace.", show_default="kubectl's present one")
]
Json = dict[str, Any]


def resource(name: str, namespace: str | None) -> Json:
    """One InferenceDeployment as the API server has it.

    Raises:
        NotFound: there is none of that name.
        Unreachable: no kubectl, or no API server that answers.
    """
    return _read("get", CRD_NAME, name, *_in(namespace))


def resources(namespace: str | None, *, everywhere: bool) -> list[Json]:
    """All InferenceDeployments of a namespace, or of all."""
    where = ("-A",) if everywhere else _in(namespace)
    items: list[Json] = _read("get", CRD_NAME, *where)["items"]
    return items


def events(of: Json) -> list[Json]:
    """The events of an object, oldest first."""
    selector = f"involvedObject.kind={KIND},involvedObject.name={of['metadata']['name']}"
    found: list[Json] = _read("get", "events", *_in(of["metadata"]["namespace"]), "--field-selector", selector)["items"]
    return sorted(found, key=when)


def when(event: Json) -> str:
    """When it was seen last, RFC 3339."""
    seen = event.get("lastTimestamp") or event.get("eventTime") or event["metadata"]["creationTimestamp"]
    return str(seen)


def _in(namespace: str | None) -> tuple[str, ...]:
    return ("-n", namespace) if namespace else ()


def _read(*arguments: str) -> Json:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        raise Unreachable("kubectl, through which Ballast reads clusters, is not on the PATH: install it")
    command = [kubectl, *arguments, "-o", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - arguments, no shell
    if done.returncode == 0:
        answer: Json = json.loads(done.stdout)
        return answer
    said = (done.stderr.strip().splitlines() or ["no word"])[-1].removeprefix("Error from server ")
    if "doesn't have a resource type" in said:
        raise NotFound(f"{said}: this cluster has no Ballast; see docs/how-to/install-on-kubernetes.md")
    if "(NotFound)" in said:
        raise NotFound(f"{said}: `ballast get -A` lists what there is")
    raise Unreachable(f"kubectl {arguments[0]} {arguments[1]}: {said}")
