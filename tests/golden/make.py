"""Makes the golden containers of the present format version: `python -m tests.golden.make`, from the repository's root.

They are made once a format version and then stay for good, so this refuses to touch those that exist. `ids.json` beside
this file holds, by name, the container id and the digest of all decoded weights as the independent reader saw them.
"""

import json
import sys
from pathlib import Path

from blake3 import blake3

from formats.layout import FORMAT_VERSION
from tests.support import independent_reader as independent
from tests.support.containers import Spec, all_codecs, build_container

FOLDER = Path(__file__).parent
SPECS = {"mixed": Spec(), "codecs": all_codecs()}


def weights_digest(container: Path) -> str:
    """BLAKE3 of every decoded weight, float32, in the order of the manifest."""
    manifest = independent.read_manifest(container)
    hasher = blake3()
    for layer in manifest["layers"]:
        for expert in range(layer["records"]):
            record = independent.read_record(container, manifest, layer["layer"], expert)
            for matrix in independent.decode_record(record):
                hasher.update(matrix.tobytes())
    for tensor in manifest["tensors"]:
        hasher.update(independent.decode_tensor(container, manifest, tensor["name"]).tobytes())
    return hasher.hexdigest()


def main() -> int:
    """Write what is not there yet."""
    ids_path = FOLDER / "ids.json"
    ids = json.loads(ids_path.read_text()) if ids_path.exists() else {}
    for name, spec in SPECS.items():
        folder = FOLDER / f"v{FORMAT_VERSION}-{name}"
        if folder.exists():
            print(f"{folder.name} exists and stays as it is")
            continue
        build_container(folder, spec)
        manifest = independent.read_manifest(folder)
        ids[folder.name] = {"container_id": manifest["container_id"], "weights": weights_digest(folder)}
        print(f"{folder.name} made")
    ids_path.write_text(json.dumps(ids, indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
