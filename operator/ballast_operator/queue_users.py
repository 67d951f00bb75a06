"""The users in the operator's own Redis that resources need, and the queues that they use there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic

from ballast_operator.cache import Cache
from ballast_operator.context import OperatorContext
from ballast_operator.kinds import Body, Key
from ballast_operator.queue_rules import queue_refusal
from ballast_operator.resource_type import R, ResourceType
from ballast_queue.rights import RedisUser

GRANT_AGAIN_SECONDS = 10.0
"""Interval of checks of a queue of another namespace. No event shows the end of a grant."""


class QueueUsers(Generic[R]):
    """The users of each resource of one type.

    A resource that cannot be reconciled keeps its users, unless it may not use its queue.
    """

    def __init__(self, resource_type: ResourceType[R], cache: Cache, *, changed: Callable[[], None]) -> None:
        """Prepare. `changed()` is called when other users are needed."""
        self.users: dict[Key, tuple[RedisUser, ...]] = {}
        self._type = resource_type
        self._cache = cache
        self._changed = changed

    def use(self, key: Key, users: tuple[RedisUser, ...]) -> None:
        """Set which users a resource needs."""
        if self.users.get(key) != users:
            self.users[key] = users
            self._changed()

    def keep(self, key: Key, body: Body, context: OperatorContext) -> float | None:
        """Keep the users of a resource whose children stay as they are, unless its reported queue is refused.

        Return after how many seconds to check the queue again. None: it belongs to the namespace of the resource.
        """
        reported = (body.get("status") or {}).get("queue")
        if self.is_refused(key, reported, context):
            self.use(key, ())
        queues = (self._type.own_queue(body), reported)
        is_foreign = any(queue and queue.partition("/")[0] != key.namespace for queue in queues)
        return GRANT_AGAIN_SECONDS if is_foreign else None

    def forget(self, key: Key) -> None:
        """Forget a resource that is gone, or that another release reconciles."""
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
            queue = self._type.own_queue(body)
            if queue is not None and not self.is_refused(key, queue, context):
                yield queue
