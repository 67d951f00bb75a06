"""A replica of Ray Serve, which needs no Ray in this process: Serve calls it in these ways."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from queue_objects import make_line
from starlette.applications import Starlette
from starlette.types import Receive, Scope, Send
from waiting import until

from ballast_api.errors import InvalidConfig
from ballast_api.worker_config import WorkerConfig
from ballast_queue.redis_store import Queue
from ballast_serve import leave
from ballast_serve.replica import IN_POD, ServeReplica
from ballast_serve.served import ReadyApp, serve_app
from ballast_worker.errors import NotServed
from ballast_worker.http_connection import Connections, HttpLimits

pytestmark = pytest.mark.anyio
PATIENCE = 120.0
ASK = {"model": "tiny", "prompt": "The method returns", "max_tokens": 8, "temperature": 0}


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Replicas exempt what is loaded from the collection of garbage, for as long as their process lives."""
    gc.unfreeze()
    yield
    gc.unfreeze()


async def eventually(is_true: Callable[[], Any], what: str) -> Any:
    async with asyncio.timeout(PATIENCE):
        while not (found := is_true()):  # noqa: ASYNC110 - other threads and processes change it
            await asyncio.sleep(0.02)
    assert found, what
    return found


@asynccontextmanager
async def lived(replica: ServeReplica, path: str = "") -> AsyncIterator[httpx.AsyncClient]:
    """Run the lifespan of the ingress, as Serve does, and give a client that reaches the ingress by its path."""
    ingress = replica.__serve_build_asgi_app__()
    events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    answers: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    life = asyncio.create_task(ingress({"type": "lifespan"}, events.get, answers.put))  # type: ignore[arg-type]
    await events.put({"type": "lifespan.startup"})
    await answers.get()
    try:
        transport = httpx.ASGITransport(ingress, root_path=path)
        async with httpx.AsyncClient(transport=transport, base_url=f"http://proxy{path}") as client:
            yield client
    finally:
        await events.put({"type": "lifespan.shutdown"})
        await answers.get()
        await life


@pytest.fixture
def make_text(model_dir: Path) -> Callable[..., str]:
    def make(**sections: Any) -> str:
        base = {"model": {"uri": str(model_dir), "servedName": "tiny"}, "slots": 4, "engine": {"threads": 1}}
        runtime = {"port": 0} | sections.pop("runtime", {})
        return WorkerConfig.model_validate(base | {"runtime": runtime} | sections).dump()

    return make


@pytest.fixture
def in_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let replicas of this process take it for a pod."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(IN_POD, "1")


@pytest.mark.parametrize("path", ["", "/llama"])
async def test_a_replica_serves_its_port_and_a_proxy_with_one_worker_and_applies_hot_fields(make_text, path):
    replica = ServeReplica()
    async with lived(replica, path) as proxy:
        early = await proxy.get("/ready")
        await replica.reconfigure({"config": make_text()})
        assert gc.get_freeze_count() > 0  # no full collection visits the engine
        address = replica.served.address
        async with httpx.AsyncClient(base_url=address) as port:
            answers = [await client.post("/v1/completions", json=ASK) for client in (port, proxy)]
            before = (await port.get("/ballast/status")).json()
            await replica.reconfigure({"config": make_text(slo={"ttftMilliseconds": 7})})
            await eventually(lambda: replica.served.app.state.worker.config.slo.ttft_milliseconds == 7, "hot field")
            after = (await port.get("/ballast/status")).json()
        replica.check_health()

    texts = {answer.json()["choices"][0]["text"] for answer in answers}
    assert early.status_code == 503
    assert len(texts) == 1
    assert before["address"] == address
    assert after["worker_id"] == before["worker_id"]
    assert after["config_hash"] != before["config_hash"]
    with pytest.raises(OSError, match="onnect"):
        await asyncio.open_connection("127.0.0.1", httpx.URL(address).port)


async def test_a_replica_that_ends_returns_its_items(make_text, queue, valkey, queue_name):
    replica = ServeReplica()
    async with lived(replica):
        sections = {"offline": {"queue": queue_name, "leaseSeconds": 600}, "runtime": {"redisUrl": valkey.url}}
        await replica.reconfigure({"config": make_text(**sections)})
        job_id = queue.submissions.submit([make_line(n, max_tokens=1000) for n in range(8)]).job_id
        await eventually(lambda: queue.jobs.get(job_id).counts.leased, "an item to be leased")

    assert queue.jobs.get(job_id).counts.leased == 0
    assert queue.jobs.get(job_id).counts.waiting > 0


async def test_a_pod_that_is_to_end_waits_until_its_replica_has_drained(make_text, queue: Queue, valkey, in_pod):
    queue_name = queue.name
    replica = ServeReplica()
    async with lived(replica) as proxy:
        sections = {"offline": {"queue": queue_name, "leaseSeconds": 600}, "runtime": {"redisUrl": valkey.url}}
        await replica.reconfigure({"config": make_text(**sections)})
        await eventually((leave.directory() / leave.REPLICA).exists, "the replica to watch for the end of its pod")
        job_id = queue.submissions.submit([make_line(n, max_tokens=1000) for n in range(8)]).job_id
        await eventually(lambda: queue.jobs.get(job_id).counts.leased, "an item to be leased")
        await asyncio.to_thread(leave.main)
        leased = queue.jobs.get(job_id).counts.leased
        refused = await proxy.post("/v1/completions", json=ASK)
        await replica.reconfigure({"config": make_text()})
        replica.check_health()  # Serve must not start another replica in this pod

    assert leased == 0
    assert refused.status_code == 503


async def test_a_pod_whose_replica_serve_has_ended_waits_for_nothing(make_text, in_pod):
    replica = ServeReplica()
    async with lived(replica):
        await replica.reconfigure({"config": make_text()})
        await eventually((leave.directory() / leave.REPLICA).exists, "the replica to watch for the end of its pod")

    assert (leave.directory() / leave.DONE).exists()
    leave.main()


async def test_a_pod_that_is_to_end_while_serve_ends_its_replica_waits_for_it(make_text, in_pod):

    async def end(replica: ServeReplica) -> None:
        async with lived(replica):
            await replica.reconfigure({"config": make_text(runtime={"unreadySeconds": 3})})
            await eventually((leave.directory() / leave.REPLICA).exists, "the replica to watch for the end of its pod")

    replica = ServeReplica()
    ending = asyncio.create_task(end(replica))
    address = httpx.URL(await eventually(lambda: replica.served and replica.served.address, "the replica"))
    worker = replica.served.app.state.worker
    await eventually(lambda: worker.is_draining, "Serve to end the replica")
    await asyncio.to_thread(leave.main)
    with pytest.raises(OSError, match="onnect"):
        await asyncio.open_connection("127.0.0.1", address.port)
    await ending


def test_without_a_replica_a_pod_ends_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))

    leave.main()


def test_a_pod_whose_replica_was_killed_ends_at_once(tmp_path):
    environment = os.environ | {"HOME": str(tmp_path)}
    program = "import os; from ballast_serve import leave; leave.watch_for(); os.kill(os.getpid(), 9)"
    killed = subprocess.run([sys.executable, "-c", program], env=environment, check=False)
    left = subprocess.run([sys.executable, "-m", "ballast_serve.leave"], env=environment, timeout=PATIENCE, check=False)

    assert (killed.returncode, left.returncode) == (-signal.SIGKILL, 0)


async def test_a_replica_that_starts_while_its_pod_is_to_end_is_asked_too(make_text, in_pod):
    """The hook of a restarted container, whose files are in a volume of the pod, has no effect on it."""
    leave.watch_for()
    (leave.directory() / leave.ASKED).touch()
    replica = ServeReplica()
    async with lived(replica) as proxy:
        await replica.reconfigure({"config": make_text()})
        ready = await proxy.get("/ready")
        await asyncio.to_thread(leave.main)
        left = await proxy.get("/ready")

    assert (ready.status_code, left.status_code) == (200, 503)


def test_a_replica_that_starts_after_its_pod_was_to_end_is_asked_again(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    leave.watch_for()
    asked = leave.directory() / leave.ASKED
    hook = threading.Thread(target=leave.main, daemon=True)
    hook.start()
    until(asked.exists, said="the hook to ask")
    leave.watch_for()
    until(asked.exists, said="the hook to ask the later replica")
    leave.drained()
    hook.join(PATIENCE)

    assert not hook.is_alive()


async def test_a_stop_that_serve_gives_up_goes_on_for_the_end_of_the_pod():
    replica = ServeReplica()
    given_up = asyncio.create_task(replica.stop())
    await asyncio.sleep(0)
    given_up.cancel()
    await replica.stop()

    assert given_up.cancelled()


def test_the_end_of_a_replica_does_not_answer_for_the_one_that_replaces_it(tmp_path, monkeypatch):
    """Serve starts a replica while the one that it replaces still drains, maybe in the same pod."""
    monkeypatch.setenv("HOME", str(tmp_path))
    leave.watch_for()
    leave.drained()
    alone = (leave.directory() / leave.DONE).exists()
    (leave.directory() / leave.DONE).unlink()
    (leave.directory() / leave.REPLICA).write_text("1", encoding="utf-8")
    leave.drained()

    assert alone
    assert not (leave.directory() / leave.DONE).exists()


class BrokenFeeder:
    """A feeder that cannot return its items."""

    is_dead = False
    num_held = 0

    def drain(self) -> None:
        raise RuntimeError("The feeder cannot drain.")

    def stop(self) -> None:
        pass


async def test_a_pod_whose_replica_fails_to_drain_ends_at_once(make_text, in_pod, capfd):
    replica = ServeReplica()
    await replica.reconfigure({"config": make_text()})
    replica.served.app.state.worker.feeder = BrokenFeeder()
    await asyncio.to_thread(leave.main)
    await replica.stop()

    assert "the replica did not drain" in capfd.readouterr().err


async def test_a_pod_whose_home_cannot_be_written_has_a_sentence(make_text, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    monkeypatch.setenv(IN_POD, "1")
    replica = ServeReplica()
    with pytest.raises(NotServed, match="Set HOME to a directory that can be written"):
        await replica.reconfigure({"config": make_text()})
    await replica.stop()


async def test_what_a_replica_cannot_serve_is_a_sentence_for_serve_and_leaves_no_file(make_text, tmp_path, monkeypatch):
    """Serve kills such a replica. The configuration may have a password."""
    files = tmp_path / "files"
    files.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(files))

    async def start(text: str, key: str = "config") -> None:
        replica = ServeReplica()
        assert list(files.iterdir())
        try:
            await replica.reconfigure({key: text})
        finally:
            assert not list(files.iterdir())

    with pytest.raises(NotServed, match=r"user_config of the deployment has no key 'config', expected .* --show"):
        await start(make_text(), key="configuration")
    with pytest.raises(InvalidConfig, match="slots"):
        await start(make_text() + "\nslots: none\n")
    with pytest.raises(NotServed, match="does not exist"):
        await start(make_text(model={"uri": str(tmp_path / "missing")}))


class UnfitApp(Starlette):
    """An app that does not start, as that of vLLM if Ballast refuses its arguments."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "lifespan"
        await receive()
        self.state.ballast_error = "The model serves none of the URLs of items."
        await send({"type": "lifespan.startup.failed", "message": self.state.ballast_error})


async def test_a_replica_removes_the_file_of_one_that_was_killed_in_its_pod(make_text, tmp_path, in_pod, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    program = "import os; from ballast_serve.replica import ServeReplica; r = ServeReplica(); os.kill(os.getpid(), 9)"
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    killed = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", program], env=environment, check=False)
    [left] = tmp_path.glob("ballast-replica-*")
    other = ServeReplica()  # Serve may start a replica while the one that it replaces still drains
    replica = ServeReplica()
    remaining = set(tmp_path.glob("ballast-replica-*"))
    for each in (other, replica):
        await each.stop()

    assert killed.returncode == -signal.SIGKILL
    assert left not in remaining
    assert len(remaining) == 2


async def test_an_app_that_does_not_start_is_a_sentence_for_serve():
    async def drain(_hang_up: Callable[[], None]) -> None:
        raise AssertionError

    opened = ReadyApp(UnfitApp(), Connections(HttpLimits()), lambda: None, drain)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        pytest.raises(NotServed, match=r"^The model serves none of the URLs of items\.$"),
    ):
        async with serve_app(opened, listener):
            pass


async def test_an_http_server_that_ended_is_a_reason_for_another_replica(make_text):
    replica = ServeReplica()
    async with lived(replica):
        await replica.reconfigure({"config": make_text()})
        replica.check_health()
        replica.served.app.state.server.should_exit = True
        await eventually(replica.served.failure, "the HTTP server to end")
        with pytest.raises(RuntimeError, match=r"The HTTP server of the replica ended\."):
            replica.check_health()


async def test_a_broken_engine_is_a_reason_for_another_replica(make_text):
    replica = ServeReplica()
    async with lived(replica):
        await replica.reconfigure({"config": make_text()})
        replica.served.app.state.worker.loop.failure = "The engine failed."
        with pytest.raises(RuntimeError, match=r"The engine failed\."):
            replica.check_health()
