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


def packages_imported(package: Path) -> set[str]:
    """The other packages of the packer that the modules of one import."""
    found = set()
    for source in package.rglob("*.py"):
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("packer."):
                found.add((node.module or "").split(".")[1])
    return found - {package.name}


def test_no_two_packages_of_the_packer_lean_on_each_other() -> None:
    """Nor three in a circle: what is left when packages that lean on nothing that is left are taken away."""
    left = {path.parent.name: packages_imported(path.parent) for path in (ROOT / "packer").glob("*/__init__.py")}
    assert len(left) > 10
    while free := [name for name, others in left.items() if not others & left.keys()]:
        for name in free:
            del left[name]
    assert left == {}


def test_files_stay_short() -> None:
    """A file above 400 lines wants a reason; none has one so far."""
    sources = [path for floor in FORBIDDEN for path in (ROOT / floor).rglob("*.py")]
    long = {
        str(path.relative_to(ROOT)): count
        for path in sources
        if (count := len(path.read_text(encoding="utf-8").splitlines())) > 400
    }
    assert long == {}
