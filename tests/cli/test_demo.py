"""`ballast demo` as a process of its own, with everything real, as short as it goes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.slow
SHORT = ("--quick", "--seconds", "5", "--requests", "20", "--slots", "8")


def start(directory: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ballast_cli", "demo", *SHORT, *options]
    # A shell starts a program in the background without SIGINT, which its processes inherit.
    unignore = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(
        command,
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=unignore,  # noqa: PLW1509
    )


def test_the_demo_compares_both_sides_and_says_what_it_saw(tmp_path: Path):
    mine = tmp_path / "ballast-demo" / "run"
    mine.mkdir(parents=True)
    process = start(tmp_path, "--json", "ballast-demo/figures.json", "--seed", "3")
    out, err = process.communicate(timeout=280)
    assert process.returncode == 0, err

    found = json.loads((tmp_path / "ballast-demo" / "figures.json").read_text())
    assert found["online_only"]["requests"] == found["mixed"]["requests"] >= 20
    assert found["online_only"]["failed"] == found["mixed"]["failed"] == 0
    assert found["offline"]["items_completed"] > 0
    assert found["offline"]["tokens"] > 0
    assert found["prefix_hit_rate"] < 0.01
    assert found["slot_utilization"]["mixed"] > found["slot_utilization"]["online_only"]
    assert found["slots"]["online_only"]["offline"] == 0
    assert found["flood"]["offline_slots_reserved"] == 1
    assert found["flood"]["offline_tokens_per_second"] > 0
    assert found["verdict"] in out
    assert "Pair 2 of 2: online with the offline job" in err
    assert (tmp_path / "ballast-demo" / "slots.png").read_bytes().startswith(b"\x89PNG")
    assert list(mine.parent.glob("run*")) == [mine]


def is_served_from(directory: Path, url: str) -> bool:
    """Whether the Valkey at a URL has its data there. Its port may belong to another Valkey by now."""
    import redis

    with redis.Redis.from_url(url) as client:
        try:
            return client.config_get("dir")["dir"].startswith(str(directory))
        except redis.ConnectionError:
            return False


def test_an_interrupted_demo_leaves_nothing_running(tmp_path: Path):
    import socket

    process = start(tmp_path, "--keep")
    for line in process.stderr:
        if "capacity" in line:
            break
    (work,) = (tmp_path / "ballast-demo").iterdir()
    config = yaml.safe_load((work / "worker.yaml").read_text())["runtime"]
    assert is_served_from(tmp_path, config["redisUrl"])
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=120)[1]

    assert f"configuration: {work}" in said
    assert process.returncode == 130
    assert not is_served_from(tmp_path, config["redisUrl"])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", config["port"]))
