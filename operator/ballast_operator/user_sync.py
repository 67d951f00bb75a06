"""Keeps the users in the operator's own Redis: creates those of all resources, and removes those of resources gone.

Redis loses users when it restarts or fails over, so the operator states all of them again at each interval.
"""

from __future__ import annotations

import asyncio
import base64
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import closing, suppress
from dataclasses import KW_ONLY, dataclass, field
from math import isfinite
from typing import Protocol

from ballast_api.names import MANAGED_BY_LABEL, OPERATOR
from ballast_log import Log
from ballast_operator.addresses import Address
from ballast_operator.children.redis_users import user_prefix
from ballast_operator.cluster import Cluster
from ballast_operator.context import UserKeys
from ballast_operator.errors import ClusterRefused, ClusterUnavailable, Conflict
from ballast_operator.kinds import INFERENCE_DEPLOYMENT, SECRET, Body, Key
from ballast_queue.connection import Connection
from ballast_queue.errors import CommandForbidden, QueueError, QueueUnavailable
from ballast_queue.redis_store import Queue
from ballast_queue.rights import RedisUser
from ballast_queue.users import RedisUsers

log = Log(__name__)

TIMEOUT_SECONDS = 5.0
OVERLAP_SECONDS = 3600.0
"""How long the previous passwords stay valid after a rotation."""
DAY = 86_400.0


class RefusalObserver(Protocol):
    """Takes whether Redis refuses the operator the creation of users."""

    def __call__(self, *, is_refused: bool) -> None: ...


class UserKeyStore:
    """The Secret with the key from which passwords are computed, in the operator's namespace."""

    def __init__(self, cluster: Cluster, key: Key, *, days: float) -> None:
        """Prepare a store. The key is replaced after `days`; 0 keeps it."""
        self._cluster = cluster
        self._key = key
        self._seconds = days * DAY

    async def read(self) -> UserKeys:
        """Return the keys. Create or replace the present one first, if it is missing or too old.

        A key that cannot be replaced stays, and the next call tries again.

        Raises:
            ClusterUnavailable, ClusterRefused: the Secret cannot be read or created.
        """
        body, now = await self._cluster.get(self._key), time.time()
        texts = _texts(body)
        age = now - _seconds(texts.get("rotated", ""))
        if age < -OVERLAP_SECONDS:
            age = now  # no clock is so far ahead: somebody edited the time, and would keep both keys valid
        present, previous = texts.get("key", ""), texts.get("previous", "")
        if not present or (self._seconds and age >= self._seconds):
            new = secrets.token_hex(32)
            try:
                await self._write({"key": new, "previous": present, "rotated": f"{now:.0f}"}, body)
            except Conflict:
                return await self.read()
            except (ClusterUnavailable, ClusterRefused) as error:
                if not present:
                    raise
                log.warning("the key of the passwords of users in redis is not replaced", error=str(error))
            else:
                log.info("made a new key for the passwords of users in redis", secret=self._key.name)
                return UserKeys(new, present, is_first=not present)
        return UserKeys(present, previous if age < OVERLAP_SECONDS else "", is_first=not previous)

    async def _write(self, texts: Mapping[str, str], before: Body | None) -> None:
        labels = {MANAGED_BY_LABEL: OPERATOR}
        metadata: Body = {"name": self._key.name, "namespace": self._key.namespace, "labels": labels}
        body = {"apiVersion": SECRET.api_version, "kind": SECRET.name, "metadata": metadata, "type": "Opaque"}
        data = {name: base64.b64encode(text.encode()).decode() for name, text in texts.items()}
        uid = None
        if before is not None:
            # Another process may have replaced the key after `before` was read.
            uid, metadata["resourceVersion"] = str(before["metadata"]["uid"]), before["metadata"]["resourceVersion"]
        await self._cluster.apply(self._key, body | {"data": data}, uid=uid)


def _seconds(text: str) -> float:
    """Return a time that somebody may have edited; 0 if it is no number, so that the key is replaced."""
    try:
        found = float(text)
    except ValueError:
        return 0.0
    return found if isfinite(found) else 0.0


def _texts(body: Body | None) -> dict[str, str]:
    data = (body or {}).get("data") or {}
    return {name: base64.b64decode(value).decode(errors="replace") for name, value in data.items()}


@dataclass(slots=True)
class RedisUserSync:
    """Creates and removes users. It belongs to one event loop; Redis is called on threads."""

    cluster: Cluster
    _: KW_ONLY
    release: str
    """Only users of this release are removed."""
    every_seconds: float
    address: Callable[[], Address | None]
    """Return the operator's own Redis, or None if there is none."""
    wanted: Callable[[], Mapping[Key, Sequence[RedisUser]]]
    """Return the users of each resource that is known."""
    on_hold: Callable[[], AbstractSet[Key]]
    """Return the resources among them that may have further users."""
    has_all: Callable[[AbstractSet[Key]], bool]
    """Return whether the caches have all these resources. Until then, no user is removed: a grant of a resource that is
    not known yet would count as revoked."""
    has_pods: Callable[[str], bool]
    """Return whether a resource (`namespace/name`) that is gone still has pods, which need its users."""
    refused: RefusalObserver
    """Is called with whether Redis refuses the operator the creation of users."""
    changed: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    """Set it to create new users at once."""

    async def run(self) -> None:
        """Keep the users until cancelled."""
        while True:
            self.changed.clear()
            await self.keep()
            with suppress(TimeoutError):
                async with asyncio.timeout(self.every_seconds):
                    await self.changed.wait()

    async def keep(self) -> None:
        """Create the missing users, and remove the users of deleted resources. Log a failure: the next call retries."""
        address = self.address()
        if address is None:
            return
        wanted = dict(self.wanted())
        settled = wanted.keys() - self.on_hold()
        users = [user for of_one in wanted.values() for user in of_one]
        try:
            # A new connection each time. After a switchover, an open one still leads to the former primary, which
            # accepts users also as a replica. In a cluster, an open one knows no node that was added.
            with closing(await asyncio.to_thread(_connect, address)) as connection:
                known = await asyncio.to_thread(self._put, connection, users)
                gone = await self._gone(settled, set(known) - {user.name for user in users})
                await asyncio.to_thread(_remove, connection, gone)
        except CommandForbidden:
            self.refused(is_refused=True)
        except QueueError as error:
            log.info("users in redis not kept, will retry", error=type(error).__name__)
        except (ClusterUnavailable, ClusterRefused) as error:
            log.warning("users of deleted resources not removed, will retry", error=str(error))
        else:
            if users:
                self.refused(is_refused=False)

    async def _gone(self, settled: AbstractSet[Key], unknown: set[str]) -> dict[str, str]:
        """Return the users to remove, and the resource of each, as `namespace/name`.

        The caches may be incomplete, so the API server decides whether a resource is gone. A resource on hold may have
        users that are not known now, such as the submitters of an invalid spec. Whether a resource of a namespace that
        is not watched is gone is unknown, so it keeps its users.
        """
        if not unknown:
            return {}
        found = (await self.cluster.uids(INFERENCE_DEPLOYMENT, "")).keys()
        if not self.has_all(found):
            return {}
        reconciled, present = ({f"{key.namespace}/{key.name}" for key in keys} for keys in (settled, found))
        owners = {name: name.removeprefix(user_prefix(self.release)).partition(":")[0] for name in unknown}
        watched = self.cluster.namespaces
        return {
            name: owner
            for name, owner in owners.items()
            if (not watched or owner.partition("/")[0] in watched)
            and (owner in reconciled or (owner not in present and not self.has_pods(owner)))
        }

    def _put(self, connection: Connection, users: Sequence[RedisUser]) -> list[str]:
        """Create the users, and return the names of all users of this release. Runs on a thread."""
        found = RedisUsers(connection)
        found.put(users)
        return found.names(user_prefix(self.release))


def _connect(address: Address) -> Connection:
    return Connection.open(address.url, password=address.password, ca=address.ca, socket_timeout=TIMEOUT_SECONDS)


def _remove(connection: Connection, gone: Mapping[str, str]) -> None:
    """Remove users, and then the settings that their resources wrote. Runs on a thread.

    A user can write anything into its queue, so no content of a queue may keep a user.
    """
    if not gone:
        return
    users = RedisUsers(connection)
    queues = {(queue, owner) for name, owner in gone.items() for queue in users.queues_of(name)}
    users.remove(list(gone))
    log.info("removed users from redis", users=sorted(gone))
    for queue, owner in sorted(queues):
        try:
            Queue(connection, queue).settings.drop(owner)
        except QueueUnavailable:
            raise
        except QueueError as error:
            log.warning("settings of a queue were not removed", queue=queue, error=type(error).__name__)
