"""The resources whose queue has the same name. PURE."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property

from ballast_api.served_model import default_served_name
from ballast_operator.kinds import Body


class Sharing(tuple[Body, ...]):  # noqa: SLOT001  it keeps what is computed from all of them
    """The resources whose queue has the same name, in whichever Redis."""

    @cached_property
    def grants(self) -> frozenset[tuple[str, str]]:
        """Return each namespace that grants the queue, with one to which it does so."""
        return frozenset(
            (body["metadata"]["namespace"], namespace)
            for body in self
            if not body["metadata"].get("deletionTimestamp")
            for namespace in ((body.get("spec") or {}).get("queueAccess") or {}).get("namespaces") or ()
        )

    @cached_property
    def oldest(self) -> Mapping[str, Sequence[tuple[Body, str]]]:
        """Return the resources that others must agree with, and the name of the model of each, by `redis_secret_of`.

        Of each namespace, these are the oldest resource and the oldest one with another model.
        """
        found: dict[tuple[str, str], list[tuple[Body, str]]] = defaultdict(list)
        for body in sorted(self, key=age):
            model = (body.get("spec") or {}).get("model")
            if not isinstance(model, dict) or body["metadata"].get("deletionTimestamp"):
                continue  # a model is left out of a resource that is too large
            served = model.get("servedName") or default_served_name(str(model.get("uri", "")))
            known = found[redis_secret_of(body), body["metadata"]["namespace"]]
            if not known or (len(known) == 1 and known[0][1] != served):
                known.append((body, served))
        by_redis: dict[str, list[tuple[Body, str]]] = defaultdict(list)
        for (redis, _), known in found.items():
            by_redis[redis].extend(known)
        return by_redis


def age(body: Body) -> tuple[str, str, str]:
    """Return a key by which older resources sort first."""
    about = body["metadata"]
    return about.get("creationTimestamp") or "", about["namespace"], about["name"]


def redis_secret_of(body: Body) -> str:
    """Return the Secret that leads to the Redis of a resource; empty for the operator's own."""
    redis = (body.get("spec") or {}).get("redis")
    secret = redis.get("secretName") if isinstance(redis, dict) else None
    return f"{body['metadata']['namespace']}/{secret}" if redis else ""
