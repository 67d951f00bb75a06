"""Apply a changed configuration file: hot fields at once. Other fields wait for a restart, and the log names them.

An invalid file leaves the configuration in force unchanged. The watcher polls, because a mounted ConfigMap changes by a
symlink two directories up, and inotify on the file does not see that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ballast_api.errors import InvalidConfig
from ballast_api.hot import changed_fields, with_hot_fields
from ballast_api.worker_config import WorkerConfig, content_hash
from ballast_log import Log
from ballast_worker.errors import NotServed

log = Log(__name__)

POLL_SECONDS = 1.0
Stamp = tuple[int, int, int]
_Change = tuple[WorkerConfig, str]
"""The configuration in a changed file, and the hash of its text."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration in force."""

    config: WorkerConfig
    content_hash: str
    """Hash of the last file whose fields are all in force."""
    restart_required: tuple[str, ...] = ()
    """Fields that differ between the file and the configuration in force, as a user writes them."""


def reloaded(current: Loaded, wanted: WorkerConfig, text_hash: str) -> Loaded:
    """Return the configuration in force after `wanted` was read: its hot fields, and the current other fields."""
    config = with_hot_fields(current.config, wanted)
    cold = tuple(changed_fields(config, wanted))
    if cold:
        # Generation and hash state that the whole file is in force. That is not so before the restart.
        runtime = config.runtime.model_copy(update={"generation": current.config.runtime.generation})
        return Loaded(config.model_copy(update={"runtime": runtime}), current.content_hash, cold)
    return Loaded(config, text_hash)


class ConfigWatcher:
    """Poll one file, and other files that belong to it, once a second on its own thread.

    That thread calls `apply` with the configuration that is now in force. It calls the function that `also` names for
    another file, such as the API keys, when that file changes; it raises `NotServed` if the file is invalid. The calls
    do not overlap. `parse` reads the text of the file; its second argument names the file. Without a `path`, there are
    only other files.
    """

    def __init__(
        self,
        path: Path | None,
        loaded: Loaded,
        apply: Callable[[Loaded], None],
        *,
        also: Mapping[Path, Callable[[], None]] | None = None,
        parse: Callable[[str, str], WorkerConfig] = WorkerConfig.parse,
    ) -> None:
        self.loaded = loaded
        self._path = path
        self._apply = apply
        self._parse = parse
        self._loads: dict[Path, Callable[[], _Change | None]] = dict(also or {})
        """What loads each file. That of the configuration returns what is to be applied, if anything."""
        self._seen = {path: stamp(path) for path in self._loads}
        if path is not None:
            self._loads[path] = partial(self._read, path)
        self._errors: dict[Path, str] = {}
        """What is wrong with a file that is not in force."""
        self._last_failure = ""
        self._text_hash = loaded.content_hash
        """Hash of the file whose configuration was applied last; empty after a failure, which may have had effects."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ballast-reload", daemon=True)

    @property
    def is_invalid(self) -> bool:
        """Whether a file is invalid, or one that `also` names does not exist."""
        return bool(self._errors) or any(stamp(path) is None for path in self._loads if path != self._path)

    def start(self) -> None:
        """Start polling."""
        self._thread.start()

    def stop(self) -> None:
        """Stop polling, and wait for a poll in progress."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def check(self) -> None:
        """Poll once.

        If `apply` or a function for another file raises, so does this call, after the check of all files. The next call
        tries that file again.
        """
        with ExitStack() as checks:
            for path in self._loads:
                checks.callback(self._check, path)

    def _check(self, path: Path) -> None:
        now = stamp(path)
        if now is None or now == self._seen.get(path):
            return  # a file that is missing for a moment is being replaced
        try:
            change = self._loads[path]()
        except (InvalidConfig, NotServed) as error:
            if str(error) != self._errors.get(path):
                log.error("invalid file, the old one stays in force", because=str(error))  # noqa: TRY400 -- no defect
            self._errors[path] = str(error)
            if not isinstance(error.__cause__, OSError):  # the next poll would read the same invalid file
                self._seen[path] = now
            return
        if change is not None:
            self._take(*change)
        self._errors.pop(path, None)
        self._seen[path] = now

    def _read(self, path: Path) -> _Change | None:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise NotServed(str(error)) from error
        text_hash = content_hash(text)
        return None if text_hash == self._text_hash else (self._parse(text, str(path)), text_hash)

    def _take(self, wanted: WorkerConfig, text_hash: str) -> None:
        self._text_hash = ""
        before = self.loaded.config
        loaded = reloaded(self.loaded, wanted, text_hash)
        self._apply(loaded)
        self.loaded, self._text_hash = loaded, text_hash
        if loaded.restart_required:
            log.warning("fields changed that need a restart", fields=", ".join(loaded.restart_required))
        log.info(
            "configuration applied",
            generation=loaded.config.runtime.generation,
            changed=", ".join(changed_fields(before, loaded.config)) or "nothing",
        )

    def _run(self) -> None:
        while not self._stop.wait(POLL_SECONDS):
            try:
                self.check()
            except Exception as error:
                if repr(error) != self._last_failure:
                    log.exception("the changed configuration was not applied, the next poll tries it again")
                self._last_failure = repr(error)
            else:
                self._last_failure = ""


def stamp(path: Path) -> Stamp | None:
    """Return what changes with a file; None if there is no file, as while an editor replaces it."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size
