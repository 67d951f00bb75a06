from __future__ import annotations

import errno
import fcntl
import json
import os
from pathlib import Path

import pytest

from ballast_cli.errors import CliError, NotNow, Usage
from ballast_cli.outfile import OutFile


def make_line(custom_id: str, job: str = "j1", **more: str) -> dict[str, str]:
    return {"id": f"batch_req_{job}_{custom_id}", "custom_id": custom_id, **more}


def ids(path: Path) -> list[str]:
    return [json.loads(line)["custom_id"] for line in path.read_text().splitlines()]


def test_the_file_appears_whole(tmp_path: Path):
    path = tmp_path / "out.jsonl"

    def lines():
        for name in "abc":
            assert not path.exists()
            yield make_line(name)

    assert OutFile(path).write(lines(), job_id="j1") == 3
    assert ids(path) == ["a", "b", "c"]
    assert list(tmp_path.iterdir()) == [path]


def test_a_broken_call_is_gone_on_with(tmp_path: Path):
    path = tmp_path / "out.jsonl"

    def broken():
        yield make_line("a")
        yield make_line("b")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        OutFile(path).write(broken(), job_id="j1")
    assert not path.exists()

    assert OutFile(path).write(map(make_line, "abc"), job_id="j1") == 3
    assert ids(path) == ["a", "b", "c"]


@pytest.mark.parametrize("num_before", [0, 1, 3, 4])
def test_the_new_result_of_a_redriven_item_replaces_its_error(tmp_path: Path, num_before: int):
    path = tmp_path / "out.jsonl"
    lines = [make_line("a", error="e" * 20), make_line("b"), make_line("c"), make_line("a", body="x")]

    def broken():
        yield from lines[:num_before]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        OutFile(path).write(broken(), job_id="j1")

    assert OutFile(path).write(lines[1:], job_id="j1") == 3
    assert [json.loads(line) for line in path.read_text().splitlines()] == lines[1:]


def test_a_second_download_into_the_file_is_refused_until_the_first_one_ends(tmp_path: Path):
    path = tmp_path / "out.jsonl"

    def lines():
        yield make_line("a")
        with pytest.raises(NotNow, match="another download writes"):
            OutFile(path).write(map(make_line, "ab"), job_id="j1")
        yield make_line("b")

    assert OutFile(path).write(lines(), job_id="j1") == 2
    assert ids(path) == ["a", "b"]
    assert OutFile(path).write(map(make_line, "c"), job_id="j1") == 1
    assert ids(path) == ["c"]


def test_a_download_that_ends_while_the_next_one_starts_keeps_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "out.jsonl"
    flock, num_calls = fcntl.flock, 0

    def late(file: object, operation: int) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:  # the first download renames the part that the second one has opened
            path.with_name("out.jsonl.part").replace(path)
        flock(file, operation)

    path.with_name("out.jsonl.part").write_text(json.dumps(make_line("a")) + "\n")
    monkeypatch.setattr("fcntl.flock", late)

    assert OutFile(path).write(map(make_line, "ab"), job_id="j1") == 2
    assert num_calls == 2
    assert ids(path) == ["a", "b"]


def test_a_torn_last_line_is_written_again(tmp_path: Path):
    path = tmp_path / "out.jsonl"
    whole = json.dumps(make_line("a"))
    (tmp_path / "out.jsonl.part").write_text(f'{whole}\n{{"id": "batch_req_j1_b", "custom')

    OutFile(path).write(map(make_line, "ab"), job_id="j1")

    assert ids(path) == ["a", "b"]


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(make_line("a", job="other")) + "\n",
        json.dumps(make_line("a", job="j1_eu")) + "\n",
        json.dumps({"custom_id": "a"}) + "\n",
        "notes\n",
        "notes without an end of line",
        "{}",
    ],
)
def test_the_unfinished_output_of_another_job_or_program_is_not_overwritten(tmp_path: Path, text: str):
    part = tmp_path / "out.jsonl.part"
    part.write_text(text)
    with pytest.raises(Usage, match="unfinished output of"):
        OutFile(tmp_path / "out.jsonl").write(map(make_line, "a"), job_id="j1")

    assert part.read_text() == text


def test_a_part_with_a_broken_line_in_its_middle_is_written_again_from_there(tmp_path: Path):
    path = tmp_path / "out.jsonl"
    lines = [json.dumps(make_line(name)) for name in "abc"]
    (tmp_path / "out.jsonl.part").write_text(f"{lines[0]}\n{lines[1][9:]}\n{lines[2]}\n")

    OutFile(path).write(map(make_line, "abc"), job_id="j1")

    assert ids(path) == ["a", "b", "c"]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_without_locks_takes_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int):
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refuse)

    assert OutFile(tmp_path / "out.jsonl").write(map(make_line, "ab"), job_id="j1") == 2


def test_a_directory_is_refused(tmp_path: Path):
    with pytest.raises(Usage, match="is a directory"):
        OutFile(tmp_path)


def test_a_device_is_not_replaced(tmp_path: Path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    with pytest.raises(Usage, match="no regular file"):
        OutFile(pipe)


def test_a_link_stays_and_the_file_behind_it_is_replaced(tmp_path: Path):
    link, target = tmp_path / "link.jsonl", tmp_path / "results" / "out.jsonl"
    target.parent.mkdir()
    target.write_text("old\n")
    link.symlink_to(target)

    OutFile(link).write(map(make_line, "a"), job_id="j1")

    assert link.is_symlink()
    assert ids(target) == ["a"]


def test_a_full_disk_is_no_wrong_option(tmp_path: Path):
    def full():
        yield make_line("a")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(CliError, match="Free space, and run the command again") as refused:
        OutFile(tmp_path / "out.jsonl").write(full(), job_id="j1")

    assert refused.value.exit_code == 1


def test_an_old_file_is_replaced_only_at_the_end(tmp_path: Path):
    path = tmp_path / "out.jsonl"
    path.write_text("old\n")

    def lines():
        assert path.read_text() == "old\n"
        yield make_line("new")

    OutFile(path).write(lines(), job_id="j1")

    assert ids(path) == ["new"]


def test_the_error_of_an_item_that_runs_again_is_left_out(tmp_path: Path):
    path = tmp_path / "out.jsonl"
    lines = [make_line("a"), make_line("b", error="e"), make_line("c")]
    path.with_name("out.jsonl.part").write_text("".join(json.dumps(line) + "\n" for line in lines))

    assert OutFile(path).write([lines[0], lines[2]], job_id="j1") == 2
    assert ids(path) == ["a", "c"]


def test_a_result_that_is_unreadable_now_stays(tmp_path: Path):
    path = tmp_path / "out.jsonl"
    OutFile(path).write(map(make_line, "abc"), job_id="j1")
    path.rename(path.with_name("out.jsonl.part"))

    assert OutFile(path).write(map(make_line, "ac"), job_id="j1") == 3
    assert ids(path) == ["a", "b", "c"]
