"""Writing on from prompts: tokens in, text out as it comes, and the figures that a user wants at the end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from formats.errors import UsageError
from formats.spelling import counted
from packer.output import human_bytes, human_number
from packer.running.token_input import parse_ids
from packer.running.writing_options import WritingOptions
from runtime.assets import read_config
from runtime.generate import Model, Wishes, check_room, end_ids, generate
from runtime.sampling import Sampling
from runtime.session import SessionStatistics
from runtime.tokenizer import Tokenizer, has_tokenizer, load_tokenizer


class RunningModel(Model, Protocol):
    """What writing needs of a session."""

    container_id: str | None

    def statistics(self) -> SessionStatistics:
        """What was done so far."""


@dataclass
class _Record:
    """What has been written so far, of all prompts together."""

    prompt_tokens: int = 0
    tokens: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    ending: str | None = None
    prompt_seconds: float = 0.0
    seconds: float = 0.0  # after the first token of each answer
    timed: int = 0  # tokens that came in these


class Writer:
    """A conversation with a model.

    Args:
        tokenizer: None if tokens are shown as ids.
        first: ids of the prompt, without the token that a text begins with; empty where prompts come later.
        wishes: how much is written, and how.
        special: show special tokens by their spelling.
        begin: id that goes before the first prompt, or None.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        first: tuple[int, ...],
        wishes: Wishes,
        special: bool,
        begin: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._first = first
        self._wishes = wishes
        self._special = special
        self._generator = wishes.sampling.generator()
        self._pending: tuple[int, ...] = () if begin is None else (begin,)
        self._record = _Record()

    @property
    def needed(self) -> int:
        """Positions that the first prompt and its answer take."""
        return len(self._pending) + len(self._first) + max(self._wishes.tokens - 1, 0)

    def write(self, model: RunningModel, prompt: str | None = None) -> Iterator[str]:
        """Feed a prompt, the first one if none is given, and yield the answer piece by piece.

        The state is kept, so a later prompt follows on everything before it.

        Raises:
            UsageError: no room left in the context; before anything is computed.
            FormatError: weights are damaged.
        """
        ids = self._first if prompt is None or self.tokenizer is None else tuple(self.tokenizer.encode(prompt))
        ids = (*self._pending, *ids)
        check_room(model, len(ids), self._wishes.tokens)
        record, began = self._record, time.monotonic()
        record.prompt_tokens += len(ids)
        pieces = generate(model, self.tokenizer, ids, self._wishes, self._generator, special=self._special)
        for count, piece in enumerate(pieces):
            now = time.monotonic()
            if count == 0:
                record.prompt_seconds += now - began
            else:  # counted at once: an interrupted answer has its rate, too
                record.seconds += now - began
                record.timed += 1
            began = now
            record.tokens.append(piece.token)
            record.ending = piece.ending
            self._pending = (piece.token,)
            text = piece.text if self.tokenizer is not None else f"{' ' if count else ''}{piece.token}"
            record.text.append(text)
            yield text

    @property
    def has_written(self) -> bool:
        """Whether there is a token to report on."""
        return bool(self._record.tokens)

    def summary(self, statistics: SessionStatistics) -> str:
        """One line for people."""
        record, stream, trunk = self._record, statistics.stream, statistics.trunk
        rate = self._rate()
        line = counted(len(record.tokens), "token") + ("" if rate is None else f", {human_number(rate)} a second")
        line += f" after {counted(record.prompt_tokens, 'token')} of prompt in {record.prompt_seconds:.2f} s"
        share = "-" if not stream.asked else f"{100 * stream.hit_rate:.1f} %"
        read = f"read {human_bytes(stream.bytes_read)} of experts and {human_bytes(trunk.bytes_read)} of the trunk"
        return f"{line}; experts found in memory {share}; {read}"

    def document(self, model: RunningModel | None = None) -> dict[str, Any]:
        """What ``--json`` prints; without a model, where none was needed."""
        record = self._record
        statistics = None if model is None else model.statistics()
        stream = None if statistics is None else statistics.stream
        return {
            "container_id": None if model is None else model.container_id,
            "text": None if self.tokenizer is None else "".join(record.text),
            "ids": record.tokens,
            "ending": record.ending,
            "prompt_tokens": record.prompt_tokens,
            "tokens": len(record.tokens),
            "prompt_seconds": record.prompt_seconds,
            "seconds": record.seconds,
            "tokens_per_second": self._rate(),
            "cache_hit_rate": stream.hit_rate if stream is not None and stream.asked else None,
            "bytes_read": 0 if stream is None else stream.bytes_read,
            "trunk_bytes_read": 0 if statistics is None else statistics.trunk.bytes_read,
        }

    def _rate(self) -> float | None:
        record = self._record
        return record.timed / record.seconds if record.timed and record.seconds else None


def make_writer(path: Path, options: WritingOptions, *, text: str | None, ids: str | None, special: bool) -> Writer:
    """Read the tokenizer and check everything that can be checked before the weights are opened.

    Args:
        path: a container or a checkpoint directory.
        options: what is written.
        text: the prompt, or None.
        ids: the prompt as a list of ids, or None; without either, prompts come later.
        special: show special tokens by their spelling.

    Raises:
        UsageError: a setting out of range, an empty prompt, stop strings where there is no text.
        FormatError: no tokenizer for a text, or a malformed one.
    """
    vocabulary = read_config(path).vocab_size
    sampling = Sampling(options.temperature, options.top_p, options.seed)
    wishes = Wishes(options.count, sampling, options.stops, end_ids(path))
    if ids is not None:
        speaking = load_tokenizer(path, vocabulary) if has_tokenizer(path) else None
        if options.stops and speaking is None:
            raise UsageError("there is no text to stop in", where="--stop", hint="the model has no tokenizer")
        return Writer(speaking, tuple(parse_ids(ids, vocabulary, where="--ids")), wishes, special)
    tokenizer = load_tokenizer(path, vocabulary)
    first = () if text is None else tuple(tokenizer.encode(text))
    if text is not None and not first:
        raise UsageError("prompt is empty", where="PROMPT", expected="at least one token")
    return Writer(tokenizer, first, wishes, special, tokenizer.begin)
