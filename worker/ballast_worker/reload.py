"""Apply a changed configuration file: hot fields at once; the others are reported until the next start.

An invalid file leaves the configuration in force unchanged. The file is polled, because a mounted ConfigMap changes by
replacing a symlink two directories up, which inotify on the file does not report.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel
from pydantic.alias_generators import to_camel

from ballast_api.errors import InvalidConfig
from ballast_api.worker_config import WorkerConfig
from ballast_log import Log

log = Log(__name__)

HOT = frozenset(
    {
        "slo",
        "offline",
        "limits",
        "cost",
        "engine.prefill_chunk_tokens",
        "runtime.generation",
        "runtime.created",
        "runtime.drain_seconds",
        "runtime.unready_seconds",
    }
)
COLD = frozenset({"offline.queue"})
"""Exceptions inside a hot section."""
POLL_SECONDS = 1.0

M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration in force."""

    config: WorkerConfig
    content_hash: str
    """Hash of the file whose fields are all in force. It stays while a restart is required."""
    restart_required: tuple[str, ...] = ()
    """Fields of the file that are not in force, in the spelling of users."""


def content_hash(text: str) -> str:
    """Return the hash of a configuration file. The operator computes the same hash of the file that it renders."""
    return hashlib.sha256(text.encode()).hexdigest()


def take_up(current: Loaded, wanted: WorkerConfig, text_hash: str) -> Loaded:
    """Return the configuration in force after `wanted` was read: its hot fields, and the current cold fields."""
    cold: list[str] = []
    config = _merge(current.config, wanted, "", cold)
    if cold:
        # Generation and hash stand for a whole file. Before the restart it is not in force.
        runtime = config.runtime.model_copy(update={"generation": current.config.runtime.generation})
        config = config.model_copy(update={"runtime": runtime})
        return Loaded(config, current.content_hash, tuple(cold))
    return Loaded(config, text_hash)


def _merge(current: M, wanted: M, path: str, cold: list[str]) -> M:
    """Return `current` with the hot fields of `wanted`. Add changed cold fields to `cold`."""
    update: dict[str, object] = {}
    for name in type(current).model_fields:
        here, there = getattr(current, name), getattr(wanted, name)
        if here == there:
            continue
        full = f"{path}{name}"
        if isinstance(here, BaseModel) and type(here) is type(there):
            update[name] = _merge(here, there, f"{full}.", cold)
        elif _is_hot(full):
            update[name] = there
        else:
            cold.append(".".join(to_camel(part) for part in full.split(".")))
    return current.model_copy(update=update)


def _is_hot(full: str) -> bool:
    return full not in COLD and (full in HOT or full.partition(".")[0] in HOT)


class ConfigWatcher:
    """Poll a configuration file and other files once a second, on a separate thread.

    On a change, the thread calls `apply` with the configuration in force, or the function of the changed file in
    `also`, such as that for API keys. Calls do not overlap.
    """

    def __init__(
        self,
        path: Path,
        loaded: Loaded,
        apply: Callable[[Loaded], None],
        *,
        also: Mapping[Path, Callable[[], None]] | None = None,
    ) -> None:
        self.loaded = loaded
        self.is_invalid = False
        """Whether the file is invalid."""
        self._path = path
        self._apply = apply
        self._also = dict(also or {})
        self._last_error = ""
        self._seen: tuple[int, int, int] | None = None
        self._also_seen = {path: _stamp(path) for path in self._also}
        self._text_hash = loaded.content_hash
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ballast-reload", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread after the current poll."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def check(self) -> bool:
        """Poll once. Return whether a configuration was applied."""
        self._check_also()
        stamp = _stamp(self._path)
        if stamp is None or stamp == self._seen:
            return False  # a file that is gone for a moment is being replaced
        try:
            text = self._path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            self._text_hash = ""
            self._refuse(str(error))
            return False
        self._seen = stamp
        text_hash = content_hash(text)
        if text_hash == self._text_hash:
            return False
        self._text_hash = text_hash
        try:
            wanted = WorkerConfig.parse(text, str(self._path))
        except InvalidConfig as error:
            self._refuse(str(error))
            return False
        self._apply_file(wanted, text_hash)
        return True

    def _apply_file(self, wanted: WorkerConfig, text_hash: str) -> None:
        before = self.loaded.config
        loaded = take_up(self.loaded, wanted, text_hash)
        self._apply(loaded)
        self.loaded = loaded
        self.is_invalid = False
        self._last_error = ""
        if loaded.restart_required:
            log.warning("configuration needs a restart", fields=", ".join(loaded.restart_required))
        log.info(
            "configuration applied",
            generation=loaded.config.runtime.generation,
            changed=", ".join(_changed(before, loaded.config)) or "nothing",
        )

    def _refuse(self, why: str) -> None:
        if why != self._last_error:
            log.error("configuration not applied, the old one stays in force", because=why)
        self._last_error = why
        self.is_invalid = True

    def _check_also(self) -> None:
        for path, changed in self._also.items():
            stamp = _stamp(path)
            if stamp is not None and stamp != self._also_seen[path]:
                self._also_seen[path] = stamp
                changed()

    def _run(self) -> None:
        while not self._stop.wait(POLL_SECONDS):
            try:
                self.check()
            except Exception:
                log.exception("configuration not applied")


def _changed(before: BaseModel, after: BaseModel, path: str = "") -> list[str]:
    names: list[str] = []
    for name in type(before).model_fields:
        here, there = getattr(before, name), getattr(after, name)
        if isinstance(here, BaseModel) and isinstance(there, BaseModel):
            names += _changed(here, there, f"{path}{to_camel(name)}.")
        elif here != there:
            names.append(f"{path}{to_camel(name)}")
    return names


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size
