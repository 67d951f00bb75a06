"""The worker as a process: start, bad input, kill, drain."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path

import pytest
from queue_objects import make_line, make_status
from streamed import BODY, begun

from ballast_operator.poll_result import PollResult
from ballast_queue.job import JobState
from ballast_queue.redis_store import Queue
from ballast_worker.__main__ import main
from ballast_worker.errors import AddressTaken
from ballast_worker.owner_port import address_of
from ballast_worker.preflight import listen, listen_for_metrics


@pytest.fixture
def start(capsys):
    """Run the program in this process, where it ends by itself: gives its exit code and what it said."""

    def run(*arguments: str) -> tuple[int, str]:
        return main(list(arguments)), capsys.readouterr().err

    return run


@pytest.fixture
def fed_config(make_config, valkey, queue_name):
    def make(worker_id: str, **changes):
        return make_config(
            **{
                "offline": {"queue": queue_name, "leaseSeconds": 1},
                "runtime": {"redisUrl": valkey.url, "workerId": worker_id},
            }
            | changes
        )

    return make


def results_of(queue: Queue, job_id: str) -> dict[str, str]:
    results = list(queue.results.read(job_id))
    texts = {r.custom_id: r.body["choices"][0]["text"] for r in results if r.body is not None}
    assert len(texts) == len(results), "a result is an error, or appears twice"
    return texts


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param("model: {uri: /none}", "directory /none does not exist", id="no model"),
        pytest.param("model: {uri: ~no-user/m}", "directory ~no-user/m does not exist", id="a home of no user"),
        pytest.param("model: {uri: 'hf://org/name'}", "a worker reads only directories", id="a hub"),
        pytest.param("model: {uri: 'file://host/x'}", "three slashes", id="a host"),
        pytest.param("slots: 0", "model: Field required", id="invalid"),
        pytest.param(
            "model: {uri: MODEL}\nslo: {latencyMilliseconds: 30}", "the native engine only generates text", id="latency"
        ),
        pytest.param(
            "model: {uri: MODEL}\nruntime: {redisUrl: 'http://x'}",
            "the scheme is not redis, rediss or unix",
            id="redis address",
        ),
        pytest.param("model: {uri: MODEL}\nruntime: {port: 0, apiKeysFile: /none}", "API keys file", id="keys"),
        pytest.param("model: {uri: EMPTY}\nruntime: {port: 0}", "config.json", id="an empty directory"),
        pytest.param("model: {uri: CORRUPT}\nruntime: {port: 0}", "safetensors", id="a corrupt checkpoint"),
        pytest.param(
            "model: {uri: MODEL}\nruntime: {port: 0, redisUrl: 'redis://127.0.0.1:1', redisPasswordFile: /none}",
            "redisPasswordFile",
            id="password",
        ),
        pytest.param("model: {uri: MODEL}\nruntime: {port: 0, redisUrlFile: /none}", "redisUrlFile", id="address file"),
    ],
)
def test_a_worker_that_cannot_start_says_why_in_a_sentence(start, tmp_path, model_dir, text, said) -> None:
    corrupt = tmp_path / "corrupt"
    (tmp_path / "empty").mkdir()
    corrupt.mkdir()
    for path in model_dir.iterdir():
        content = path.read_bytes()
        (corrupt / path.name).write_bytes(content[:1000] if path.suffix == ".safetensors" else content)
    for name, place in (("MODEL", model_dir), ("EMPTY", tmp_path / "empty"), ("CORRUPT", corrupt)):
        text = text.replace(name, str(place))
    path = tmp_path / "config.yaml"
    path.write_text(text)

    ended, err = start("--config", str(path), "--log-level", "error")

    assert ended == 78
    assert said in err
    assert err.startswith("ballast-worker: ")


def test_an_address_has_one_worker_from_the_start_on(make_config) -> None:
    with listen(make_config()) as first:
        config = make_config(runtime={"port": first.getsockname()[1]})
        with pytest.raises(AddressTaken, match="Stop the process that listens there"):
            listen(config)


PODS = [("10.0.0.7", "http://10.0.0.7", "127.0.0.1"), ("fd00::7", "http://[fd00::7]", "::1")]


@pytest.mark.parametrize(("pod_ip", "address", "probed"), PODS)
def test_a_pod_listens_where_kubernetes_probes_it_and_its_address_leads_the_operator_to_it(
    pod_ip: str, address: str, probed: str, make_config, monkeypatch
) -> None:
    monkeypatch.setenv("POD_IP", pod_ip)
    config = make_config(runtime={"host": "0.0.0.0", "metricsPort": 0})
    with listen(config) as listener, listen_for_metrics(config) as metrics:
        found, port = address_of(listener, None), listener.getsockname()[1]
        for host in {"127.0.0.1", probed}:
            for each in (listener, metrics):
                socket.create_connection((host, each.getsockname()[1])).close()
    pod = {"metadata": {"name": "llm-1"}, "status": {"podIP": pod_ip}}
    published = make_status("w", address=found)

    assert found == f"{address}:{port}"
    assert dict(PollResult(0, workers=(published,)).by_pod((pod,))) == {"llm-1": published}


def test_a_taken_port_is_told_before_the_model_is_loaded(start, tmp_path, make_config) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        path = tmp_path / "config.yaml"
        path.write_text(make_config(runtime={"port": port}).dump())
        ended, err = start("--config", str(path))

    assert ended == 71
    assert f"Cannot listen on 127.0.0.1:{port}" in err
    assert "runtime.port" in err
    assert "model loaded" not in err


def test_without_its_packages_the_worker_names_the_extra(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model: {uri: /none}")
    program = (
        "import sys, importlib.util as u\n"
        "find = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'torch' else find(name, *rest)\n"
        "from ballast_worker.__main__ import main\n"
        f"sys.exit(main(['--config', {str(tmp_path / 'config.yaml')!r}]))\n"
    )

    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)

    assert ended.returncode == 69
    assert "pip install 'ballast[worker]'" in ended.stderr
    assert "torch" in ended.stderr


@pytest.mark.parametrize("name", ["worker", "vllm"])
def test_a_signal_before_the_model_is_loaded_is_handled(name: str, tmp_path: Path) -> None:
    program = (
        "import os, signal\n"
        f"from ballast_{name}.__main__ import main\n"
        f"main(['--config', {str(tmp_path / 'none.yaml')!r}])\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "signal.pause()\n"
    )

    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=False)

    assert ended.returncode == 128 + signal.SIGTERM, "process 1 of a container ignores a signal without a handler"
    assert ended.stderr.splitlines()[-1].startswith(f"ballast-{name}: SIGTERM ended the start. ".encode())


@pytest.mark.slow
def test_a_signal_finishes_online_requests_closes_idle_connections_and_then_refuses_new_ones(
    run_worker, make_config, tmp_path
) -> None:
    with run_worker(make_config(), tmp_path) as running, running.client() as client, running.client() as other:
        kept = HTTPConnection(other.base_url.host, other.base_url.port, timeout=60)
        kept.request("GET", "/ready")
        kept.getresponse().read()
        with begun(client, max_tokens=300) as lines:
            running.signal(signal.SIGTERM)
            left = kept.sock.recv(1)
            refused = other.post("/v1/completions", json=BODY)
            ready, health = other.get("/ready"), other.get("/health")
            rest = list(lines)
        kept.close()
        code = running.wait()

    assert (left, rest[-2]) == (b"", "data: [DONE]")
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert refused.json()["error"]["code"] == "draining"
    assert refused.headers.get_list("connection") == ["close"]
    assert (ready.status_code, health.status_code) == (503, 200)
    assert code == 0


@pytest.mark.slow
def test_a_worker_says_that_it_is_not_ready_before_it_refuses(run_worker, make_config, tmp_path, eventually) -> None:
    with run_worker(make_config(runtime={"unreadySeconds": 3600}), tmp_path) as running, running.client() as client:
        running.signal(signal.SIGTERM)
        eventually(lambda: client.get("/ready").status_code == 503, "the worker to be unready")
        metrics = client.get("/metrics").text
        answered = client.post("/v1/completions", json=BODY)
        running.signal(signal.SIGTERM)
        code = running.wait()

    assert (answered.status_code, code) == (200, 0)
    assert answered.headers["connection"] == "close"
    assert "ballast_draining 1.0" in metrics


@pytest.mark.slow
@pytest.mark.parametrize(("drain_seconds", "num_signals"), [(0.2, 1), (3600, 2)])
def test_after_the_drain_time_or_a_second_signal_what_is_left_is_aborted_with_an_error(
    *, run_worker, make_config, tmp_path, eventually, drain_seconds, num_signals
) -> None:
    config = make_config(runtime={"drainSeconds": drain_seconds})
    with run_worker(config, tmp_path) as running, running.client() as client:
        with begun(client) as lines:
            running.signal(signal.SIGTERM)
            eventually(lambda: '"draining"' in running.log, "the drain to begin")
            if num_signals == 2:
                running.signal(signal.SIGINT)
            said = [line for line in lines if line]
        code = running.wait()

    assert '"code": "draining"' in said[-2]
    assert said[-1] == "data: [DONE]"
    assert ("second signal" in running.log) == (num_signals == 2)
    assert '"level": "error"' not in running.log
    assert code == 0


HALVES = {
    "half of the headers": b"POST /v1/completions HTTP/1.1\r\nhost:",
    "no body": b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\n",
    "half of the body": b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\n{",
}


@pytest.mark.slow
@pytest.mark.parametrize("signals", [1, 2])
def test_a_request_that_has_not_arrived_when_the_worker_stops_gets_a_503(
    run_worker, make_config, tmp_path, eventually, signals
) -> None:
    config = make_config(runtime={"unreadySeconds": 3600 if signals == 2 else 0})
    with run_worker(config, tmp_path) as running, running.client() as client, ExitStack() as stack:
        at = (client.base_url.host, client.base_url.port)
        halves = [stack.enter_context(socket.create_connection(at, timeout=60)) for _ in HALVES]
        for raw, half in zip(halves, HALVES.values(), strict=True):
            raw.sendall(half)
        waits = 'ballast_http_connections{waits_for="body"} 2.0'
        eventually(lambda: waits in client.get("/metrics").text, "the halves to arrive")
        for _ in range(signals):
            running.signal(signal.SIGTERM)
            eventually(lambda: '"draining"' in running.log, "the drain to begin")
        answers = [raw.recv(65536) for raw in halves]  # and the clients leave their sockets open
        code = running.wait()

    assert [answer.split(b" ")[1] for answer in answers] == [b"503"] * len(HALVES)
    assert all(b"retry-after: 1" in answer for answer in answers)
    assert code == 0
    assert '"level": "error"' not in running.log


@pytest.mark.parametrize(
    ("soft", "hard", "expected"),
    [
        pytest.param(64, 4096, (1500, 1756), id="the process may open as many files"),
        pytest.param(4096, 4096, (1500, 4096), id="enough"),
        pytest.param(64, 1024, (768, 1024), id="fewer"),
        pytest.param(64, 64, (32, 64), id="few"),
    ],
)
def test_a_worker_has_no_more_connections_than_it_may_have_files(soft, hard, expected) -> None:
    program = f"""
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
from ballast_worker.http_connection import Connections, HttpLimits
allowed = Connections(HttpLimits(connections=1500)).limits.connections
print((allowed, resource.getrlimit(resource.RLIMIT_NOFILE)[0]))
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert ended.stdout.strip() == str(expected)


@pytest.mark.slow
def test_a_killed_workers_items_are_finished_by_the_next_one_each_exactly_once(
    run_worker, fed_config, queue, tmp_path, eventually
) -> None:
    lines = [make_line(i, temperature=1.0, max_tokens=60, ignore_eos=True) for i in range(40)]
    job_id = queue.submissions.submit(lines).job_id
    with run_worker(fed_config("first"), tmp_path) as first:
        eventually(lambda: queue.jobs.get(job_id).counts.succeeded >= 5, "some results")
        first.signal(signal.SIGKILL)
        first.wait()
        counts = queue.jobs.get(job_id).counts
        claimed = queue.jobs.get(job_id)
    assert counts.leased > 0, "the killed worker must hold leases"
    assert counts.succeeded < 40
    assert claimed.state is JobState.IN_PROGRESS

    with run_worker(fed_config("second"), tmp_path):
        job = eventually(lambda: (j := queue.jobs.get(job_id)).state.is_over and j, "the job to be over")

    results = list(queue.results.read(job_id))
    assert job.state is JobState.COMPLETED
    assert sorted(r.custom_id for r in results) == sorted(f"item-{i}" for i in range(40))
    assert {r.status_code for r in results} == {200}
    assert {r.worker for r in results} == {"first", "second"}


@pytest.mark.slow
def test_a_drained_workers_items_go_on_where_they_stood(run_worker, fed_config, queue, tmp_path, eventually) -> None:
    lines = [make_line(i, temperature=1.0, max_tokens=200, ignore_eos=True) for i in range(12)]
    job_id = queue.submissions.submit(lines).job_id
    with run_worker(fed_config("first"), tmp_path) as first:
        eventually(lambda: queue.jobs.get(job_id).counts.succeeded >= 1, "a result")
        first.signal(signal.SIGTERM)
        assert first.wait() == 0
    counts = queue.jobs.get(job_id).counts
    peek = queue.leases.claim(job_id, 12, "peek")
    attempts = {item.attempt for item in peek}
    num_prefixes = sum(item.prefix is not None for item in peek)
    queue.leases.give_back_many([(item, None) for item in peek])

    with run_worker(fed_config("second"), tmp_path) as second:
        eventually(lambda: queue.jobs.get(job_id).state.is_over, "the job to be over")
        # The same items with the same seeds, undisturbed, over HTTP.
        with second.client() as client:
            seeds = {item.custom_id: item.seed for item in peek}
            alone = {
                json.loads(line)["custom_id"]: client.post(
                    "/v1/completions",
                    json=json.loads(line)["body"] | {"seed": seeds[json.loads(line)["custom_id"]]},
                ).json()["choices"][0]["text"]
                for line in lines
                if json.loads(line)["custom_id"] in seeds
            }

    texts = results_of(queue, job_id)
    assert counts.leased == 0
    assert counts.succeeded < 12
    assert attempts == {1}, "no attempt is spent"
    assert num_prefixes >= 1
    assert len(texts) == 12
    assert {key: texts[key] for key in alone} == alone
