"""The results of a job, and its dead letters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from operator import call

from ballast_queue.job import DeadLetter, Result
from ballast_queue.jobs import Jobs
from ballast_queue.records import readable
from ballast_queue.store import Attempt, Store
from ballast_queue.unreadable import text_of

PAGE = 1000
"""Results read in one call, unless they are long."""


@dataclass(frozen=True, slots=True)
class Results:
    """The results of jobs. Each custom_id has at most one visible result."""

    _store: Store
    _jobs: Jobs

    def read(
        self, job_id: str, *, follow: bool = False, poll_seconds: float = 1.0, attempt: Attempt = call
    ) -> Iterator[Result]:
        """Yield the results in the order of completion. With `follow`, continue until the job is over.

        A redrive removes the error results of the items that it puts back. A reader that has seen them also gets the
        items' new results. After a redrive, and after a failover that lost results, it gets some results again.
        `attempt` makes each call after the first one. A result that cannot be read is skipped and named in
        `Unreadable.places`.

        Raises:
            JobNotFound: there is no such job, or it was deleted during the call.
        """
        # A redrive removes the last entry that was seen only if it is an error.
        key, seen, succeeded = self._store.keys.part(job_id, "results"), b"0", b"0"
        self._jobs.get(job_id)
        while True:
            # Read the state first: a job that is over at this point has all results of its items. Only a line that
            # comes later adds one, its refusal, which no reader waits for.
            is_over = follow and attempt(partial(self._jobs.get, job_id)).state.is_over
            while page := attempt(
                partial(self._store.call, self._store.functions.results(job_id, seen, PAGE, succeeded))
            ):
                seen = page[-2]
                for entry, text in zip(page[::2], page[1::2], strict=True):
                    place = f"result {text_of(entry)} of job {job_id}"
                    result = self._store.unreadable.try_read(place, partial(Result.model_validate_json, text))
                    if result is not None:
                        succeeded = entry if result.error is None else succeeded
                        yield result
            if not follow or is_over:
                # The last page of a job that was deleted meanwhile is empty, too, and a redrive or a failover may have
                # removed the end of the results.
                is_over = attempt(partial(self._jobs.get, job_id)).state.is_over
                if not follow or is_over:
                    return
            attempt(partial(self._store.connection.wait_for_entry, key, seen, poll_seconds))

    def dead_letters(self, job_id: str) -> Iterator[DeadLetter]:
        """Yield the dead letters of a job."""
        key = self._store.keys.part(self._jobs.get(job_id).id, "dead")
        for _, letter in self._store.connection.hash_pairs(key):
            yield _letter(letter)


@readable("a dead letter")
def _letter(stored: bytes) -> DeadLetter:
    return DeadLetter.model_validate_json(stored.split(b"\n", 3)[3])
