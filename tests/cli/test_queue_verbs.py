from __future__ import annotations

import io
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis
from queue_objects import make_status
from tls import LOOPBACK, tls_proxy

from ballast_cli.console import stdout
from ballast_queue.batch_lines import CHUNK_LINES
from ballast_queue.errors import QueueForbidden, QueueUnavailable
from ballast_queue.job import Claimed, Result
from ballast_queue.redis_store import Queue
from ballast_queue.settings import QueueSettings, TenantSettings
from ballast_queue.status import ClassLoad, ReservationStatus, SloStatus, WorkerStatus
from ballast_queue.submissions import Terms, new_job_id, open_job


def make_result(claimed: Claimed, **fields: Any) -> Result:
    return Result(custom_id=claimed.custom_id, status_code=200, body={"ok": claimed.custom_id}, tokens_out=4, **fields)


def finish(queue: Any, job_id: str, count: int) -> list[str]:
    claimed = queue.leases.claim(job_id, count, "w1")
    for one in claimed:
        queue.leases.finish("w1", one, make_result(one))
    return [one.custom_id for one in claimed]


def make_busy(*, items_rate: float = 0.0, tokens_rate: float = 0.0, **offline: float) -> WorkerStatus:
    return make_status(
        at=time.time(),
        model="tiny",
        batch_ceiling=6,
        kv_blocks_total=100,
        kv_blocks_free=40,
        online=ClassLoad(running=2, waiting=1),
        offline=ClassLoad(running=4, reserved=1, borrowed=3, **offline),
        reservation=ReservationStatus(slots=1, blocks=10, chunk=13, in_use=1, is_met=True),
        offline_items_per_second=items_rate,
        offline_tokens_per_second=tokens_rate,
        ttft_p99_seconds=0.0123,
    )


def submit(queued, items: Path, *options: object) -> str:
    ran = queued("submit", items, *options)

    assert ran.code == 0, ran.err
    return ran.out.strip()


def submit_in_part(queue: Queue, lines: list[str], key: str) -> None:
    """Submit lines as a client that ends before it has sent all of them."""

    def interrupted() -> Iterator[str]:
        yield from lines
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        queue.submissions.submit(interrupted(), key=key)


def test_submit_prints_the_job_on_stdout_and_the_rest_on_stderr(queued, items: Path):
    ran = queued("submit", items, "--tenant", "research", "--priority", 3)

    assert ran.code == 0
    assert ran.out.startswith("job-")
    assert len(ran.out.split()) == 1
    assert "3 items" in ran.err
    assert "No worker serves queue" in ran.err


def test_submit_states_a_priority_that_the_tenant_may_not_have(queued, items: Path, queue: Queue):
    queue.settings.apply(QueueSettings(tenants=(TenantSettings(name="acme"),)))
    lowered = queued("submit", items, "--tenant", "acme", "--priority", 5)
    kept = queued("submit", items, "--tenant", "acme", "--priority", 0)

    assert "The job has the priority 0, the maximum of tenant acme (maxPriority)." in lowered.err
    assert "maxPriority" not in kept.err


def test_a_first_line_that_is_an_array_is_a_bad_line_beside_others(queued, items: Path):
    items.write_text(f"\n[]\n\n{items.read_text()}")

    ran = queued("submit", items)

    assert "3 items of" in ran.err
    assert "accepted, 1 rejected" in ran.err


def test_submit_reads_standard_input(queued, items: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(items.read_bytes())))

    assert queued("submit", "-", "--json").json["accepted"] == 3


class Pipe(io.BytesIO):
    """Remembers how much of a line a reader asks for."""

    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        self.asked: list[int | None] = []

    def readline(self, size: int | None = -1) -> bytes:
        self.asked.append(size)
        return super().readline(size)


@pytest.mark.parametrize("event", ["a cancellation", "a lost user", "a rollback", signal.SIGTERM, signal.SIGHUP])
def test_a_submission_that_fails_or_is_ended_names_its_key(
    queued, queue: Queue, make_line: Any, monkeypatch: pytest.MonkeyPatch, event: Any
):
    class Interrupted(io.BytesIO):
        def readline(self, size: int | None = -1) -> bytes:
            jobs = queue.jobs.all()
            if jobs and event == "a cancellation":
                queue.jobs.cancel(jobs[0].id)
            elif jobs and event == "a rollback":  # as a failover does, without a broken connection
                queue.store.connection.set_hash_field(queue.store.keys.job(jobs[0].id), "lines", "0")
            elif jobs and event == "a lost user":
                raise QueueForbidden("Redis does not know the user")
            elif jobs:
                os.kill(os.getpid(), event)
            return super().readline(size)

    lines = "\n".join(make_line(f"item-{number}") for number in range(CHUNK_LINES + 1))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(Interrupted(lines.encode())))
    if isinstance(event, signal.Signals):
        monkeypatch.setattr("ballast_cli.interrupts.signal.getsignal", lambda _: signal.SIG_DFL)
    ran = queued("submit", "-")
    (job,) = queue.jobs.all()

    assert ran.code == {"a cancellation": 5, "a lost user": 4, "a rollback": 1}.get(event, 130)
    resumes = f"Run the same command with --key {job.key} to resume." in ran.err
    assert resumes is (event != "a cancellation"), "a repetition for a job that ended adds nothing"
    assert f"key         {job.key}\n" in queued("job", job.id).out


def test_a_submission_continues_when_redis_knows_the_user_again(
    queued, queue: Queue, make_line: Any, valkey: Any, monkeypatch: pytest.MonkeyPatch
):
    class Slow(io.BytesIO):
        """Ends the connection of the submitter after the first lines are stored."""

        def readline(self, size: int | None = -1) -> bytes:
            if not admin.acl_log() and queue.jobs.all():
                admin.execute_command("ACL", "DELUSER", "submitter")
            return super().readline(size)

    def let_in() -> None:
        while not admin.acl_log():
            time.sleep(0.01)
        admin.execute_command(*user)

    lines = "\n".join(make_line(f"item-{number}") for number in range(CHUNK_LINES + 1))
    user = ("ACL", "SETUSER", "submitter", "reset", "on", "~*", "+@all", ">secret")
    with redis.Redis.from_url(valkey.url) as admin:
        admin.execute_command(*user)
        admin.acl_log_reset()
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(Slow(lines.encode())))
        monkeypatch.setattr("ballast_cli.watch._POLL_SECONDS", 0.01)
        door = threading.Thread(target=let_in, daemon=True)
        door.start()
        ran = queued("submit", "-", "--redis-url", valkey.url.replace("redis://", "redis://submitter:secret@"))
        door.join()
        admin.execute_command("ACL", "DELUSER", "submitter")

    assert ran.code == 0, ran.err
    assert "Waiting for it, at most 60 s ..." in ran.err
    assert queue.jobs.get(ran.out.strip()).counts.total == CHUNK_LINES + 1


def test_a_job_that_cannot_be_read_after_its_submission_is_not_submitted_again(
    queued, items: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: object) -> None:
        raise QueueUnavailable("Redis is unavailable")

    monkeypatch.setattr("ballast_queue.jobs.Jobs.get", fail)
    ran = queued("submit", items, "--deadline", "1h")
    shown = queued("submit", items, "--deadline", "1h", "--json")

    assert (ran.code, shown.code) == (0, 0)
    assert f"{ran.out.strip()} is stored: do not submit it again." in ran.err
    assert shown.json["deadline"]["feasible"] == "unknown"


def test_messages_without_a_reader_do_not_end_a_submission(
    queued, queue: Queue, tmp_path: Path, make_line: Any, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "many.jsonl").write_text("\n".join(make_line(f"item-{number}") for number in range(CHUNK_LINES + 1)))
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr("ballast_cli.watch._PLAIN_SECONDS", 0.0)
    with os.fdopen(writer, "w") as unread:
        monkeypatch.setattr("sys.stderr", unread)
        ran = queued("submit", "many.jsonl")

    assert ran.code == 0
    assert queue.jobs.get(ran.out.strip()).counts.total == CHUNK_LINES + 1


def test_submit_reads_a_pipe(queued, items: Path, queue: Any, tmp_path: Path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(items.read_bytes()))
    writer.start()
    ran = queued("submit", pipe)
    writer.join()

    assert ran.code == 0
    assert queue.jobs.get(ran.out.strip()).counts.total == 3


def test_submit_without_a_standard_input_says_what_to_name(queued, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.stdin", None)
    ran = queued("submit", "-")

    assert ran.code == 2
    assert "Standard input is closed" in ran.err


def test_submit_keeps_no_more_of_a_line_than_the_queue_takes(
    queued, items: Path, queue: Any, monkeypatch: pytest.MonkeyPatch
):
    queue.settings.apply(QueueSettings(max_line_bytes=200))
    pipe = Pipe(b"x" * 10_000 + b"\n" + items.read_bytes())
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(pipe))
    job_id = submit(queued, Path("-"))
    (refused,) = queue.results.read(job_id)

    assert set(pipe.asked) == {203}
    assert refused.error["code"] == "line_too_long"
    assert queue.jobs.get(job_id).counts.waiting == 3


@pytest.mark.parametrize("num_sent", [0, 550])
def test_the_key_of_a_job_that_was_cancelled_before_its_last_line_names_its_state(
    queued, queue: Queue, tmp_path: Path, make_line: Any, num_sent: int
):
    lines = [make_line(f"item-{number}") for number in range(600)]
    (tmp_path / "many.jsonl").write_text("\n".join(lines))

    if num_sent:
        submit_in_part(queue, lines[:num_sent], "k")
    else:  # Redis was away after it had opened the job
        open_job(queue.store, new_job_id(), Terms("default"), key="k", source="submit")
    (job,) = queue.jobs.all()
    queue.jobs.cancel(job.id)
    queue.timers.run_due()

    ran = queued("submit", "many.jsonl", "--key", "k")

    assert (ran.code, ran.out) == (5, f"{job.id}\n")
    assert f"{job.id} with {num_sent // 500 * 500} items, cancelled. Nothing was added" in ran.err
    assert f"{job.id} is cancelled, and takes no lines. Use another key to submit the lines again." in ran.err


@pytest.mark.parametrize(
    ("end", "code", "state"),
    [("no valid line", 1, "failed"), ("a cancellation", 5, "cancelled"), ("its deadline", 5, "expired")],
)
def test_a_repetition_for_a_job_that_ended_badly_is_no_success(
    queued, items: Path, queue: Queue, *, end: str, code: int, state: str
):
    deadline = datetime.fromtimestamp(queue.now() + 1.0, UTC).isoformat()
    options = ("--key", "nightly", *(("--deadline", deadline) if end == "its deadline" else ()))
    if end == "no valid line":
        items.write_text("nonsense\n")
    first = queued("submit", items, *options)
    if end == "a cancellation":
        queue.jobs.cancel(first.out.strip())
    while end == "its deadline" and queue.jobs.get(first.out.strip()).state != "expired":
        queue.timers.run_due()
    again = queued("submit", items, *options)
    as_json = queued("submit", items, *options, "--json")

    assert first.code == (1 if end == "no valid line" else 0)
    assert (again.code, again.out) == (code, first.out)
    assert (as_json.code, as_json.json["state"], as_json.json["was_closed"]) == (code, state, True)


def test_a_deadline_that_has_passed_refuses_new_jobs_only(queued, items: Path, queue: Queue):
    job_id = submit(queued, items, "--key", "nightly")
    again = queued("submit", items, "--key", "nightly", "--deadline", "2020-01-01")
    new = queued("submit", items, "--key", "other", "--deadline", "1960-01-01")

    assert (again.code, again.out) == (0, f"{job_id}\n")
    assert (new.code, new.out) == (2, "")
    assert "--deadline: '1960-01-01' is 19" in new.err
    assert "which has passed. Use a time span such as 24h" in new.err
    assert [job.id for job in queue.jobs.all()] == [job_id]


@pytest.mark.parametrize("options", [(), ("--json",)])
@pytest.mark.parametrize("event", ["a full disk", "an interrupt"])
def test_a_job_whose_id_could_not_be_written_is_named_on_stderr(
    queued, items: Path, queue: Queue, monkeypatch: pytest.MonkeyPatch, *, event: str, options: tuple[str, ...]
):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, Path("/dev/full").open("w") as full:
        if event == "a full disk":
            patched.setattr("sys.stdout", full)
        else:
            patched.setattr("ballast_queue.jobs.Jobs.get", interrupt)
        ran = queued("submit", items, *options)
    (job,) = queue.jobs.all()

    assert ran.code == (1 if event == "a full disk" else 130)
    assert f"{job.id} is stored with the key {job.key}: do not submit the lines without this key." in ran.err


def test_a_key_with_other_lines_is_refused(queued, items: Path, tmp_path: Path, make_line: Any):
    job_id = submit(queued, items, "--key", "nightly")
    other = tmp_path / "other.jsonl"
    other.write_text(make_line("z"))
    ran = queued("submit", other, "--key", "nightly")

    assert (ran.code, ran.out) == (2, "")
    assert f"--key nightly names {job_id}, which has 3 lines, but {other} has 1." in ran.err
    assert f"The job stays as it is. Use another key for other lines. `ballast job {job_id}" in ran.err


@pytest.mark.parametrize("source", ["file", "stdin"])
def test_a_key_with_an_edited_line_is_refused(
    queued, items: Path, monkeypatch: pytest.MonkeyPatch, make_line: Any, source: str
):
    job_id = submit(queued, items, "--key", "nightly")
    first, *rest = items.read_text().splitlines()
    items.write_text("\n".join([first.replace('"model"', '"seed": 7, "model"'), *rest]))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(Pipe(items.read_bytes())))
    ran = queued("submit", items if source == "file" else "-", "--key", "nightly")

    name = items if source == "file" else "standard input"
    assert (ran.code, ran.out) == (2, "")
    assert f"--key nightly names {job_id}, which has 3 lines, but {name} has other ones." in ran.err


def test_a_repeated_submission_with_a_deadline_shows_the_deadline_of_the_job(queued, items: Path):
    submit(queued, items, "--key", "none")
    submit(queued, items, "--key", "day", "--deadline", "24h")
    without = queued("submit", items, "--key", "none", "--deadline", "1h")
    other = queued("submit", items, "--key", "day", "--deadline", "1h")

    assert without.code == 0
    assert "Deadline" not in without.err
    assert "its priority and deadline stay" in without.err
    assert "(in 1d)" in other.err.replace("23h59m", "1d")  # a slow machine takes a second


def test_a_submission_that_is_continued_says_that_it_added_lines(queued, tmp_path: Path, make_line: Any, queue: Any):
    lines = [make_line(f"i{number}") for number in range(600)]
    (tmp_path / "many.jsonl").write_text("\n".join(lines))

    submit_in_part(queue, lines[:550], "k")
    ran = queued("submit", "many.jsonl", "--key", "k", "--priority", 5, "--deadline", "1h")

    job_id = ran.out.strip()
    assert f"600 items of many.jsonl accepted in all, with those that {job_id} had before." in ran.err
    assert "The job keeps its priority, 0, and no deadline: a repetition does not change them." in ran.err


def test_the_commands_in_messages_have_the_options_that_find_the_queue(ballast, items: Path, valkey: Any):
    ran = ballast("submit", items, "--redis-url", valkey.url, "--queue", "team/nightly")

    assert f"`ballast job {ran.out.strip()} --redis-url {valkey.url} --queue team/nightly`" in ran.err


def test_a_message_never_repeats_a_password(ballast, items: Path, valkey: Any):
    address = valkey.url.replace("redis://", "redis://default:secret@")
    ran = ballast("submit", items, "--redis-url", address, "--queue", "team/nightly")

    assert "secret" not in ran.out + ran.err


def test_a_bad_line_is_told_and_the_rest_goes_on(queued, items: Path):
    with items.open("ab") as file:
        file.write(b"{nonsense\n\xff\xfe\n")
    ran = queued("submit", items)

    assert ran.code == 0
    assert "3 items" in ran.err
    assert "2 rejected" in ran.err
    written = [json.loads(line) for line in queued("results", ran.out.strip()).out.splitlines()]
    assert [line["error"] is not None for line in written] == [True, True]


def test_a_file_without_one_good_line_fails(queued, tmp_path: Path):
    file = tmp_path / "photo.jsonl"
    file.write_bytes(bytes(range(1, 256)))
    ran = queued("submit", file)

    assert ran.code == 1
    assert "No line of" in ran.err


def test_a_deadline_that_cannot_be_met_is_told_at_submission(queued, items: Path, queue: Any):
    queue.workers.publish(make_busy(items_rate=0.25, tokens_rate=1.0), 60)
    missed = queued("submit", items, "--deadline", "10s", "--json").json["deadline"]
    at_risk = queued("submit", items, "--deadline", "20s").err
    fine = queued("submit", items, "--deadline", "1h", "--json").json["deadline"]

    assert missed["feasible"] == "no"
    assert missed["because"].startswith("it needs 12s at 1 output token/s of 1 worker, ")
    assert "It is AT RISK: it needs 12s at 1 output token/s of 1 worker after 12s of work before it" in at_risk
    assert "`ballast cancel job-" in at_risk
    assert fine["feasible"] == "yes"


def test_a_job_at_risk_says_so_wherever_it_is_shown(queued, items: Path, queue: Any):
    fine = submit(queued, items, "--deadline", "2h")
    queue.workers.publish(make_busy(items_rate=0.25, tokens_rate=1.0), 60)
    late = submit(queued, items, "--deadline", "10s", "--tenant", "late")
    top = queued("top", "--once").out.splitlines()
    shown = queued("job", late).out

    assert "1 job AT RISK" in top[0]
    assert [line.split()[1] for line in top if line.startswith("job ")] == [late, fine]
    assert "AT RISK" in next(line for line in queued("jobs").out.splitlines() if late in line)
    assert "AT RISK" in shown
    assert "ago: it needs 12s at 1 output token/s" in shown
    assert queued("job", late, "--json").json["job"]["outlook"] == "no"


def test_without_history_a_deadline_is_taken_and_repeated_and_nothing_promised(queued, items: Path, queue: Any):
    nobody = queued("submit", items, "--deadline", "24h")
    queue.workers.publish(make_busy(decode_tokens_per_second=5.0), 60)
    unmeasured = queued("submit", items, "--deadline", "10s")

    assert (nobody.code, unmeasured.code) == (0, 0)
    assert "UTC (in 24h" in nobody.err.replace("1d", "24h")
    assert "unknown: no ready worker has published" in nobody.err
    assert "unknown: no rate is known yet: no item of 1 worker has ended" in unmeasured.err


def test_no_text_of_a_queue_controls_a_terminal(queued, queue: Any, make_line, tmp_path: Path):
    name = "\x9b31m\x9d0;t\x9c\u202e\x7f\u2028\U000e0041\u200d\N{CJK UNIFIED IDEOGRAPH-65E5}"
    (tmp_path / "items.jsonl").write_text(make_line(name) + "\n")
    again = ("submit", tmp_path / "items.jsonl", "--key", name)
    job_id = submit(queued, *again[1:])
    queue.workers.publish(make_status(worker_id=name), 60)
    queue.store.call(queue.store.functions.begin_end(job_id, "cancelled"))
    queue.timers.run_due()
    queue.store.connection.client.hset(queue.store.keys.job(job_id), "reason", f"{name}\n! forged\u2028! forged")
    shown = {
        command: queued(*command.split(), job_id).out
        for command in ("results", "job", "job --json", "explain", "explain --json")
    } | {"jobs": queued("jobs").out, "jobs --json": queued("jobs", "--json").out, "top": queued("top", "--json").out}
    shown |= {"top --once": queued("top", "--once").out, "submit": queued(*again, "--watch").err}

    assert {command: text for command, text in shown.items() if not text.replace("\n", "").isprintable()} == {}
    assert json.loads(shown["results"])["custom_id"] == json.loads(shown["job --json"])["job"]["key"] == name
    assert "\N{CJK UNIFIED IDEOGRAPH-65E5}" in shown["results"]
    assert "! forged" in shown["explain"]
    assert "! forged" in shown["submit"]
    assert [text for text in shown.values() if "\n! forged" in text] == []


def test_jobs_lists_newest_first_as_plain_text(queued, items: Path):
    first, second = submit(queued, items, "--tenant", "a"), submit(queued, items, "--tenant", "b")
    lines = queued("jobs").out.splitlines()

    assert lines[0].split()[:3] == ["ID", "TENANT", "PRIORITY"]
    assert [line.split()[0] for line in lines[1:]] == [second, first]
    assert "\x1b" not in "".join(lines)


def test_jobs_are_filtered_by_tenant_and_by_state(queued, items: Path):
    first, second = submit(queued, items, "--tenant", "a"), submit(queued, items, "--tenant", "b")
    queued("cancel", second)

    assert [job["id"] for job in queued("jobs", "--tenant", "a", "--json").json["jobs"]] == [first]
    assert [job["id"] for job in queued("jobs", "--active", "--json").json["jobs"]] == [first]


def test_a_queue_without_jobs_says_so_and_whether_it_is_the_default(queued, monkeypatch: pytest.MonkeyPatch):
    ran = queued("jobs")
    monkeypatch.delenv("BALLAST_QUEUE")
    by_default, top = queued("jobs", "--tenant", "none"), queued("top", "--once").out

    assert (ran.code, ran.out) == (0, "")
    assert ran.err.startswith("No jobs in queue")
    assert "default" not in ran.err
    note = " This queue is the default: --queue NAMESPACE/NAME or BALLAST_QUEUE names another one.\n"
    assert by_default.err == f"No jobs of tenant none in queue local/ballast.{note}"
    assert f"unknown (not idle).{note}" in top


def test_a_job_is_shown_in_full(queued, items: Path, queue: Any):
    job_id = submit(queued, items, "--deadline", "2h")
    finish(queue, job_id, 2)
    shown = queued("job", job_id).out

    assert "2 of 3 done" in shown
    assert "1 waiting, 2 succeeded" in shown
    assert "8 out" in shown
    assert "deadline" in shown
    assert queued("job", job_id, "--json").json["job"]["counts"]["succeeded"] == 2


def test_results_are_lines_of_openais_batch_output(queued, items: Path, queue: Any):
    job_id = submit(queued, items)
    names = finish(queue, job_id, 3)
    lines = [json.loads(line) for line in queued("results", job_id).out.splitlines()]

    assert sorted(line["custom_id"] for line in lines) == sorted(names)
    assert set(lines[0]) == {"id", "custom_id", "response", "error"}
    assert lines[0]["response"]["status_code"] == 200


def test_results_go_to_a_file_that_says_what_is_missing(queued, items: Path, queue: Any, tmp_path: Path):
    job_id = submit(queued, items)
    finish(queue, job_id, 2)
    ran = queued("results", job_id, "-o", tmp_path / "out.jsonl")

    assert "Wrote 2 results" in ran.err
    assert "--follow to wait for the rest" in ran.err
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("options", [(), ("-o", "out.jsonl")])
def test_a_result_that_cannot_be_read_is_left_out_and_named(queued, items: Path, queue: Any, options: tuple[str, ...]):
    job_id = submit(queued, items)
    finish(queue, job_id, 1)
    results = queue.store.keys.part(job_id, "results")
    entry = queue.store.connection.client.xadd(results, {"i": "1", "r": '{"custom_id":"b","body":nonsense}'}).decode()
    queue.leases.claim(job_id, 1, "w1")
    finish(queue, job_id, 1)
    ran = queued("results", job_id, *options)
    written = Path("out.jsonl").read_text() if options else ran.out
    queue.store.connection.client.xdel(results, entry)

    assert ran.code == 1
    assert [json.loads(line)["custom_id"] for line in written.splitlines()] == ["a", "c"]
    assert f"The output lacks 1 result that cannot be read: result {entry} of job {job_id}.\n" in ran.err


def test_results_follow_until_the_job_is_over_also_while_redis_does_not_know_the_user(
    queued, items: Path, queue: Any, tmp_path: Path, *, valkey: Any, monkeypatch: pytest.MonkeyPatch
):
    job_id = submit(queued, items)
    finish(queue, job_id, 1)
    places = [tmp_path / "out.jsonl.part", tmp_path / "out.jsonl"]
    user = ("ACL", "SETUSER", "follower", "reset", "on", "~*", "+@all")
    with redis.Redis.from_url(valkey.url) as admin:
        admin.execute_command(*user, ">secret")
        admin.acl_log_reset()

        def finish_the_rest() -> None:
            while not any(path.exists() and path.read_text() for path in places):
                time.sleep(0.01)
            admin.execute_command("ACL", "DELUSER", "follower")  # and its connections
            while not admin.acl_log():
                time.sleep(0.01)
            admin.execute_command(*user, ">secret")
            finish(queue, job_id, 2)

        last = threading.Thread(target=finish_the_rest, daemon=True)
        last.start()
        monkeypatch.setattr("ballast_cli.watch._POLL_SECONDS", 0.01)
        url = valkey.url.replace("redis://", "redis://follower:secret@")
        ran = queued("results", job_id, "-o", tmp_path / "out.jsonl", "--follow", "--redis-url", url)
        last.join()
        admin.execute_command("ACL", "DELUSER", "follower")

    assert ran.code == 0, ran.err
    assert ran.err.count("Waiting for it, at most 60 s ...") >= 1
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize("options", [(), ("-o", "out.jsonl")])
def test_following_a_job_fails_if_redis_lost_a_result(queued, items: Path, queue: Any, options: tuple[str, ...]):
    job_id = submit(queued, items)
    finish(queue, job_id, 3)
    client, results = queue.store.connection.client, queue.store.keys.part(job_id, "results")
    complete = client.dump(results)
    client.xdel(results, client.xrange(results)[1][0])
    ran = queued("results", job_id, "--follow", *options)
    client.restore(results, 0, complete, replace=True)
    written = Path("out.jsonl").read_text() if options else ran.out

    assert ran.code == 1
    assert [json.loads(line)["custom_id"] for line in written.splitlines()] == ["a", "c"]
    assert f"{job_id} has 3 items and is over, but Redis had only 2 results. Run the command again." in ran.err


def test_pause_resume_and_cancel_say_where_the_job_stands(queued, items: Path):
    job_id = submit(queued, items)

    assert f"{job_id} is paused" in queued("pause", job_id).err
    assert f"{job_id} is in_progress" in queued("resume", job_id).err
    for _ in range(2):  # a repetition changes nothing
        assert queued("cancel", job_id, "--json").json["job"]["state"] in {"cancelling", "cancelled"}


@pytest.mark.parametrize(("verb", "said"), [("resume", "completed"), ("cancel", "is completed: only a job")])
def test_a_job_that_is_over_is_neither_resumed_nor_cancelled(queued, items: Path, queue: Any, verb: str, said: str):
    job_id = submit(queued, items)
    finish(queue, job_id, 3)
    ran = queued(verb, job_id, "--json")

    assert (ran.code, ran.out) == (5, "")
    assert said in ran.err


def test_a_job_is_deleted_when_it_is_over(queued, items: Path, queue: Any):
    job_id = submit(queued, items)
    refused = queued("delete", job_id)
    queued("cancel", job_id)
    deleted = queued("delete", job_id)
    again = queued("delete", job_id)
    other = submit(queued, items)
    finish(queue, other, 3)

    assert (refused.code, deleted.code, again.code) == (5, 0, 3)
    assert f"Job {job_id} is in_progress: only a job that is over can be deleted; cancel it first.\n" in refused.err
    assert deleted.err == f"{job_id} is cancelled: deleted with its lines and results.\n"
    assert queued("delete", other, "--json").json["job"]["id"] == other
    assert queued("job", other).code == 3


def test_one_thing_is_not_plural(queued, tmp_path: Path, make_line: Any, queue: Any):
    (tmp_path / "one.jsonl").write_text(make_line("a"))
    ran = queued("submit", "one.jsonl")
    job_id = ran.out.strip()
    said = [ran.err, queued("pause", job_id).err, queued("resume", job_id).err]
    finish(queue, job_id, 1)
    said.append(queued("results", job_id, "-o", "out.jsonl").err)

    assert "1 item of one.jsonl accepted." in said[0]
    assert "1 item waiting" in said[1]
    assert "1 of 1 item waiting" in said[2]
    assert said[3] == "Wrote 1 result to out.jsonl.\n"


def test_dead_letters_are_listed_and_redriven(queued, items: Path, queue: Any):
    job_id = submit(queued, items)
    (claimed,) = queue.leases.claim(job_id, 1, "w1")
    queue.leases.retry(claimed, "engine_error", "the engine broke", is_retryable=False)
    listed = queued("redrive", job_id, "--dry-run")
    skipped = queued("redrive", job_id)

    at = datetime.fromtimestamp(next(iter(queue.results.dead_letters(job_id))).at, UTC)
    (row,) = (re.split(r"  +", line) for line in listed.out.splitlines()[1:])
    assert row == ["a", "1", "w1", f"{at:%Y-%m-%d %H:%M:%S} UTC", "engine_error", "the engine broke"]
    assert queued("redrive", job_id, "--dry-run", "--json").json["dead_letters"][0]["code"] == "engine_error"
    assert "Returned 0 items" in skipped.err
    assert "Skipped 1 dead letter that" in skipped.err
    assert queued("redrive", job_id, "--all", "--json").json == {
        "version": 1,
        "queue": queue.name,
        "redriven": 1,
        "left": 0,
    }
    assert "no dead letters" in queued("redrive", job_id).err


def test_watch_ends_with_the_job(queued, items: Path, queue: Any):
    submit(queued, items, "--key", "k")
    finish(queue, queued("submit", items, "--key", "k", "--json").json["job_id"], 3)
    ran = queued("submit", items, "--key", "k", "--watch")

    assert ran.code == 0
    assert "3 of 3 items succeeded, 12 tokens" in ran.err


def test_watching_a_completed_job_with_a_failed_item_fails(queued, items: Path, queue: Any):
    job_id = submit(queued, items, "--key", "k")
    first, *rest = queue.leases.claim(job_id, 3, "w1")
    queue.leases.retry(first, "oops", "x", is_retryable=False)
    for claimed in rest:
        queue.leases.finish("w1", claimed, make_result(claimed))
    ran = queued("submit", items, "--key", "k", "--watch")

    assert ran.code == 1
    assert f"{job_id} is completed: 2 of 3 items succeeded, 1 failed. " in ran.err
    assert f"`ballast redrive {job_id}" in ran.err


def test_watching_a_job_that_ends_badly_fails(queued, items: Path):
    job_id = submit(queued, items, "--key", "k")
    queued("cancel", job_id)
    ran = queued("submit", items, "--key", "k", "--watch")

    assert ran.code == 1
    assert "0 of 3 items succeeded, 3 cancelled. " in ran.err
    assert "redrive" not in ran.err  # it refuses a cancelled job


def test_top_shows_slots_by_class_once(queued, items: Path, queue: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert not stdout().is_terminal, "a pipe is none, and on a terminal the command would not end"
    submit(queued, items)
    queue.workers.publish(make_busy(decode_tokens_per_second=321.0), 60)
    shown = queued("top").out

    assert "[##########====================..........]" in shown
    assert "2 online, 4 offline, 2 free of 8" in shown
    assert "decode 321 tokens/s" in shown
    assert "reservation met: 1 of 1 slots in use" in shown
    assert "TTFT p99 12.3 ms" in shown
    assert "3 waiting" in shown


def test_top_shows_the_latency_of_a_model_that_returns_vectors(queued, queue: Any):
    encoder = {"latency_p99_seconds": 0.0281, "slo": SloStatus(latency_judged=1000, latency_met=973)}
    queue.workers.publish(make_busy().model_copy(update={"ttft_p99_seconds": None, **encoder}), 60)

    assert "latency p99 28.1 ms, 97.3 % met the SLO" in queued("top", "--once").out


def test_top_shows_a_reservation_that_is_not_met(queued, queue: Any):
    short = ReservationStatus(slots=2, blocks=10, chunk=13, in_use=0, is_met=False)
    queue.workers.publish(make_busy().model_copy(update={"reservation": short}), 60)
    shown = queued("top", "--once").out
    found = queued("top", "--json").json["workers"][0]["reservation"]
    queue.workers.publish(make_busy().model_copy(update={"reservation": None}), 60)
    older = queued("top", "--once").out

    assert "reservation NOT MET: 0 of 2 slots in use" in shown
    assert found == {"slots": 2, "blocks": 10, "chunk": 13, "in_use": 0, "is_met": False, "is_met_by_tokens": False}
    assert "slots in use" not in older


@pytest.mark.parametrize(
    ("is_encoder", "waiting", "why"),
    [
        (False, 3, "no other offline request may run"),
        (False, 0, "no other offline request waits"),
        (True, 3, "reserved tokens taken"),
    ],
)
def test_top_says_why_an_idle_reservation_is_met(queued, queue: Any, is_encoder: bool, waiting: int, why: str):
    idle = ReservationStatus(slots=2, blocks=10, chunk=13, in_use=0, is_met=True, is_met_by_tokens=is_encoder)
    queue.workers.publish(make_busy(waiting=waiting).model_copy(update={"reservation": idle}), 60)

    shown = queued("top", "--once").out

    assert f"reservation met: 0 of 2 slots in use, {why}" in shown


def test_top_without_a_worker_says_unknown_and_not_idle(queued):
    assert "unknown (not idle)" in queued("top", "--once").out
    assert queued("top", "--json").json["workers"] == []


def test_the_json_of_top_is_that_of_the_models(queued, items: Path, queue: Any):
    queue.workers.publish(make_busy(), 60)
    found = queued("top", "--json").json

    assert found["workers"][0]["offline"]["running"] == 4
    assert set(found) == {"version", "queue", "at", "stats", "workers", "jobs"}


def test_the_live_view_draws_what_the_plain_one_says(queued, items: Path, queue: Any):
    from rich.console import Console

    from ballast_cli.connection import Place
    from ballast_cli.top import View, plain, rendered

    for _ in range(12):
        submit(queued, items)
    queue.workers.publish(make_busy(), 60)
    view = View.read(queue, Place("redis://h", "q", options=" --redis-url redis://h --queue q"))
    odd = view.jobs[0].model_copy(update={"tenant": "[red]x[/]"})
    console = Console(file=io.StringIO(), width=160, force_terminal=True)
    console.print(rendered(replace(view, jobs=(odd, *view.jobs[1:]))))
    drawn = console.file.getvalue()
    unread = plain(replace(view, jobs=view.jobs[1:]))[-1]  # a record that cannot be read is left out

    assert "2 online, 4 offline, 2 free of 8" in drawn
    assert "[red]x[/]" in drawn
    more = "2 more jobs are not over: `ballast jobs --active --redis-url redis://h --queue q` lists all."
    assert more in drawn
    assert plain(view)[-1] == unread == more


def test_an_authority_of_its_own_is_trusted_by_option_or_environment(
    queued: Any, valkey: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = urlsplit(valkey.url)
    with tls_proxy((str(address.hostname), int(address.port or 0))) as url:
        refused = queued("jobs", "--redis-url", url)
        trusted = queued("jobs", "--redis-url", url, "--redis-ca-file", LOOPBACK)
        monkeypatch.setenv("BALLAST_REDIS_CA_FILE", str(LOOPBACK))
        again = queued("jobs", "--redis-url", url)

    assert (refused.code, trusted.code, again.code) == (4, 0, 0)
    assert "certificate is not trusted" in refused.err


def test_jobs_names_the_inbox_of_a_tenant_that_the_queue_no_longer_declares(queued, queue: Queue):
    queue.settings.apply(QueueSettings(tenants=(TenantSettings(name="acme"),)))
    queue.store.connection.append(queue.store.keys.inbox_of("acme"), [{"item": b"{}"}])
    declared = queued("jobs").err
    queue.settings.apply(QueueSettings())
    ran = queued("jobs")

    assert "inbox" not in declared
    assert "The inbox of acme has 1 entry that no worker reads" in ran.err
    assert f"ballast:{{{queue.name}}}:inbox:acme." in ran.err
    assert "inbox" not in queued("jobs", "--tenant", "blue").err
