from __future__ import annotations

import pwd
import stat
from pathlib import Path

import pytest

from ballast_cli.errors import Usage
from ballast_cli.worker_file import DEMO_MODEL, DEMO_MODEL_NAME, Flags, compose, write


def make_file(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    return file


def test_without_file_and_flags_the_small_model_is_served():
    found = compose(None, Flags())

    assert (found.model.uri, found.model.served_name) == (str(DEMO_MODEL), DEMO_MODEL_NAME)


def test_a_file_need_not_name_a_model(tmp_path: Path):
    found = compose(make_file(tmp_path, "slots: 4"), Flags())

    assert (found.slots, found.model.served_name) == (4, DEMO_MODEL_NAME)


def test_an_empty_file_changes_nothing(tmp_path: Path):
    assert compose(make_file(tmp_path, ""), Flags()) == compose(None, Flags())


@pytest.mark.parametrize("spelling", ["redisUrl", "redis_url"])
def test_flags_beat_the_file_however_it_spells_its_fields(tmp_path: Path, spelling: str):
    file = make_file(tmp_path, f"slots: 4\nruntime: {{{spelling}: 'redis://a', port: 1}}\noffline: {{maxAttempts: 2}}")
    found = compose(file, Flags(slots=8, port=2, redis_url="redis://b", queue="x/y"))

    assert (found.slots, found.runtime.port, found.runtime.redis_url) == (8, 2, "redis://b")
    assert (found.offline.max_attempts, found.queue_name) == (2, "x/y")


def test_a_model_of_the_command_line_leaves_nothing_of_the_files_model(tmp_path: Path):
    file = make_file(tmp_path, f"model: {{uri: {DEMO_MODEL}, servedName: other, revision: r1}}")
    found = compose(file, Flags(model=f"file://{DEMO_MODEL}"))

    assert (found.model.served_name, found.model.revision) == (None, "")


@pytest.mark.parametrize("uri", ["~/my model", "file://{home}/my%20model", "{home}/my model"])
def test_a_model_is_found_however_its_directory_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "my model").mkdir()
    (tmp_path / "my model" / "config.json").touch()
    written = uri.format(home=tmp_path)

    assert compose(make_file(tmp_path, f"model: {{uri: '{written}'}}"), Flags()).model.uri == written


def test_a_home_directory_that_is_unknown_is_a_sentence(monkeypatch: pytest.MonkeyPatch):
    """Such as that of a process with any number as its user."""
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda number: {}[number])

    for model, said in (("hf://a/b", "no home directory"), ("~/b", "~/b is no directory"), ("~no-user/b", "~no-user")):
        with pytest.raises(Usage, match=said):
            compose(None, Flags(model=model))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("slots: [", "mine.yaml"),
        ("- slots", "expected a mapping"),
        ("slots: 0", "slots"),
        ("bogus: 1", "bogus"),
        ("offline: {reservedPercent: 50, maxPercent: 20}", "Lower the reservation"),
    ],
)
def test_a_bad_file_is_told_field_by_field(tmp_path: Path, text: str, said: str):
    with pytest.raises(Usage, match=said):
        compose(make_file(tmp_path, text), Flags())


def test_a_bad_option_is_told_like_a_field():
    with pytest.raises(Usage, match=r"offline\.queue"):
        compose(None, Flags(queue="a b"))


def test_only_the_owner_reads_a_written_file(tmp_path: Path):
    file = tmp_path / "worker.yaml"
    file.touch(mode=0o644)
    write(compose(None, Flags(redis_url="redis://:secret@127.0.0.1:1")), file)

    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_written_file_reads_back_equal(tmp_path: Path):
    composed = compose(None, Flags(slots=3, redis_url="redis://x:1"))
    write(composed, tmp_path / "worker.yaml")

    assert compose(tmp_path / "worker.yaml", Flags()) == composed


def test_an_address_on_the_command_line_beats_the_file_that_holds_one(tmp_path: Path) -> None:
    file = tmp_path / "worker.yaml"
    file.write_text(f"model: {{uri: {DEMO_MODEL}}}\nruntime: {{redisUrlFile: /run/secrets/url}}\n")

    assert compose(file, Flags()).runtime.redis_url_file == Path("/run/secrets/url")
    runtime = compose(file, Flags(redis_url="redis://127.0.0.1:1")).runtime
    assert (runtime.redis_url, runtime.redis_url_file) == ("redis://127.0.0.1:1", None)
