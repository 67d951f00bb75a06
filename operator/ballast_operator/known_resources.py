"""The resources of all types: their caches, and the reconcilers of their types."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from ballast_operator.cache import Cache
from ballast_operator.context import OperatorContext
from ballast_operator.handlers import watched
from ballast_operator.kinds import Key, Kind
from ballast_operator.reconcile import Reconciler
from ballast_operator.resource_type import ResourceType
from ballast_queue.rights import RedisUser


class KnownResources:
    """All resources that this process knows."""

    def __init__(
        self,
        types: Sequence[ResourceType[Any]],
        reconciler: Callable[[ResourceType[Any], Cache], Reconciler[Any]],
        *,
        add: Callable[[Key], None],
    ) -> None:
        """Prepare for these types. `reconciler` makes the reconciler of a type, and `add` has a resource reconciled."""
        self.add = add
        self.types = types
        self.kinds = watched(types)
        """Every kind that is watched: the resources, their children and pods."""
        self.caches = {found.kind: Cache(found.kind, found.label, queue_of=found.queue_of) for found in types}
        """The watched objects, by kind of resource."""
        self.reconcilers: Mapping[Kind, Reconciler[Any]] = {
            found.kind: reconciler(found, self.caches[found.kind]) for found in types
        }

    @property
    def keys(self) -> Sequence[Key]:
        """Return the keys of all resources."""
        return [key for cache in self.caches.values() for key in cache.resources]

    @property
    def users(self) -> Mapping[Key, Sequence[RedisUser]]:
        """Return the users in Redis of each resource."""
        return {key: users for each in self.reconcilers.values() for key, users in each.users.users.items()}

    @property
    def on_hold(self) -> AbstractSet[Key]:
        """Return the resources that may have further users."""
        return {key for each in self.reconcilers.values() for key in each.users.on_hold}

    def queues(self, context: OperatorContext) -> AbstractSet[str]:
        """Return the queues of the operator's own Redis that resources use."""
        return {queue for each in self.reconcilers.values() for queue in each.users.queues(context)}

    def add_all(self) -> None:
        """Reconcile every resource."""
        for key in self.keys:
            self.add(key)
