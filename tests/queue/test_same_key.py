"""A key names one job with one list of lines, whoever submits it, and whenever a submitter dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from hashlib import sha256
from itertools import chain
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ballast_queue.batch_lines import CHUNK_LINES, read_lines
from ballast_queue.errors import JobNotFound, JobStateConflict, OtherLines, QueueUnavailable
from ballast_queue.job import Claimed, JobState
from ballast_queue.line_digest import LineDigest
from ballast_queue.redis_store import Queue
from ballast_queue.settings import QueueSettings
from ballast_queue.submissions import Submissions

MANY = 3 * CHUNK_LINES - 100


class Died(Exception):
    """The end of a submitter in the middle of a file."""


def make_line(number: int, prompt: str = "p") -> bytes:
    body = {"model": "m", "prompt": prompt}
    return json.dumps({"custom_id": f"r{number}", "url": "/v1/completions", "body": body}).encode()


def make_lines(num: int, **others: str) -> list[bytes]:
    """Lines 0 to `num` - 1. `r7="x"` changes the prompt of line 7."""
    return [make_line(number, others.get(f"r{number}", "p")) for number in range(num)]


def dying(lines: list[bytes]) -> Iterator[bytes]:
    yield from lines
    raise Died


def interrupt(queue: Queue, lines: list[bytes], key: str = "k") -> str:
    """Submit lines without an end. Return the id of the job."""
    with pytest.raises(Died):
        queue.submissions.submit(dying(lines), key=key)
    return queue.jobs.ids()[-1]


def drain(queue: Queue, job_id: str) -> list[Claimed]:
    """Claim all items."""
    pages = iter(lambda: queue.leases.claim(job_id, 500, "w1"), [])
    return list(chain.from_iterable(pages))


def prompts(queue: Queue, job_id: str) -> list[str]:
    """Return the prompts of all items."""
    return [item.body["prompt"] for item in drain(queue, job_id)]


@pytest.mark.parametrize(
    ("other", "num_found", "found"),
    [
        ([*make_lines(3, r1="other"), b"{"], 4, "other lines"),
        ([*reversed(make_lines(3)), b"{"], 4, "other lines"),
        (make_lines(2), 2, "2 lines"),
        (make_lines(5), 5, "5 lines"),
        ([*make_lines(3), b"["], 4, "other lines"),
    ],
    ids=["one prompt", "another order", "lines less", "a line more", "another wrong line"],
)
def test_the_key_of_a_job_with_other_lines_is_refused(queue: Queue, other: list[bytes], num_found: int, found: str):
    job_id = queue.submissions.submit([*make_lines(3), b"{"], key="k").job_id
    expected = f"^key 'k': found {found}, expected the 4 of {job_id}, which has this key: use another key for other"
    with pytest.raises(OtherLines, match=expected) as caught:
        queue.submissions.submit(other, key="k")

    assert (caught.value.job_id, caught.value.num_kept, caught.value.num_found) == (job_id, 4, num_found)
    assert prompts(queue, job_id) == ["p"] * 3


@pytest.mark.parametrize(
    "again",
    [
        lambda lines: [b"", *lines, b"  ", b"\n"],
        lambda lines: [line + b"\r\n" for line in lines],
        lambda lines: [b"\xef\xbb\xbf" + lines[0], *lines[1:]],
        lambda lines: [line.decode() for line in lines],
    ],
    ids=["blank lines", "ends of lines", "a byte order mark", "text"],
)
def test_blank_lines_and_the_ends_of_lines_make_no_other_lines(queue: Queue, again: Callable[..., Any]):
    lines = [*make_lines(3), b"{"]
    first = queue.submissions.submit(lines, key="k")
    second = queue.submissions.submit(again(lines), key="k")

    assert (second.job_id, second.accepted, second.rejected) == (first.job_id, 3, 1)


def test_an_edited_line_that_the_job_has_ends_a_continued_submission(queue: Queue):
    job_id = interrupt(queue, make_lines(MANY)[:1100])
    with pytest.raises(OtherLines):
        queue.submissions.submit(make_lines(MANY, r999="other"), key="k")
    half = queue.jobs.get(job_id)
    claimable = [head.waiting for head in queue.claimable.heads()]
    # The job does not have this line yet, so the edited file is the file.
    edited = queue.submissions.submit(make_lines(MANY, r1000="other"), key="k")

    assert (half.state, half.counts.total, claimable) == (JobState.VALIDATING, 1000, [1000])
    assert (edited.job_id, edited.accepted) == (job_id, MANY)
    assert prompts(queue, job_id).count("other") == 1


def test_fewer_lines_than_the_job_has_do_not_close_it(queue: Queue):
    job_id = interrupt(queue, make_lines(1100))
    with pytest.raises(OtherLines) as caught:
        queue.submissions.submit(make_lines(900), key="k")

    assert (caught.value.num_kept, caught.value.num_found) == (1000, 900)
    assert queue.jobs.get(job_id).state is JobState.VALIDATING


def test_blank_lines_at_the_end_do_not_keep_a_job_open(queue: Queue):
    job_id = interrupt(queue, [*make_lines(400), *[b""] * 200])
    again = queue.submissions.submit(make_lines(400), key="k")

    assert (again.job_id, again.accepted) == (job_id, 400)
    assert queue.jobs.get(job_id).state is JobState.IN_PROGRESS


@pytest.mark.parametrize("number", [300, 600], ids=["before its first line", "behind its first lines"])
@pytest.mark.parametrize("ends", [True, False], ids=["a whole submission", "one that died"])
def test_two_submitters_of_two_files_with_one_key_make_a_job_of_one_file(queue: Queue, ends: bool, number: int):
    mine, theirs = make_lines(MANY), make_lines(MANY, **{f"r{other}": "other" for other in range(700, MANY)})

    def overtaken() -> Iterator[bytes]:
        yield from mine[:number]
        if ends:
            queue.submissions.submit(theirs, key="k")
        else:
            interrupt(queue, theirs[:1100])
        yield from mine[number:]

    with pytest.raises(OtherLines):
        queue.submissions.submit(overtaken(), key="k")
    (job_id,) = queue.jobs.ids()

    assert prompts(queue, job_id) == ["p"] * 700 + ["other"] * ((MANY if ends else 1000) - 700)


@pytest.mark.parametrize("ends", [True, False], ids=["a whole submission", "one that died"])
def test_two_submitters_of_one_file_with_one_key_store_each_line_once(queue: Queue, ends: bool):
    lines = make_lines(MANY)

    def overtaken() -> Iterator[bytes]:
        yield from lines[:700]
        if ends:
            queue.submissions.submit(lines, key="k")
        else:
            interrupt(queue, lines[:1200])
        yield from lines[700:]

    submission = queue.submissions.submit(overtaken(), key="k")

    assert (submission.accepted, submission.rejected) == (MANY, 0)


@pytest.mark.parametrize("ahead", [7, CHUNK_LINES - 1, CHUNK_LINES, CHUNK_LINES + 1])
def test_a_submitter_that_is_overtaken_at_each_chunk_reads_each_line_once(queue: Queue, ahead: int):
    lines = make_lines(MANY)

    class Overtaken:
        """The store of a submitter, before each of whose calls another one adds lines."""

        def __getattr__(self, name: str) -> Any:
            return getattr(queue.store, name)

        def call(self, call: Any) -> Any:
            if call[0] == "append" and (found := queue.jobs.ids()):
                before = queue.jobs.get(found[0]).counts.total
                then, digest = min(before + ahead, MANY - 1), LineDigest()
                digest.add(lines[:then])
                added, key = read_lines(lines[before:then], QueueSettings())
                terms: Any = {"digest": digest.text(), "prefix_key": key, "closes": False}
                queue.store.call(queue.store.functions.append(found[0], before, added, **terms))
            return queue.store.call(call)

    submissions = Submissions(Overtaken(), queue.settings)  # type: ignore[arg-type]
    done = submissions.submit(lines, key="k")
    claimed = drain(queue, done.job_id)

    assert (done.accepted, done.rejected) == (MANY, 0)
    assert [item.custom_id for item in claimed] == [f"r{number}" for number in range(MANY)]


def test_the_key_of_a_cancelled_job_names_it_for_the_lines_that_it_had(queue: Queue):
    job_id = interrupt(queue, make_lines(1100))
    queue.jobs.cancel(job_id)
    again = queue.submissions.submit(make_lines(MANY), key="k")
    with pytest.raises(OtherLines):
        queue.submissions.submit(make_lines(MANY, r0="other"), key="k")

    assert (again.job_id, again.was_closed, again.accepted) == (job_id, True, 1000)


def test_a_job_that_is_cancelled_while_other_lines_come_names_its_state(queue: Queue):
    def cancelled() -> Iterator[bytes]:
        for number, raw in enumerate(make_lines(MANY)):
            if number == 600:
                queue.jobs.cancel(queue.jobs.ids()[0])
            yield raw

    with pytest.raises(JobStateConflict, match="became cancelled while its lines arrived") as caught:
        queue.submissions.submit(cancelled(), key="k")

    assert not hasattr(caught.value, "__notes__"), "the same key takes no more lines"


def older_submission(queue: Queue, job_id: str, before: int, lines: list[bytes], *, closes: bool) -> list[Any]:
    """Store lines with the call of a version that knows no digest."""
    arguments: list[Any] = [job_id, "submit", before, int(closes), 0]
    for raw in lines:
        name = json.loads(raw)["custom_id"]
        arguments += ["a", "", name, json.dumps(name), raw, ""]
    return queue.store.connection.call("store", queue.store.keys.of_job(job_id), arguments)


def test_a_job_of_an_older_version_is_compared_by_its_number_of_lines(queue: Queue):
    keys = queue.store.keys
    opened = queue.store.connection.call("open", keys.of_job("j"), ("j", "default", 0, 0, "k", "submit", 1))
    older_submission(queue, "j", 0, make_lines(3), closes=False)
    with pytest.raises(OtherLines):
        queue.submissions.submit(make_lines(2), key="k")
    resumed = queue.submissions.submit(make_lines(4), key="k")
    again = queue.submissions.submit(make_lines(4, r0="other"), key="k")
    with pytest.raises(OtherLines):
        queue.submissions.submit(make_lines(5), key="k")

    assert len(opened) == 7, "an older version reads seven values"
    assert (resumed.job_id, resumed.accepted, again.job_id, again.accepted) == ("j", 4, "j", 4)


def test_lines_that_an_older_version_adds_make_the_digest_unknown(queue: Queue):
    job_id = interrupt(queue, make_lines(1100))
    status, *_ = older_submission(queue, job_id, 1000, make_lines(1010)[1000:], closes=False)
    resumed = queue.submissions.submit(make_lines(MANY, r0="other"), key="k")

    assert status == b"ok"
    assert (resumed.job_id, resumed.accepted) == (job_id, MANY)


@pytest.mark.parametrize("text", ["", "3", "3 xyz", "3 " + "0" * 10_000, "x" * 10, "9" * 400 + " 00"])
def test_an_invalid_digest_counts_as_unknown(queue: Queue, desk: Any, text: str):
    job_id = queue.submissions.submit(make_lines(3), key="k").job_id
    desk.raw.hset(queue.store.keys.job(job_id), "digest", text)
    again = queue.submissions.submit(make_lines(3, r0="other"), key="k")

    assert again.job_id == job_id


def test_versions_agree_on_the_digest_of_the_same_lines():
    digest = LineDigest()
    digest.add([b"a", b"", b" b\r\n"])

    assert digest.text() == sha256(b"a\nb\n").hexdigest()


class Dying:
    """The store of a submitter that dies at one of its calls: before the server runs it, or before the reply comes."""

    def __init__(self, queue: Queue, lives: int, *, runs_last: bool) -> None:
        self._store, self._lives, self._runs_last = queue.store, lives, runs_last

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def call(self, call: Any) -> Any:
        self._lives -= 1
        if self._lives >= 0:
            return self._store.call(call)
        if self._runs_last:
            self._store.call(call)
        raise QueueUnavailable("died")


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    deaths=st.lists(st.tuples(st.integers(0, 7), st.booleans()), max_size=3),
    num=st.sampled_from([1, CHUNK_LINES - 1, CHUNK_LINES, CHUNK_LINES + 1, MANY]),
)
def test_whatever_call_a_submitter_dies_at_its_key_continues_the_job(
    queue: Queue, deaths: list[tuple[int, bool]], num: int
):
    lines, key = make_lines(num), uuid4().hex
    for lives, runs_last in deaths:
        store = Dying(queue, lives, runs_last=runs_last)
        submissions = Submissions(store, queue.settings)  # type: ignore[arg-type]
        try:
            submissions.submit(lines, key=key)
        except QueueUnavailable:
            continue
    last = queue.submissions.submit(lines, key=key)
    with pytest.raises(OtherLines):
        queue.submissions.submit([*lines[:-1], make_line(num - 1, "other")], key=key)
    job = queue.jobs.get(last.job_id)
    claimed = drain(queue, job.id)

    assert (last.accepted, last.rejected, job.state) == (num, 0, JobState.IN_PROGRESS)
    assert [item.custom_id for item in claimed] == [f"r{number}" for number in range(num)]


def submit_for_ever(url: str, name: str, key: str) -> None:
    """Submit the same lines again and again. Print a line whenever the server has stored some, and after each end."""
    queue = Queue.connect(url, name)

    def told(_: int) -> None:
        sys.stdout.write(".\n")
        sys.stdout.flush()

    while True:
        queue.submissions.submit(make_lines(MANY), key=key, on_progress=told)


@pytest.mark.parametrize("num_signs", range(4))
def test_a_submitter_that_is_killed_loses_and_doubles_no_line(queue: Queue, desk: Any, valkey: Any, num_signs: int):
    for _ in range(2):
        command = [sys.executable, __file__, valkey.url, queue.name, "k"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            for _ in range(num_signs + 1):
                assert child.stdout.readline() == ".\n", "the child failed by itself"
            os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(OtherLines):
        queue.submissions.submit(make_lines(MANY, r0="other"), key="k")
    last = queue.submissions.submit(make_lines(MANY), key="k")
    claimed = drain(queue, last.job_id)

    assert queue.jobs.ids() == [last.job_id]
    assert [item.custom_id for item in claimed] == [f"r{number}" for number in range(MANY)]
    assert desk.differences() == []


def test_a_submitter_whose_calls_run_twice_stores_each_line_once(queue):
    lines = make_lines(MANY)
    done = queue.submissions.submit(iter(lines), key="k", attempt=lambda call: (call(), call())[1])

    assert (done.accepted, done.is_new, done.was_closed) == (MANY, True, False)
    assert [item.custom_id for item in drain(queue, done.job_id)] == [f"r{number}" for number in range(MANY)]


def test_a_submitter_whose_job_is_deleted_does_not_hear_that_it_keeps_lines(queue):
    def deleted(call):
        for job_id in queue.jobs.ids():
            queue.jobs.cancel(job_id)
            queue.jobs.delete(job_id)
        return call()

    with pytest.raises(JobNotFound) as caught:
        queue.submissions.submit(make_lines(1), key="k", attempt=deleted)

    assert not hasattr(caught.value, "__notes__")


if __name__ == "__main__":
    submit_for_ever(*sys.argv[1:])
