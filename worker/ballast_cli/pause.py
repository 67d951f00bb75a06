"""`ballast pause`: pause a job."""

from __future__ import annotations

from ballast_cli.console import examples
from ballast_cli.transition import transition
from ballast_openai.errors import counted

EXAMPLES = examples("ballast pause job-1f3a")

pause = transition(
    lambda queue, job_id: queue.jobs.pause(job_id),
    lambda job: f"{counted(job.counts.waiting, 'item')} waiting for `ballast resume`, {job.counts.leased:,} running",
    purpose="Pause a job.\n\nNo further item starts until `ballast resume`. Running items finish.",
)
