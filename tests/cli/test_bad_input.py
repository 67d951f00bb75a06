from __future__ import annotations

import errno
import gzip
import io
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from ballast_cli.app import app
from ballast_cli.errors import EXIT_CODES
from ballast_cli.sim_options import check_output
from ballast_cli.worker_file import DEMO_MODEL
from ballast_queue.redis_store import Queue
from ballast_queue.settings import QueueSettings

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
VERBS = sorted(COMMANDS)
TAKES = {verb: {each.name: each.param_type_name for each in COMMANDS[verb].params} for verb in VERBS}
ON_A_JOB = [verb for verb in VERBS if "job_id" in TAKES[verb]]
STARTING = {"serve", "up"}
ON_A_QUEUE = [v for v in VERBS if "queue" in TAKES[v] and "argument" not in TAKES[v].values() and v not in STARTING]
NOWHERE = "redis://127.0.0.1:1"


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_each_verb_has_examples(ballast, verb: str):
    ran = ballast(verb, "--help")

    assert ran.code == 0
    assert f"ballast {verb}" in ran.out.split("Examples:")[1]


def test_the_help_lists_the_verbs_and_the_exit_codes(ballast):
    shown = " ".join(ballast("--help").out.split())

    assert all(f" {verb} " in shown for verb in VERBS)
    assert EXIT_CODES in shown


def test_help_needs_neither_redis_nor_torch():
    program = (
        "import sys; sys.argv = ['ballast', '--help']\n"
        "from ballast_cli.__main__ import main; main()\n"
        "heavy = {'redis', 'torch', 'numpy', 'matplotlib', 'httptools', 'uvicorn'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=False)

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "arguments",
    [*((verb,) for verb in ON_A_QUEUE), *((verb, "job-1") for verb in ON_A_JOB), ("submit", "items.jsonl")],
)
@pytest.mark.usefixtures("items")
def test_without_a_redis_a_verb_says_what_to_start(ballast, arguments: tuple[str, ...]):
    ran = ballast(*arguments, "--redis-url", NOWHERE)

    assert ran.code == 4
    assert ran.out == ""
    assert "127.0.0.1:1" in ran.err
    assert "ballast up" in ran.err
    assert "Traceback" not in ran.err


@pytest.mark.parametrize("verb", ON_A_JOB)
def test_an_unknown_job_is_named(queued, verb: str):
    ran = queued(verb, "job-nobody")

    assert ran.code == 3
    assert "job-nobody" in ran.err
    assert "ballast jobs" in ran.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("submit", "nowhere.jsonl"), "No such file"),
        (("submit", "."), "is a directory"),
        (("submit", "empty.jsonl"), "is empty"),
        (("submit", "blank.jsonl"), "is empty"),
        (("submit", "items.gz"), "items.gz is compressed. Unpack it first"),
        (("submit", "utf16.jsonl"), "utf16.jsonl is no UTF-8 text"),
        (
            ("submit", "array.json"),
            "array.json is a JSON array, expected JSONL with one request on each line. `jq -c '.[",
        ),
        (("submit", "line.json"), "line.json is a JSON array, expected JSONL"),
        (
            ("submit", "object.json"),
            "object.json is JSON over several lines, expected JSONL with one request on each l",
        ),
        (("submit", "s3://bucket/items.jsonl"), "is a URL, and this command reads files. Copy it first"),
        (("submit", "items.jsonl", "--deadline", "soon"), "Use a time span such as 24h"),
        (("submit", "items.jsonl", "--tenant", "a b"), "tenant"),
        (("submit", "items.jsonl", "--key", "k" * 300), "300"),
        (("submit", "items.jsonl", "--key", ""), "--key is empty"),
        (("submit", "items.jsonl", "--deadline", ""), "Use a time span such as 24h"),
        (("submit",), "FILE"),
        (("results", "job-1", "-o", "no/such/dir/out.jsonl"), "no directory"),
        (("results", "job-1", "-o", "."), "directory"),
        (("results", "job-1", "-o", "pipe"), "is no regular file"),
        (("jobs", "--redis-url", "http://127.0.0.1"), "use redis://"),
        (("jobs", "--redis-url", "redis://127.0.0.1:1/jobs"), "the database is not a number"),
        (("jobs", "--queue", "a b"), "queue"),
        (("jobs", "--queue", ""), "--queue is empty"),
        (("jobs", "--redis-url", ""), "--redis-url is empty"),
        (("explain", "chat", "--redis-url", ""), "--redis-url is empty"),
        (("alerts", "-f", "chat.yaml", "-n", ""), "--namespace is empty"),
        (("up", "--redis-url", ""), "--redis-url is empty"),
        (("up", "--queue", ""), "--queue is empty"),
        (("up", "--data", "", "--model", "nowhere"), "--data is empty"),
        (("up", "--data", "data", "--config", "data/../data/worker.yaml"), "writes data/worker.yaml itself"),
        (("up", "--data", ".", "--config", "link.yaml"), "writes worker.yaml itself"),
        (("serve", "--model", ""), "--model is empty"),
        (("plan", "--model", ""), "--model is empty"),
        (("plan", "--gpu", ""), "--gpu is empty"),
        (("jobs", "--redis-password-file", "nowhere"), "cannot read"),
        (("jobs", "--redis-ca-file", "nowhere"), "cannot read"),
        (("jobs", "--bogus"), "--bogus"),
        (("bogus",), "bogus"),
        (("demo", "--requests", "0"), "--requests"),
        (("demo", "--json", "no/such/dir/x.json"), "no directory"),
        (("plan", "--json", "/proc/x.json"), "--json: cannot write /proc/x.json"),
        (("up", "--model", "nowhere"), "is no directory"),
        (("up", "--model", "."), "is a directory without config.json"),
        (("up", "--config", "nowhere.yaml"), "nowhere.yaml"),
        (("up", "--config", "loop.yaml"), "loop.yaml"),
        (("up", "--config", "bad.yaml"), "slots"),
        (("serve", "--config", "items.jsonl"), "items.jsonl"),
    ],
)
def test_a_users_mistake_is_a_sentence_and_not_a_traceback(
    queued, items: Path, tmp_path: Path, arguments: tuple[str, ...], said: str
):
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "blank.jsonl").write_text("\n \n")
    (tmp_path / "items.gz").write_bytes(gzip.compress(items.read_bytes()))
    (tmp_path / "utf16.jsonl").write_bytes(items.read_text().encode("utf-16"))
    (tmp_path / "array.json").write_text('[\n  {\n    "custom_id": "a"\n  }\n]\n')
    (tmp_path / "line.json").write_text('\n[{"custom_id": "a"}]\n\n')
    (tmp_path / "object.json").write_text('\ufeff\n{\n  "custom_id": "a"\n}\n')
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    (tmp_path / "link.yaml").symlink_to("worker.yaml")
    (tmp_path / "bad.yaml").write_text("model: {uri: /m}\nslots: many\n")
    os.mkfifo(tmp_path / "pipe")
    ran = queued(*arguments)

    assert ran.code == 2
    assert said in ran.err
    assert "Traceback" not in ran.err
    assert ran.out == ""


def test_a_mistake_in_an_option_names_the_help_of_its_command(ballast):
    assert ballast("submit").err.endswith("See `ballast submit --help`.\n")
    assert ballast("queue", "bogus").err.endswith("See `ballast queue --help`.\n")


def test_a_file_without_a_kind_says_so(ballast, tmp_path: Path):
    (tmp_path / "item.json").write_text('{"custom_id": "a"}')
    ran = ballast("alerts", "-f", "item.json")

    assert (ran.code, ran.err) == (
        2,
        "ballast: item.json holds an object without kind, expected at least one InferenceDeployment.\n",
    )


@pytest.mark.parametrize("arguments", ["version", "--help", "version --json"])
def test_a_reader_that_ends_before_the_output_is_no_failure_of_the_pipeline(arguments: str):
    line = f"{sys.executable} -m ballast_cli {arguments} | true"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", line], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("redirections", "arguments", "code", "said"),
    [
        ("2>&-", "version", 0, ""),
        ("2>&-", "bogus", 2, ""),
        (">&-", "version", 1, "Cannot use the output (Bad file descriptor)"),
        ("<&-", "alerts -f -", 2, "Standard input is closed"),
        ("<&- >&- 2>&-", "version", 1, ""),
        ("2> >(true)", "bogus", 2, ""),
        ("2>/dev/full", "bogus", 2, ""),
        (">/dev/full", "version", 1, "No space left on device"),
        (">/dev/full 2>/dev/full", "version", 1, ""),
    ],
)
def test_closed_and_broken_streams_do_not_change_what_a_command_does(
    redirections: str, arguments: str, code: int, said: str
):
    line = f"{sys.executable} -m ballast_cli {arguments} {redirections}"
    done = subprocess.run(["bash", "-c", f"sleep 0.1; {line}"], capture_output=True, text=True, check=False)

    assert done.returncode == code
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_process_that_a_command_starts_has_all_standard_streams():
    program = (
        "import subprocess, sys; from ballast_cli.streams import standard_streams\n"
        "child = [sys.executable, '-c', 'import os; [os.fstat(number) for number in range(3)]']\n"
        "with standard_streams(): code = subprocess.run(child).returncode\n"
        "sys.exit(code)"
    )
    line = f"{sys.executable} -c {shlex.quote(program)} <&- >&- 2>&-"

    assert subprocess.run(["bash", "-c", line], check=False).returncode == 0


@pytest.mark.parametrize("number", [errno.EFBIG, errno.EIO, errno.EPIPE])
def test_data_that_cannot_be_written_is_exit_code_1(number: int):
    """A pipe that breaks is a success only if it is that of stdout."""
    program = f"""
import io, os, sys
from ballast_cli import version
from ballast_cli.__main__ import main

class Broken(io.RawIOBase):
    def writable(self): return True
    def fileno(self): return 1
    def write(self, data):
        if os.fstat(1).st_rdev == os.stat(os.devnull).st_rdev: return len(data)
        raise OSError({number}, os.strerror({number}))

sys.stdout = io.TextIOWrapper(io.BufferedWriter(Broken()))
sys.exit(main(["version"]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout) == (1, "")
    assert f"Cannot use the output ({os.strerror(number)})" in done.stderr


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_text_that_the_encoding_of_stdout_lacks_is_escaped(
    queued, make_line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, errors: str
):
    (tmp_path / "items.jsonl").write_text(make_line("日\U0001f600é", stream=True))
    job_id = queued("submit", "items.jsonl", "--key", "ключ").out.strip()
    shown = {}
    for command in (("results", job_id), ("jobs", "--json"), ("job", job_id)):
        stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors=errors)
        with monkeypatch.context() as patched, stream as written:
            patched.setattr("sys.stdout", written)
            assert queued(*command).code == 0
            shown[command[0]] = written.buffer.getvalue().decode("ascii")

    assert json.loads(shown["results"])["custom_id"] == "日\U0001f600é"
    assert json.loads(shown["jobs"])["jobs"][0]["key"] == "ключ"
    assert "key         \\u043a" in shown["job"]


def test_a_check_of_an_output_leaves_no_trace(tmp_path: Path):
    old, new, pipe, link = (tmp_path / name for name in ("old.json", "new.json", "pipe", "link.json"))
    old.write_text("old")
    link.symlink_to("results.json")
    os.mkfifo(pipe)  # opening it would wait for a reader
    for path in (old, new, pipe, link, Path("-"), None):
        check_output("--json", path)

    assert old.read_text() == "old"
    assert sorted(tmp_path.iterdir()) == [link, old, pipe]


def test_a_place_that_cannot_be_written_is_a_sentence_and_not_a_traceback(ballast):
    ran = ballast("fetch", DEMO_MODEL, "/proc/model")

    assert ran.code == 1
    assert "/proc" in ran.err
    assert "permissions" in ran.err


def test_a_data_directory_that_cannot_be_made_is_named(ballast, items: Path):
    ran = ballast("up", "--port", "0", "--data", items / "data")

    assert ran.code == 1
    assert f"{items / 'data'} cannot be created" in ran.err
    assert "--data" in ran.err


def test_a_host_that_does_not_exist_is_told_from_a_taken_port(ballast):
    ran = ballast("up", "--host", "nowhere.invalid")

    assert ran.code == 1
    assert "nowhere.invalid" in ran.err
    assert "--host" in ran.err
    assert "Unknown error" not in ran.err


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:secret@127.0.0.1:1",
        "redis://secret:secret@127.0.0.1:1?client_name=secret",
        "redis://user:secret/x@127.0.0.1:1",
        "redis://user:12/secret@127.0.0.1:1",
        "redis://:secret#x@127.0.0.1:1",
        "redis://:secret?x@127.0.0.1:1",
        "redis://:[secret@127.0.0.1:1",
        "redis://127.0.0.1:secret",
        "redis://127.0.0.1:1?secret=1",
        "redis://127.0.0.1:1/secret",
        "redsi://user:secret@host",
        "secret://host",
        "user:secret@host",
    ],
)
def test_the_password_of_a_url_is_never_shown(ballast, url: str):
    ran = ballast("jobs", "--redis-url", url)

    assert "secret" not in ran.err


def test_the_version_names_the_parts(ballast):
    assert ballast("version", "--json").json["versions"]["redis"]
    assert ballast("--version").out.startswith("ballast ")


def test_a_taken_port_stops_up_before_anything_starts(ballast, tmp_path: Path):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        ran = ballast("up", "--port", server.getsockname()[1])

    assert ran.code == 1
    assert "--port" in ran.err
    assert not (tmp_path / ".ballast").exists()


def test_a_line_that_no_parser_takes_is_a_rejected_line_with_a_deadline_too(
    queued, queue: Queue, make_line, tmp_path: Path
):
    queue.settings.apply(QueueSettings())  # of workers with Ballast's own engine, whose items are checked
    file = tmp_path / "deep.jsonl"
    file.write_text(f"{make_line('a')}\n{'[' * 100_000}\n{make_line('b', max_tokens=10**400)}\n")
    ran = queued("submit", file, "--deadline", "1h")

    assert ran.code == 0
    assert "1 item of" in ran.err
    assert "2 rejected" in ran.err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_there_is_a_completion_for_each_shell(shell: str):
    done = subprocess.run(
        [sys.executable, "-c", "from ballast_cli.__main__ import main; main()"],
        env={"_BALLAST_COMPLETE": f"source_{shell}", "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )

    assert "ballast" in done.stdout
