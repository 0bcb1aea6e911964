"""The budget is a ceiling, measured from outside, on a container several times larger than it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.synthetic import Size, make
from formats.container import open_container
from runtime.budget import Shape, floor_of
from runtime.description import describe_container
from runtime.stream.container import container_needs

MIB = 1 << 20
INTERPRETER_AND_LIBRARIES = 96 * MIB
CONTEXT = 512

_CHILD = """
import re, sys
from pathlib import Path
from runtime.session import Options, open_session
path, budget, trunk = sys.argv[1], int(sys.argv[2]), sys.argv[3]
with open_session(path, Options(budget=budget, context=512, trunk=trunk, threads=2)) as session:
    for _ in session.stream([number * 7919 % 8000 for number in range(150)]):
        pass
    for token in range(8):
        session.feed([token])
    assert session.statistics().stream.evictions, "everything fitted: nothing is shown"
print(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two layers of 24 experts of Kimi K3's size: about 600 MB."""
    path = tmp_path_factory.mktemp("synthetic") / "large.moepack"
    make(path, Size(layers=3, experts=24, per_token=4))
    yield path
    for bank in (path / "experts").iterdir():
        bank.unlink()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's account of memory")
@pytest.mark.parametrize(("trunk", "experts"), [("streamed", 0), ("resident", 0), ("resident", 6)])
def test_peak_memory_stays_within_the_budget(container: Path, trunk: str, experts: int) -> None:
    with open_container(container) as opened:
        description = describe_container(opened)
        needs = container_needs(opened, description)
        size = sum(file.stat().st_size for file in container.rglob("*") if file.is_file())
    floor = floor_of(description, needs, Shape(CONTEXT, 64, 2))
    least = floor.streamed_bytes if trunk == "streamed" else floor.resident_bytes
    budget = least + experts * needs.slot_bytes
    assert size > 2.5 * budget
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, str(container), str(budget), trunk],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    match = re.fullmatch(r"(\d+)\n", done.stdout)
    assert match is not None
    assert int(match[1]) * 1024 <= budget + INTERPRETER_AND_LIBRARIES
