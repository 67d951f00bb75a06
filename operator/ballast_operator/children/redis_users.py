"""The users in the operator's own Redis that a resource gets, and the Secrets with their passwords. PURE.

A password is computed from a key that only the operator knows. So the same users can be created again after Redis lost
them, and only the key is stored.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from ballast_api.connections import Submitter
from ballast_api.errors import InvalidConfig
from ballast_api.inference_deployment import InferenceDeployment
from ballast_api.metadata import Metadata
from ballast_api.names import COPY_OF, SPEC_HASH, redis_secret
from ballast_operator.children.config import CA
from ballast_operator.children.manifest import hash_of, manifest
from ballast_operator.context import OperatorContext, UserKeys
from ballast_operator.kinds import SECRET, Body, Key, key_of
from ballast_queue.address import with_user
from ballast_queue.errors import InvalidAddress
from ballast_queue.keys import key_pattern
from ballast_queue.rights import RedisUser, submitter_rules, worker_rules

PREFIX = "ballast"


def user_prefix(release: str) -> str:
    """Return the begin of the names of all users that a release creates."""
    return f"{PREFIX}:{release}:"


def redis_users(
    resource: InferenceDeployment, context: OperatorContext, served: Sequence[str] = ()
) -> tuple[RedisUser, ...]:
    """Return the users of a resource; none if it does not use the operator's own Redis.

    Args:
        resource: the wanted state.
        context: the key of the passwords.
        served: queues in the operator's own Redis that pods of an earlier spec may serve. The user of the workers may
            use them too. It exists for them even if the resource names another Redis now.
    """
    queues = (resource.queue_name,) if resource.spec.redis is None else ()
    submitters = resource.spec.queue_access.submitters
    return tuple(user for _, user in _users(resource.metadata, (*queues, *served), submitters, context))


def kept_users(body: Body, served: Sequence[str], context: OperatorContext) -> tuple[RedisUser, ...]:
    """Return the users of a resource that is not reconciled and may be invalid, for the queues that it served.

    Its Secrets stay as they are, and may have older passwords. So the passwords that Redis knows stay valid too, unless
    all former passwords were ended. An invalid resource has no users for submitters.
    """
    submitters: tuple[Submitter, ...] = ()
    with suppress(InvalidConfig):
        submitters = InferenceDeployment.read(body, "", is_stored=True).spec.queue_access.submitters
    users = _users(Metadata.model_validate(body["metadata"]), served, submitters, context)
    return tuple(replace(user, keeps_passwords=not context.user_keys.is_first) for _, user in users)


def secrets_of_users(resource: InferenceDeployment, context: OperatorContext) -> Iterator[tuple[str, Key, str]]:
    """Yield the name of each user of `redis_secrets`, its Secret, and the hash of the manifest."""
    users = {name: user.name for name, user in _by_secret(resource, context)}
    for body in redis_secrets(resource, context):
        yield users[body["metadata"]["name"]], key_of(SECRET, body), body["metadata"]["annotations"][SPEC_HASH]


def redis_secrets(resource: InferenceDeployment, context: OperatorContext) -> tuple[Body, ...]:
    """Return the Secrets with address, user and password for the workers, and for each submitter.

    There are none while the operator's own URL is malformed.
    """
    if has_malformed_url(context):
        return ()
    source = context.redis_key
    origin = {COPY_OF: f"{source.namespace}/{source.name}" if source is not None else ""}
    return tuple(
        manifest(SECRET, resource, {"type": "Opaque", "data": _data(context, user)}, name=name, annotations=origin)
        for name, user in _by_secret(resource, context)
    )


def secrets_hash(resource: InferenceDeployment, context: OperatorContext) -> str:
    """Return a hash of the data of all these Secrets; empty if there are none."""
    if has_malformed_url(context):
        return ""
    data = {name: _data(context, user) for name, user in _by_secret(resource, context)}
    return hash_of(data) if data else ""


def has_malformed_url(context: OperatorContext) -> bool:
    """Return whether the operator has a Redis of its own whose URL is malformed."""
    if context.redis is None:
        return False
    try:
        with_user(_url(context), PREFIX)
    except InvalidAddress:
        return True
    return False


def _by_secret(resource: InferenceDeployment, context: OperatorContext) -> Iterator[tuple[str, RedisUser]]:
    if resource.spec.redis is None:
        submitters = resource.spec.queue_access.submitters
        yield from _users(resource.metadata, (resource.queue_name,), submitters, context)


def _users(
    about: Metadata, queues: Sequence[str], submitters: Iterable[Submitter], context: OperatorContext
) -> Iterator[tuple[str, RedisUser]]:
    """Yield the name of the Secret and the user of the workers, and of each submitter of the first queue."""
    if context.redis is None or not queues:
        return
    queue, *more = dict.fromkeys(queues)
    name = f"{user_prefix(context.release)}{about.namespace}/{about.name}"
    rules = {name: (redis_secret(about.name), (*worker_rules(queue), *(f"~{key_pattern(each)}" for each in more)))}
    for submitter in submitters:
        rules[f"{name}:{submitter.secret_name}"] = submitter.secret_name, submitter_rules(queue, submitter.tenant)
    for user, (secret, allowed) in rules.items():
        yield secret, RedisUser(user, _passwords(context.user_keys, user, about.uid), allowed)


def _passwords(keys: UserKeys, user: str, uid: str) -> tuple[str, ...]:
    """Return the password of a user, and the one before while both are valid."""
    return tuple(
        hmac.new(key.encode(), f"{user}\n{uid}".encode(), hashlib.sha256).hexdigest()
        for key in (keys.present, keys.previous)
        if key
    )


def _url(context: OperatorContext) -> str:
    return base64.b64decode((context.redis or {}).get("url", "")).decode(errors="replace").strip()


def _data(context: OperatorContext, user: RedisUser) -> Mapping[str, str]:
    texts = {"url": with_user(_url(context), user.name), "password": user.passwords[0]}
    data = {key: base64.b64encode(text.encode()).decode() for key, text in texts.items()}
    return data | {key: value for key, value in (context.redis or {}).items() if key == CA}
