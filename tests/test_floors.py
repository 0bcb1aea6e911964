"""The floors of the house: who may import whom. Imports are read from the sources, those inside functions too."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FORBIDDEN = {
    "formats": {"packer", "runtime", "tests", "torch", "transformers"},
    "runtime": {"packer", "tests", "torch", "transformers"},
    "packer": {"tests", "torch", "transformers"},
}
STDLIB_UNSAFE = {"pickle", "marshal", "shelve"}


def imported(source: Path) -> set[str]:
    """Top-level names that a module imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source}: relative import"
            names.add((node.module or "").split(".")[0])
    return names


@pytest.mark.parametrize("floor", [floor for floor in FORBIDDEN if (ROOT / floor).is_dir()])
def test_no_forbidden_import(floor: str) -> None:
    sources = [path for path in (ROOT / floor).rglob("*.py") if not path.name.startswith("test_")]
    assert sources
    wrong = {str(path.relative_to(ROOT)): imported(path) & (FORBIDDEN[floor] | STDLIB_UNSAFE) for path in sources}
    assert {path: names for path, names in wrong.items() if names} == {}


def test_files_stay_short() -> None:
    """A file above 400 lines wants a reason; none has one so far."""
    sources = [path for floor in FORBIDDEN for path in (ROOT / floor).rglob("*.py")]
    long = {
        str(path.relative_to(ROOT)): count
        for path in sources
        if (count := len(path.read_text(encoding="utf-8").splitlines())) > 400
    }
    assert long == {}
