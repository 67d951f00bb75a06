"""A submitter adds a job to an inbox entry by entry, and may not read anything back."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from tls import LOOPBACK, tls_proxy

from ballast_queue.batch_lines import CHUNK_BYTES, CHUNK_LINES
from ballast_queue.errors import CommandForbidden, EmptyJob, InvalidJob, QueueForbidden, QueueUnavailable
from ballast_queue.inbox_writer import InboxWriter
from ballast_queue.keys import Keys
from ballast_queue.rights import submitter_rules
from ballast_queue.submissions import Terms

OF_ALL, OF_TENANT = Keys("a/b").inbox, Keys("a/b").inbox_of("acme")


class Inboxes:
    """Remembers what is added. Some calls fail, by their number."""

    def __init__(self, failures: Mapping[int, BaseException] | None = None) -> None:
        self.failures = failures or {}
        self.calls: list[tuple[bytes, Sequence[Mapping[str, bytes | str]]]] = []

    def log_in(self) -> None:
        """Accept the user. A connection that breaks later fails in `append`."""

    def append(self, key: bytes, entries: Sequence[Mapping[str, bytes | str]]) -> None:
        self.calls.append((key, entries))
        if failure := self.failures.get(len(self.calls)):
            raise failure


def submit(inboxes: Any, lines: Sequence[bytes], **terms: Any) -> tuple[str, list[int]]:
    """Return the id of the job, and what was reported."""
    reported: list[int] = []
    job_id, number = InboxWriter(inboxes, "a/b").submit(lines, Terms("acme", **terms), on_progress=reported.append)
    assert reported[-1] == number
    return job_id, reported


def test_each_line_is_an_entry_with_the_terms_and_the_last_entry_ends_the_job(
    queue: Any, desk: Any, user: Any, valkey: Any
) -> None:
    name, password = user(*submitter_rules(queue.name, "acme"))
    host, port = valkey.url.removeprefix("redis://").split(":")
    with tls_proxy((host, int(port))) as address:
        writer = InboxWriter.connect(
            address.replace("//", f"//{name}@"), queue.name, password=password, ca=LOOPBACK.read_text()
        )
        job_id, number = writer.submit([b" 1\n", b"\n", b"2"], Terms("acme", 3, 9.5e9), on_progress=lambda _: None)
        writer.close()

    terms = {
        b"job": job_id.removesuffix("@acme").encode(),
        b"tenant": b"acme",
        b"priority": b"3",
        b"deadline": b"9500000000.0",
    }
    added = [entry for _, entry in desk.raw.xrange(queue.store.keys.inbox_of("acme"))]
    assert added == [terms | {b"item": b"1"}, terms | {b"item": b"2"}, terms | {b"end": b"1", b"lines": b"2"}]
    assert number == 2


@pytest.mark.parametrize(
    ("sizes", "chunks"),
    [
        ([1] * (2 * CHUNK_LINES + 1), [CHUNK_LINES, CHUNK_LINES, 1]),
        ([CHUNK_BYTES // 2, CHUNK_BYTES // 2 - 1, 1] * 2 + [1], [3, 3, 1]),
    ],
    ids=["lines", "bytes"],
)
def test_a_chunk_ends_with_the_line_that_reaches_a_limit(sizes: list[int], chunks: list[int]) -> None:
    inboxes = Inboxes()
    _, reported = submit(inboxes, [b"x" * size for size in sizes])

    assert reported == [sum(chunks[: end + 1]) for end in range(len(chunks))]
    assert [len(entries) for _, entries in inboxes.calls] == [1, chunks[0] - 1, *chunks[1:], 1]


def test_a_job_without_a_deadline_goes_to_the_inbox_for_all_if_that_of_the_tenant_is_closed() -> None:
    inboxes = Inboxes({1: CommandForbidden()})
    job_id, _ = submit(inboxes, [b"1", b"2"])

    entries = [(key, list(map(dict, added))) for key, added in inboxes.calls]
    job = {"job": job_id, "tenant": "acme", "priority": "0"}
    assert entries == [
        (OF_TENANT, [job | {"item": b"1"}]),
        (OF_ALL, [job | {"item": b"1"}]),
        (OF_ALL, [job | {"item": b"2"}]),
        (OF_ALL, [job | {"end": "1", "lines": "2"}]),
    ]


@pytest.mark.parametrize(
    ("lines", "terms", "kind"),
    [
        ([b" \n", b""], {}, EmptyJob),
        ([b"1"], {"deadline": -1.0}, InvalidJob),
    ],
    ids=["no line", "a wrong deadline"],
)
def test_a_job_that_no_worker_would_take_adds_nothing(lines: list[bytes], terms: Any, kind: type[InvalidJob]) -> None:
    inboxes = Inboxes()
    with pytest.raises(kind, match="found"):
        submit(inboxes, lines, **terms)

    assert inboxes.calls == []


@pytest.mark.parametrize("kind", [QueueUnavailable, QueueForbidden, CommandForbidden, KeyboardInterrupt])
@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_failure_names_the_job_that_it_leaves_open(kind: type[BaseException], call: int) -> None:
    inboxes = Inboxes({call: kind()} | ({2: kind()} if kind is CommandForbidden else {}))
    with pytest.raises(kind) as caught:
        submit(inboxes, [b"1", b"2"])

    job_id = f"{inboxes.calls[0][1][0]['job']}@acme"
    has_no_reply = kind in {QueueUnavailable, KeyboardInterrupt}
    is_unknown = call == 3 and has_no_reply  # the last entry may have come
    state = "may be complete: look at it as a worker's user before you submit again"
    if not is_unknown:
        may_exist = "may exist, and " if call == 1 else ""
        state = f"{may_exist}is not complete: cancel it as a worker's user, and submit again"
    notes = [f"job {job_id} {state}"] if call > 1 or has_no_reply else []
    assert getattr(caught.value, "__notes__", []) == notes


def test_a_server_that_is_down_has_no_job() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    writer = InboxWriter.connect(f"redis://127.0.0.1:{port}", "a/b")
    with pytest.raises(QueueUnavailable) as caught:
        writer.submit([b"1"], Terms("acme"), on_progress=lambda _: None)

    assert getattr(caught.value, "__notes__", []) == []
