"""Compares an object with the manifest that was applied. PURE.

A field of the manifest drifts if the object lacks it or has another value. A field that only the object has is an
addition, unless it is a default of the API server. Server-side apply merges a list by a key of its items. If all items
of a list have different values of such a key, they are compared by it, and other lists as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any, NamedTuple

_QUANTITY = re.compile(r"^([+-]?[0-9.]+)([eE][+-]?[0-9]+|[numkMGTPE]|[KMGTPE]i)?$")
_SUFFIX = {
    "n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3"), "k": Decimal(10**3), "M": Decimal(10**6),
    "G": Decimal(10**9), "T": Decimal(10**12), "P": Decimal(10**15), "E": Decimal(10**18),
    "Ki": Decimal(2**10), "Mi": Decimal(2**20), "Gi": Decimal(2**30), "Ti": Decimal(2**40), "Pi": Decimal(2**50),
    "Ei": Decimal(2**60),
}  # fmt: skip
_CONTENT_EXCLUDES = frozenset({"apiVersion", "kind", "metadata", "status"})
_ANY = object()
_DEFAULTS: Mapping[str, tuple[Any, ...]] = {
    # pods
    "restartPolicy": ("Always",), "dnsPolicy": ("ClusterFirst",), "schedulerName": ("default-scheduler",),
    "terminationMessagePath": ("/dev/termination-log",), "imagePullPolicy": ("Always", "IfNotPresent"),
    "apiVersion": ("v1",), "scheme": ("HTTP",), "successThreshold": (1,), "defaultMode": (420,),
    "volumeMode": ("Filesystem",), "protocol": ("TCP",), "type": ("", "ClusterIP"),
    # `kubectl rollout restart` sets it on a Deployment's template.
    "kubectl.kubernetes.io/restartedAt": (_ANY,),
    # Services
    "clusterIP": (_ANY,), "clusterIPs": (_ANY,), "ipFamilies": (_ANY,), "ipFamilyPolicy": (_ANY,),
    "internalTrafficPolicy": ("Cluster",), "sessionAffinity": ("None",),
    # the volume claims of StatefulSets
    "status": ({"phase": "Pending"},),
    # RayServices
    "numOfHosts": (1,),
}  # fmt: skip
"""Values that the API server sets, by the name of the field. An unknown one is overwritten once, and then tolerated."""

_KEYS = ("mountPath", "containerPort", "name")
"""The keys by which the API server merges lists of pods. An item may have several of them, and the first is unique."""
_SELECTORS = frozenset({"labelSelector", "namespaceSelector", "podSelector"})
"""Fields in which an empty map has a meaning: it selects everything."""


class Drift(NamedTuple):
    """The paths at which an object differs from a manifest. A list that is longer counts as both."""

    changed: tuple[str, ...]
    """The object lacks a value of the manifest, or has another one."""
    added: tuple[str, ...]
    """Only the content of the object has a value, and it is no default of the API server."""


def drift(wanted: Any, found: Any) -> Drift:
    """Compare the object `found` with the manifest `wanted`."""
    changed, added = [], []
    for path, is_added in _differences(wanted, found, ""):
        if not is_added:
            changed.append(path)
        elif path.partition(".")[0] not in _CONTENT_EXCLUDES:
            added.append(path)
    return Drift(tuple(changed), tuple(added))


def without_additions(wanted: Any, found: Any) -> Any:
    """Return the merge patch that makes the content of `found` match `wanted`. It replaces lists as a whole."""
    return _patch(_content(wanted), _content(found))


def _content(body: Any) -> Any:
    return {name: value for name, value in body.items() if name not in _CONTENT_EXCLUDES}


def _patch(wanted: Any, found: Any) -> Any:
    if not isinstance(wanted, dict) or not isinstance(found, dict):
        return wanted
    removed = {
        name: None for name, value in found.items() if name not in wanted and not _is_default(name, value, wanted)
    }
    return {name: _patch(value, found.get(name)) for name, value in wanted.items()} | removed


def _is_default(name: str, value: Any, wanted: Mapping[str, Any]) -> bool:
    if name == "serviceAccount":  # an old name of `serviceAccountName`, which the API server keeps equal
        return bool(value == wanted.get("serviceAccountName"))
    known = _DEFAULTS.get(name, ())
    return _is_empty(name, value) or value in known or _ANY in known


def _differences(wanted: Any, found: Any, path: str) -> Iterator[tuple[str, bool]]:
    """Yield the paths that differ, and whether only `found` has each."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        for name, value in wanted.items():
            where = f"{path}.{name}" if path else name
            if name in found:
                yield from _differences(value, found[name], where)
            elif not _is_empty(name, value):
                yield where, False
        for name, value in found.items():
            if name not in wanted and not _is_default(name, value, wanted):
                yield f"{path}.{name}" if path else name, True
    elif isinstance(wanted, list) and isinstance(found, list):
        yield from _list_differences(wanted, found, path)
    elif not _is_equal(wanted, found):
        yield path, False


def _list_differences(wanted: list[Any], found: list[Any], path: str) -> Iterator[tuple[str, bool]]:
    for key in _KEYS:
        named = _by(key, wanted)
        others = _by(key, found) if named is not None else None
        if named is not None and others is not None:
            for name, item in named.items():
                if name in others:
                    yield from _differences(item, others[name], f"{path}[{name}]")
                else:
                    yield f"{path}[{name}]", False
            yield from ((f"{path}[{name}]", True) for name in others if name not in named)
            return
    if len(wanted) != len(found):
        yield path, False
        if len(wanted) < len(found):
            yield path, True  # an apply would keep what was added to a list that the API server merges
        return
    for i, (one, other) in enumerate(zip(wanted, found, strict=True)):
        yield from _differences(one, other, f"{path}[{i}]")


def _by(key: str, items: list[Any]) -> Mapping[Any, Any] | None:
    """Return the items of a list by the value of a key; None if an item has no such value, or two have the same."""
    found = {item[key]: item for item in items if isinstance(item, dict) and isinstance(item.get(key), str | int)}
    return found if len(found) == len(items) else None


def _is_empty(name: str, value: Any) -> bool:
    """Return whether a field means the same as none. The API server omits empty maps and lists."""
    return value is None or (value in ({}, []) and name not in _SELECTORS)


def _is_equal(wanted: Any, found: Any) -> bool:
    if type(wanted) is bool or type(found) is bool:
        return wanted is found
    if wanted == found:
        return True
    if not isinstance(wanted, (str, int, float)) or not isinstance(found, (str, int, float)):
        return False
    quantity = _quantity(wanted)
    return quantity is not None and quantity == _quantity(found)


def _quantity(value: str | float) -> Decimal | None:
    """Return a Kubernetes quantity as a number: `1000m` is `1`."""
    match = _QUANTITY.match(str(value))
    if match is None:
        return None
    number, suffix = match.groups()
    try:
        if suffix and suffix[0] in "eE" and len(suffix) > 1 and suffix != "Ei":
            return Decimal(number + suffix)
        return Decimal(number) * _SUFFIX.get(suffix or "", Decimal(1))
    except InvalidOperation:
        return None
