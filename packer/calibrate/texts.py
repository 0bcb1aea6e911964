"""Sample text as windows of tokens, each with a label: the sources that are counted apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from formats.errors import UsageError
from packer.running.token_input import decoded, read_file
from packer.statistics.types import MAX_LABELS, SampleLabel, SampleText

DEFAULT_LABEL = "text"


@dataclass(frozen=True)
class Sample:
    """All windows.

    Attributes:
        labels: in the order in which they were first named.
        windows: token ids of each; all of one label before those of the next.
        label_of: for each window the number of its label.
    """

    labels: tuple[SampleLabel, ...]
    windows: tuple[tuple[int, ...], ...]
    label_of: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Tokens in all windows."""
        return sum(len(window) for window in self.windows)


def parse_sources(options: Iterable[str], *, where: str) -> dict[str, list[Path]]:
    """``FILE``, ``LABEL=FILE`` or several of these with commas between, as files by label.

    ``where`` is the option, for messages.

    Raises:
        UsageError: an empty label or path, or too many labels.
    """
    sources: dict[str, list[Path]] = {}
    for option in options:
        for item in option.split(","):
            label, equals, path = item.partition("=")
            if not equals:
                label, path = DEFAULT_LABEL, item
            if not label or not path:
                raise UsageError("not a source of text", where=where, expected="FILE or LABEL=FILE", found=item)
            sources.setdefault(label, []).append(Path(path))
    if len(sources) > MAX_LABELS:
        raise UsageError("too many labels", where=where, expected=f"at most {MAX_LABELS}", found=len(sources))
    return sources


def make_sample(
    sources: Mapping[str, Sequence[Path]],
    *,
    encode: Callable[[str], Sequence[int]],
    window: int,
    begin: int | None,
    where: str,
) -> Sample:
    """Read all sources and cut them into windows.

    A file's last tokens that do not fill a window are left out, unless the file has no more than these.

    Args:
        sources: files by label.
        encode: from the text of a file to token ids.
        window: tokens of a window, ``begin`` included.
        begin: an id that every window starts with, or None.
        where: the option that named the sources, for messages.

    Raises:
        UsageError: a label without enough tokens for one window, or a file that is no UTF-8.
        EnvironmentProblem: a file that cannot be read.
    """
    labels: list[SampleLabel] = []
    windows: list[tuple[int, ...]] = []
    label_of: list[int] = []
    head = () if begin is None else (begin,)
    step = window - len(head)
    for number, (name, paths) in enumerate(sources.items()):
        files, found = [], 0
        for path in paths:
            data = read_file(path)
            files.append(SampleText(name=str(path), bytes=len(data), blake3=blake3(data).hexdigest()))
            ids = encode(decoded(data, where=path))
            found += len(ids)
            pieces = [(*head, *ids[start : start + step]) for start in range(0, len(ids) - step + 1, step)]
            windows += pieces
            label_of += [number] * len(pieces)
        used = label_of.count(number)
        if not used:
            raise UsageError(
                f"label {name} has less text than one window",
                where=where,
                expected=f"at least {step} tokens in a file" + (", besides the one that begins a text" if head else ""),
                found=f"{found} tokens",
                hint="give more text, or a smaller --window",
            )
        labels.append(SampleLabel(name=name, tokens=used * window, texts=tuple(files)))
    if not labels:
        raise UsageError("no text", where=where, expected="at least one file")
    return Sample(tuple(labels), tuple(windows), tuple(label_of))
