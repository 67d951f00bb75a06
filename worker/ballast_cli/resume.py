"""`ballast resume`: resume a paused job."""

from __future__ import annotations

from ballast_cli.console import examples
from ballast_cli.transition import transition
from ballast_openai.errors import counted

EXAMPLES = examples("ballast resume job-1f3a")

resume = transition(
    lambda queue, job_id: queue.jobs.resume(job_id),
    lambda job: f"{job.counts.waiting:,} of {counted(job.counts.total, 'item')} waiting for a slot",
    purpose="Resume a paused job.",
)
