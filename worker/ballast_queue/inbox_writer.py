"""Submit a job through the inbox of a queue, with a user of Redis that may add entries and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Self

from ballast_queue.batch_lines import take
from ballast_queue.connection import Connection
from ballast_queue.errors import CommandForbidden, EmptyJob, QueueError, QueueUnavailable
from ballast_queue.keys import Keys
from ballast_queue.settings import check_name
from ballast_queue.submissions import Terms, check_deadline, job_of_tenant, new_job_id

Entry = dict[str, bytes | str]
MOST_ENTRY_BYTES = 64 * 1024 * 1024
"""Bytes of the longest line. A longer one is cut, and a queue refuses it by its length."""


class InboxWriter:
    """The inbox of a queue, for a submitter. Workers validate the entries when they read them."""

    def __init__(self, connection: Connection, queue: str) -> None:
        self._connection = connection
        self._keys = Keys(queue)

    @classmethod
    def connect(cls, url: str, queue: str, *, password: str | None = None, ca: str | None = None) -> Self:
        """Connect without a check of the functions, which a submitter may not call."""
        connection = Connection.open(url, password=password, socket_timeout=5.0, checks_functions=False, ca=ca)
        return cls(connection, queue)

    def close(self) -> None:
        """Close the sockets."""
        self._connection.close()

    def submit(self, lines: Iterable[bytes], terms: Terms, *, on_progress: Callable[[int], None]) -> tuple[str, int]:
        """Add a job. Return its id, and the number of its entries.

        The entries go to the inbox of the tenant if the user may write to it, otherwise to the inbox for all. A call
        that fails leaves an open job with the entries added so far: the job completes only after its last entry. A note
        of the error names the job, and states if it may be complete.

        Raises:
            InvalidJob: tenant or deadline is wrong.
            EmptyJob: every line is blank.
            CommandForbidden: the user may write to neither inbox.
        """
        tenant, deadline = check_name("tenant", terms.tenant), check_deadline(terms.deadline)
        job_id, name = "", new_job_id()
        job: Entry = {"job": name, "tenant": tenant, "priority": str(terms.priority)}
        job |= {} if deadline is None else {"deadline": repr(deadline)}
        inbox, num_entries, is_begun, is_last = self._keys.inbox_of(tenant), 0, False, False
        try:
            for chunk in _chunks(lines):
                entries = [job | {"item": line} for line in chunk]
                if not is_begun:
                    self._connection.log_in()  # so that no job may exist if there is no connection
                    job_id, first = job_of_tenant(name, tenant), [entries.pop(0)]
                    try:
                        self._connection.append(inbox, first)
                    except CommandForbidden:
                        job_id, inbox = name, self._keys.inbox
                        self._connection.append(inbox, first)
                    is_begun = True
                self._connection.append(inbox, entries)
                num_entries += len(chunk)
                on_progress(num_entries)
            if not num_entries:
                raise EmptyJob("found no line, expected at least one request in OpenAI's batch format")
            is_last = True
            self._connection.append(inbox, [job | {"end": "1", "lines": str(num_entries)}])
        except (QueueError, KeyboardInterrupt) as error:
            # Without a reply, the entry may have come all the same.
            is_unknown = isinstance(error, QueueUnavailable | KeyboardInterrupt)
            if is_last and is_unknown:
                error.add_note(f"job {job_id} may be complete: look at it as a worker's user before you submit again")
            elif is_begun or (is_unknown and job_id):
                may_exist = "" if is_begun else "may exist, and "
                error.add_note(
                    f"job {job_id} {may_exist}is not complete: cancel it as a worker's user, and submit again"
                )
            raise
        return job_id, num_entries


def _chunks(lines: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Yield the lines that are not blank, in chunks of limited size."""
    written = (line for raw in lines if (line := raw.strip()))
    return iter(lambda: take(written), [])
