"""What the watches showed of the cluster: the one place that reads of a turn come from.

Kopf keeps the streams; a stream that was cut off for long is listed anew, which shows no deletion. So an audit compares
what is here with what is there, rarely and after each new listing, and forgets what is gone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from ballast_api.names import INSTANCE_LABEL
from ballast_operator.kinds import INFERENCE_DEPLOYMENT, POD, Body, Key, Kind, key_of
from ballast_operator.plan import ChildName


class Cache:
    """Objects by kind and name, and the children of each resource."""

    def __init__(self) -> None:
        self.resources: dict[Key, Body] = {}
        self._children: dict[Key, dict[ChildName, Body]] = defaultdict(dict)
        self._pods: dict[Key, dict[ChildName, Body]] = defaultdict(dict)
        self._revisions: dict[Key, int] = defaultdict(int)

    def put(self, kind: Kind, body: Body) -> Key | None:
        """Take in an object; give the resource whose turn it is, None where nothing is new or it is nobody's."""
        body = trimmed(kind, body)
        key = key_of(body)
        if kind == INFERENCE_DEPLOYMENT:
            known = self.resources.get(key)
            self.resources[key] = body
            return None if _is_same(known, body) else key
        owner = owner_of(body)
        if owner is None:
            return None
        place, name = self._place(kind, owner), (kind.name, key.name)
        if _is_same(place.get(name), body) or _is_older(body, place.get(name)):
            return None
        place[name] = body
        self._revisions[owner] += 1
        return owner

    def drop(self, kind: Kind, body: Body) -> Key | None:
        """Forget an object that was deleted; give the resource whose turn it is."""
        key = key_of(body)
        if kind == INFERENCE_DEPLOYMENT:
            self.resources.pop(key, None)
            self._revisions.pop(key, None)
            return key
        owner = owner_of(body)
        if owner is None:
            return None
        place, name = self._place(kind, owner), (kind.name, key.name)
        if place.get(name, body)["metadata"]["uid"] == body["metadata"]["uid"]:
            place.pop(name, None)
        self._revisions[owner] += 1
        if not place:
            (self._pods if kind == POD else self._children).pop(owner, None)
        return owner

    def children(self, key: Key) -> Mapping[ChildName, Body]:
        """Children of a resource, by kind and name."""
        return self._children.get(key, {})

    def pods(self, key: Key) -> tuple[Body, ...]:
        """Pods of a resource, in the order of their names."""
        return tuple(body for _, body in sorted(self._pods.get(key, {}).items()))

    def revision(self, key: Key) -> int:
        """Grows with each change of a resource's children and pods."""
        return self._revisions.get(key, 0)

    def uids(self, kind: Kind) -> dict[Key, str]:
        """What is here of a kind, to be compared with a list that is asked for after this."""
        return {key_of(body): body["metadata"]["uid"] for body in self._all(kind)}

    def forget_missing(self, kind: Kind, before: Mapping[Key, str], present: Mapping[Key, str]) -> list[Key]:
        """Drop what was here before the cluster was asked and is not there; give the resources whose turn it is."""
        gone = [
            body
            for body in self._all(kind)
            if (uid := body["metadata"]["uid"]) == before.get(key_of(body)) and present.get(key_of(body)) != uid
        ]
        return [owner for body in gone if (owner := self.drop(kind, body)) is not None]

    def _all(self, kind: Kind) -> Iterator[Body]:
        if kind == INFERENCE_DEPLOYMENT:
            yield from self.resources.values()
        elif kind == POD:
            for pods in self._pods.values():
                yield from pods.values()
        else:
            for children in self._children.values():
                yield from (body for (name, _), body in children.items() if name == kind.name)

    def _place(self, kind: Kind, owner: Key) -> dict[ChildName, Body]:
        return (self._pods if kind == POD else self._children)[owner]


def trimmed(kind: Kind, body: Body) -> Body:
    """What the operator reads of an object: a pod's spec and the records of field managers take most of the memory."""
    metadata = dict(body["metadata"])
    if "managedFields" in metadata:
        metadata["managedFields"] = [
            {name: entry[name] for name in ("manager", "time") if name in entry} for entry in metadata["managedFields"]
        ]
    kept = {name: value for name, value in body.items() if not (kind == POD and name == "spec")}
    return kept | {"metadata": metadata}


def owner_of(body: Body) -> Key | None:
    """The resource that a child or a pod belongs to, by its label."""
    name = (body["metadata"].get("labels") or {}).get(INSTANCE_LABEL)
    return Key(body["metadata"]["namespace"], name) if name else None


def _is_same(known: Body | None, body: Body) -> bool:
    return known is not None and known["metadata"].get("resourceVersion") == body["metadata"].get("resourceVersion")


def _is_older(body: Body, known: Body | None) -> bool:
    """An answer to our own write may overtake the watch; versions of one object grow."""
    if known is None or known["metadata"]["uid"] != body["metadata"]["uid"]:
        return False
    return int(body["metadata"]["resourceVersion"]) < int(known["metadata"]["resourceVersion"])
