"""Kubernetes Events, which `kubectl describe` shows. PURE."""

from __future__ import annotations

from datetime import UTC, datetime

from ballast_api.metadata import Metadata
from ballast_api.names import API_VERSION, KIND, OPERATOR
from ballast_operator.kinds import Body

MOST_CHARACTERS = 1000


def event(metadata: Metadata, *, reason: str, message: str, now: float, is_warning: bool = False) -> Body:
    """Return an Event about a resource. `now` is Unix seconds."""
    at = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{metadata.name}.", "namespace": metadata.namespace},
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "namespace": metadata.namespace,
            "name": metadata.name,
            "uid": metadata.uid,
        },
        "reason": reason,
        "message": message[:MOST_CHARACTERS],
        "type": "Warning" if is_warning else "Normal",
        "source": {"component": OPERATOR},
        "reportingComponent": OPERATOR,
        "firstTimestamp": at,
        "lastTimestamp": at,
        "count": 1,
    }
