"""Reads the cluster through the `kubernetes` package, with the kubeconfig that kubectl uses. Writes nothing."""

from __future__ import annotations

import json
import os
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ballast_api.names import API_VERSION, CRD_NAME, KIND, PLURAL
from ballast_cli.errors import CliError, NotFound, Unreachable

if TYPE_CHECKING:
    from kubernetes.client import Configuration

Namespace = Annotated[
    str | None, typer.Option("--namespace", "-n", help="Namespace.", show_default="that of the kubeconfig's context")
]
Json = dict[str, Any]
KUBECONFIG = "~/.kube/config"
TIMEOUT_SECONDS = 30
POD_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


@dataclass(frozen=True, slots=True)
class Access:
    """How to reach the cluster."""

    configuration: Configuration
    namespace: str
    """The namespace to read if none is given."""

    def read(self, path: str, **query: str) -> Json:
        """Return the answer to a GET request."""
        from kubernetes.client import ApiClient, ApiException  # noqa: PLC0415  takes a second, and is an extra
        from urllib3.exceptions import HTTPError  # noqa: PLC0415

        with closing(ApiClient(self.configuration)) as client:
            try:
                answer, *_ = client.call_api(
                    path,
                    "GET",
                    query_params=list(query.items()),
                    header_params={"Accept": "application/json"},
                    response_types_map={200: "object"},
                    auth_settings=["BearerToken"],
                    _request_timeout=TIMEOUT_SECONDS,
                )
            except ApiException as error:
                raise _failure(path, int(error.status or 0), str(error.body or error.reason)) from None
            except HTTPError as error:
                raise Unreachable(f"The API server at {self.configuration.host} does not answer: {error}.") from None
        found: Json = answer
        return found


def resource(name: str, namespace: str | None) -> Json:
    """Return an InferenceDeployment.

    Raises:
        NotFound: it does not exist.
        Unreachable: there is no kubeconfig, or the API server does not answer.
    """
    access = _access()
    return access.read(f"/apis/{API_VERSION}/namespaces/{namespace or access.namespace}/{PLURAL}/{name}")


def resources(namespace: str | None, *, everywhere: bool) -> list[Json]:
    """Return all InferenceDeployments of a namespace or of the cluster."""
    access = _access()
    where = "" if everywhere else f"/namespaces/{namespace or access.namespace}"
    items: list[Json] = access.read(f"/apis/{API_VERSION}{where}/{PLURAL}")["items"]
    return items


def events(of: Json) -> list[Json]:
    """Return the Events of a resource, the oldest first."""
    selector = f"involvedObject.kind={KIND},involvedObject.name={of['metadata']['name']}"
    path = f"/api/v1/namespaces/{of['metadata']['namespace']}/events"
    found: list[Json] = _access().read(path, fieldSelector=selector)["items"]
    return sorted(found, key=when)


def when(event: Json) -> str:
    """Return when an Event last occurred, RFC 3339."""
    seen = event.get("lastTimestamp") or event.get("eventTime") or event["metadata"]["creationTimestamp"]
    return str(seen)


def _access() -> Access:
    """Return the access of the kubeconfig, or of the pod in which the command runs."""
    try:
        from kubernetes import client, config  # noqa: PLC0415  takes a second, and is an extra
    except ImportError as error:
        raise CliError(f"Reading a cluster needs {error.name}: pip install 'ballast[cluster]'.") from None
    file, found = os.environ.get("KUBECONFIG") or KUBECONFIG, client.Configuration()
    found.retries = False
    try:
        config.load_kube_config(config_file=file, client_configuration=found, persist_config=False)
        _, context = config.list_kube_config_contexts(file)
        return Access(found, str(context["context"].get("namespace") or "default"))
    except config.ConfigException as error:
        if not POD_NAMESPACE.exists():
            raise Unreachable(
                f"Cannot use the kubeconfig {file}: {str(error).rstrip('.')}. Set KUBECONFIG to another file."
            ) from None
        config.load_incluster_config(client_configuration=found)
        return Access(found, POD_NAMESPACE.read_text(encoding="utf-8").strip())


def _failure(path: str, status: int, body: str) -> CliError:
    try:
        message = str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        message = body.strip()
    if status == 404 and CRD_NAME not in message:
        return NotFound("This cluster does not have Ballast's CRD: see docs/how-to/install-on-kubernetes.md.")
    if status == 404:
        return NotFound(f"{message}: `ballast get -A` lists all InferenceDeployments.")
    return Unreachable(f"GET {path}: the API server answered {status}: {message.rstrip('.')}.")
