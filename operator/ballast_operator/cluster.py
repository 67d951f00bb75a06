"""The Kubernetes API as the operator uses it: few calls, each counted, without retries.

This module is the only writer to Kubernetes. A call that fails raises an error, and the work queue tries the whole
reconciliation again later. `kubernetes.aio` sends the calls and reads rotated tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from types import TracebackType
from typing import Any, Self

import aiohttp
from kubernetes.aio.client import ApiClient, ApiException, Configuration
from kubernetes.aio.config import ConfigException, load_incluster_config, load_kube_config

from ballast_api.names import FIELD_MANAGER, SCALING_MANAGER
from ballast_api.nested_json import decoded
from ballast_log import Log
from ballast_operator.content import items_of
from ballast_operator.errors import (
    BadSetting,
    ClusterRefused,
    ClusterUnavailable,
    Conflict,
    Forbidden,
    Invalid,
    ObjectNotFound,
)
from ballast_operator.kinds import EVENT, SECRET, Body, Key, Kind, key_of

log = Log(__name__)

TIMEOUT_SECONDS = 30.0
WRITE_SECONDS = 65.0
"""Timeout of a write. The API server ends a write after 60 s, and its answer names the webhook that was slow."""
MOST_RETRY_SECONDS = 60.0
"""A longer `Retry-After` counts as this time, after which a change of the resource would have to wait."""
MOST_CONNECTIONS = 20
POSTED_AT_ONCE, POST_SECONDS, MOST_UNPOSTED, LAST_POST_SECONDS = 4, 5.0, 1000, 2.0
"""Limits of Events, so that slow ones take few connections: how many are posted at the same time, the timeout of each,
how many may wait, and how long the end of the process waits for them."""
KUBECONFIG = "~/.kube/config"
APPLY = "application/apply-patch+yaml"  # JSON is YAML
MERGE = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"
METADATA_ONLY = "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io"
METADATA_OF_ONE = "application/json;as=PartialObjectMetadata;v=v1;g=meta.k8s.io"
NO_VERSION = "1"
"""A resourceVersion that no object has: etcd counts all objects of the cluster, and begins at 1."""
PAGE = 50
"""Objects of a list. Each may have 1.5 MiB of metadata."""
STRICT = {"fieldValidation": "Strict"}
ANY_OBJECT: Mapping[int, str] = {HTTPStatus.OK: "object", HTTPStatus.CREATED: "object", HTTPStatus.ACCEPTED: "object"}
NAMES = "names"
"""The type of an answer that is a list of objects, of which only name, namespace and uid are kept."""
_REFUSALS: Mapping[int, type[ClusterRefused]] = {
    400: Invalid,
    403: Forbidden,
    404: ObjectNotFound,
    409: Conflict,
    422: Invalid,
}
_OTHER_UID = "metadata.uid: Invalid value"
_NOT_TYPED = "failed to create typed patch object"
_TRANSIENT = frozenset({HTTPStatus.UNAUTHORIZED, HTTPStatus.TOO_MANY_REQUESTS})


class Cluster:
    """A client of the API server. It belongs to one event loop and is used as an async context manager."""

    def __init__(
        self, *, observe_call: Callable[[str, str, int], None] | None = None, namespaces: Sequence[str] = ()
    ) -> None:
        """Prepare a client. `observe_call(verb, kind, status)` is called for each answer; status 0 means no answer."""
        self.namespaces = tuple(namespaces)
        """Lists contain the objects of these namespaces; empty for all."""
        self._observe_call = observe_call or (lambda _verb, _kind, _status: None)
        self._client: ApiClient | None = None
        self._connecting = asyncio.Lock()
        self._posting: set[asyncio.Task[None]] = set()
        self._may_post = asyncio.Semaphore(POSTED_AT_ONCE)
        self._is_dropping = False
        """Whether an Event was dropped since none waited."""

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._posting:
            _, late = await asyncio.wait(self._posting, timeout=LAST_POST_SECONDS)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        if self._client is not None:
            await self._client.close()

    async def apply(self, key: Key, manifest: Body, *, uid: str | None) -> Body:
        """Make an object match `manifest` by server-side apply, which takes over fields that others own.

        The object must have this uid. None: the object must not exist.

        Raises:
            Conflict: another object has the name.
        """
        # The API server creates an object under any version, and changes one only under its present version.
        condition = {"resourceVersion": NO_VERSION} if uid is None else {"uid": uid}
        body = manifest | {"metadata": manifest["metadata"] | condition}
        return await self._patch("apply", key, body, APPLY, query={"force": "true"} | STRICT)

    async def overwrite(self, key: Key, manifest: Body, *, uid: str) -> Body:
        """Set the content of an object to `manifest`, lists included. Apply would keep the items that others added."""
        body = {name: value for name, value in manifest.items() if name not in {"apiVersion", "kind", "metadata"}}
        return await self._patch("overwrite", key, body | {"metadata": {"uid": uid}}, MERGE)

    async def apply_status(self, key: Key, manifest: Body) -> Body:
        """Make the status of a resource match `manifest`."""
        query = {"force": "true"} | STRICT
        return await self._patch("apply_status", key, manifest, APPLY, query=query, subresource="status")

    async def scale(self, key: Key, replicas: int, *, version: str) -> None:
        """Write `spec.replicas` of a resource through its scale subresource, as an HPA does.

        Raises:
            Conflict: the resource has another resourceVersion than `version`.
        """
        body = {"metadata": {"resourceVersion": version}, "spec": {"replicas": replicas}}
        await self._patch("scale", key, body, MERGE, query={"fieldManager": SCALING_MANAGER}, subresource="scale")

    async def annotate(self, key: Key, annotations: Mapping[str, str | None]) -> None:
        """Set annotations; None removes an annotation. Does nothing if the object was deleted."""
        with contextlib.suppress(ObjectNotFound):
            await self._patch("annotate", key, {"metadata": {"annotations": dict(annotations)}}, MERGE)

    async def resize(self, key: Key, replicas: int, leaving: Sequence[str], *, owner: str) -> bool:
        """Add worker pods to a Ray cluster up to `replicas`. Or remove those that are `leaving`, so that these remain.

        Return whether this changed something. It does not if the Ray cluster was deleted, has enough pods, or would
        have another number than `replicas` without those that are leaving: then the caller's number is old.

        Raises:
            Invalid: the first owner of the Ray cluster has another uid than `owner`.
        """
        found = await self.get(key)
        if found is None:
            return False
        before = int(found["spec"]["workerGroupSpecs"][0].get("replicas") or 0)
        if before != replicas + len(leaving) if leaving else before >= replicas:
            return False
        group = "/spec/workerGroupSpecs/0"
        steps: list[Body] = [
            {"op": "test", "path": "/metadata/ownerReferences/0/uid", "value": owner},
            {"op": "add", "path": f"{group}/replicas", "value": replicas},
            {"op": "add", "path": f"{group}/scaleStrategy", "value": {"workersToDelete": list(leaving)}},
        ]
        try:
            await self._patch("resize", key, steps, JSON_PATCH)
        except ObjectNotFound:
            return False
        return True

    async def delete(self, key: Key, uid: str) -> None:
        """Delete the object with this uid. Kubernetes deletes its dependents in the background."""
        body = {"propagationPolicy": "Background", "preconditions": {"uid": uid}}
        with contextlib.suppress(ObjectNotFound):
            await self._call("delete", "DELETE", key.kind, key.path(), body=body, seconds=WRITE_SECONDS)

    async def get(self, key: Key) -> Body | None:
        """Return an object, or None if it does not exist."""
        try:
            return await self._call("get", "GET", key.kind, key.path())
        except ObjectNotFound:
            return None

    async def metadata(self, key: Key) -> Body | None:
        """Return an object with its metadata only, or None if it does not exist.

        A Secret is read by its name, and other objects with the permission to list.
        """
        if key.kind != SECRET:
            return await self.find(key, accept=METADATA_ONLY)
        with contextlib.suppress(ObjectNotFound):
            return await self._call("get", "GET", SECRET, key.path(), accept=METADATA_OF_ONE)
        return None

    async def find(self, key: Key, *, accept: str = "application/json") -> Body | None:
        """Return an object, or None if it does not exist, with the permission to list."""
        query, path = {"fieldSelector": f"metadata.name={key.name}"}, key.kind.path(key.namespace)
        answer = await self._call("list", "GET", key.kind, path, query=query, accept=accept)
        return next(iter(answer["items"] or ()), None)

    async def create(self, kind: Kind, body: Body, *, seconds: float = TIMEOUT_SECONDS) -> Body:
        """Create an object. `seconds` is the timeout."""
        path, query = kind.path(body["metadata"]["namespace"]), {"fieldManager": FIELD_MANAGER}
        return await self._call("create", "POST", kind, path, query=query, body=body, seconds=seconds)

    async def replace(self, key: Key, body: Body) -> Body:
        """Replace an object if its resourceVersion is still that of `body`."""
        query = {"fieldManager": FIELD_MANAGER}
        return await self._call("update", "PUT", key.kind, key.path(), query=query, body=body)

    async def uids(self, kind: Kind, selector: str) -> dict[Key, str]:
        """Return the uid of each object of a kind. The result is empty if the cluster does not have the kind."""
        found: dict[Key, str] = {}
        for namespace in self.namespaces or (None,):
            found |= await self._uids(kind, kind.path(namespace), selector)
        return found

    async def _uids(self, kind: Kind, path: str, selector: str) -> dict[Key, str]:
        found: dict[Key, str] = {}
        query = {"labelSelector": selector, "limit": str(PAGE)}
        while True:
            try:
                page = await self._call(
                    "list", "GET", kind, path, query=query, accept=METADATA_ONLY, answers={HTTPStatus.OK: NAMES}
                )
            except ObjectNotFound:
                return {}
            found |= {key_of(kind, item): item["metadata"]["uid"] for item in page["items"] or ()}
            token = page["metadata"].get("continue")
            if not token:
                return found
            query = query | {"continue": token}

    async def may_list(self, kind: Kind, namespace: str) -> bool:
        """Return whether the role of the operator allows it to list the objects of a kind in a namespace."""
        try:
            await self._call("list", "GET", kind, kind.path(namespace), query={"limit": "1"}, accept=METADATA_ONLY)
        except Forbidden:
            return False
        return True

    async def plurals(self, like: Kind) -> frozenset[str]:
        """Return the plural names of the kinds that the cluster has in the group and version of `like`."""
        path = f"/apis/{like.group}/{like.version}" if like.group else f"/api/{like.version}"
        try:
            answer = await self._call("discover", "GET", like, path)
        except ObjectNotFound:
            return frozenset()
        return frozenset(resource["name"] for resource in answer.get("resources") or ())

    def post_event(self, body: Body) -> None:
        """Create an Event in the background: no reconciliation waits for it, and a lost Event does no harm."""
        if len(self._posting) >= MOST_UNPOSTED:
            if not self._is_dropping:
                log.info("events are not posted until the others are", because=f"{MOST_UNPOSTED} others wait")
            self._is_dropping = True
            return
        self._is_dropping = self._is_dropping and bool(self._posting)
        task = asyncio.create_task(self._post_event(body))
        self._posting.add(task)
        task.add_done_callback(self._posting.discard)

    async def _post_event(self, body: Body) -> None:
        async with self._may_post:
            try:
                await self.create(EVENT, body, seconds=POST_SECONDS)
            except (ClusterUnavailable, ClusterRefused) as error:
                log.info("event not posted", because=str(error))

    async def _patch(
        self,
        verb: str,
        key: Key,
        body: Body | list[Body],
        content_type: str,
        *,
        query: Mapping[str, str] | None = None,
        subresource: str | None = None,
    ) -> Body:
        query = {"fieldManager": FIELD_MANAGER} | dict(query or {})
        path = key.path(subresource)
        return await self._call(
            verb, "PATCH", key.kind, path, query=query, body=body, content_type=content_type, seconds=WRITE_SECONDS
        )

    async def _call(
        self,
        verb: str,
        method: str,
        kind: Kind,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Body | list[Body] | None = None,
        content_type: str = "application/json",
        accept: str = "application/json",
        seconds: float = TIMEOUT_SECONDS,
        answers: Mapping[int, str] = ANY_OBJECT,
    ) -> Body:
        client, status = self._client, 0
        assert client is not None, "use as an async context manager"
        try:
            answer, status, _ = await client.call_api(
                path,
                method,
                query_params=list((query or {}).items()),
                header_params={"Content-Type": content_type, "Accept": accept},
                body=body,
                response_types_map=answers,
                auth_settings=["BearerToken"],
                _request_timeout=seconds,
            )
        except ApiException as error:
            status = int(error.status or 0)
            if status == HTTPStatus.UNAUTHORIZED:
                await self.connect()  # the token or certificate may have been replaced, and the call is retried later
            raise _failure(f"{verb} {path}", status, error) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ClientError):
                late = f"{verb} {path}: the API server did not answer within {seconds:g} s"
                raise ClusterUnavailable(late, is_about_one=True) from error
            reason = str(error) or type(error).__name__
            raise ClusterUnavailable(f"{verb} {path}: the API server does not answer ({reason})") from error
        except RuntimeError as error:  # aiohttp: the session is closed
            if client is self._client:
                raise
            raise ClusterUnavailable(f"{verb} {path}: the connection was replaced meanwhile") from error
        finally:
            self._observe_call(verb, kind.name, status)
        return answer if isinstance(answer, dict) else {}

    async def connect(self) -> None:
        """Use the present token, certificate, and authorities of the API server for all later calls."""
        async with self._connecting:
            before = self._client
            configuration = await _configuration()
            configuration.connection_pool_maxsize = MOST_CONNECTIONS
            self._client = ListingClient(configuration)
            self._client.user_agent = FIELD_MANAGER
            if before is not None:
                await before.close()


class ListingClient(ApiClient):  # type: ignore[misc]
    """Decodes objects however deep they are nested. Decodes those of a list of names one after another.

    Their labels may take much memory.
    """

    def deserialize(self, response: Any, response_type: str) -> Any:
        if response_type != NAMES:
            with contextlib.suppress(ValueError):
                return decoded(response.data)
            return response.data
        items, rest = items_of(response.data, _named)
        return rest | {"items": items}


def _named(body: Body) -> Body:
    return {"metadata": {name: body["metadata"][name] for name in ("namespace", "name", "uid")}}


async def _configuration() -> Configuration:
    """Return the configuration of the pod's service account, whose token is read again each minute, or the kubeconfig.

    Raises:
        BadSetting: neither exists.
    """
    found = Configuration()
    try:
        load_incluster_config(client_configuration=found)
    except ConfigException:
        file = os.environ.get("KUBECONFIG") or KUBECONFIG
        try:
            await load_kube_config(config_file=file, client_configuration=found, persist_config=False)
        except (ConfigException, TypeError) as error:  # TypeError: the file is empty
            raise BadSetting(
                f"No service account and no usable kubeconfig found ({file}). Run the operator in a pod, or set "
                "KUBECONFIG to a file with a current context"
            ) from error
    return found


def _failure(call: str, status: int, error: ApiException) -> ClusterUnavailable | ClusterRefused:
    message = _message(error)
    if _OTHER_UID in message:
        status = HTTPStatus.CONFLICT
    if _NOT_TYPED in message:
        status = HTTPStatus.UNPROCESSABLE_ENTITY  # server-side apply answers 500 to an unknown field
    if status in _TRANSIENT or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        after = (error.headers or {}).get("Retry-After", "")
        seconds = min(float(after), MOST_RETRY_SECONDS) if after.isdigit() else None
        sentence = f"{call}: the API server answered {status}: {message}"
        return ClusterUnavailable(sentence, seconds, is_about_one=status not in _TRANSIENT)
    return _REFUSALS.get(status, ClusterRefused)(call, status, message)


def _message(error: ApiException) -> str:
    """Return the API server's own sentence, which a `Status` object holds."""
    try:
        answer = json.loads(error.body or "")
    except ValueError:
        answer = error.body
    return str(answer.get("message", "") if isinstance(answer, dict) else answer or error.reason)[:1000]
