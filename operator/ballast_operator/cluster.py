"""The Kubernetes API as the operator uses it: few calls, each counted, no retry.

The one writer to Kubernetes. A call that fails raises, and the turn that made it is tried again by `turns`, so that a
busy API server meets one patience and not two.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from types import TracebackType
from typing import Any, Self

import aiohttp
import kopf

from ballast_api.names import FIELD_MANAGER, SCALING_MANAGER
from ballast_log import Log
from ballast_operator.errors import (
    BadSetting,
    ClusterRefused,
    ClusterUnavailable,
    Conflict,
    Forbidden,
    Invalid,
    NotFound,
)
from ballast_operator.kinds import EVENT, INFERENCE_DEPLOYMENT, POD, Body, Key, Kind, key_of

log = Log(__name__)

TIMEOUT_SECONDS = 30.0
APPLY = "application/apply-patch+yaml"  # JSON is YAML
MERGE = "application/merge-patch+json"
METADATA_ONLY = "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io"
PAGE = 500
_REFUSALS: Mapping[int, type[ClusterRefused]] = {
    400: Invalid,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    422: Invalid,
}
_NOT_TYPED = "failed to create typed patch object"
_PASSING = frozenset({HTTPStatus.UNAUTHORIZED, HTTPStatus.TOO_MANY_REQUESTS})


def log_in() -> kopf.ConnectionInfo:
    """Where the API server is and who we are: the pod's service account, else the kubeconfig.

    Raises:
        BadSetting: there is neither.
    """
    settings = kopf.OperatorSettings()
    found = kopf.login_with_service_account(settings=settings) or kopf.login_with_kubeconfig(settings=settings)
    if found is None:
        raise BadSetting(
            "found neither a service account nor a kubeconfig: run in a pod, or set KUBECONFIG to a file with a "
            "current context"
        )
    return found


@dataclass(frozen=True, slots=True)
class _Request:
    """One call."""

    verb: str
    method: str
    kind: Kind
    path: str
    query: Mapping[str, str]
    body: Body | None = None
    content_type: str = "application/json"
    accept: str = "application/json"


class Cluster:
    """A session with the API server. Belongs to one event loop; used as an async context manager."""

    def __init__(self, *, observe_call: Callable[[str, str, int], None] | None = None) -> None:
        """Prepare a session; `observe_call(verb, kind, status)` sees each answer, status 0 is none."""
        self._observe_call = observe_call or (lambda _verb, _kind, _status: None)
        self._session: aiohttp.ClientSession | None = None
        self._server = ""
        self._login = asyncio.Lock()
        self._posting: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        await self._open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.gather(*self._posting, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def apply(self, kind: Kind, manifest: Body, *, force: bool) -> Body:
        """Make the object what `manifest` says, by server-side apply; with `force`, take fields from others."""
        key = key_of(manifest)
        query = {"fieldManager": FIELD_MANAGER, "force": str(force).lower(), "fieldValidation": "Strict"}
        return await self._call(
            "apply", "PATCH", kind, kind.path(key.namespace, key.name), query, body=manifest, content_type=APPLY
        )

    async def overwrite(self, kind: Kind, manifest: Body) -> Body:
        """Make every list in the object exactly what `manifest` says, which apply cannot where others added to it."""
        key = key_of(manifest)
        body = {name: value for name, value in manifest.items() if name not in {"apiVersion", "kind", "metadata"}}
        query = {"fieldManager": FIELD_MANAGER}
        path = kind.path(key.namespace, key.name)
        return await self._call("overwrite", "PATCH", kind, path, query, body=body, content_type=MERGE)

    async def apply_status(self, manifest: Body) -> Body:
        """Make the status of an InferenceDeployment what `manifest` says."""
        key, kind = key_of(manifest), INFERENCE_DEPLOYMENT
        query = {"fieldManager": FIELD_MANAGER, "force": "true", "fieldValidation": "Strict"}
        path = kind.path(key.namespace, key.name, "status")
        return await self._call("apply_status", "PATCH", kind, path, query, body=manifest, content_type=APPLY)

    async def scale(self, key: Key, replicas: int) -> None:
        """Write `spec.replicas` of an InferenceDeployment through its scale subresource, as an HPA does."""
        kind = INFERENCE_DEPLOYMENT
        path = kind.path(key.namespace, key.name, "scale")
        query = {"fieldManager": SCALING_MANAGER}
        await self._call("scale", "PATCH", kind, path, query, body={"spec": {"replicas": replicas}}, content_type=MERGE)

    async def annotate_pod(self, key: Key, annotations: Mapping[str, str | None]) -> None:
        """Set annotations of a pod; None removes one. A pod that is gone needs none."""
        body = {"metadata": {"annotations": dict(annotations)}}
        query = {"fieldManager": FIELD_MANAGER}
        try:
            await self._call(
                "annotate", "PATCH", POD, POD.path(key.namespace, key.name), query, body=body, content_type=MERGE
            )
        except NotFound:
            return

    async def delete(self, kind: Kind, key: Key, uid: str) -> None:
        """Delete this very object, and what belongs to it in the background."""
        body = {"propagationPolicy": "Background", "preconditions": {"uid": uid}}
        try:
            await self._call("delete", "DELETE", kind, kind.path(key.namespace, key.name), {}, body=body)
        except NotFound:
            return

    async def get(self, kind: Kind, key: Key) -> Body | None:
        """Read one object; None where there is none."""
        try:
            return await self._call("get", "GET", kind, kind.path(key.namespace, key.name))
        except NotFound:
            return None

    async def create(self, kind: Kind, body: Body) -> Body:
        """Create an object."""
        path = kind.path(body["metadata"]["namespace"])
        return await self._call("create", "POST", kind, path, {"fieldManager": FIELD_MANAGER}, body=body)

    async def replace(self, kind: Kind, body: Body) -> Body:
        """Replace an object, if it still has the resourceVersion that `body` names."""
        key = key_of(body)
        query = {"fieldManager": FIELD_MANAGER}
        return await self._call("update", "PUT", kind, kind.path(key.namespace, key.name), query, body=body)

    async def uids(self, kind: Kind, selector: str, namespace: str | None = None) -> dict[Key, str] | None:
        """Which objects of a kind there are; None where the kind itself is missing."""
        found: dict[Key, str] = {}
        query = {"labelSelector": selector, "limit": str(PAGE)}
        while True:
            try:
                page = await self._call("list", "GET", kind, kind.path(namespace), query, accept=METADATA_ONLY)
            except NotFound:
                return None
            found |= {key_of(item): item["metadata"]["uid"] for item in page["items"] or ()}
            token = page["metadata"].get("continue")
            if not token:
                return found
            query = query | {"continue": token}

    async def plurals(self, like: Kind) -> frozenset[str]:
        """Which kinds the cluster knows in the group and version of `like`, by their plurals."""
        path = f"/apis/{like.group}/{like.version}" if like.group else f"/api/{like.version}"
        try:
            answer = await self._call("discover", "GET", like, path)
        except NotFound:
            return frozenset()
        return frozenset(resource["name"] for resource in answer.get("resources") or ())

    def post_event(self, body: Body) -> None:
        """Tell people what happened to an object, in the background: no turn waits, and a lost one harms none."""
        task = asyncio.create_task(self._post_event(body))
        self._posting.add(task)
        task.add_done_callback(self._posting.discard)

    async def _post_event(self, body: Body) -> None:
        try:
            await self.create(EVENT, body)
        except (ClusterUnavailable, ClusterRefused) as error:
            log.info("event not posted", because=str(error))

    async def _call(
        self, verb: str, method: str, kind: Kind, path: str, query: Mapping[str, str] | None = None, **more: Any
    ) -> Body:
        request = _Request(verb, method, kind, path, query or {}, **more)
        status, answer, headers = await self._send(request)
        if status == HTTPStatus.UNAUTHORIZED:
            await self._open()  # service account tokens are rotated: read the new one
            status, answer, headers = await self._send(request)
        if status < HTTPStatus.MULTIPLE_CHOICES:
            return answer
        what, message = f"{verb} {path}", str(answer.get("message", ""))[:1000]
        if _NOT_TYPED in message:
            status = HTTPStatus.UNPROCESSABLE_ENTITY  # server-side apply answers 500 where a field has no place
        if status in _PASSING or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            after = headers.get("Retry-After", "")
            said = f"{what}: the API server answered {status}: {message}"
            seconds = float(after) if after.isdigit() else None
            raise ClusterUnavailable(said, seconds, is_about_one=status not in _PASSING)
        raise _REFUSALS.get(status, ClusterRefused)(what, status, message)

    async def _send(self, request: _Request) -> tuple[int, Body, Mapping[str, str]]:
        assert self._session is not None, "use as an async context manager"
        status = 0
        try:
            async with self._session.request(
                request.method,
                self._server + request.path,
                params=request.query,
                data=None if request.body is None else json.dumps(request.body),
                headers={"Content-Type": request.content_type, "Accept": request.accept},
            ) as response:
                text = await response.text()
                status = response.status
                return status, _parse(text), response.headers
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            said = f"no answer from {self._server} ({error or type(error).__name__})"
            raise ClusterUnavailable(f"{request.verb} {request.path}: {said}") from error
        finally:
            self._observe_call(request.verb, request.kind.name, status)

    async def _open(self) -> None:
        async with self._login:
            before = self._session
            info = log_in()
            self._server = info.server.rstrip("/")
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(ssl=info.as_ssl_context(), limit=20),
                headers=info.as_http_headers() | {"User-Agent": FIELD_MANAGER},
                timeout=aiohttp.ClientTimeout(total=TIMEOUT_SECONDS),
            )
            if before is not None:
                await before.close()


def _parse(text: str) -> dict[str, Any]:
    try:
        answer = json.loads(text)
    except ValueError:
        return {"message": text}
    return answer if isinstance(answer, dict) else {"message": text}
