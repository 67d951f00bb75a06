from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ballast_cli.errors import Usage
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


def test_a_torn_last_line_is_written_again(tmp_path: Path):
    path = tmp_path / "out.jsonl"
    whole = json.dumps(make_line("a"))
    (tmp_path / "out.jsonl.part").write_text(f'{whole}\n{{"id": "batch_req_j1_b", "custom')

    OutFile(path).write(map(make_line, "ab"), job_id="j1")

    assert ids(path) == ["a", "b"]


def test_the_unfinished_output_of_another_job_is_not_overwritten(tmp_path: Path):
    (tmp_path / "out.jsonl.part").write_text(json.dumps(make_line("a", job="other")) + "\n")

    with pytest.raises(Usage, match="another job"):
        OutFile(tmp_path / "out.jsonl").write(map(make_line, "a"), job_id="j1")


def test_a_directory_is_refused(tmp_path: Path):
    with pytest.raises(Usage, match="is a directory"):
        OutFile(tmp_path)


def test_a_device_is_not_replaced(tmp_path: Path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    with pytest.raises(Usage, match="no regular file"):
        OutFile(pipe)


def test_an_old_file_is_replaced_only_at_the_end(tmp_path: Path):
    path = tmp_path / "out.jsonl"
    path.write_text("old\n")

    def lines():
        assert path.read_text() == "old\n"
        yield make_line("new")

    OutFile(path).write(lines(), job_id="j1")

    assert ids(path) == ["new"]
