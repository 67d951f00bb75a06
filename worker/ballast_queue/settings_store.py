"""The settings of a queue that are in force for all submitters and workers."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import ValidationError

from ballast_queue.errors import QueueError
from ballast_queue.settings import QueueSettings
from ballast_queue.store import Store


@dataclass(frozen=True, slots=True)
class SettingsStore:
    """Law: the settings of the newest resource and generation are in force."""

    _store: Store

    def read(self) -> QueueSettings:
        """Return the settings in force, or the defaults if no worker has configured the queue yet."""
        text = self._store.connection.hash_field(self._store.keys.settings, "json")
        if text is None:
            return QueueSettings()
        try:
            return QueueSettings.model_validate_json(text)
        except ValidationError as error:
            field = ".".join(map(str, error.errors()[0]["loc"])) or "its JSON"
            raise QueueError(
                f"settings of queue {self._store.name!r}: found a value of {field} that this version of Ballast cannot "
                "read: use the version that the workers run"
            ) from error

    def apply(self, settings: QueueSettings) -> bool:
        """Put the settings in force unless newer ones are. Return whether these are in force now."""
        numbers = {
            "max_attempts": settings.max_attempts,
            "lease_seconds": settings.lease_seconds,
            "results_seconds": settings.results_seconds,
            "backoff_seconds": settings.backoff_seconds,
            "backoff_max_seconds": settings.backoff_max_seconds,
        }
        call = self._store.functions.configure(
            settings.created, settings.generation, settings.model_dump_json(), numbers
        )
        return bool(self._store.call(call))
