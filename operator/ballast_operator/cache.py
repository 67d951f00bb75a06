"""The watched objects. A reconciliation reads objects only from here.

Kopf keeps the watches. A watch that was interrupted for long lists its objects again, and a list does not show
deletions. An audit therefore compares the cache with the cluster, rarely and after each new list, and removes the
objects that are gone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from ballast_api.names import INSTANCE_LABEL, NAME_LABEL, RAY_HEAD_LABEL, WORKER
from ballast_operator.content import is_too_large, is_whole, metadata_of, trimmed
from ballast_operator.kinds import INFERENCE_DEPLOYMENT, POD, Body, Key, Kind, key_of
from ballast_operator.plan import is_owned
from ballast_operator.queue_rules import queue_of
from ballast_operator.sharing import Sharing


class Cache:
    """The resources, and the children and pods of each."""

    def __init__(self) -> None:
        self.resources: dict[Key, Body] = {}
        self._queues: dict[str, dict[Key, Body]] = defaultdict(dict)
        """The resources by the name of their queue."""
        self._sharing: dict[str, Sharing] = {}
        """The same, for the queues that did not change since they were asked for."""
        self._children: dict[Key, dict[Key, Body]] = defaultdict(dict)
        self._pods: dict[Key, dict[Key, Body]] = defaultdict(dict)
        self._heads: dict[Key, dict[Key, Body]] = defaultdict(dict)
        self._owners: dict[Key, Key] = {}
        """The resource under which each child and pod is stored."""
        self._revisions: dict[Key, int] = defaultdict(int)

    def owner(self, kind: Kind, body: Body) -> Key | None:
        """Return the resource that an object is or belongs to by its labels; None if it belongs to none."""
        if kind == INFERENCE_DEPLOYMENT:
            return key_of(kind, body)
        labels = body["metadata"].get("labels") or {}
        name = labels.get(RAY_HEAD_LABEL) if _is_head(kind, body) else labels.get(INSTANCE_LABEL)
        if not name or (labels.get(NAME_LABEL) != WORKER and not _is_head(kind, body)):
            return None
        return Key(INFERENCE_DEPLOYMENT, body["metadata"]["namespace"], name)

    def put(self, kind: Kind, body: Body) -> tuple[Key, ...]:
        """Store an object. Return the resources to reconcile: none if nothing is new or the object is not ours.

        An object whose labels changed leaves its former owner, which must be reconciled too.
        """
        body = trimmed(kind, body)
        key, owner = key_of(kind, body), self.owner(kind, body)
        known = self.resources.get(key) if kind == INFERENCE_DEPLOYMENT else self._known(key)
        if _is_same(known, body) or _is_older(body, known):
            return ()
        if kind == INFERENCE_DEPLOYMENT:
            self._put_resource(key, body)
            return (key,)
        former = self._remove(key)
        if owner is not None:
            self._store(kind, body)[owner][key] = body
            self._owners[key] = owner
            self._revisions[owner] += 1
        return tuple(found for found in dict.fromkeys((owner, former)) if found is not None)

    def drop(self, kind: Kind, body: Body) -> Key | None:
        """Remove an object that was deleted, unless a new one has its name. Return the resource to reconcile.

        Return None if the object is not ours.
        """
        key = key_of(kind, body)
        if kind == INFERENCE_DEPLOYMENT:
            if self.resources.get(key, body)["metadata"]["uid"] == body["metadata"]["uid"]:
                self._put_resource(key, None)
                self._revisions.pop(key, None)
            return key
        known = self._known(key)
        if known is not None and known["metadata"]["uid"] == body["metadata"]["uid"]:
            return self._remove(key)
        return self.owner(kind, body)

    def keep_own(self, key: Key, uid: str) -> list[Key]:
        """Keep the children that the resource with this uid owns, and only the metadata of the others.

        Return the children that it owns and of which only the metadata is there. They came while no such resource did.
        """
        found = self._children.get(key, {})
        foreign = [child for child, body in found.items() if is_whole(body) and not is_owned(body, uid)]
        found.update({child: metadata_of(found[child]) for child in foreign})
        partial = [child for child, body in found.items() if not is_whole(body) and not is_too_large(body)]
        return [child for child in partial if is_owned(found[child], uid)]

    def sharing(self, queue: str) -> Sharing:
        """Return the resources whose queue has this name, in whichever Redis."""
        if queue not in self._queues:
            return Sharing()
        found = self._sharing.get(queue)
        if found is None:
            found = self._sharing[queue] = Sharing(self._queues[queue].values())
        return found

    def children(self, key: Key) -> Mapping[Key, Body]:
        """Return the children of a resource."""
        return self._children.get(key, {})

    def pods(self, key: Key) -> tuple[Body, ...]:
        """Return the worker pods of a resource, ordered by name."""
        return tuple(body for _, body in sorted(self._pods.get(key, {}).items()))

    def heads(self, key: Key) -> tuple[Body, ...]:
        """Return the heads of the Ray clusters of a resource."""
        return tuple(self._heads.get(key, {}).values())

    def revision(self, key: Key) -> int:
        """Return a number that grows with each change of the children and pods of a resource."""
        return self._revisions.get(key, 0)

    def uids(self, kind: Kind) -> dict[Key, str]:
        """Return the uid of each stored object of a kind, for a comparison with a list requested after this call."""
        return {key_of(kind, body): body["metadata"]["uid"] for body in self._all(kind)}

    def forget_missing(self, kind: Kind, before: Mapping[Key, str], present: Mapping[Key, str]) -> list[Key]:
        """Remove objects that are in `before` and not in `present`. Return the resources to reconcile."""
        gone = [
            body
            for body in self._all(kind)
            if (uid := body["metadata"]["uid"]) == before.get(key := key_of(kind, body)) and present.get(key) != uid
        ]
        return [owner for body in gone if (owner := self.drop(kind, body)) is not None]

    def _all(self, kind: Kind) -> Iterator[Body]:
        if kind == INFERENCE_DEPLOYMENT:
            yield from self.resources.values()
            return
        for store in self._stores(kind):
            for objects in store.values():
                yield from (body for key, body in objects.items() if key.kind == kind)

    def _put_resource(self, key: Key, body: Body | None) -> None:
        """Store a resource, or remove it."""
        former = self.resources.pop(key, None)
        if former is not None:
            queue = queue_of(former)
            self._sharing.pop(queue, None)
            self._queues[queue].pop(key, None)
            if not self._queues[queue]:
                del self._queues[queue]
        if body is not None:
            queue = queue_of(body)
            self.resources[key] = body
            self._sharing.pop(queue, None)
            self._queues[queue][key] = body

    def _known(self, key: Key) -> Body | None:
        """Return the stored child or pod of this key."""
        owner = self._owners.get(key)
        if owner is None:
            return None
        return next(store[owner][key] for store in self._stores(key.kind) if key in store.get(owner, {}))

    def _remove(self, key: Key) -> Key | None:
        """Remove a child or pod. Return the resource under which it was stored; None if it was not."""
        owner = self._owners.pop(key, None)
        if owner is None:
            return None
        for store in self._stores(key.kind):
            store.get(owner, {}).pop(key, None)
            if not store.get(owner, True):
                del store[owner]
        self._revisions[owner] += 1
        return owner

    def _stores(self, kind: Kind) -> tuple[dict[Key, dict[Key, Body]], ...]:
        return (self._pods, self._heads) if kind == POD else (self._children,)

    def _store(self, kind: Kind, body: Body) -> dict[Key, dict[Key, Body]]:
        if kind != POD:
            return self._children
        return self._heads if _is_head(kind, body) else self._pods


def _is_head(kind: Kind, body: Body) -> bool:
    return kind == POD and RAY_HEAD_LABEL in (body["metadata"].get("labels") or {})


def _is_same(known: Body | None, body: Body) -> bool:
    if known is None or (is_whole(body) and not is_whole(known)):
        return False
    return bool(known["metadata"].get("resourceVersion") == body["metadata"].get("resourceVersion"))


def _is_older(body: Body, known: Body | None) -> bool:
    """Watch events and answers to writes arrive in any order. The versions of one object grow."""
    if known is None or known["metadata"]["uid"] != body["metadata"]["uid"]:
        return False
    return int(body["metadata"]["resourceVersion"]) < int(known["metadata"]["resourceVersion"])
