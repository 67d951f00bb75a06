"""The Secrets among the children of an InferenceDeployment, and which of them must be written. PURE.

The cache holds no Secrets, because the operator would need the permission to read all of them. An annotation of the
ConfigMap records which data was written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ballast_api.inference_deployment import InferenceDeployment
from ballast_api.names import redis_secret
from ballast_operator.children.config import REDIS_HASH
from ballast_operator.children.gcs import PASSWORD, gcs_secret, is_needed
from ballast_operator.children.redis_users import redis_secrets, secrets_hash, secrets_of_users
from ballast_operator.context import OperatorContext
from ballast_operator.kinds import SECRET, STATEFUL_SET, Key, key_of
from ballast_operator.plan import Apply, ClusterSnapshot, is_owned
from ballast_operator.running_config import config_map_of


def own_secrets(resource: InferenceDeployment, context: OperatorContext) -> tuple[Key, ...]:
    """Return the keys of all these Secrets."""
    own = (gcs_secret(resource),) if is_needed(resource, context) else ()
    return tuple(key_of(SECRET, body) for body in (*redis_secrets(resource, context), *own))


def copied_hash(resource: InferenceDeployment, snapshot: ClusterSnapshot, context: OperatorContext) -> str:
    """Return the hash of the Redis Secrets that are wanted now; empty if there are none.

    Until Redis accepted a user, Secrets that exist stay as they are, because workers may use them.
    """
    wanted, written = secrets_hash(resource, context), _written(resource, snapshot)
    return written if wanted and written is not None and context.refuses_users is None else wanted


def _written(resource: InferenceDeployment, snapshot: ClusterSnapshot) -> str | None:
    """Return the hash of the Redis Secrets that were written, or None if there are none."""
    found = config_map_of(resource, snapshot)
    if found is None or not is_owned(found, snapshot.uid):
        return None
    return (found["metadata"].get("annotations") or {}).get(REDIS_HASH) or None


def outdated_users(
    resource: InferenceDeployment, snapshot: ClusterSnapshot, context: OperatorContext, written: Mapping[Key, str]
) -> frozenset[str]:
    """Return the names of the users whose Secret may have a former password.

    `written` has the hash of the manifest of each Secret that this process wrote.
    """
    is_recorded = _written(resource, snapshot) in {None, secrets_hash(resource, context)}
    if is_recorded and not snapshot.lost:
        return frozenset()
    return frozenset(
        user
        for user, secret, marker in secrets_of_users(resource, context)
        if secret in snapshot.lost or not (is_recorded or written.get(secret) == marker)
    )


def redis_secret_writes(
    resource: InferenceDeployment, snapshot: ClusterSnapshot, context: OperatorContext, copied: str
) -> Iterator[Apply]:
    """Yield the Secrets with users of the operator's own Redis if they are outdated."""
    if not copied:
        return
    is_written = _written(resource, snapshot) == copied
    for body in redis_secrets(resource, context):
        key = key_of(SECRET, body)
        if not is_written or key in snapshot.lost:
            because = f"Wrote the Redis Secret {key.name}"
            is_for_others = key.name != redis_secret(resource.metadata.name)
            yield Apply(key, body, uid=None, because=because, is_for_others=is_for_others)


def gcs_secret_writes(
    resource: InferenceDeployment, snapshot: ClusterSnapshot, context: OperatorContext
) -> Iterator[Apply]:
    """Yield the Secret of a head's Redis if it is missing. Its password is made when it is created, and then kept."""
    if not is_needed(resource, context):
        return
    body = gcs_secret(resource)
    key = key_of(SECRET, body)
    if key in snapshot.lost or snapshot.child(STATEFUL_SET, resource.metadata, key.name) is None:
        yield Apply(key, body, uid=None, because=f"Wrote the Secret {key.name}", generates=PASSWORD)
