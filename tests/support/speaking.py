"""A small model that has a tokenizer: k3-tiny with the vocabulary of ``tests.support.vocabularies`` beside it."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from packer.commands import run
from tests.support.vocabularies import tokenizer_files

DATA = Path(__file__).parent.parent / "data"
VOCABULARY = 512


@dataclass(frozen=True)
class Speaking:
    """A checkpoint with a tokenizer, and its lossless container."""

    source: Path
    container: Path


def make_speaking(folder: Path) -> Speaking:
    """Copy the checkpoint, give it a tokenizer, and pack it. No token ends its texts."""
    source, container = folder / "source", folder / "speaking.moepack"
    shutil.copytree(DATA / "k3-tiny", source)
    for name, data in tokenizer_files().items():
        (source / name).write_bytes(data)
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": 600}))
    assert run(["pack", str(source), str(container), "--quiet", "--recipe", "kimi-k3-lossless", "--jobs", "1"]) == 0
    return Speaking(source, container)
