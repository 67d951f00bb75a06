"""The settings of a queue that are in force for all submitters and workers."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from ballast_queue.errors import RefusedCall, UnreadableValue
from ballast_queue.records import parse, readable
from ballast_queue.settings import UNCONFIGURED, InForce, QueueSettings
from ballast_queue.store import Store
from ballast_queue.unreadable import text_of

NUMBERS = (
    *("max_attempts", "lease_seconds", "results_seconds", "abandoned_seconds"),
    *("backoff_seconds", "backoff_max_seconds"),
)
"""Settings that the functions in ballast.lua read."""


@dataclass(frozen=True, slots=True)
class SettingsStore:
    """The settings of a queue. Those of one owner are in force, in their newest generation, until it is gone."""

    _store: Store

    def read(self) -> QueueSettings:
        """Return the settings in force, or those of a queue that no worker has configured yet."""
        text = self._store.connection.hash_field(self._store.keys.settings, "json")
        return UNCONFIGURED if text is None else parse(QueueSettings, text, f"settings of queue {self._store.name!r}")

    @readable("the time of a lease")
    def lease_seconds(self) -> float:
        """Return the time of a lease in the settings in force, in seconds. It reads only this number."""
        found = self._store.connection.hash_field(self._store.keys.settings, "lease_seconds")
        return UNCONFIGURED.lease_seconds if found is None else float(found)

    def tenants(self) -> tuple[str, ...]:
        """Return the tenants that the queue declares; none if the settings cannot be read."""
        try:
            return tuple(tenant.name for tenant in self.read().tenants)
        except UnreadableValue:
            return ()

    def apply(self, settings: QueueSettings) -> bool:
        """Put the settings in force unless another owner's, or newer ones, are. Return whether these are in force now.

        Repeat the call at least once a minute, so that the settings stay in force.
        """
        numbers = {name: getattr(settings, name) for name in NUMBERS}
        call = self._store.functions.set_settings(
            settings.owner,
            _rank(settings.owner, self._store.name),
            settings.created,
            settings.generation,
            text=settings.model_dump_json(),
            numbers=numbers,
        )
        is_in_force = bool(self._store.call(call))
        if is_in_force and settings.tenants:
            with contextlib.suppress(RefusedCall):  # the names serve a message only, which then says what is wrong
                self._store.call(self._store.functions.declare([tenant.name for tenant in settings.tenants]))
        return is_in_force

    @readable("the settings in force")
    def renew(self, owner: str) -> InForce:
        """Keep the settings of an owner in force. Return those in force."""
        reply = self._store.call(self._store.functions.renew_settings(owner))
        if isinstance(reply, bytes):  # of older functions, which stay while Redis has no memory for these
            return InForce(text_of(reply))
        name, created, generation = reply
        return InForce(text_of(name), float(created), float(generation))

    def drop(self, owner: str) -> bool:
        """Remove the settings if they are those of an owner that is gone. Return whether they were."""
        return bool(self._store.call(self._store.functions.drop_settings(owner)))


def _rank(owner: str, queue: str) -> int:
    """Return the precedence of an owner: the resource that the queue is named after, then others of its namespace."""
    if owner == queue:
        return 0
    return 1 if owner.partition("/")[0] == queue.partition("/")[0] else 2
