"""The users in the operator's own Redis that resources need, and the queues that they use there."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ballast_api.sections import is_name
from ballast_operator.cache import Cache
from ballast_operator.children.redis_users import kept_users
from ballast_operator.context import OperatorContext
from ballast_operator.kinds import Body, Key
from ballast_operator.queue_rules import own_queue, queue_refusal
from ballast_queue.rights import RedisUser

GRANT_AGAIN_SECONDS = 10.0
"""Interval of checks of a queue of another namespace. No event shows the end of a grant."""


class QueueUsers:
    """The users of each resource.

    A resource that cannot be reconciled keeps its users, unless it may not use its queue. Pods of an earlier spec keep
    their rights until they are gone.
    """

    def __init__(self, cache: Cache, *, changed: Callable[[], None]) -> None:
        """Prepare. `changed()` is called when other users are needed."""
        self.users: dict[Key, tuple[RedisUser, ...]] = {}
        self.on_hold: set[Key] = set()
        """The resources that were not reconciled since the start, and may have users that are not known."""
        self._cache = cache
        self._changed = changed

    def use(self, key: Key, users: tuple[RedisUser, ...]) -> None:
        """Set which users a resource needs."""
        self.on_hold.discard(key)
        if self.users.get(key) != users:
            self.users[key] = users
            self._changed()

    def widen(self, key: Key, users: tuple[RedisUser, ...], wider: tuple[RedisUser, ...]) -> None:
        """Set the users of a resource whose pods may be of an earlier spec. `wider` has the rights of these pods."""
        self.on_hold.discard(key)
        known = self.users.get(key)
        # After a start it is not known whether pods of a resource with another Redis use this one. Redis then keeps the
        # users that it has.
        if known != users and (users or known is not None or not wider):
            self.use(key, wider)

    def served(self, key: Key, body: Body, context: OperatorContext) -> tuple[str, ...]:
        """Return the queues that pods of a resource may serve by its status, without those that it may not use."""
        status = body.get("status") or {}
        names = dict.fromkeys((status.get("queue") or "", *(status.get("formerQueues") or ())))
        # One rule that is no pattern would keep Redis from creating any user.
        return tuple(name for name in names if is_name(name) and not self.is_refused(key, name, context))

    def keep(self, key: Key, body: Body, context: OperatorContext) -> float | None:
        """Keep the users of a resource whose children stay as they are, unless its reported queue is refused.

        Return after how many seconds to check the queue again. None: it belongs to the namespace of the resource.
        """
        reported = (body.get("status") or {}).get("queue")
        if self.is_refused(key, reported, context):
            self.use(key, ())
        elif not self.users.get(key) and (users := self._lost(key, body, context)):
            self.use(key, users)
            self.on_hold.add(key)
        queues = (own_queue(body), reported)
        is_foreign = any(queue and queue.partition("/")[0] != key.namespace for queue in queues)
        return GRANT_AGAIN_SECONDS if is_foreign else None

    def _lost(self, key: Key, body: Body, context: OperatorContext) -> tuple[RedisUser, ...]:
        """Return the users of before the operator started, or before a grant ended that holds again."""
        own = own_queue(body)
        is_deleted = body["metadata"].get("deletionTimestamp")  # another release may have reconciled it
        if own is None or is_deleted or self.is_refused(key, own, context):
            return ()
        return kept_users(body, self.served(key, body, context), context)

    def forget(self, key: Key) -> None:
        """Forget a resource that is gone, or that another release reconciles."""
        self.on_hold.discard(key)
        if self.users.pop(key, None):
            self._changed()

    def is_refused(self, key: Key, queue: str | None, context: OperatorContext) -> bool:
        """Return whether a resource may not use a queue."""
        if not queue:
            return False
        others = self._cache.sharing(queue)
        return queue_refusal(queue, key.namespace, context=context, others=others) is not None

    def queues(self, context: OperatorContext) -> Iterator[str]:
        """Yield the queues that resources use.

        A queue that a resource may not use does not count: it would be removed after the resource.
        """
        for key, body in self._cache.resources.items():
            queue = own_queue(body)
            if queue is not None and not self.is_refused(key, queue, context):
                yield queue
