"""`ballast fetch` trusts neither its source nor the directory that it finds."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from threading import Barrier, Event, Thread
from types import SimpleNamespace
from typing import Any

import boto3
import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballast_cli.__main__ import main
from ballast_cli.errors import CliError
from ballast_cli.fetch import hub as hub_module
from ballast_cli.fetch import store
from ballast_cli.fetch.bucket import Bucket, best_digest
from ballast_cli.fetch.directory import Directory, is_safe
from ballast_cli.fetch.hub import Hub
from ballast_cli.fetch.location import parse
from ballast_cli.fetch.manifest import EMPTY, MANIFEST, Kept, Manifest, parse_manifest
from ballast_cli.fetch.model_files import File, ModelFiles, select
from ballast_cli.fetch.source import Unavailable
from ballast_cli.fetch.threads import map_in_threads

FROM_HUB = "hf://org/name"
MIB = 1 << 20
WEIGHTS = "model.safetensors"


def fetch(*arguments: object) -> int:
    return main(["fetch", *map(str, arguments)])


class Endless:
    """Sends pieces of a mebibyte, as many as somebody reads, whatever it announced."""

    origin = ""

    def __init__(self, announced: int | None, num_pieces: int = 600, errors: Sequence[Exception] = ()) -> None:
        """Raise each of the errors before anything is sent."""
        self.announced, self.num_pieces, self.errors, self.num_sent = announced, num_pieces, [*errors], 0

    def resolve(self) -> ModelFiles:
        return ModelFiles("here", "1", (File("config.json", self.announced),))

    @contextmanager
    def read(self, _: File, start: int) -> Iterator[Iterator[bytes]]:
        if self.errors:
            raise self.errors.pop()
        yield self._pieces(start)

    def _pieces(self, start: int) -> Iterator[bytes]:
        for _ in range(self.num_pieces - start // MIB):
            self.num_sent += 1
            yield bytes(MIB)


def download(source: Any, path: Path, **options: Any) -> bool:
    return store.download(source, source.resolve(), path, advance=lambda _: None, **options)


def stored(path: Path) -> int:
    return sum(found.stat().st_size for found in path.iterdir() if not found.name.startswith("."))


# More than announced


def test_a_source_that_sends_more_than_it_announced_is_stopped_at_once(tmp_path: Path) -> None:
    source = Endless(announced=10)
    with pytest.raises(CliError, match=r"config.json of here is longer than the 10 bytes that the source announced"):
        download(source, tmp_path / "model")

    assert source.num_sent == 1
    assert stored(tmp_path / "model") == 0


def test_a_hub_that_sends_more_than_it_announced_is_stopped(
    hub: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.announced["config.json"] = 10
    assert fetch(FROM_HUB, tmp_path / "model") == 1
    assert "longer than the 10 bytes" in capsys.readouterr().err
    assert not (tmp_path / "model" / MANIFEST).exists()
    assert not (tmp_path / "model" / "config.json").exists()


def test_a_size_that_is_not_announced_is_limited_by_the_option_and_by_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Endless(announced=None)
    with pytest.raises(CliError, match=r"sends more than 5\.0 MB, which --max-gigabytes or the free disk admits"):
        download(source, tmp_path / "model", max_bytes=5_000_000)
    by_option = source.num_sent
    monkeypatch.setattr(store.shutil, "disk_usage", lambda _: SimpleNamespace(free=3 * MIB))
    with pytest.raises(CliError, match="the free disk"):
        download(source, tmp_path / "model")

    assert (by_option, source.num_sent - by_option) == (5, 4)
    assert stored(tmp_path / "model") == 0


def test_a_file_without_an_announced_size_is_downloaded_whole(
    hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.announced["tokenizer.json"] = None
    assert fetch(FROM_HUB, tmp_path / "model") == 0
    assert (tmp_path / "model" / "tokenizer.json").read_bytes() == hub.files["tokenizer.json"]
    hub.requests.clear()
    assert fetch(FROM_HUB, tmp_path / "model") == 0
    assert not [path for path, _ in hub.requests if "/resolve/" in path], "complete"


def test_a_model_above_the_limit_is_refused_before_anything_is_downloaded(
    hub: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fetch(FROM_HUB, tmp_path / "model", "--max-gigabytes", "0.001") == 1
    assert "but --max-gigabytes admits 1.0 MB" in capsys.readouterr().err
    assert not [path for path, _ in hub.requests if "/resolve/" in path]


# Errors


def test_a_full_disk_is_reported_and_keeps_the_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CliError, match=r"is full\. Free some"):
        download(Endless(10, errors=[OSError(errno.ENOSPC, "No space left on device")]), tmp_path)
    with pytest.raises(CliError, match=rf"The quota of {tmp_path} is used up\. Free some"):
        download(Endless(10, errors=[OSError(errno.EDQUOT, "Disk quota exceeded")]), tmp_path)
    monkeypatch.setattr(store.shutil, "disk_usage", lambda _: SimpleNamespace(free=3))
    with pytest.raises(CliError, match="but the model needs"):
        download(Endless(10), tmp_path)
    with pytest.raises(CliError, match=rf"{tmp_path} keeps each version that was fetched: delete those that no pod"):
        download(Endless(10), tmp_path / "v2", is_shared=True)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_volume_without_locks_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, "no locks")

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(CliError, match=rf"Cannot lock {tmp_path} \(no locks\).*Use a volume with locks"):
        download(Endless(10), tmp_path)


def test_a_process_that_waited_for_a_directory_has_it_alone(tmp_path: Path) -> None:
    waits, has, may_end = Event(), Event(), Event()

    def follow() -> None:
        with Directory.open(tmp_path) as directory, directory.lock("lock", waits.set):
            has.set()
            assert may_end.wait(60)

    second = Thread(target=follow)
    with Directory.open(tmp_path) as directory, directory.lock("lock", lambda: None):
        second.start()
        assert waits.wait(60)
    try:
        assert has.wait(60)
        with (tmp_path / "lock").open() as third, pytest.raises(BlockingIOError):
            fcntl.flock(third, fcntl.LOCK_SH | fcntl.LOCK_NB)
    finally:
        may_end.set()
        second.join()


KEPT_FREE = {
    "the disk of a node": ({"KUBERNETES_SERVICE_HOST": "10.96.0.1"}, True, True),
    "a volume of its own": ({"KUBERNETES_SERVICE_HOST": "10.96.0.1"}, False, False),
    "a pod without the file": ({"KUBERNETES_SERVICE_HOST": "10.96.0.1"}, None, False),
    "a laptop": ({}, True, False),
    "a node that evicts later": (
        {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "BALLAST_KEEP_FREE_PERCENT": "5"}, True, False,
    ),
    "a laptop that shall keep more free": ({"BALLAST_KEEP_FREE_PERCENT": "11"}, True, True),
}  # fmt: skip


@pytest.mark.parametrize("case", KEPT_FREE)
def test_a_disk_keeps_the_share_free_below_which_a_node_evicts_pods(
    hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    """The model has 2 MB, and 12 of 100 are free."""
    variables, is_of_node, is_refused = KEPT_FREE[case]
    monkeypatch.setattr(store.shutil, "disk_usage", lambda _: SimpleNamespace(free=12_000_000, total=100_000_000))
    monkeypatch.setattr(store, "NODE_FILE", {True: tmp_path, False: Path("/proc"), None: tmp_path / "none"}[is_of_node])
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = fetch(FROM_HUB, tmp_path / "model")

    assert found == int(is_refused)
    assert (" MB must stay free (--keep-free-percent; " in capsys.readouterr().err) is is_refused


def test_the_share_that_stays_free_counts_for_what_is_written_and_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = 500

    def usage(_: Path) -> SimpleNamespace:
        return SimpleNamespace(free=(1000 - others) * MIB - stored(tmp_path), total=1000 * MIB)

    monkeypatch.setattr(store.shutil, "disk_usage", usage)
    options = {"keep_free_percent": 15.0}
    small, large = Endless(MIB, 1), Endless(300 * MIB, 300)
    assert download(small, tmp_path, **options)

    others = 900
    assert not download(small, tmp_path, is_verified=True, **options), "nothing is written"
    (tmp_path / "config.json").write_bytes(b"")
    assert download(small, tmp_path, **options), "a trifle is written"
    with pytest.raises(CliError, match=r"must stay free \(.*\), but the model needs"):
        download(large, tmp_path, **options)

    others = 500

    def advance(_: int) -> None:
        nonlocal others
        others += 1  # another pod writes as well

    with pytest.raises(CliError, match=r"must stay free \([^)]*\)\. Free some"):
        store.download(large, large.resolve(), tmp_path, advance=advance, **options)
    assert 70 * MIB < usage(tmp_path).free < 150 * MIB
    assert stored(tmp_path) > 100 * MIB, "its part is kept"


def test_the_error_of_a_source_that_never_answers_is_its_own(tmp_path: Path) -> None:
    gone, began = Unavailable("gone away"), time.monotonic()
    with pytest.raises(Unavailable, match="gone away"):
        download(Endless(MIB, 1, [gone] * 9), tmp_path)

    assert time.monotonic() - began >= 0.01 + 0.02 + 0.04 + 0.08, "the pauses grow"
    assert download(Endless(MIB, 1, [gone] * 2), tmp_path), "twice is forgiven"
    assert not download(Endless(MIB, 1), tmp_path), "whole"


# Names that a source chooses


def test_a_manifest_in_the_repository_does_not_replace_ours(hub: Any, tmp_path: Path) -> None:
    theirs = json.dumps({"source": "evil", "version": "evil", "files": {"passwd": {"size": 1}}}).encode()
    hub.files |= {MANIFEST: theirs, ".ballast-fetch.lock": b"x", ".hidden.json": b"{}"}
    assert fetch(FROM_HUB, tmp_path / "model") == 0
    hub.requests.clear()
    assert fetch(FROM_HUB, tmp_path / "model") == 0

    assert not [path for path, _ in hub.requests if "/resolve/" in path], "complete"
    assert json.loads((tmp_path / "model" / MANIFEST).read_text())["source"] == f"{FROM_HUB}@main"
    assert not (tmp_path / "model" / ".hidden.json").exists()


NAMES = ["../x.json", "/etc/x.json", "a/../x.json", "..", ".x.json", "a\\x.json", "x\n.json", "x\x1b[2J.json", ""]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_is_not_plain_is_neither_selected_nor_written(name: str, tmp_path: Path) -> None:
    listed = [File("config.json", 1), File(WEIGHTS, 1), File(name, 1), File("long" * 70 + ".json", 1)]
    source = Endless(announced=1)
    source.resolve = lambda: ModelFiles("here", "1", (File(name, 1),))  # type: ignore[method-assign]
    with pytest.raises(CliError, match="is not a plain name"):
        download(source, tmp_path / "model")

    assert [file.name for file in select(listed, "here", "config.json", source.read)] == ["config.json", WEIGHTS]
    assert source.num_sent == 0


@pytest.mark.parametrize(
    "modules",
    [b"[", b'{"a": 1}', b'[{"path": 1}]', b'[{"path": "../outside"}]', b'[{"path": "a/b"}]', b"[" + b" " * MIB],
    ids=["no JSON", "no list", "a number", "a path outside", "two folders", "a long file"],
)
def test_modules_that_are_no_folders_of_the_model_are_refused(
    hub: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], modules: bytes
) -> None:
    hub.files["modules.json"] = modules
    assert fetch(FROM_HUB, tmp_path / "model") == 1
    assert "modules.json" in capsys.readouterr().err


def test_a_commit_that_is_a_path_is_refused(hub: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub.commit = "../../../outside"
    assert fetch(FROM_HUB, tmp_path / "model", "--cache", tmp_path / "cache") == 1
    assert "named no commit" in capsys.readouterr().err


# Links in the directory


@pytest.mark.parametrize("name", [f"{WEIGHTS}.part", WEIGHTS, "config.json", MANIFEST, f"{MANIFEST}.part"])
@pytest.mark.parametrize("kind", ["symbolic", "hard", "dangling"])
def test_a_link_in_the_directory_is_never_followed(hub: Any, tmp_path: Path, name: str, kind: str) -> None:
    victim, model = tmp_path / "victim", tmp_path / "model"
    model.mkdir()
    if kind != "dangling":
        victim.write_bytes(b"precious")
    if kind == "hard":
        os.link(victim, model / name)
    else:
        (model / name).symlink_to(victim)

    assert fetch(FROM_HUB, model) == 0
    assert (victim.read_bytes() == b"precious") if kind != "dangling" else not victim.exists()
    assert not any(path.is_symlink() for path in model.iterdir())
    assert (model / WEIGHTS).read_bytes() == hub.files[WEIGHTS]


def test_a_link_to_good_content_is_replaced_by_a_file(hub: Any, tmp_path: Path) -> None:
    fetch(FROM_HUB, tmp_path / "model")
    moved = tmp_path / "elsewhere"
    (tmp_path / "model" / WEIGHTS).rename(moved)
    (tmp_path / "model" / WEIGHTS).symlink_to(moved)

    assert fetch(FROM_HUB, tmp_path / "model") == 0
    assert not (tmp_path / "model" / WEIGHTS).is_symlink()


def test_a_lock_that_is_a_link_is_refused(hub: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / ".ballast-fetch.lock").symlink_to(tmp_path / "victim")
    assert fetch(FROM_HUB, tmp_path / "model") == 2
    assert "symbolic link" in capsys.readouterr().err
    assert not (tmp_path / "victim").exists()
    assert hub.requests


def test_a_directory_of_a_cache_that_is_a_link_is_refused(
    hub: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache, elsewhere = tmp_path / "cache", tmp_path / "elsewhere"
    fetch(FROM_HUB, tmp_path / "a", "--cache", cache)
    (version,) = cache.iterdir()
    version.rename(elsewhere)
    version.symlink_to(elsewhere)
    hub.requests.clear()

    assert fetch(FROM_HUB, tmp_path / "b", "--cache", cache) == 2
    assert "symbolic link" in capsys.readouterr().err
    hub.is_away = True
    assert fetch(FROM_HUB, tmp_path / "b", "--cache", cache) == 4, "no copy for the time without the hub"


# Changes in the directory, and caches that tenants share


def change(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[5] ^= 1
    path.write_bytes(content)


def test_a_change_of_equal_size_is_noticed_and_repaired(hub: Any, tmp_path: Path) -> None:
    fetch(FROM_HUB, tmp_path / "a", "--cache", tmp_path / "cache")
    change(tmp_path / "a" / WEIGHTS)
    hub.requests.clear()

    assert fetch(FROM_HUB, tmp_path / "b", "--cache", tmp_path / "cache") == 0
    assert (tmp_path / "b" / WEIGHTS).read_bytes() == hub.files[WEIGHTS]
    assert [path.rpartition("/")[2] for path, _ in hub.requests if "/resolve/" in path] == [WEIGHTS]


def test_a_copy_that_was_changed_is_not_used_while_the_source_is_away(hub: Any, tmp_path: Path) -> None:
    fetch(FROM_HUB, tmp_path / "model")
    hub.is_away = True
    as_it_was = fetch(FROM_HUB, tmp_path / "model")
    os.utime(tmp_path / "model" / WEIGHTS, (1, 1))
    touched = fetch(FROM_HUB, tmp_path / "model")
    change(tmp_path / "model" / WEIGHTS)

    assert (as_it_was, touched) == (0, 0)
    assert fetch(FROM_HUB, tmp_path / "model") == 4


def test_a_restored_directory_is_read_once_and_not_downloaded(
    hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy has other times and inodes. The checksums show that it is the same."""
    fetch(FROM_HUB, tmp_path / "model")
    for name in ("config.json", WEIGHTS):
        content = (tmp_path / "model" / name).read_bytes()
        (tmp_path / "model" / name).unlink()
        (tmp_path / "model" / name).write_bytes(content)
    (tmp_path / "model" / f"{WEIGHTS}.part").write_bytes(b"left by a process that was killed")
    hub.requests.clear()
    assert fetch(FROM_HUB, tmp_path / "model") == 0
    assert not (tmp_path / "model" / f"{WEIGHTS}.part").exists()
    monkeypatch.setattr(store, "verified", None)  # a second start reads no file

    assert fetch(FROM_HUB, tmp_path / "model") == 0
    assert not [path for path, _ in hub.requests if "/resolve/" in path]


def test_verify_finds_a_change_behind_a_forged_manifest(hub: Any, tmp_path: Path) -> None:
    model = tmp_path / "model"
    fetch(FROM_HUB, model)
    change(model / WEIGHTS)
    found, forged = (model / WEIGHTS).stat(), json.loads((model / MANIFEST).read_text())
    forged["files"][WEIGHTS] |= {
        "mtime_ns": found.st_mtime_ns,
        "inode": found.st_ino,
        "sha256": hashlib.sha256((model / WEIGHTS).read_bytes()).hexdigest(),
    }
    (model / MANIFEST).write_text(json.dumps(forged))

    assert fetch(FROM_HUB, model) == 0
    assert (model / WEIGHTS).read_bytes() != hub.files[WEIGHTS], "the quick check believes the manifest"
    assert fetch(FROM_HUB, model, "--verify") == 0
    assert (model / WEIGHTS).read_bytes() == hub.files[WEIGHTS]


def test_another_hub_cannot_put_its_files_under_the_name_of_a_model(
    hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenant serves the same name and commit from an endpoint of its own, through the same cache."""
    good, cache = hub.url, tmp_path / "cache"
    bad = good.replace("127.0.0.1", "localhost")
    monkeypatch.setenv("HF_ENDPOINT", bad)
    hub.files[WEIGHTS] = evil = bytes(len(hub.files[WEIGHTS]))
    fetch(FROM_HUB, tmp_path / "theirs", "--cache", cache)
    monkeypatch.setenv("HF_ENDPOINT", good)
    hub.files[WEIGHTS] = b"the real weights"
    fetch(FROM_HUB, tmp_path / "ours", "--cache", cache)

    assert (tmp_path / "theirs" / WEIGHTS).read_bytes() == evil
    assert (tmp_path / "ours" / WEIGHTS).read_bytes() == b"the real weights"
    for endpoint, weights in ((bad, b"the evil weights"), (good, b"the real weights")):
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        hub.files[WEIGHTS] = weights
        fetch(FROM_HUB, tmp_path / "model")
        assert (tmp_path / "model" / WEIGHTS).read_bytes() == weights
    monkeypatch.setenv("HF_ENDPOINT", bad)
    fetch(FROM_HUB, tmp_path / "theirs", "--cache", cache)  # the copy that the name had last
    monkeypatch.setenv("HF_ENDPOINT", good)
    hub.is_away = True
    assert fetch(FROM_HUB, tmp_path / "away", "--cache", cache) == 0
    assert (tmp_path / "away").resolve() == (tmp_path / "ours").resolve()


# Objects in S3


def upload_in_parts(bucket: Any, content: bytes) -> None:
    """Upload weights whose ETag is no checksum of the content."""
    key = f"models/llama/{WEIGHTS}"
    upload = bucket.create_multipart_upload(Bucket=bucket.name, Key=key)["UploadId"]
    done = []
    for number, piece in enumerate((content[: 5 * MIB], content[5 * MIB :]), 1):
        tag = bucket.upload_part(Bucket=bucket.name, Key=key, UploadId=upload, PartNumber=number, Body=piece)["ETag"]
        done.append({"ETag": tag, "PartNumber": number})
    bucket.complete_multipart_upload(Bucket=bucket.name, Key=key, UploadId=upload, MultipartUpload={"Parts": done})


@pytest.fixture
def parts(bucket: Any) -> Any:
    upload_in_parts(bucket, bytes(5 * MIB + 17))
    return bucket


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_weights_of_an_older_upload_are_not_taken_for_the_new_ones(
    parts: Any, tmp_path: Path, is_interrupted: bool
) -> None:
    place, model, new = f"s3://{parts.name}/models/llama", tmp_path / "model", b"x" * (5 * MIB + 17)
    assert fetch(place, model) == 0
    if is_interrupted:
        (model / MANIFEST).unlink()
        (model / WEIGHTS).unlink()
        (model / f"{WEIGHTS}.part").write_bytes(bytes(MIB))
        (model / ".ballast-fetch.partial").write_text("another key")
    upload_in_parts(parts, new)

    assert fetch(place, model) == 0
    assert (model / WEIGHTS).read_bytes() == new


def test_an_interrupted_download_without_a_checksum_is_resumed(tmp_path: Path) -> None:
    starts = []

    class Cut(Endless):
        def _pieces(self, start: int) -> Iterator[bytes]:
            starts.append(start)
            yield bytes(MIB)
            if not start:
                raise CliError("cut")

    source = Cut(announced=2 * MIB)
    with pytest.raises(CliError, match="cut"):
        download(source, tmp_path)

    assert download(source, tmp_path)
    assert starts == [0, MIB]


def test_the_first_failure_stops_the_other_files_at_once(tmp_path: Path) -> None:
    class Failing(Endless):
        def resolve(self) -> ModelFiles:
            return ModelFiles("here", "1", (File("config.json", None), File(WEIGHTS, 1)))

        @contextmanager
        def read(self, file: File, start: int) -> Iterator[Iterator[bytes]]:
            if file.name == WEIGHTS:
                raise CliError("denied")
            yield self._pieces(start)

        def _pieces(self, _: int) -> Iterator[bytes]:
            while self.num_sent < 2000:
                time.sleep(0.001)
                self.num_sent += 1
                yield b"x"

    source = Failing(announced=None)
    with pytest.raises(CliError, match="denied"):
        download(source, tmp_path)

    assert source.num_sent < 1000


def test_an_interrupt_ends_the_calls_that_wait_for_nothing_before_it_is_raised() -> None:
    began, stopped, ended = Barrier(4), Event(), []

    def call(item: int) -> None:
        began.wait()
        if item == 0:
            raise KeyboardInterrupt
        stopped.wait()
        time.sleep(0.01)  # the last write of the call
        ended.append(item)

    with pytest.raises(KeyboardInterrupt):
        map_in_threads(call, range(4), on_failure=stopped.set)

    assert sorted(ended) == [1, 2, 3]


def test_a_container_that_has_too_many_threads_is_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped, start, number = Event(), Thread.start, count()

    def refuse_third(thread: Thread) -> None:
        if next(number) == 2:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(Thread, "start", refuse_third)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        map_in_threads(lambda _: stopped.wait(), range(8), on_failure=stopped.set)


def test_an_object_without_a_checksum_is_named_and_gets_our_own(
    parts: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place, model = f"s3://{parts.name}/models/llama", tmp_path / "model"
    assert fetch(place, model) == 0
    said = " ".join(capsys.readouterr().err.split())
    whole = (model / WEIGHTS).read_bytes()
    recorded = json.loads((model / MANIFEST).read_text())["files"][WEIGHTS]["sha256"]
    change(model / WEIGHTS)

    assert f"has no checksum for {WEIGHTS}." in said
    assert recorded == hashlib.sha256(whole).hexdigest()
    assert fetch(place, model) == 0
    assert (model / WEIGHTS).read_bytes() == whole


def test_an_object_that_is_replaced_after_it_was_listed_is_an_error(parts: Any) -> None:
    source = Bucket(parse(f"s3://{parts.name}/models/llama"))
    found = {file.name: file for file in source.resolve().files}
    parts.put_object(Bucket=parts.name, Key=f"models/llama/{WEIGHTS}", Body=b"of another version")

    with pytest.raises(CliError, match="changed during the download"), source.read(found[WEIGHTS]):
        pass


@pytest.fixture
def before(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """An object store without ETags. The headers that the test sets replace those of HEAD, also its ETag."""
    headers: dict[str, str] = {}
    left_out = {"etag", "connection", "transfer-encoding"}

    class Proxy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = f"{bucket.meta.endpoint_url}{self.path}"
            answer = httpx2.request(self.command, url, headers=dict(self.headers), timeout=60)
            shown = {name: value for name, value in answer.headers.items() if name not in left_out}
            self.send_response(answer.status_code)
            for name, value in (shown | (headers if self.command == "HEAD" else {})).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(answer.content)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    thread = Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    yield headers
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_object_that_became_shorter_after_it_was_listed_is_an_error(bucket: Any) -> None:
    source = Bucket(parse(f"s3://{bucket.name}/models/llama"))

    with pytest.raises(CliError, match="changed during the download"), source.read(File(WEIGHTS, MIB * 9), MIB * 8):
        pass


@pytest.mark.parametrize("tag", [{}, {"etag": ""}])
def test_an_object_without_a_tag_is_known_by_its_time(
    bucket: Any, before: dict[str, str], tmp_path: Path, tag: dict[str, str]
) -> None:
    place, model = f"s3://{bucket.name}/models/llama", tmp_path / "model"
    before |= tag
    assert fetch(place, model) == 0
    versions = {Bucket(parse(place)).resolve().version for _ in range(2)}
    before["last-modified"] = "Mon, 31 Dec 2018 12:00:00 GMT"
    older = Bucket(parse(place))
    listed = older.resolve()

    assert (model / WEIGHTS).read_bytes() == bucket.files[WEIGHTS]
    assert len(versions) == 1
    assert listed.version not in versions
    with pytest.raises(CliError, match="changed during the download"), older.read(listed.files[0]):
        pass


def test_a_checksum_of_s3_is_used(bucket: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    client = boto3.client("s3")
    content = b"weights"
    client.put_object(
        Bucket=bucket.name, Key=f"models/llama/{WEIGHTS}", Body=content, ChecksumAlgorithm="SHA256",
        ServerSideEncryption="aws:kms",
    )  # fmt: skip
    assert fetch(f"s3://{bucket.name}/models/llama", tmp_path / "model") == 0
    assert "no checksum" not in capsys.readouterr().err


TAG = {"ETag": '"0123456789abcdef0123456789abcdef-2"'}


@pytest.mark.parametrize(
    ("head", "digest"),
    [
        ({}, ""),
        (TAG, ""),
        (TAG | {"ChecksumSHA256": "3q2+7w=="}, "sha256:deadbeef"),
        (TAG | {"ChecksumSHA256": "3q2+7w==", "ChecksumType": "COMPOSITE"}, ""),
        (TAG | {"ChecksumSHA256": "3q2+7w==-2"}, ""),
        (TAG | {"ChecksumSHA1": "3q2+7w=="}, "sha1:deadbeef"),
        (TAG | {"ChecksumCRC32": "3q2+7w==", "ChecksumType": "FULL_OBJECT"}, "crc32:deadbeef"),
        (TAG | {"ChecksumCRC64NVME": "3q2+7w==", "ChecksumType": "FULL_OBJECT"}, ""),
        ({"ETag": '"0123456789abcdef0123456789abcdef"'}, "md5:0123456789abcdef0123456789abcdef"),
        ({"ETag": '"0123456789abcdef0123456789abcdef"', "ServerSideEncryption": "aws:kms"}, ""),
    ],
)
def test_the_best_checksum_of_an_object_is_chosen(head: dict[str, Any], digest: str) -> None:
    assert best_digest(head) == digest


@pytest.mark.parametrize("kind", ["sha256", "sha1", "md5", "crc32", "git"])
def test_every_kind_of_checksum_tells_content_apart(kind: str, tmp_path: Path) -> None:
    right = {
        "sha256": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        "sha1": "a94a8fe5ccb19ba61c4c0873d391e987982fbbd3",
        "md5": "098f6bcd4621d373cade4e832627b4f6",
        "crc32": "d87f7e0c",
        "git": "30d74d258442c7c65512eafab474568dd706c430",
    }[kind]
    found = []
    for content in (b"test", b"tesu"):
        (tmp_path / "x").write_bytes(content)
        with (tmp_path / "x").open("rb") as opened:
            found.append(store.verified(File("x", 4, f"{kind}:{right}"), 4, opened))

    assert found == [hashlib.sha256(b"test").hexdigest(), None]


# The reader of manifests

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FILES = st.dictionaries(
    st.sampled_from(["config.json", "../x", ".x", WEIGHTS, "a/b"]) | st.text(max_size=6),
    st.fixed_dictionaries(
        {"size": JSON | st.integers()},
        optional={"sha256": JSON, "mtime_ns": JSON | st.integers(), "inode": JSON | st.integers()},
    )
    | JSON,
    max_size=3,
)
MANIFESTS = st.fixed_dictionaries(
    {"files": FILES | JSON}, optional={"source": JSON | st.text(), "origin": JSON | st.text(), "version": JSON}
)


@given(st.binary(max_size=60) | (MANIFESTS | JSON).map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_a_manifest_with_plain_names_or_an_empty_one(text: bytes) -> None:
    found = parse_manifest(text)

    assert all(map(is_safe, found.files))
    assert all(type(kept.size) is int and kept.size >= 0 for kept in found.files.values())
    assert isinstance(found.source, str)


@given(
    st.dictionaries(
        st.sampled_from(["config.json", WEIGHTS]),
        st.builds(Kept, size=st.integers(0), sha256=st.text(min_size=1), mtime_ns=st.integers(0), inode=st.integers(0)),
    ),
    st.text(),
)
def test_what_is_written_is_read(files: dict[str, Kept], text: str) -> None:
    manifest = Manifest(text, text, text, files)

    assert parse_manifest(json.dumps(asdict(manifest)).encode()) == manifest


def test_a_manifest_that_is_deep_or_huge_or_has_no_checksum_is_an_empty_one() -> None:
    without = {"source": "s", "origin": "", "version": "", "files": {"a": asdict(Kept(1, "", 1, 1))}}

    assert parse_manifest(json.dumps(without).encode()) == EMPTY
    assert parse_manifest(b"[" * 100_000) == EMPTY
    assert parse_manifest(b" " * (17 * MIB)) == EMPTY


def test_a_source_that_breaks_off_without_a_size_starts_again(tmp_path: Path) -> None:
    class Broken(Endless):
        def _pieces(self, start: int) -> Iterator[bytes]:
            assert start == 0, "nothing shows how much of the part is right"
            self.num_sent += 1
            yield b"half"
            if self.num_sent < 3:
                raise Unavailable("gone away")
            yield b" and half"

    assert download(Broken(announced=None), tmp_path, max_bytes=13)
    assert (tmp_path / "config.json").read_bytes() == b"half and half"


def test_a_source_that_breaks_off_again_and_again_is_read_on_while_each_part_brings_more(tmp_path: Path) -> None:
    class Broken(Endless):
        def _pieces(self, start: int) -> Iterator[bytes]:
            yield next(super()._pieces(start))
            raise Unavailable("gone away")

    source = Broken(announced=12 * MIB)

    assert download(source, tmp_path)
    assert (source.num_sent, stored(tmp_path)) == (12, 12 * MIB)


def test_a_file_that_is_damaged_once_on_its_way_is_sent_again_within_the_limit(tmp_path: Path) -> None:
    class Damaged(Endless):
        def resolve(self) -> ModelFiles:
            return ModelFiles("here", "1", (File("config.json", 4, f"sha256:{hashlib.sha256(b'good').hexdigest()}"),))

        def _pieces(self, start: int) -> Iterator[bytes]:
            assert start == 0, "no byte of the damaged file is used"
            self.num_sent += 1
            yield b"bad!" if self.num_sent == 1 else b"good"

    assert download(Damaged(announced=4), tmp_path, max_bytes=4)
    assert (tmp_path / "config.json").read_bytes() == b"good"


def test_a_source_that_always_breaks_off_without_a_size_is_given_up(tmp_path: Path) -> None:
    class Broken(Endless):
        def _pieces(self, _: int) -> Iterator[bytes]:
            self.num_sent += 1
            assert self.num_sent < 10
            yield b"half"
            raise Unavailable("gone away")

    with pytest.raises(Unavailable, match="gone away"):
        download(Broken(announced=None), tmp_path)

    assert stored(tmp_path) == 0


@pytest.mark.parametrize(
    ("lie", "sentence"),
    [
        ({"num_siblings": 150_000}, "the hub's list of files has more than 16 MiB"),
        ({"num_siblings": 20_000}, "files that an engine reads, and a model at most 10,000"),
        ({"is_packed": True}, "the hub sends gzip data"),
        ({"announced": {"model.safetensors": -1}}, "did not answer with JSON"),
        ({"announced": {"model.safetensors": 10**4000}}, "did not answer with JSON"),
        ({"announced": {"model.safetensors": {}}}, "did not answer with JSON"),
    ],
)
def test_a_hub_cannot_fill_the_memory_or_the_disk_by_its_list_of_files(
    hub: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], lie: dict[str, Any], sentence: str
) -> None:
    vars(hub).update(lie)

    assert fetch(FROM_HUB, tmp_path / "model") != 0
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(("objects", "most_pages"), [(1000, 101), (0, 1001)])
def test_a_list_of_objects_without_an_end_is_not_read_to_its_end(
    monkeypatch: pytest.MonkeyPatch, objects: int, most_pages: int
) -> None:
    pages = 0

    def one_page(_: object, operation: str, arguments: dict[str, Any]) -> dict[str, Any]:
        nonlocal pages
        assert operation == "ListObjectsV2"
        pages += 1
        keys = [{"Key": f"m/{pages}-{number}.json", "Size": 1} for number in range(objects)]
        return {"Contents": keys, "IsTruncated": True, "NextContinuationToken": str(pages)}

    monkeypatch.setattr("botocore.client.BaseClient._make_api_call", one_page)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "here")

    with pytest.raises(CliError, match="more than 100,000 objects or 1,000 pages"):
        Bucket(parse("s3://bucket/m")).resolve()
    assert pages == most_pages


@pytest.mark.parametrize(("reach_of_the_hub", "code"), [(0, 4), (1, 4), (2, 0)])
def test_a_hub_cannot_make_an_answer_from_inside_of_the_network_a_file_of_the_model(
    *, hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    reach_of_the_hub: int, code: int,
) -> None:  # fmt: skip
    reaches = iter([reach_of_the_hub])  # each server here has a loopback address
    own = hub_module._reach  # noqa: SLF001
    monkeypatch.setattr(hub_module, "_reach", lambda address: next(reaches, own(address)))
    hub.files["chat_template.jinja"] = hub.files["config.json"]
    hub.redirects["chat_template.jinja"] = f"{hub.url}/org/name/resolve/{hub.commit}/config.json"

    assert fetch(FROM_HUB, tmp_path / "model") == code
    assert ("redirects to 127.0.0.1, an address inside of this network" in capsys.readouterr().err) == (code != 0)


@pytest.mark.parametrize(
    ("address", "reach"),
    [
        ("93.184.215.14", 0), ("2606:4700::1111", 0), ("10.0.0.1", 1), ("fd00:ec2::254", 2), ("100.100.100.200", 2),
        ("100.64.0.1", 1), ("168.63.129.16", 2), ("64:ff9b::a9fe:a9fe", 2), ("2002:a9fe:a9fe::1", 2),
        ("127.0.0.2", 2), ("::1", 2), ("169.254.169.254", 2), ("::ffff:169.254.169.254", 2), ("fe80::1%eth0", 2),
    ],
)  # fmt: skip
def test_addresses_inside_of_a_network_are_known(address: str, reach: int) -> None:
    assert hub_module._reach(address) == reach  # noqa: SLF001


def test_a_redirect_does_not_give_up_encryption(hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Hub(parse(FROM_HUB))
    monkeypatch.setattr(source, "_endpoint", "https://hub.example")

    with pytest.raises(Unavailable, match="without https"):
        source._check_scheme(httpx2.Request("GET", "http://files.example/a"))  # noqa: SLF001
    source._check_scheme(httpx2.Request("GET", "https://files.example/a"))  # noqa: SLF001
