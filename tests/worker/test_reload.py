from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from ballast_api.worker_config import WorkerConfig, content_hash
from ballast_worker.reload import ConfigWatcher, Loaded

START = "model: {uri: /models/tiny}\nslots: 8\noffline: {reservedPercent: 10}\nruntime: {generation: 1}\n"


class Taken:
    """What a watcher handed over."""

    def __init__(self) -> None:
        self.all: list[Loaded] = []
        self.keys = 0

    def take(self, loaded: Loaded) -> None:
        self.all.append(loaded)

    def keys_changed(self) -> None:
        self.keys += 1


def make_watcher(path: Path, taken: Taken, also: Path | None = None) -> ConfigWatcher:
    path.write_text(START)
    loaded = Loaded(WorkerConfig.load(path), content_hash(START))
    return ConfigWatcher(path, loaded, taken.take, also={also: taken.keys_changed} if also else None)


def rewrite(path: Path, text: str) -> None:
    """Replace the file by a rename, as an editor or the kubelet does, within one tick of the clock.

    Only the inode tells both apart, so check in between: the next file may get the inode of the one before.
    """
    new = path.with_suffix(".new")
    new.write_text(text, errors="surrogateescape")
    os.utime(new, ns=(0, path.stat().st_mtime_ns if path.exists() else 0))
    new.replace(path)


def test_an_untouched_file_changes_nothing(tmp_path: Path) -> None:
    taken = Taken()
    watcher = make_watcher(tmp_path / "c.yaml", taken)

    watcher.check()
    watcher.check()

    assert taken.all == []


def test_a_hot_field_is_taken_up_with_generation_and_hash(tmp_path: Path) -> None:
    taken = Taken()
    watcher = make_watcher(tmp_path / "c.yaml", taken)
    text = START.replace("reservedPercent: 10", "reservedPercent: 25").replace("generation: 1", "generation: 2")

    rewrite(tmp_path / "c.yaml", text)
    watcher.check()

    [loaded] = taken.all
    assert loaded.config.offline.reserved_percent == 25
    assert loaded.config.runtime.generation == 2
    assert loaded.content_hash == content_hash(text)
    assert loaded.restart_required == ()


def test_a_cold_field_is_named_and_stays_as_it_was_while_hot_ones_are_taken(tmp_path: Path) -> None:
    taken = Taken()
    watcher = make_watcher(tmp_path / "c.yaml", taken)
    text = (
        START.replace("slots: 8", "slots: 16").replace("generation: 1", "generation: 2")
        + "slo: {ttftMilliseconds: 50}\nengine: {blockTokens: 32, prefillChunkTokens: 64}\n"
    ).replace("offline: {", "offline: {queue: other, ")

    rewrite(tmp_path / "c.yaml", text)
    watcher.check()

    [loaded] = taken.all
    assert loaded.restart_required == ("engine.blockTokens", "slots", "offline.queue")
    assert loaded.config.slots == 8
    assert loaded.config.offline.queue is None
    assert loaded.config.slo.ttft_milliseconds == 50
    assert loaded.config.engine.prefill_chunk_tokens == 64
    assert loaded.config.engine.block_tokens == 16
    assert loaded.config.runtime.generation == 1, "the new generation is not in force in full"
    assert loaded.content_hash == content_hash(START)


def test_a_cold_field_put_back_requires_no_restart_any_more(tmp_path: Path) -> None:
    taken = Taken()
    watcher = make_watcher(tmp_path / "c.yaml", taken)

    rewrite(tmp_path / "c.yaml", START.replace("slots: 8", "slots: 16"))
    watcher.check()
    rewrite(tmp_path / "c.yaml", START)
    watcher.check()

    assert [bool(loaded.restart_required) for loaded in taken.all] == [True, False]
    assert watcher.loaded.content_hash == content_hash(START)


@pytest.mark.parametrize(
    "wrong", [pytest.param("slots: eight", id="a wrong value"), pytest.param("slots: \udcff", id="no unicode")]
)
def test_an_invalid_file_leaves_the_old_configuration_and_is_told_until_mended(tmp_path: Path, wrong: str) -> None:
    taken = Taken()
    watcher = make_watcher(tmp_path / "c.yaml", taken)

    rewrite(tmp_path / "c.yaml", START.replace("slots: 8", wrong))
    watcher.check()
    assert watcher.is_invalid
    assert watcher.loaded.config.slots == 8
    rewrite(tmp_path / "c.yaml", START)
    watcher.check()

    assert not watcher.is_invalid


def test_each_new_problem_of_a_file_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    watcher = make_watcher(tmp_path / "c.yaml", Taken())

    for wrong in ("slots: eight", "slots: eight", "slots: -1"):
        rewrite(tmp_path / "c.yaml", START.replace("slots: 8", wrong))
        watcher.check()

    found = [vars(record)["fields"]["because"] for record in caplog.records if record.levelname == "ERROR"]
    assert ["eight" in because for because in found] == [True, False]


def test_a_file_that_is_gone_for_a_moment_is_waited_for(tmp_path: Path) -> None:
    taken = Taken()
    watcher = make_watcher(tmp_path / "c.yaml", taken)

    (tmp_path / "c.yaml").unlink()
    watcher.check()
    assert not watcher.is_invalid
    rewrite(tmp_path / "c.yaml", START.replace("reservedPercent: 10", "reservedPercent: 30"))
    watcher.check()

    assert watcher.loaded.config.offline.reserved_percent == 30


def test_a_config_map_is_followed_through_its_symlinks(tmp_path: Path) -> None:
    def publish(version: str, text: str) -> None:
        (tmp_path / version).mkdir()
        (tmp_path / version / "config.yaml").write_text(text)
        (tmp_path / "tmp").symlink_to(version)
        (tmp_path / "tmp").replace(tmp_path / "..data")

    publish("v1", START)
    path = tmp_path / "config.yaml"
    path.symlink_to("..data/config.yaml")
    taken = Taken()
    watcher = ConfigWatcher(path, Loaded(WorkerConfig.load(path), content_hash(START)), taken.take)

    publish("v2", START.replace("reservedPercent: 10", "reservedPercent: 40"))
    watcher.check()

    assert taken.all[0].config.offline.reserved_percent == 40


def test_rotated_api_keys_are_noticed(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("a: team-a")
    taken = Taken()
    watcher = make_watcher(tmp_path / "c.yaml", taken, also=keys)

    watcher.check()
    rewrite(keys, "b: team-a")
    watcher.check()
    before = watcher.is_invalid
    keys.unlink()

    assert taken.keys == 1
    assert (before, watcher.is_invalid) == (False, True)


class Failing(Taken):
    """The first configurations that it gets cannot be applied."""

    def __init__(self, num_failures: int) -> None:
        super().__init__()
        self.num_failures = num_failures

    def take(self, loaded: Loaded) -> None:
        super().take(loaded)
        if len(self.all) <= self.num_failures:
            raise TimeoutError


def test_a_configuration_that_could_not_be_applied_is_tried_again(tmp_path: Path) -> None:
    failing, keys = Failing(2), tmp_path / "keys.yaml"
    keys.write_text("a: team-a")
    watcher = make_watcher(tmp_path / "c.yaml", failing, also=keys)

    rewrite(keys, "b: team-a")
    rewrite(tmp_path / "c.yaml", START.replace("reservedPercent: 10", "reservedPercent: 25"))
    for _ in range(2):
        with pytest.raises(TimeoutError):
            watcher.check()
        assert watcher.loaded.config.offline.reserved_percent == 10
        assert failing.keys == 1, "the change of another file takes effect"
    for _ in range(2):
        watcher.check()

    assert watcher.loaded.config.offline.reserved_percent == 25
    assert len(failing.all) == 3


def test_a_file_that_is_put_back_after_a_failure_is_applied(tmp_path: Path) -> None:
    """A call that failed may have had its effect."""
    failing = Failing(1)
    watcher = make_watcher(tmp_path / "c.yaml", failing)

    rewrite(tmp_path / "c.yaml", START.replace("reservedPercent: 10", "reservedPercent: 25"))
    with pytest.raises(TimeoutError):
        watcher.check()
    rewrite(tmp_path / "c.yaml", START)
    watcher.check()

    assert failing.all[-1].config.offline.reserved_percent == 10


def test_a_file_that_could_not_be_taken_is_tried_again_and_holds_up_no_other(tmp_path: Path) -> None:
    keys, taken, attempts = tmp_path / "keys.yaml", Taken(), []

    def fail_once() -> None:
        attempts.append(keys.read_text())
        if len(attempts) == 1:
            raise OSError("disk")

    keys.write_text("a")
    (tmp_path / "c.yaml").write_text(START)
    loaded = Loaded(WorkerConfig.load(tmp_path / "c.yaml"), content_hash(START))
    watcher = ConfigWatcher(tmp_path / "c.yaml", loaded, taken.take, also={keys: fail_once})
    rewrite(keys, "b")
    rewrite(tmp_path / "c.yaml", START.replace("reservedPercent: 10", "reservedPercent: 25"))
    with pytest.raises(OSError, match="disk"):
        watcher.check()
    applied = len(taken.all)
    for _ in range(2):
        watcher.check()

    assert (applied, attempts) == (1, ["b", "b"])


def test_a_failure_is_logged_again_after_a_poll_without_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    watcher = make_watcher(tmp_path / "c.yaml", Taken())
    outcomes = iter([False, True, True, False, True])

    def check() -> bool:
        is_failure = next(outcomes, None)
        if is_failure:
            raise OSError("disk")
        if is_failure is None:
            is_over.set()
        return False

    is_over = threading.Event()
    monkeypatch.setattr(watcher, "check", check)
    monkeypatch.setattr("ballast_worker.reload.POLL_SECONDS", 0)
    watcher.start()
    assert is_over.wait(60)
    watcher.stop()

    assert len(caplog.records) == 2
