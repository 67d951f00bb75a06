"""The settings of a queue that are in force for all submitters and workers."""

from __future__ import annotations

from dataclasses import dataclass

from ballast_queue.records import parse
from ballast_queue.settings import QueueSettings
from ballast_queue.store import Store

_NUMBERS = (
    *("max_attempts", "lease_seconds", "results_seconds", "abandoned_seconds"),
    *("backoff_seconds", "backoff_max_seconds"),
)
"""Settings that the functions in ballast.lua read."""


@dataclass(frozen=True, slots=True)
class SettingsStore:
    """The settings of a queue. Those of the newest resource and generation are in force."""

    _store: Store

    def read(self) -> QueueSettings:
        """Return the settings in force, or the defaults if no worker has configured the queue yet."""
        text = self._store.connection.hash_field(self._store.keys.settings, "json")
        return (
            QueueSettings() if text is None else parse(QueueSettings, text, f"settings of queue {self._store.name!r}")
        )

    def apply(self, settings: QueueSettings) -> bool:
        """Put the settings in force unless newer ones are. Return whether these are in force now."""
        numbers = {name: getattr(settings, name) for name in _NUMBERS}
        text = settings.model_dump_json()
        call = self._store.functions.configure(settings.created, settings.generation, text, numbers)
        return bool(self._store.call(call))
