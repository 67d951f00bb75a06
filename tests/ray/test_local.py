"""`ballast up --ray`, and a replica with vLLM, each on a Ray of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
import yaml
from queue_objects import make_line

import ballast_cli
from ballast_api.worker_config import WorkerConfig
from ballast_queue.job import JobState
from ballast_queue.redis_store import Queue
from ballast_worker.errors import WorkerError

pytestmark = pytest.mark.timeout(900)
MODEL = Path(ballast_cli.__file__).parent / "demo" / "model"


def status_of(url: str) -> dict:
    return httpx.get(f"{url}/ballast/status", timeout=30).json()


def waiting_fields(url: str) -> float:
    lines = httpx.get(f"{url}/metrics", timeout=30).text.splitlines()
    [found] = [line for line in lines if line.startswith("ballast_config_restart_required")]
    return float(found.split()[-1])


def ask(url: str, model: str, **body) -> httpx.Response:
    body = {"model": model, "prompt": "Once", "max_tokens": 12, "temperature": 0} | body
    return httpx.post(f"{url}/v1/completions", json=body, timeout=300)


@contextmanager
def running(command: list[str], directory: Path, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command that ends at SIGINT."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BALLAST_")}
    environment["RAY_ADDRESS"] = "127.0.0.1:1"  # of another Ray, which a Ray of its own must not join
    environment |= variables
    log = directory / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, cwd=directory, stdout=file, stderr=file, env=environment)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(timeout=240)


def shared_memory_of(pid: int) -> set[Path]:
    found = re.findall(r"(/dev/shm/(?:psm_|sem\.mp-)\S+)", Path(f"/proc/{pid}/maps").read_text())
    return set(map(Path, found))


def children_of(pid: int) -> list[int]:
    import psutil

    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def core_of(pid: int) -> int:
    [core] = [each for each in children_of(pid) if "EngineCore" in Path(f"/proc/{each}/cmdline").read_text()]
    return core


def kill(program: str, pids: list[int]) -> None:
    import psutil

    [found] = [each for each in map(psutil.Process, pids) if any(word.endswith(program) for word in each.cmdline())]
    found.kill()


def niceness_of_the_replica(pids: list[int]) -> int:
    import psutil

    [found] = [each for each in map(psutil.Process, pids) if "ServeReplica" in " ".join(each.cmdline())]
    return found.nice()


def received(listener: socket.socket) -> bytes:
    """Return what clients have sent, which have waited for an answer."""
    found = b""
    listener.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            with listener.accept()[0] as connection:
                connection.settimeout(30)
                found += connection.recv(65536)
    return found


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_up_with_ray_serves_both_classes_applies_hot_fields_only_and_leaves_no_process(tmp_path, eventually):
    config = tmp_path / "mine.yaml"
    config.write_text("slots: 4\nslo: {ttftMilliseconds: 900}\n")
    command = [sys.executable, "-m", "ballast_cli", "up", "--ray", "--port", "0", "--config", str(config)]
    note = tmp_path / ".ballast" / "up.json"
    with running(command, tmp_path) as process:
        eventually(lambda: note.exists() or process.poll() is not None, "the worker to be ready")
        assert process.poll() is None, (tmp_path / "log").read_text()
        url = json.loads(note.read_text())["address"]
        before = status_of(url)
        answer = ask(url, "ballast-tiny").json()
        lines = tmp_path / "items.jsonl"
        lines.write_text("\n".join(make_line(index, model="ballast-tiny") for index in range(12)))
        done = subprocess.run(
            [sys.executable, "-m", "ballast_cli", "submit", str(lines), "--watch"],
            cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
        config.write_text("slots: 4\nslo: {ttftMilliseconds: 901}\n")
        eventually(lambda: status_of(url)["config_hash"] != before["config_hash"], "the new configuration")
        config.write_text("slots: 4\nslo: {ttftMilliseconds: 901}\nengine: {blockTokens: 8}\n")
        eventually(lambda: waiting_fields(url) == 1, "the cold field to wait for a restart")
        after, children = status_of(url), children_of(process.pid)
        niceness = niceness_of_the_replica(children)
        kill("dashboard.py", children)
        config.write_text("slots: 4\nslo: {ttftMilliseconds: 902}\n")
        log = tmp_path / ".ballast" / "worker.log"
        eventually(lambda: "the old configuration stays in force" in log.read_text(), "the change to be refused")
        without_dashboard = ask(url, "ballast-tiny").json()
        process.send_signal(signal.SIGINT)
        code = process.wait(timeout=240)

    assert answer["usage"]["completion_tokens"] == without_dashboard["usage"]["completion_tokens"] == 12
    assert done.returncode == 0, done.stderr
    assert after["worker_id"] == before["worker_id"]
    assert niceness == os.nice(0)
    assert code == 0
    eventually(lambda: not any(map(is_there, children)), "all processes to end")


def test_a_replica_with_vllm_serves_both_classes_and_serve_replaces_it_when_enginecore_dies(
    tiny_llama, valkey, tmp_path, free_port, eventually
):
    port, queue_name = free_port, "test/ray-vllm"
    queue = Queue.connect(valkey.url, queue_name, loads_functions=True)
    config = tmp_path / "worker.yaml"
    config.write_text(
        yaml.safe_dump(
            {
                "model": {"uri": str(tiny_llama), "servedName": "m", "dtype": "float32", "maxModelLen": 1024},
                "engine": {"backend": "vllm", "vllm": {"args": ["--enforce-eager"]}},
                "slots": 4,
                "offline": {"queue": queue_name, "leaseSeconds": 5},
                "runtime": {"redisUrl": valkey.url, "port": port},
            }
        )
    )
    url = f"http://127.0.0.1:{port}"

    def worker() -> dict | None:
        assert process.poll() is None, (tmp_path / "log").read_text()[-4000:]
        try:
            return status_of(url)
        except (httpx.TransportError, ValueError):
            return None

    with running([sys.executable, "-m", "ballast_serve", "--config", str(config)], tmp_path) as process:
        first = eventually(worker, "the replica to serve")
        online = ask(url, "m")
        job_id = queue.submissions.submit([make_line(index, model="m", max_tokens=64) for index in range(40)]).job_id
        eventually(lambda: queue.jobs.get(job_id).counts.done, "the job to begin")
        core = core_of(process.pid)
        shared_memory = shared_memory_of(core)
        threads = re.findall(rb"OMP_NUM_THREADS=(\d+)", Path(f"/proc/{core}/environ").read_bytes())
        os.kill(core, signal.SIGKILL)
        eventually(lambda: queue.jobs.get(job_id).state is JobState.COMPLETED, "the job to be done")
        second = eventually(worker, "the next replica to serve")
        assert shared_memory
        assert not any(map(Path.exists, shared_memory)), "after the death of EngineCore"
        shared_memory = shared_memory_of(core_of(process.pid))
        process.send_signal(signal.SIGTERM)
        code = process.wait(timeout=240)

    results = [result.custom_id for result in queue.results.read(job_id) if result.status_code == 200]
    assert (online.status_code, code) == (200, 0)
    assert shared_memory
    assert not any(map(Path.exists, shared_memory)), "after a stop"
    assert threads != [b"1"], "vLLM computes with the one thread that Ray allows"
    assert first["worker_id"] != second["worker_id"]
    assert sorted(results) == sorted(f"item-{index}" for index in range(40))
    queue.close()


@pytest.mark.parametrize("program", ["/raylet", "/gcs_server"])
def test_a_ray_whose_token_no_proxy_sees_ends_with_a_sentence_when_its_process_dies(tmp_path, eventually, program):
    note = tmp_path / ".ballast" / "up.json"
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        variables = {"http_proxy": f"http://127.0.0.1:{proxy.getsockname()[1]}", "HOME": str(tmp_path)}
        command = [sys.executable, "-m", "ballast_cli", "up", "--ray", "--port", "0"]
        with running(command, tmp_path, **variables) as process:
            eventually(lambda: note.exists() or process.poll() is not None, "the worker to be ready")
            assert process.poll() is None, (tmp_path / "log").read_text()
            children = children_of(process.pid)
            kill(program, children)
            code = process.wait(timeout=240)
        seen = received(proxy)

    assert code == 1
    assert b"authorization" not in seen.lower()
    assert f"Ray ended: its process {program[1:]} is gone. The logs of Ray are in" in (tmp_path / "log").read_text()
    assert (tmp_path / ".ray" / "auth_token").stat().st_mode & 0o777 == 0o600
    eventually(lambda: not any(map(is_there, children)), "all processes to end")


def test_a_ray_that_does_not_start_is_a_sentence(tmp_path, monkeypatch):
    from ballast_serve.local import LocalRay

    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("RAY_TMPDIR", str(blocked / "ray"))

    with pytest.raises(WorkerError, match=r"Ray did not start\. .*logs"), LocalRay():
        pass


def test_a_changed_replica_waits_until_the_one_that_it_replaces_has_left_their_port(tmp_path, free_port, eventually):
    """The node of this Ray has a CPU for each if the machine has two cores. The first one drains for a while. Before
    that, a replica does not start three times, after which Serve tries again only if the configuration changes.
    """
    from ray import serve

    from ballast_serve.local import LocalRay

    def make_config(slots: int, uri: str = str(MODEL)) -> WorkerConfig:
        model = {"uri": uri, "servedName": "m"}
        runtime = {"port": free_port, "unreadySeconds": 40}
        return WorkerConfig.model_validate(
            {"model": model, "slots": slots, "engine": {"threads": 1}, "runtime": runtime}
        )

    def has_slots(number: int) -> bool:
        found = serve.status().applications["ballast"]
        assert found.status != "DEPLOY_FAILED", found
        try:
            return status_of(f"http://127.0.0.1:{free_port}")["slots"] == number
        except httpx.TransportError:
            return False

    with LocalRay() as ray:
        missing = make_config(4, uri="/no/model")
        with pytest.raises(WorkerError) as refused:
            ray.deploy(missing, missing.dump(), is_stopped=lambda: False)
        assert re.fullmatch(
            r"The deployment failed to start 3 times in a row\. .*NotServed: .*/no/model does not exist\. .*logs",
            str(refused.value),
        )
        for slots in (4, 5):
            config = make_config(slots)
            ray.deploy(config, config.dump(), is_stopped=lambda: False)
            eventually(lambda slots=slots: has_slots(slots), "the replica to serve")
