from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis
from waiting import until_gone

from ballast_cli.errors import CliError, NotNow
from ballast_cli.processes import Signals, Valkey, WorkerProcess, take_port

HOLDER = """
import sys
from pathlib import Path
from ballast_cli.processes import Valkey
valkey = Valkey.start(Path(sys.argv[1]))
print(valkey.url, valkey.supervisor.pid, flush=True)
sys.stdin.read()
"""


def test_the_embedded_valkey_refuses_to_evict_and_writes_a_log(tmp_path: Path):
    valkey = Valkey.start(tmp_path)
    try:
        with redis.Redis.from_url(valkey.url, decode_responses=True) as client:
            config = client.config_get("maxmemory-policy") | client.config_get("appendonly")
    finally:
        valkey.stop()

    assert config == {"maxmemory-policy": "noeviction", "appendonly": "yes"}
    assert not valkey.is_running


def test_valkeys_that_start_together_get_a_port_each(tmp_path: Path):
    with ThreadPoolExecutor(6) as pool:
        started = [pool.submit(Valkey.start, tmp_path / str(number)) for number in range(6)]
    valkeys = [one.result() for one in started if not one.exception()]
    for valkey in valkeys:
        valkey.stop()

    assert [one.exception() for one in started] == [None] * 6
    assert len({valkey.url for valkey in valkeys}) == 6


def test_what_was_written_is_there_after_a_restart(tmp_path: Path):
    for turn in range(2):
        valkey = Valkey.start(tmp_path)
        try:
            with redis.Redis.from_url(valkey.url) as client:
                assert client.incr("turns") == turn + 1
        finally:
            valkey.stop()


def test_valkey_lives_in_a_directory_of_any_name(tmp_path: Path):
    home = tmp_path / "my 'üblicher' #ordner"
    for turn in range(2):
        valkey = Valkey.start(home)
        with redis.Redis.from_url(valkey.url) as client:
            assert client.incr("turns") == turn + 1
        valkey.stop()

    assert (home / "appendonlydir").is_dir()


def test_two_valkeys_never_share_a_directory(tmp_path: Path):
    valkey = Valkey.start(tmp_path)
    try:
        with pytest.raises(CliError, match="Another `ballast up` uses this data directory"):
            Valkey.start(tmp_path)
    finally:
        valkey.stop()


def test_the_next_start_stops_the_valkey_of_a_killed_supervisor_and_keeps_its_data(tmp_path: Path):
    first = Valkey.start(tmp_path)
    with redis.Redis.from_url(first.url) as client:
        client.set("kept", "yes")
        orphan = client.info("server")["process_id"]
    first.supervisor.kill()
    first.stop()

    second = Valkey.start(tmp_path)
    try:
        until_gone(orphan)
        with redis.Redis.from_url(second.url) as client:
            assert client.get("kept") == b"yes"
    finally:
        second.stop()


def test_ctrl_c_in_the_terminal_does_not_reach_valkey(tmp_path: Path):
    valkey = Valkey.start(tmp_path)
    try:
        assert os.getpgid(valkey.supervisor.pid) != os.getpgid(0)
        os.kill(valkey.supervisor.pid, signal.SIGINT)
        with redis.Redis.from_url(valkey.url) as client:
            assert client.ping()
            server = client.info("server")["process_id"]
        assert os.getpgid(server) == os.getpgid(valkey.supervisor.pid)
    finally:
        valkey.stop()


def test_valkey_does_not_outlive_a_killed_parent(tmp_path: Path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    url, supervisor = holder.stdout.readline().split()
    with redis.Redis.from_url(url) as client:
        server = client.info("server")["process_id"]
        client.set("kept", "yes")

    holder.kill()
    holder.communicate()
    until_gone(int(supervisor), server)


def test_a_valkey_that_is_busy_for_seconds_is_not_taken_for_dead(tmp_path: Path):
    valkey = Valkey.start(tmp_path)
    try:
        with redis.Redis.from_url(valkey.url) as client:
            server = client.info("server")["process_id"]
            os.kill(server, signal.SIGSTOP)
            try:
                with pytest.raises(subprocess.TimeoutExpired):
                    valkey.supervisor.wait(timeout=5)  # it looks every second, and waits a second for an answer
            finally:
                os.kill(server, signal.SIGCONT)
            assert client.ping()
    finally:
        valkey.stop()


def test_a_valkey_that_cannot_start_says_why(tmp_path: Path):
    (tmp_path / "appendonlydir").mkdir()
    (tmp_path / "appendonlydir" / "appendonly.aof.manifest").write_text("nonsense\n")

    with pytest.raises(CliError, match=r"(?s)did not start.*Invalid AOF manifest"):
        Valkey.start(tmp_path)


def test_a_taken_port_is_named_with_what_to_do():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(CliError, match=rf"Port {port} on 127.0.0.1 is in use.*--port"):
            take_port("127.0.0.1", port)


def test_port_0_picks_a_free_one():
    assert take_port("127.0.0.1", 0) > 0


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(CliError, match="cannot be used"):
        take_port("203.0.113.1", 8000)


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import sys; print('model is broken'); sys.exit(3)", "ended with exit code 3"),
        ("import os; print('model is broken', flush=True); os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
    ],
)
def test_the_error_of_a_dead_worker_contains_its_last_log_lines(tmp_path: Path, program: str, said: str):
    log = tmp_path / "worker.log"
    log.write_text("--- worker starts\nan older line\n--- worker starts\n")
    with log.open("ab") as output:
        process = subprocess.Popen([sys.executable, "-c", program], stdout=output)
    worker = WorkerProcess(process, log, "http://127.0.0.1:1")

    with pytest.raises(CliError, match=rf"(?s){said}.*model is broken") as caught:
        worker.wait_until_ready(seconds=30)
    assert "an older line" not in str(caught.value)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells a child of its parent's death on Linux only")
def test_a_command_ends_with_its_killed_parent():
    child = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    program = (
        "import os, subprocess, sys; subprocess.Popen([sys.executable, '-m', 'ballast_cli.end_with_parent', "
        "str(os.getpid()), sys.executable, '-c', sys.argv[1]], start_new_session=True).wait()"
    )
    parent = subprocess.Popen([sys.executable, "-c", program, child], stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())

    parent.kill()
    parent.communicate()
    until_gone(pid)


def test_a_worker_that_does_not_drain_is_killed_when_hurried(tmp_path: Path):
    stubborn = "import signal; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); signal.pause()"
    process = subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE)
    process.stdout.readline()
    worker = WorkerProcess(process, tmp_path / "log", "http://127.0.0.1:1")

    assert not worker.stop(seconds=600, is_hurried=lambda: True)
    assert process.returncode == -signal.SIGKILL
    process.stdout.close()


@pytest.mark.parametrize("by_session", [(), (signal.SIGTERM,)], ids=["a terminal closes", "a session ends"])
def test_a_terminal_or_session_that_ends_stops_up_and_does_not_hurry_it(by_session: tuple[signal.Signals, ...]):
    with Signals() as signals:
        # From the kernel and from the shell. systemd sends SIGTERM first, but Python handles SIGHUP first.
        for number in (signal.SIGHUP, *by_session, signal.SIGHUP):
            os.kill(os.getpid(), number)
        assert signals.received == 1
        for number in {signal.SIGTERM, signal.SIGINT}.difference(by_session):
            os.kill(os.getpid(), number)
        assert signals.received == 2


def test_nohup_keeps_up_running():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
        assert signals.received == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_file_of_an_ended_process_is_ignored(tmp_path: Path):
    from ballast_cli.connection import Running
    from ballast_cli.data_directory import held

    with held(tmp_path):
        Running("redis://x", "q", "http://x", os.getpid(), 1).write(tmp_path)
        assert Running.read(tmp_path).redis_url == "redis://x"
        with pytest.raises(NotNow, match="already running"), held(tmp_path):
            pass

    assert Running.read(tmp_path) is None, "another process can have its ID"
    assert json.loads((tmp_path / "up.json").read_text())["queue"] == "q"
