"""The bundled model on its whole way: what the demonstration measures at its end.

The model is a small Kimi K3 with every part of the architecture, trained on code and prose (``recipes/demo``). Source,
lossless container and 3-bit container read the same held-out text, each window of it with a fresh state.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import recipes.demo
from formats.errors import EnvironmentProblem, FormatError, UsageError
from packer.output import Output, human_bytes, human_number
from packer.progress import Progress
from packer.running.logits import Report
from packer.storage.new_file import write_new
from packer.verify.logits_parity import LogitsParity, compare_models
from runtime.assets import read_config
from runtime.opening import Options
from runtime.perplexity import windows
from runtime.session import open_session
from runtime.tokenizer import load_tokenizer

WINDOW = 256  # what the model was trained on
TOKENS = 2048  # of each held-out text
EXCERPT_BYTES = 1500
PROMPT = "def "


@dataclass(frozen=True)
class Bundle:
    """The model that comes along, and texts that it has never seen.

    Attributes:
        checkpoint: in the released layout.
        texts: held-out texts by name.
    """

    checkpoint: Path
    texts: Mapping[str, Path]


@dataclass(frozen=True)
class Reading:
    """How a container read a held-out text, beside its source."""

    container: str
    text: str
    found: LogitsParity


def bundled() -> Bundle:
    """Where the bundled model lies.

    Raises:
        EnvironmentProblem: this installation came without it.
    """
    home = Path(recipes.demo.__file__).parent
    texts = {path.stem: path for path in sorted((home / "heldout").glob("*.txt"))}
    if not (home / "checkpoint" / "config.json").is_file() or not texts:
        raise EnvironmentProblem(
            "the demo model is not installed", where=home, hint="train it: see README.md in recipes/demo"
        )
    return Bundle(home / "checkpoint", texts)


def write_excerpt(bundle: Bundle, folder: Path) -> Path:
    """A short piece of held-out text as a file.

    Raises:
        UsageError: another file has its name, or the folder is a container.
        EnvironmentProblem: it cannot be read or written.
    """
    path = folder / "demo-excerpt.txt"
    lines = _read(next(iter(bundle.texts.values())))[:EXCERPT_BYTES].rpartition(b"\n")[0]  # no character is cut
    if not os.path.lexists(path):
        write_new(path, [lines])
    elif _read(path) != lines:
        raise UsageError("another file is in the way", where=path, hint="name another folder with --dir")
    return path


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise EnvironmentProblem(f"cannot read: {error.strerror}", where=path) from None


def read_texts(bundle: Bundle, tokens: int = TOKENS) -> dict[str, list[tuple[int, ...]]]:
    """The beginnings of the held-out texts as windows of token ids.

    Raises:
        FormatError: a text is not UTF-8, or the tokenizer is malformed.
        EnvironmentProblem: a text cannot be read.
    """
    tokenizer = load_tokenizer(bundle.checkpoint, read_config(bundle.checkpoint).vocab_size)
    found = {}
    for name, path in bundle.texts.items():
        try:
            text = _read(path).decode("utf-8")
        except UnicodeDecodeError as error:
            raise FormatError("not UTF-8", where=path, offset=error.start) from None
        found[name] = windows(tokenizer.encode(text)[:tokens], WINDOW, tokenizer.begin)
    return found


def read_along(
    bundle: Bundle,
    containers: Mapping[str, Path],
    texts: Mapping[str, Sequence[Sequence[int]]],
    progress: Report | None = None,
) -> list[Reading]:
    """Let each container read each text beside the source.

    Raises:
        UsageError: not enough memory is free.
        FormatError: a container or the source is damaged.
    """
    options = Options(context=WINDOW)
    total = len(containers) * sum(len(window) for parts in texts.values() for window in parts)
    done = 0
    readings = []

    def tell(step: Progress) -> None:
        if progress is not None:
            progress(Progress(done + step.done_bytes, total, step.what))

    for name, path in containers.items():
        with open_session(bundle.checkpoint, options) as source, open_session(path, options) as container:
            for text, parts in texts.items():
                source.reset()
                container.reset()
                readings.append(Reading(name, text, compare_models(source, container, parts, tell)))
                done += sum(map(len, parts))
    return readings


def table_document(readings: Sequence[Reading], sizes: Mapping[str, int]) -> list[dict[str, Any]]:
    """The table for programs: the source first, then every container."""
    names = ["source", *dict.fromkeys(reading.container for reading in readings)]
    rows = []
    for name in names:
        shown = [item for item in readings if item.container in (name, *names[1:2] * (name == "source"))]
        rows.append(
            {
                "model": name,
                "bytes": sizes[name],
                "texts": {
                    item.text: {
                        "tokens": item.found.source.tokens,
                        "perplexity": (item.found.source if name == "source" else item.found.container).perplexity,
                        "kl_divergence": None if name == "source" else item.found.kl_mean,
                        "top1_agreement": None if name == "source" else item.found.top1,
                    }
                    for item in shown
                },
            }
        )
    return rows


def show_table(output: Output, rows: Sequence[Mapping[str, Any]]) -> None:
    """The table for people."""
    texts = list(rows[0]["texts"])
    columns = ["model", ">size"]
    for text in texts:
        columns += [f">perplexity {text}", ">KL", ">top-1"]
    lines = []
    for row in rows:
        line = [row["model"], human_bytes(row["bytes"])]
        for text in texts:
            cell = row["texts"][text]
            agree = "-" if cell["top1_agreement"] is None else f"{100 * cell['top1_agreement']:.1f} %"
            line += [human_number(cell["perplexity"], 5), human_number(cell["kl_divergence"]), agree]
        lines.append(line)
    counts = ", ".join(f"{rows[0]['texts'][text]['tokens']} of {text}" for text in texts)
    output.line(f"Held-out text, never trained on ({counts}; KL divergence from the source in nats a token):")
    output.table("", columns, lines)


def directory_bytes(path: Path) -> int:
    """Bytes of all files in a directory."""
    return sum(item.stat().st_size for item in path.rglob("*") if item.is_file())
