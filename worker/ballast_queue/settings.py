"""What a queue is told about itself: which tenants and models it takes, and how patient it is.

Workers write it from their configuration; of two versions the newer resource wins, then the newer generation.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from ballast_queue.errors import InvalidJob, UnknownTenant

Name = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[A-Za-z0-9]([A-Za-z0-9._/-]*[A-Za-z0-9])?$")]
"""A name that is safe in keys and metric labels."""
MIN_PRIORITY = -1000
MAX_PRIORITY = 1000


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class TenantSettings(_Settings):
    """A tenant as the queue sees it."""

    name: Name
    weight: float = Field(default=1, gt=0)
    max_priority: int = Field(default=100, ge=MIN_PRIORITY, le=MAX_PRIORITY)
    """Jobs above it are taken down to it."""


class QueueSettings(_Settings):
    """Settings of one queue, in force for submitters and workers alike."""

    version: int = 1
    created: float = 0
    """When the resource they come from was created, Unix seconds."""
    generation: int = 0
    tenants: tuple[TenantSettings, ...] = ()
    """Empty: any tenant, any priority."""
    models: tuple[str, ...] = ()
    """Empty: items are not checked for their model."""
    max_attempts: int = Field(default=5, ge=1)
    lease_seconds: float = Field(default=30, gt=0)
    """How long a worker that fell silent keeps an item."""
    results_seconds: float = Field(default=7 * 86400, gt=0)
    """How long the results of a job that is over are kept."""
    backoff_seconds: float = Field(default=1, ge=0)
    """Wait before the second attempt; doubles with every further one."""
    backoff_max_seconds: float = Field(default=60, ge=0)
    max_line_bytes: int = Field(default=4 * 1024 * 1024, ge=1)

    def priority_of(self, tenant: str, priority: int) -> int:
        """Give the priority that a job of `tenant` gets when it asks for `priority`.

        Raises:
            UnknownTenant: the queue declares its tenants, and this is none of them.
            InvalidJob: the priority is out of range.
        """
        if not MIN_PRIORITY <= priority <= MAX_PRIORITY:
            raise InvalidJob(f"priority: found {priority}, wanted {MIN_PRIORITY} to {MAX_PRIORITY}")
        if not self.tenants:
            return priority
        for known in self.tenants:
            if known.name == tenant:
                return min(priority, known.max_priority)
        names = ", ".join(known.name for known in self.tenants[:20])
        raise UnknownTenant(f"tenant: found {tenant!r}, wanted one that this queue declares: {names}")
