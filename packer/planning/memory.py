"""How many jobs fit into memory."""

from __future__ import annotations

from formats.errors import EnvironmentProblem
from packer.planning.estimate import Memory


def fitting_jobs(memory: Memory, jobs: int, available: int | None) -> int:
    """The most jobs, at most ``jobs``, whose memory fits into ``available`` bytes.

    Raises:
        EnvironmentProblem: not even one fits.
    """
    if available is None or memory.with_jobs(jobs) <= available:
        return jobs
    if memory.with_jobs(1) > available:
        raise EnvironmentProblem(
            "not enough memory for one job",
            expected=f"{memory.with_jobs(1)} bytes",
            found=f"{available} bytes available",
            hint="free some memory or raise the limit; the largest expert decides, not the model",
        )
    return max(1, (available - memory.fixed) // memory.per_job)
