from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from ballast_api.worker_config import WorkerConfig, content_hash
from ballast_worker.errors import NotServed
from ballast_worker.reload import ConfigWatcher, Loaded

START = "model: {uri: /models/tiny}\nslots: 8\noffline: {reservedPercent: 10}\nruntime: {generation: 1}\n"


class Watched:
    """A watcher of a configuration file and of one of API keys, and what it handed over."""

    def __init__(self, directory: Path, num_failures: int = 0, failure: type[Exception] = TimeoutError) -> None:
        """Watch files in a directory. The first configurations cannot be applied."""
        self.path, self.keys = directory / "c.yaml", directory / "keys.yaml"
        self.all: list[Loaded] = []
        self.keys_read: list[str] = []
        self.keys_failure: Exception | None = None
        self.num_parses = 0
        self._num_failures, self._failure = num_failures, failure
        self.path.write_text(START)
        self.keys.write_text("a: team-a")
        loaded = Loaded(WorkerConfig.load(self.path), content_hash(START))
        also = {self.keys: self._read_keys}
        self.watcher = ConfigWatcher(self.path, loaded, self._take, also=also, parse=self._parse)

    def _parse(self, text: str, source: str) -> WorkerConfig:
        self.num_parses += 1
        return WorkerConfig.parse(text, source)

    def _take(self, loaded: Loaded) -> None:
        self.all.append(loaded)
        if len(self.all) <= self._num_failures:
            raise self._failure

    def _read_keys(self) -> None:
        self.keys_read.append(self.keys.read_text())
        if self.keys_failure is not None:
            raise self.keys_failure

    def change(self, text: str) -> None:
        """Change the configuration file, and check it."""
        rewrite(self.path, text)
        self.watcher.check()


def rewrite(path: Path, text: str) -> None:
    """Replace the file by a rename, as an editor or the kubelet does, within one tick of the clock.

    Only the inode tells both apart, so check in between: the next file may get the inode of the one before.
    """
    new = path.with_suffix(".new")
    new.write_text(text, errors="surrogateescape")
    os.utime(new, ns=(0, path.stat().st_mtime_ns if path.exists() else 0))
    new.replace(path)


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


def reserve(percent: int) -> str:
    return START.replace("reservedPercent: 10", f"reservedPercent: {percent}")


def test_an_untouched_file_changes_nothing(watched: Watched) -> None:
    watched.watcher.check()
    watched.watcher.check()

    assert watched.all == []


def test_a_hot_field_is_taken_up_with_generation_and_hash(watched: Watched) -> None:
    text = reserve(25).replace("generation: 1", "generation: 2")
    watched.change(text)

    [loaded] = watched.all
    assert loaded.config.offline.reserved_percent == 25
    assert loaded.config.runtime.generation == 2
    assert loaded.content_hash == content_hash(text)
    assert loaded.restart_required == ()


def test_a_cold_field_is_named_and_stays_as_it_was_while_hot_ones_are_taken(watched: Watched) -> None:
    watched.change(
        START.replace("slots: 8", "slots: 16")
        .replace("generation: 1", "generation: 2")
        .replace("offline: {", "offline: {queue: other, ")
        + "slo: {ttftMilliseconds: 50}\nengine: {blockTokens: 32, prefillChunkTokens: 64}\n"
    )

    [loaded] = watched.all
    assert loaded.restart_required == ("engine.blockTokens", "slots", "offline.queue")
    assert loaded.config.slots == 8
    assert loaded.config.offline.queue is None
    assert loaded.config.slo.ttft_milliseconds == 50
    assert loaded.config.engine.prefill_chunk_tokens == 64
    assert loaded.config.engine.block_tokens == 16
    assert loaded.config.runtime.generation == 1, "the new generation is not in force in full"
    assert loaded.content_hash == content_hash(START)


def test_a_cold_field_put_back_requires_no_restart_any_more(watched: Watched) -> None:
    watched.change(START.replace("slots: 8", "slots: 16"))
    watched.change(START)

    assert [bool(loaded.restart_required) for loaded in watched.all] == [True, False]
    assert watched.watcher.loaded.content_hash == content_hash(START)


@pytest.mark.parametrize(
    "wrong", [pytest.param("slots: eight", id="a wrong value"), pytest.param("slots: \udcff", id="no unicode")]
)
def test_an_invalid_file_leaves_the_old_configuration_and_is_told_until_mended(watched: Watched, wrong: str) -> None:
    watched.change(START.replace("slots: 8", wrong))
    assert watched.watcher.is_invalid
    assert watched.watcher.loaded.config.slots == 8
    watched.change(START)

    assert not watched.watcher.is_invalid


def test_each_new_problem_of_a_file_is_logged_once(watched: Watched, caplog: pytest.LogCaptureFixture) -> None:
    for wrong in ("slots: eight", "slots: eight", "slots: -1"):
        watched.change(START.replace("slots: 8", wrong))

    found = [vars(record)["fields"]["because"] for record in caplog.records if record.levelname == "ERROR"]
    assert ["eight" in because for because in found] == [True, False]


def test_an_invalid_file_is_read_once_and_one_that_could_not_be_read_again(watched: Watched) -> None:
    watched.keys_failure = NotServed("no mapping")
    rewrite(watched.keys, "b")
    watched.change(START.replace("slots: 8", "slots: eight"))
    watched.watcher.check()
    read = list(watched.keys_read)
    watched.keys_failure.__cause__ = OSError("disk")
    rewrite(watched.keys, "c")
    for _ in range(2):
        watched.watcher.check()

    assert (watched.num_parses, watched.watcher.is_invalid) == (1, True)
    assert (read, watched.keys_read) == (["b"], ["b", "c", "c"])


def test_a_file_that_is_gone_for_a_moment_is_waited_for(watched: Watched) -> None:
    watched.path.unlink()
    watched.watcher.check()
    assert not watched.watcher.is_invalid
    watched.change(reserve(30))

    assert watched.watcher.loaded.config.offline.reserved_percent == 30


def test_a_config_map_is_followed_through_its_symlinks(tmp_path: Path) -> None:
    def publish(version: str, text: str) -> None:
        (tmp_path / version).mkdir()
        (tmp_path / version / "config.yaml").write_text(text)
        (tmp_path / "tmp").symlink_to(version)
        (tmp_path / "tmp").replace(tmp_path / "..data")

    publish("v1", START)
    path, taken = tmp_path / "config.yaml", []
    path.symlink_to("..data/config.yaml")
    watcher = ConfigWatcher(path, Loaded(WorkerConfig.load(path), content_hash(START)), taken.append)
    publish("v2", reserve(40))
    watcher.check()

    assert taken[0].config.offline.reserved_percent == 40


def test_rotated_api_keys_are_noticed(watched: Watched) -> None:
    watched.watcher.check()
    rewrite(watched.keys, "b: team-a")
    watched.watcher.check()
    before = watched.watcher.is_invalid
    watched.keys.unlink()

    assert watched.keys_read == ["b: team-a"]
    assert (before, watched.watcher.is_invalid) == (False, True)


@pytest.mark.parametrize("failure", [TimeoutError, NotServed])
def test_a_configuration_that_could_not_be_applied_is_tried_again(tmp_path: Path, failure: type[Exception]) -> None:
    failing = Watched(tmp_path, num_failures=2, failure=failure)
    rewrite(failing.keys, "b: team-a")
    rewrite(failing.path, reserve(25))
    for _ in range(2):
        with pytest.raises(failure):
            failing.watcher.check()
        assert failing.watcher.loaded.config.offline.reserved_percent == 10
        assert failing.keys_read == ["b: team-a"], "the change of another file takes effect"
    for _ in range(2):
        failing.watcher.check()

    assert failing.watcher.loaded.config.offline.reserved_percent == 25
    assert len(failing.all) == 3


def test_a_file_that_is_put_back_after_a_failure_is_applied(tmp_path: Path) -> None:
    """A call that failed may have had its effect."""
    failing = Watched(tmp_path, num_failures=1)
    with pytest.raises(TimeoutError):
        failing.change(reserve(25))
    failing.change(START)

    assert failing.all[-1].config.offline.reserved_percent == 10


def test_a_file_that_could_not_be_taken_is_tried_again_and_holds_up_no_other(watched: Watched) -> None:
    watched.keys_failure = OSError("disk")
    rewrite(watched.keys, "b")
    with pytest.raises(OSError, match="disk"):
        watched.change(reserve(25))
    applied, watched.keys_failure = len(watched.all), None
    for _ in range(2):
        watched.watcher.check()

    assert (applied, watched.keys_read) == (1, ["b", "b"])


def test_a_failure_is_logged_again_after_a_poll_without_one(
    watched: Watched, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = iter([False, True, True, False, True])

    def check() -> None:
        is_failure = next(outcomes, None)
        if is_failure:
            raise OSError("disk")
        if is_failure is None:
            is_over.set()

    is_over = threading.Event()
    monkeypatch.setattr(watched.watcher, "check", check)
    monkeypatch.setattr("ballast_worker.reload.POLL_SECONDS", 0)
    watched.watcher.start()
    assert is_over.wait(60)
    watched.watcher.stop()

    assert len(caplog.records) == 2
