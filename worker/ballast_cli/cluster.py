"""Reads the cluster through the `kubernetes` package, with the kubeconfig that kubectl uses. Writes nothing."""

from __future__ import annotations

import base64
import json
import logging
import os
import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import unquote

import typer
from yaml import YAMLError

from ballast_api.names import API_VERSION, CRD_NAME, KIND, PLURAL
from ballast_api.nested_json import decoded
from ballast_cli.connection import not_empty
from ballast_cli.errors import CliError, NotFound, Unreachable, Usage

if TYPE_CHECKING:
    from kubernetes.client import Configuration

Namespace = Annotated[
    str | None,
    typer.Option(
        "--namespace",
        "-n",
        help="Namespace.",
        show_default="that of the kubeconfig's context",
        callback=not_empty,
    ),
]
Context = Annotated[
    str | None,
    typer.Option("--context", help="Context of the kubeconfig.", show_default="the current one", callback=not_empty),
]
Json = dict[str, Any]
KUBECONFIG = "~/.kube/config"
TIMEOUT_SECONDS = 30
POD_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
_ENTRY = re.compile(r"/?\{.*\}", re.DOTALL)
"""An entry of a list, which the package writes in full, with its credentials, as the place of an error."""
_LOGIN = re.compile(r"^(https?://)?.*@", re.DOTALL)
"""The beginning of a URL with a user and a password, which may have any character."""


@dataclass(frozen=True, slots=True)
class Access:
    """How to reach the cluster."""

    configuration: Configuration
    namespace: str
    """The namespace to read if none is given."""

    def read(self, path: str, **query: str) -> Json:
        """Return the answer to a GET request."""
        from kubernetes.client import ApiClient, ApiException  # noqa: PLC0415  takes a second, and is an extra
        from urllib3.exceptions import HTTPError, LocationValueError  # noqa: PLC0415

        server = _LOGIN.sub(r"\1", self.configuration.host)
        try:
            with closing(ApiClient(self.configuration)) as client:
                client.deserialize = lambda response, _: decoded(response.data)
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
        except LocationValueError:  # its text can have a part of the password
            raise Unreachable(f"The API server's URL is malformed: {server}.") from None
        except HTTPError as error:
            raise Unreachable(f"The API server at {server} does not answer: {error}.") from None
        found: Json = answer
        return found


def resource(name: str, namespace: str | None, context: str | None = None) -> Json:
    """Return an InferenceDeployment.

    Raises:
        NotFound: it does not exist.
        Unreachable: the kubeconfig cannot be used, or the API server does not answer.
    """
    if not _NAME.fullmatch(name):  # it would change the path of the request
        raise NotFound(f"No resource can have the name {name!r}: `ballast get -A` lists all InferenceDeployments.")
    access = _access(context)
    return access.read(f"/apis/{API_VERSION}{_within(namespace, access)}/{PLURAL}/{name}")


def resources(namespace: str | None, context: str | None = None, *, everywhere: bool) -> list[Json]:
    """Return all InferenceDeployments of a namespace or of the cluster."""
    access = _access(context)
    where = "" if everywhere else _within(namespace, access)
    items: list[Json] = access.read(f"/apis/{API_VERSION}{where}/{PLURAL}")["items"]
    return items


def _within(namespace: str | None, access: Access) -> str:
    """Return the part of a path that names the namespace.

    Raises:
        Usage: no namespace can have this name.
    """
    found = access.namespace if namespace is None else namespace
    if not _NAME.fullmatch(found):
        raise Usage(f"Found {found!r} as the namespace, expected lower-case letters, digits, and '-'.")
    return f"/namespaces/{found}"


def events(of: Json, context: str | None = None) -> list[Json]:
    """Return the Events of a resource, the oldest first."""
    selector = f"involvedObject.kind={KIND},involvedObject.name={of['metadata']['name']}"
    path = f"/api/v1/namespaces/{of['metadata']['namespace']}/events"
    found: list[Json] = _access(context).read(path, fieldSelector=selector)["items"]
    return sorted(found, key=when)


def when(event: Json) -> str:
    """Return when an Event last occurred, RFC 3339."""
    seen = event.get("lastTimestamp") or event.get("eventTime") or event["metadata"]["creationTimestamp"]
    return str(seen)


def _access(context: str | None) -> Access:
    """Return the access of a context, or of the current one. In a pod without a kubeconfig, it is that of the pod.

    Raises:
        Unreachable: the kubeconfig, or the service account of the pod, cannot be used.
    """
    try:
        from kubernetes import client, config  # noqa: PLC0415  takes a second, and is an extra
    except ImportError as error:
        raise CliError(f"Reading a cluster needs {error.name}: pip install 'ballast[cluster]'.") from None
    file, found = os.environ.get("KUBECONFIG"), client.Configuration()
    found.retries = False
    has_default = Path(os.path.expanduser(KUBECONFIG)).exists()  # noqa: PTH111  Path's fails without a home directory
    if not file and not context and not has_default and POD_NAMESPACE.exists():
        try:
            config.load_incluster_config(client_configuration=found)
            _settle_token(found)
        except config.ConfigException as error:
            raise Unreachable(f"Cannot use the service account of this pod: {str(error).rstrip('.')}.") from None
        return Access(found, POD_NAMESPACE.read_text(encoding="utf-8").strip())
    file = file or KUBECONFIG
    try:
        return Access(found, _load(file, context, found))
    except (config.ConfigException, OSError, YAMLError) as error:
        why = " ".join(_why(error, file).split())
    except (ValueError, TypeError, LookupError, AttributeError) as error:  # a value of another type than expected
        why = f"it is malformed ({error})"
    raise Unreachable(f"Cannot use the kubeconfig {file}: {why.rstrip('.')}. Set KUBECONFIG to another file.")


def _load(file: str, context: str | None, configuration: Configuration) -> str:
    """Load a context of a kubeconfig, or the current one, and return its namespace.

    The package reads no proxy. It goes on without credentials if a plugin yields none, or the user does not exist.

    Raises:
        ConfigException: the kubeconfig cannot be used. Malformed ones raise other errors too.
    """
    from kubernetes import config  # noqa: PLC0415  takes a second, and is an extra

    merged = config.kube_config.KubeConfigMerger(file).config
    if merged is None:
        raise config.ConfigException("no such file")
    for entry in merged["users"].value:
        if "user" in entry and entry.safe_get("user") is None:  # to kubectl, this is an anonymous user
            entry.value["user"] = {}
    with _root_log_kept() as said:
        config.kube_config.KubeConfigLoader(merged, context, config_base_path=None).load_and_set(configuration)
    _settle_token(configuration)
    used = merged["contexts"].get_with_name(context or merged["current-context"])["context"]
    cluster = merged["clusters"].get_with_name(used["cluster"])["cluster"]
    if name := used.safe_get("user"):
        user = merged["users"].get_with_name(name).safe_get("user") or {}
        has_credentials = configuration.api_key or configuration.cert_file
        if not has_credentials and (method := next((each for each in ("exec", "auth-provider") if each in user), None)):
            raise config.ConfigException(": ".join([f"the {method} of user {name} yields no credentials", *said]))
    if proxy := cluster.safe_get("proxy-url"):
        _set_proxy(configuration, proxy)
    return str(used.safe_get("namespace") or "default")


@contextmanager
def _root_log_kept() -> Iterator[list[str]]:
    """Yield the messages of the root logger, and print none. The package logs there why a plugin failed."""
    said: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        said.append(record.getMessage())
        return False

    logger = logging.getLogger()
    logger.addFilter(keep)
    try:
        yield said
    finally:
        logger.removeFilter(keep)


def _settle_token(configuration: Configuration) -> None:
    """Remove the blanks around a token, such as the end of the line in its file. No message may quote it.

    An access is for one command, so nothing refreshes its token: the refresh of the package sets the original again.

    Raises:
        ConfigException: no HTTP header can have the token.
    """
    from kubernetes.config import ConfigException  # noqa: PLC0415  takes a second, and is an extra

    configuration.refresh_api_key_hook = None
    for kind, value in configuration.api_key.items():
        scheme, _, token = value.partition(" ")
        token = token.strip()
        if not token.isascii() or not token.isprintable():
            raise ConfigException("the token has a line break or another character that no HTTP header can have")
        configuration.api_key[kind] = f"{scheme} {token}"


def _set_proxy(configuration: Configuration, url: str) -> None:
    """Use a proxy for all requests. No message may quote its URL, which can have a password.

    Raises:
        ConfigException: the URL is malformed, or of another kind of proxy.
    """
    from kubernetes.config import ConfigException  # noqa: PLC0415  takes a second, and is an extra
    from urllib3.exceptions import LocationParseError  # noqa: PLC0415
    from urllib3.util import parse_url  # noqa: PLC0415

    try:
        found = parse_url(url)
    except LocationParseError:
        raise ConfigException("proxy-url is no URL") from None
    if found.scheme not in {"http", "https"} or not found.host:
        scheme = f"{found.scheme}://" if f"{found.scheme}://" in url.lower() else "no scheme"
        raise ConfigException(f"proxy-url: found {scheme}, expected http://HOST:PORT or https://HOST:PORT")
    configuration.proxy, configuration.no_proxy = found._replace(auth=None).url, None
    if found.auth:
        credentials = base64.b64encode(unquote(found.auth).encode()).decode()
        configuration.proxy_headers = {"Proxy-Authorization": f"Basic {credentials}"}


def _why(error: Exception, file: str) -> str:
    """Return why a kubeconfig cannot be used, without its entries. Name another file that cannot be read."""
    if not isinstance(error, OSError) or not error.strerror:
        return _ENTRY.sub("", str(error))
    is_kubeconfig = error.filename in {None, file, os.path.expanduser(file)}  # noqa: PTH111
    return error.strerror if is_kubeconfig else f"{error.filename}: {error.strerror}"


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
