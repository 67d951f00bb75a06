"""What every part of the queue shares: the connection, the keys, the calls and the settings in force."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from ballast_queue.connection import Call, Connection
from ballast_queue.errors import JobNotFound, QueueError
from ballast_queue.functions import Functions
from ballast_queue.job import Job
from ballast_queue.keys import Keys
from ballast_queue.record import job_of, parse_record
from ballast_queue.settings import QueueSettings

READ_JOBS = 200
"""Records read in one call."""


class Store:
    """One queue on one connection."""

    def __init__(self, connection: Connection, name: str) -> None:
        self.name = name
        self._connection = connection
        self._keys = Keys(name)
        self._functions = Functions(self._keys)

    def _run(self, call: Call) -> Any:
        return self._connection.call(*call)

    def settings(self) -> QueueSettings:
        """Give the settings in force; the defaults where no worker has configured the queue yet."""
        text = self._connection.hash_field(self._keys.settings, "json")
        if text is None:
            return QueueSettings()
        try:
            return QueueSettings.model_validate_json(text)
        except ValidationError as error:
            raise QueueError(
                f"found settings of queue {self.name!r} that this version cannot read ({error}): use the version of "
                "Ballast that the workers run"
            ) from error

    def _records(self, job_ids: list[str]) -> list[dict[str, str]]:
        """Records of those jobs that are there."""
        records = []
        for start in range(0, len(job_ids), READ_JOBS):
            replies = self._run(self._functions.read(job_ids[start : start + READ_JOBS]))
            records += [record for record in map(parse_record, replies) if record is not None]
        return records

    def _job_ids(self, first: int = 0) -> list[str]:
        return [job_id.decode() for job_id in self._connection.members(self._keys.jobs, first, -1)]

    def job(self, job_id: str) -> Job:
        """Give one job.

        Raises:
            JobNotFound: there is none with this id.
        """
        records = self._records([job_id])
        if not records:
            raise JobNotFound(job_id, self.name)
        return job_of(records[0])
