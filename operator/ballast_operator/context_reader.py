"""Reads what all reconciliations share: the optional kinds of the cluster, and the operator's own Redis Secret."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace

from ballast_api.wildcard import ANY, listening_host
from ballast_log import Log
from ballast_operator.addresses import Address
from ballast_operator.children.config import CA, own_redis
from ballast_operator.cluster import Cluster
from ballast_operator.context import GcsValkey, OperatorContext
from ballast_operator.errors import ClusterRefused, ClusterUnavailable
from ballast_operator.kinds import SECRET, WATCHED, Key
from ballast_operator.settings import OperatorSettings, listed
from ballast_operator.user_sync import UserKeyStore

log = Log(__name__)

OPTIONAL = [kind for kind in WATCHED if kind.is_optional]
SECRET_EVERY_SECONDS = 60.0
"""Interval of reading the operator's own Redis Secret while Redis accepts its password."""
SECRET_SOON_SECONDS = 5.0
"""The same interval while Redis refuses the password."""
KINDS_AGAIN_SECONDS = 3.0
"""The API server may list a new kind a moment after its CRD changed."""
UNREAD_KINDS_AGAIN_SECONDS = 30.0
"""Interval of reading the optional kinds of a group that could not be read."""
RETRY_SECONDS = 2.0
"""Delay before a part of the cluster that could not be read is read again."""


class ContextReader:
    """The context, and what it is read from. It belongs to one event loop."""

    def __init__(
        self,
        settings: OperatorSettings,
        cluster: Cluster,
        *,
        changed: Callable[[OperatorContext], None],
    ) -> None:
        """`changed` is called with each new context."""
        self.present = _context_of(settings)
        """It is replaced as a whole when something changes."""
        self.unread = ""
        """Why the context was not read yet; empty on standby."""
        self.kinds_changed = asyncio.Event()
        self.secret_outdated = asyncio.Event()
        """Redis refuses the operator's own Secret, or the Secret is missing."""
        self._settings = settings
        self._cluster = cluster
        self._changed = changed
        keys = Key(SECRET, settings.namespace, f"{settings.lease_name}-redis-users")
        self._user_keys = UserKeyStore(cluster, keys, days=settings.redis_password_days)
        self._has_unread_kinds = False
        """Whether a group of optional kinds could not be read."""

    def use(self, context: OperatorContext) -> None:
        """Use another context from now on."""
        if context != self.present:
            self.present = context
            self._changed(context)

    async def read(self) -> None:
        """Read the context before the first reconciliation."""
        self.unread = "the kinds of the cluster and the operator's own Secrets"
        while True:
            try:
                kinds = await self._optional_kinds()
                self.use(replace(await self._with_secret(), kinds=kinds))
            except (ClusterUnavailable, ClusterRefused) as error:
                self.unread = str(error)
                log.warning("cannot read the cluster and will retry", error=str(error))
                await asyncio.sleep(RETRY_SECONDS)
            else:
                self.unread = ""
                return

    async def read_kinds(self) -> None:
        """Read the optional kinds."""
        kinds = await self._optional_kinds()  # first: the context may change meanwhile
        self.use(replace(self.present, kinds=kinds))

    async def follow_kinds(self) -> None:
        """Read the optional kinds again when a CRD of theirs changes."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(UNREAD_KINDS_AGAIN_SECONDS if self._has_unread_kinds else None):
                    await self.kinds_changed.wait()
            self.kinds_changed.clear()
            for seconds in (0.0, KINDS_AGAIN_SECONDS):
                await asyncio.sleep(seconds)
                try:
                    await self.read_kinds()
                except (ClusterUnavailable, ClusterRefused) as error:
                    log.warning("cannot read the optional kinds, which the next audit retries", error=str(error))

    async def _optional_kinds(self) -> frozenset[str]:
        """Return the names of the optional kinds that the cluster has, with one call for each of their groups.

        The kinds of a group that cannot be read stay as they were.
        """
        groups = {(kind.group, kind.version): kind for kind in OPTIONAL}
        known = frozenset(kind.plural for kind in OPTIONAL if kind.name in self.present.kinds)
        plurals, unread = {}, False
        for group, kind in groups.items():
            try:
                plurals[group] = await self._cluster.plurals(kind)
            except (ClusterUnavailable, ClusterRefused) as error:
                if isinstance(error, ClusterUnavailable) and not error.is_about_one:
                    raise
                plurals[group], unread = known, True
                log.warning("cannot read the optional kinds of a group and will retry", error=str(error))
        if unread and not self._has_unread_kinds:
            self.kinds_changed.set()  # `follow_kinds` then tries again at an interval
        self._has_unread_kinds = unread
        return frozenset(kind.name for kind in OPTIONAL if kind.plural in plurals[kind.group, kind.version])

    async def follow_redis_secret(self) -> None:
        """Read the operator's own Redis Secret at an interval, and at once if it may have changed."""
        if not self._settings.redis_secret:
            await asyncio.Event().wait()
        while True:
            with contextlib.suppress(TimeoutError):
                seconds = SECRET_SOON_SECONDS if self.present.lacks_redis else SECRET_EVERY_SECONDS
                async with asyncio.timeout(min(seconds, self._settings.audit_seconds)):
                    await self.secret_outdated.wait()
            try:
                self.use(await self._with_secret())
            except (ClusterUnavailable, ClusterRefused) as error:
                log.warning("cannot read the operator's Redis Secret", error=str(error))
            if self.secret_outdated.is_set():
                await asyncio.sleep(SECRET_SOON_SECONDS)
                self.secret_outdated.clear()

    async def _with_secret(self) -> OperatorContext:
        """Return the context with the present data of the operator's own Redis Secret."""
        name = self._settings.redis_secret
        key = Key(SECRET, self._settings.namespace, name) if name else None
        body = await self._cluster.get(key) if key else None
        redis = None if body is None else dict(body.get("data") or {})
        if redis is not None and self._settings.redis_ca_secret:
            # Workers would be replaced by others without the file, so a Secret without it counts as missing.
            authority = Key(SECRET, self._settings.namespace, self._settings.redis_ca_secret)
            found = await self._cluster.get(authority)
            ca = ((found or {}).get("data") or {}).get(CA)
            redis, key = (redis | {CA: ca}, key) if ca else (None, authority)
        user_keys = await self._user_keys.read() if redis is not None else self.present.user_keys
        return replace(self.present, redis=redis, redis_key=key, user_keys=user_keys)

    def note_refusal(self, *, is_refused: bool) -> None:
        """Note whether the operator's own Redis refuses the creation of users."""
        self.use(replace(self.present, refuses_users=is_refused))

    def redis_address(self) -> Address | None:
        """Return the address of the operator's own Redis; None if there is none."""
        return Address.of(self.present.redis or {}, own_redis("", self.present.redis_keys))


def _context_of(settings: OperatorSettings) -> OperatorContext:
    """Return the context before anything is read."""
    return OperatorContext(
        image=settings.worker_image,
        vllm_image=settings.vllm_worker_image,
        ray_image=settings.ray_worker_image,
        ray_vllm_image=settings.ray_vllm_worker_image,
        gcs=GcsValkey(
            settings.gcs_redis_image,
            settings.gcs_redis_storage,
            settings.gcs_redis_storage_class,
            settings.gcs_redis_pod_security_context,
        ),
        rules=settings.pod_rules,
        runbooks=settings.runbook_base_url or None,
        release=settings.release or settings.lease,
        shared_queues=listed(settings.shared_queues),
        any_host=listening_host(ANY, settings.pod_ip),
    )
