"""What the operator keeps of an object. PURE.

Whoever may create objects chooses their size, and JSON of one MiB takes up to 30 MiB as Python objects. So an object
above a limit is kept without the parts that make it large, and an object that belongs to no resource is kept as its
metadata. The memory of the operator then depends on the number of objects, which a quota of the namespace can limit.

The functions that read an object call themselves for each level of it. So an object with too many levels counts as too
large.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from ballast_api.errors import InvalidConfig
from ballast_api.names import INSTANCE_LABEL, MANAGED_BY_LABEL, NAME_LABEL, RAY_HEAD_LABEL
from ballast_api.nested_json import decoded_at
from ballast_operator.kinds import INFERENCE_DEPLOYMENT, POD, Body, Kind

MEBIBYTE = 2**20
RESOURCE_MEBIBYTES = 1
"""Limit of a resource or a pod. A resource with 1000 tenants, all their fields set, takes half of it."""
CHILD_MEBIBYTES = 4
"""Limit of a child. Several parts of a resource are in a child more than once, as in the pods of a Ray cluster."""
STORED_LEVELS = 10_000
"""The API server stores no object with more."""
VALUE_BYTES = 64
"""The memory that each value counts for, besides its text. An empty object or list takes about as much."""
MOST_LEVELS = 100
"""Limit of lists and objects inside each other. It is below that of the decoder, which leaves out what is deeper."""
WIDE_BYTES = 4
"""The bytes of a character in a text that is not ASCII."""
LEFT_OUT = "leftOut"
"""The key under which an object names the parts that were left out since it is too large. It names none if it is not
too large, and belongs to no resource."""
TOO_DEEP = "tooDeep"
"""The key that marks an object of which parts were left out only because it has too many levels."""
MOST_OWNERS, MOST_CHARACTERS = 8, 512
MARGIN_BYTES = 16 * 2**10
"""A shortened object stays this much below its limit, so that it is not shortened again."""
IDENTITY = ("name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp", "deletionTimestamp")
LABELS = (MANAGED_BY_LABEL, NAME_LABEL, INSTANCE_LABEL, RAY_HEAD_LABEL)

_BETWEEN = re.compile(r"[\s,:]*")


def trimmed(kind: Kind, body: Body) -> Body:
    """Return the parts that the operator reads, within the limit of the kind.

    Pod specs and the field managers' records take most of the memory.
    """
    metadata = dict(body["metadata"])
    if "managedFields" in metadata:
        metadata["managedFields"] = [
            {name: entry[name] for name in ("manager", "time") if name in entry} for entry in metadata["managedFields"]
        ]
    kept = body | {"metadata": metadata}
    if kind == POD:
        kept["spec"] = {name: body["spec"][name] for name in ("schedulingGates",) if name in body.get("spec", {})}
    is_small = kind == POD or kind.group == INFERENCE_DEPLOYMENT.group
    most = (RESOURCE_MEBIBYTES if is_small else CHILD_MEBIBYTES) * MEBIBYTE
    return kept if weight(kept, most) <= most else _shortened(kept, most)


def metadata_of(body: Body) -> Body:
    """Return an object that belongs to no resource as its metadata."""
    return {"metadata": _identity(body["metadata"]), LEFT_OUT: []}


def is_whole(body: Body) -> bool:
    """Return whether all parts of an object that the operator reads are there."""
    return LEFT_OUT not in body


def is_too_large(body: Body) -> bool:
    """Return whether parts of an object were left out since it is too large."""
    return bool(body.get(LEFT_OUT))


def whole(body: Body) -> Body:
    """Return a resource.

    Raises:
        InvalidConfig: the resource is too large, or has too many levels.
    """
    if is_too_large(body):
        large = ", ".join(body[LEFT_OUT])
        limit = (
            f"more than {MOST_LEVELS} lists and objects are inside each other"
            if body.get(TOO_DEEP)
            else f"the resource takes more than {RESOURCE_MEBIBYTES} MiB of the operator's memory, in which each value "
            f"counts {VALUE_BYTES} bytes and its text"
        )
        problem = f"{large}: {limit}. Shorten {large}. Until then, the children of this resource do not change"
        raise InvalidConfig(body["metadata"]["name"], [problem])
    return body


def weight(value: Any, most: int, levels: int = MOST_LEVELS) -> int:
    """Return about how many bytes of memory a JSON value takes.

    Return a number above `most` if it takes more, or has more than this many `levels`.
    """
    total, below = 0, [value]
    for _ in range(levels):
        if not below:
            break
        level, below = below, []
        for each in level:
            total += VALUE_BYTES
            if isinstance(each, str):
                total += _text_bytes(each)
            elif isinstance(each, dict):
                total += sum(map(_text_bytes, each))
                below.extend(each.values())
            elif isinstance(each, list | tuple):
                below.extend(each)
            if total > most:
                return total
    return max(total, most + 1) if below else total


def items_of(text: str, keep: Callable[[Body], Body]) -> tuple[list[Body], Body]:
    """Decode a list of the API server. Return what `keep` returns for each object, and the list without its objects.

    Only one object at a time is decoded as a whole.
    """
    items: list[Body] = []
    rest: Body = {}
    at = _next(text, text.index("{") + 1)
    while text[at] != "}":
        name, at = decoded_at(text, at)
        at = _next(text, at)
        if name == "items" and text[at] == "[":
            at = _next(text, at + 1)
            while text[at] != "]":
                item, at = decoded_at(text, at)
                items.append(keep(item))
                at = _next(text, at)
            at += 1
        else:
            rest[name], at = decoded_at(text, at)
        at = _next(text, at)
    return items, rest


def _next(text: str, at: int) -> int:
    """Return the position of the next value or bracket."""
    found = _BETWEEN.match(text, at)
    return found.end() if found is not None else at


def _text_bytes(text: str) -> int:
    return len(text) if text.isascii() else WIDE_BYTES * len(text)


def _shortened(body: Body, most: int) -> Body:
    """Return an object without the largest sections of its spec, so that it is within the limit.

    The small ones stay: they have the replicas, which are counted, and the queue, in which its pods keep their rights.
    """
    kept: Body = {name: body[name] for name in ("apiVersion", "kind") if name in body}
    kept |= {"metadata": _identity(body["metadata"]), "spec": {}, LEFT_OUT: []}
    total = weight(kept, most) + MARGIN_BYTES
    found = body.get("spec")
    spec: Body = found if isinstance(found, dict) else {}
    weights = {name: weight(section, most, MOST_LEVELS - 2) for name, section in spec.items()}
    status = weight(body.get("status"), most, MOST_LEVELS - 1)
    parts = [("status", status), *sorted(weights.items(), key=lambda item: item[1])]
    for name, size in parts:
        if total + size > most:
            kept[LEFT_OUT].append("status" if name == "status" else f"spec.{name}")
            continue
        total += size
        if name == "status":
            kept |= {"status": body["status"]} if "status" in body else {}
        else:
            kept["spec"][name] = spec[name]
    if isinstance(spec.get("offline"), dict) and isinstance(queue := spec["offline"].get("queue"), str):
        kept["spec"].setdefault("offline", {"queue": queue[:MOST_CHARACTERS]})
    kept[LEFT_OUT] = kept[LEFT_OUT] or ["metadata"]
    if weight(body, most, STORED_LEVELS) <= most:
        kept[TOO_DEEP] = True
    return kept


def _identity(metadata: Body) -> Body:
    """Return what identifies an object, and its owners."""
    kept = {name: metadata[name] for name in IDENTITY if name in metadata}
    labels = metadata.get("labels") or {}
    kept["labels"] = {name: labels[name] for name in LABELS if name in labels}
    owners = [_short(owner) for owner in (metadata.get("ownerReferences") or ())[:MOST_OWNERS]]
    finalizers = [name[:MOST_CHARACTERS] for name in (metadata.get("finalizers") or ())[:MOST_OWNERS]]
    lists = {"ownerReferences": owners, "finalizers": finalizers}
    return kept | {name: found for name, found in lists.items() if found}


def _short(owner: Body) -> Body:
    return {name: owner.get(name, "")[:MOST_CHARACTERS] for name in ("apiVersion", "kind", "name", "uid")}
