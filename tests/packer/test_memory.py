"""PLN-06: as many jobs as fit into memory, and a refusal where not even one does."""

from __future__ import annotations

import pytest

from formats.errors import EnvironmentProblem
from packer.planning.estimate import Memory
from packer.planning.memory import fitting_jobs

MEMORY = Memory(fixed=1000, per_job=100)


@pytest.mark.parametrize(
    ("available", "jobs"), [(None, 8), (1800, 8), (10_000, 8), (1799, 7), (1200, 2), (1199, 1), (1100, 1)]
)
def test_jobs_are_reduced_to_what_fits(available: int | None, jobs: int) -> None:
    assert fitting_jobs(MEMORY, 8, available) == jobs


def test_not_even_one_fits() -> None:
    with pytest.raises(EnvironmentProblem, match=r"expected 1100 bytes, found 1099 bytes available"):
        fitting_jobs(MEMORY, 8, 1099)
