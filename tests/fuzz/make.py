"""Makes the corpus: ``python -m tests.fuzz.make``, from the repository's root. What is there already stays.

Small sound inputs of every parser, from the containers and checkpoints of the tests. Inputs that once did harm are
added by hand, each under a name that says what it is.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from formats.codecs import group_int, raw, rvq
from formats.manifest import WORK_DIR
from packer.preflight import JOURNAL_NAME
from packer.storage.system import SYSTEM
from tests.fuzz.targets import CORPUS
from tests.support.checkpoints import K3, LINEAR, write_checkpoint
from tests.support.containers import MXFP4, Layer, Spec, build_container
from tests.support.packs import pack_source
from tests.support.shards import INDEX_NAME, Tensor, write_safetensors

RECIPES = Path(__file__).parent.parent.parent / "recipes"
TINY = ((2, 10), (2, 10), (10, 2))
PARAMETERS = {
    "rvq": rvq.Parameters(stages=2, entries=3, scope="expert"),
    "rvq-matrix": rvq.Parameters(stages=1, entries=2, scope="matrix"),
    "mxfp4": MXFP4,
    "int8": group_int.Parameters(bits=8, group=32),
    "int4": group_int.Parameters(bits=4, group=32),
    "raw": raw.Parameters("BF16"),
}


def put(name: str, data: bytes) -> None:
    """Write one input unless it is there."""
    path = CORPUS / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        path.write_bytes(data)
        print(f"{name}: {len(data)} bytes")


def containers(folder: Path) -> None:
    """Manifests, indexes, records."""
    spec = Spec(hidden_layers=2, layers={1: Layer(tuple(PARAMETERS.values()))}, shapes=TINY, tensors=Spec().tensors[:3])
    small = replace(spec, layers={1: Layer((MXFP4,), dropped=(1,))}, tensors=spec.tensors[:1], assets={})
    partial = replace(spec, partial={"layers": [0, 1], "experts": None}, omitted=3)
    for name, each in (("codecs", spec), ("small", small), ("partial", partial)):
        path = build_container(folder / name, each)
        put(f"manifest/{name}", (path / "manifest.json").read_bytes())
        put(f"index/{name}", (path / "index.bin").read_bytes())
    bank = (folder / "codecs" / "experts" / "layer-00001.bank").read_bytes()
    for number, name in enumerate(PARAMETERS):
        put(f"record-header/{name}", bank[number * 4096 : number * 4096 + 1024])
        put(f"record/{name}", bank[number * 4096 : (number + 1) * 4096])
    put("trunk-header/sound", b"MOEPACKT\x01\0\0\0\0\x10\0\0\0\xf0\0\0\0\0\0\0".ljust(4096, b"\0"))


def checkpoints(folder: Path) -> None:
    """Shards, configurations, indexes of weights, journals."""
    tensors = {
        "a.weight": Tensor("BF16", (2, 3), bytes(12)),
        "a.scale": Tensor("F32", (2,), bytes(8)),
        "b": Tensor("U8", (), bytes(1)),
        "empty": Tensor("I8", (0, 4), b""),
    }
    write_safetensors(folder / "tiny.safetensors", tensors, {"format": "pt", "note": "x"})
    put("shard/tiny", (folder / "tiny.safetensors").read_bytes())
    put("shard/none", b"\x02\0\0\0\0\0\0\0{}")
    shape = {"layers": 2, "experts": 2, "per_token": 1, "assets": False}
    for name, spec in (("linear", replace(LINEAR, **shape)), ("k3", replace(K3, **shape, vision=False))):
        source = write_checkpoint(folder / f"{name}-source", spec)
        put(f"config/{name}.json", (source / "config.json").read_bytes())
        put(f"weight-index/{name}.json", (source / INDEX_NAME).read_bytes())
        put(f"json/{name}.json", (source / "config.json").read_bytes())
        out = folder / f"{name}-out"
        try:
            pack_source(source, out, jobs=1, system=replace(SYSTEM, rename=until_the_index))
        except MemoryError:
            put(f"journal/{name}", (out / WORK_DIR / JOURNAL_NAME).read_bytes())


def until_the_index(old: Path, new: Path) -> None:
    """A rename that ends the pack when all but the last two files are done."""
    if new.name == "index.bin":
        raise MemoryError
    SYSTEM.rename(old, new)


def main() -> int:
    """Write what is not there yet."""
    with tempfile.TemporaryDirectory() as folder:
        containers(Path(folder))
        checkpoints(Path(folder))
    for path in sorted(RECIPES.glob("*.toml")):
        put(f"recipe/{path.name}", path.read_bytes())
    put("json/values", b'{"a": [1, -2.5e3, true, false, null, "\\u6f22 \xe6\xbc\xa2 \\ud83d\\ude00"], "b": {"": {}}}')
    return 0


if __name__ == "__main__":
    sys.exit(main())
