"""`ballast cancel`: cancel a job."""

from __future__ import annotations

from ballast_cli.console import examples
from ballast_cli.transition import transition

EXAMPLES = examples("ballast cancel job-1f3a")

cancel = transition(
    lambda queue, job_id: queue.jobs.cancel(job_id),
    lambda job: f"{job.counts.done:,} of {job.counts.total:,} items are over, {job.counts.leased:,} still run",
    purpose="Cancel a job.\n\nNo further item starts. Results are kept.",
)
