"""Writing text: prompt in, one token after the other out, until a limit, an end token or a stop string.

What is needed of a session stands in :class:`Model`; everything else of it (weights, budget, streaming) is hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from formats import strict_json
from formats.checkpoint import CONFIG_NAME as MODEL_NAME
from formats.errors import FormatError, UsageError
from runtime.assets import read_assets
from runtime.sampling import Sampling, choose
from runtime.tokenizer import TextStream, Tokenizer

GENERATION_NAME = "generation_config.json"
MAX_STOPS = 64


class Model(Protocol):
    """What generating needs of a session."""

    @property
    def position(self) -> int:
        """Tokens fed so far."""

    @property
    def context(self) -> int:
        """Positions that the state can hold."""

    def feed(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Advance the state; logits [vocab] after the last id."""


@dataclass(frozen=True)
class Wishes:
    """What to generate.

    Attributes:
        tokens: at most so many.
        sampling: how each is chosen.
        stops: strings that end the text; they are not part of it.
        end_ids: tokens that end the text; they are not part of it either.
    """

    tokens: int
    sampling: Sampling
    stops: tuple[str, ...] = ()
    end_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise UsageError("number of tokens is negative", found=self.tokens)
        if not all(self.stops):
            raise UsageError("a stop string is empty", expected="at least one character")
        if len(self.stops) > MAX_STOPS:
            raise UsageError("too many stop strings", expected=f"at most {MAX_STOPS}", found=len(self.stops))


@dataclass(frozen=True)
class Piece:
    """One step of generation.

    Attributes:
        token: the id that was chosen.
        text: what can be shown now; may be empty while a character or a possible stop string is incomplete.
        ending: None, or why this is the last: ``end`` (an end token), ``stop`` (a stop string), ``length``.
    """

    token: int
    text: str
    ending: str | None = None


def generate(
    model: Model,
    tokenizer: Tokenizer | None,
    prompt: Sequence[int],
    wishes: Wishes,
    generator: np.random.Generator,
    *,
    special: bool = False,
) -> Iterator[Piece]:
    """Feed ``prompt`` and yield what follows, token by token.

    The last token is not fed: a later call that goes on from it starts with it in its prompt.

    Args:
        model: holds the state, which may have a past.
        tokenizer: for text; without one, pieces have none.
        prompt: ids, at least one.
        wishes: how much and how.
        generator: drawn from once a token at temperatures above 0.
        special: show special tokens by their spelling.

    Raises:
        UsageError: an empty prompt, an id out of range, or more positions than the state can hold; before any of it is
            computed.
    """
    check_room(model, len(prompt), wishes.tokens)
    if wishes.tokens == 0:
        return
    text = _Text(tokenizer, wishes.stops, special)
    logits = model.feed(prompt)
    for count in range(1, wishes.tokens + 1):
        token = choose(logits, wishes.sampling, generator)
        if token in wishes.end_ids:
            yield Piece(token, text.finish(), "end")
            return
        shown, stopped = text.push(token)
        if stopped:
            yield Piece(token, shown, "stop")
            return
        if count == wishes.tokens:
            yield Piece(token, shown + text.finish(), "length")
            return
        yield Piece(token, shown)
        logits = model.feed((token,))


def check_room(model: Model, prompt: int, tokens: int) -> None:
    """Refuse what cannot be done before it is begun.

    Raises:
        UsageError: no prompt, or not enough positions for prompt and answer.
    """
    if prompt == 0:
        raise UsageError("prompt is empty", expected="at least one token")
    needed = model.position + prompt + max(tokens - 1, 0)
    if needed > model.context:
        before = "all that was said before counts; " if model.position else ""
        raise UsageError(
            "prompt and answer do not fit into the context",
            expected=f"at most {model.context} positions",
            found=needed,
            hint=f"{before}ask for fewer tokens with -n, or give more room with --context",
        )


class _Text:
    """Text of tokens, with what might be the beginning of a stop string held back."""

    def __init__(self, tokenizer: Tokenizer | None, stops: Sequence[str], special: bool) -> None:
        self._stream = None if tokenizer is None else TextStream(tokenizer, special=special)
        self._stops = stops
        self._held = ""

    def push(self, token: int) -> tuple[str, bool]:
        """What can be shown now, and whether a stop string has come."""
        if self._stream is None:
            return "", False
        text = self._held + self._stream.push(token)
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self._held = ""
            return text[: min(places)], True
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def finish(self) -> str:
        """Everything that was held back."""
        text = self._held + ("" if self._stream is None else self._stream.finish())
        self._held = ""
        return text


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of ``text`` could begin ``stop``."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)


def end_ids(path: Path) -> frozenset[int]:
    """The tokens that end a text: ``eos_token_id`` of ``generation_config.json``, else of ``config.json``.

    An id beyond the vocabulary ends nothing, for no model says it.

    Args:
        path: a container or a checkpoint directory.

    Raises:
        FormatError: neither a number nor a list of them.
    """
    files = read_assets(path, (GENERATION_NAME, MODEL_NAME))
    for name in (GENERATION_NAME, MODEL_NAME):
        if name not in files:
            continue
        config = strict_json.parse_object(files[name], where=name)
        text = config.get("text_config")
        for level in (config, text) if isinstance(text, dict) else (config,):
            found = _ids(level.get("eos_token_id"), name)
            if found:
                return found
    return frozenset()


def _ids(value: Any, name: str) -> frozenset[int]:
    items = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(item) is int and item >= 0 for item in items):
        raise FormatError("eos_token_id is no token id", where=name, expected="0 or more", found=repr(value)[:80])
    return frozenset(items)
