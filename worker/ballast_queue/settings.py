"""Settings of a queue: its tenants, its models, its attempts and its time limits.

Workers write them from their configuration. If several resources share a queue, the resource that the queue is named
after has its settings in force, then one of its namespace, then the oldest. Settings that are not
renewed for some minutes give way. So do those of a newer generation of the same resource that no worker applies.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from ballast_openai.errors import describe
from ballast_openai.item_body import ITEM_URLS
from ballast_queue.errors import InvalidJob, UnknownTenant

Name = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[A-Za-z0-9]([A-Za-z0-9._/-]*[A-Za-z0-9])?$")]
"""A name that is safe in keys and metric labels."""
_NAME = TypeAdapter(Name)
MIN_PRIORITY = -1000
MAX_PRIORITY = 1000


def check_name(what: str, name: str) -> str:
    """Return the name of a tenant or a queue, or raise `InvalidJob` if it is unsafe in keys and labels."""
    try:
        return _NAME.validate_python(name)
    except ValidationError:
        raise InvalidJob(
            f"{what}: found {describe(name)}, expected letters, digits, '.', '_', '/' and '-', "
            "with a letter or digit at both ends"
        ) from None


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class TenantSettings(_Settings):
    """Settings of one tenant."""

    name: Name
    weight: float = Field(default=1, gt=0)
    max_priority: int = Field(default=0, ge=MIN_PRIORITY, le=MAX_PRIORITY)
    """A job with a higher priority gets this one."""


class InForce(NamedTuple):
    """The resource whose settings are in force."""

    owner: str
    """Empty: none is known."""
    created: float = 0
    """Unix seconds."""
    generation: float = 0


class QueueSettings(_Settings):
    """Settings of one queue, for submitters and workers."""

    version: int = 1
    owner: str = ""
    """The resource of the settings, as `namespace/name`."""
    created: float = 0
    """When the resource of the settings was created, Unix seconds."""
    generation: int = 0
    tenants: tuple[TenantSettings, ...] = ()
    """Empty: the queue accepts any tenant and any priority."""
    models: tuple[str, ...] = ()
    """Empty: the queue accepts any model."""
    urls: tuple[str, ...] = ()
    """URLs of items, if the engine of the workers checks their bodies itself. Empty: items are for Ballast's own
    engine, and their bodies are checked when they are submitted."""
    serves_items: bool = True
    """Whether the model of the workers serves any URL of items."""
    max_attempts: int = Field(default=5, ge=1)
    lease_seconds: float = Field(default=30, gt=0)
    """How long an unresponsive worker keeps an item."""
    results_seconds: float = Field(default=7 * 86400, gt=0)
    """How long the queue keeps the results of a job that is over."""
    abandoned_seconds: float = Field(default=30 * 86400, gt=0)
    """How long a job that is paused or open may stay without a change."""
    backoff_seconds: float = Field(default=1, ge=0)
    """Wait before the second attempt. Each further attempt doubles it."""
    backoff_max_seconds: float = Field(default=60, ge=0)
    max_line_bytes: int = Field(default=4 * 1024 * 1024, ge=1)

    def priority_of(self, tenant: str, priority: int) -> int:
        """Return the priority that a job of `tenant` gets if it asks for `priority`.

        Raises:
            UnknownTenant: the queue declares its tenants, and this one is not among them.
            InvalidJob: the priority is out of range.
        """
        if not MIN_PRIORITY <= priority <= MAX_PRIORITY:
            raise InvalidJob(f"priority: found {priority}, expected {MIN_PRIORITY} to {MAX_PRIORITY}")
        if not self.tenants:
            return priority
        for known in self.tenants:
            if known.name == tenant:
                return min(priority, known.max_priority)
        names = ", ".join(known.name for known in self.tenants[:20])
        raise UnknownTenant(f"tenant: found {tenant!r}, expected a tenant that this queue declares: {names}")


UNCONFIGURED = QueueSettings(urls=ITEM_URLS)
"""Settings of a queue that no worker has configured yet. Its workers may run any engine, and each checks its items."""
