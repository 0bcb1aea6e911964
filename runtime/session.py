"""A model opened for running: weights behind a budget, a state, and steps from token ids to logits."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from formats.errors import FormatError, UsageError
from runtime.models import kimi
from runtime.models.observer import Observer
from runtime.opening import Options, Weights, open_weights
from runtime.stream.statistics import StreamStatistics, TrunkStatistics

__all__ = ["Observer", "Options", "Session", "SessionStatistics", "open_session"]

Single = NDArray[np.float32]


@dataclass(frozen=True)
class SessionStatistics:
    """What a session has done so far: tokens fed, seconds in steps, and the reading of experts and of the trunk."""

    tokens: int
    seconds: float
    stream: StreamStatistics
    trunk: TrunkStatistics


class Session:
    """An open model. Not for several threads at once; close it, or use it in a ``with`` statement."""

    def __init__(self, path: Path, options: Options, weights: Weights, closing: ExitStack) -> None:
        self.path = path
        self.family = weights.store.family
        self.config = weights.store.config
        self.container_id = weights.container_id
        self.plan = weights.plan
        self._options = options
        self._weights = weights
        self._closing = closing
        look_ahead = self.config.experts_per_token if options.look_ahead else 0
        self._decoder = kimi.Decoder(weights.store, weights.workers, look_ahead)
        self._state = kimi.new_state(self.config, options.context)
        self._spoilt = False
        self._work = _Work()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all threads and close all files. A second call does nothing."""
        self._closing.close()

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know, for example that direct reads are not possible here."""
        return self._weights.notes()

    @property
    def context(self) -> int:
        """Tokens that the state can hold."""
        return self._options.context

    @property
    def position(self) -> int:
        """Tokens fed since the start or the last :meth:`reset`."""
        return self._state.position

    def reset(self) -> None:
        """Forget all tokens."""
        self._state.clear()
        self._spoilt = False

    def feed(self, ids: Sequence[int]) -> Single:
        """Feed the next tokens.

        Args:
            ids: at least one.

        Returns:
            Logits after the last of them: float32 [vocab].

        Raises:
            UsageError: no token, an id out of range, or more tokens than the state can hold; nothing was fed.
            FormatError: weights are damaged or absent, or the result is not finite; reset the session to go on.
        """
        last = deque(self._steps(ids, None), maxlen=1)
        _, states = last.pop()
        logits: Single = self._logits(states[-1:])[0]
        return logits

    def stream(self, ids: Sequence[int], *, observer: Observer | None = None) -> Iterator[tuple[int, Single]]:
        """Feed the next tokens, and have the logits after each.

        Yields:
            The position of the first token of a chunk, and float32 [tokens of the chunk, vocab].

        Raises:
            As :meth:`feed`.
        """
        for first, states in self._steps(ids, observer):
            yield first, self._logits(states)

    def statistics(self) -> SessionStatistics:
        """What was done so far."""
        stream, trunk = self._weights.stream.statistics(), self._weights.trunk.statistics()
        return SessionStatistics(self._work.tokens, self._work.seconds, stream, trunk)

    def _steps(self, ids: Sequence[int], observer: Observer | None) -> Iterator[tuple[int, Single]]:
        self._check(ids)
        for start in range(0, len(ids), self._options.chunk):
            part = ids[start : start + self._options.chunk]
            first, began = self._state.position, time.monotonic()
            self._spoilt = True
            with np.errstate(all="ignore"):  # what leaves float32 shows in the logits, which are looked at
                states = self._decoder.step(part, self._state, observer)
            self._spoilt = False
            self._work.seconds += time.monotonic() - began
            self._work.tokens += len(part)
            yield first, states

    def _logits(self, states: Single) -> Single:
        began = time.monotonic()
        self._spoilt = True  # if this fails: the state has moved on already
        logits = self._weights.store.trunk.head(states)
        self._work.seconds += time.monotonic() - began
        if not np.isfinite(logits).all():
            raise FormatError("the model's logits are not finite: its weights are not sound", where=self.path)
        self._spoilt = False
        return logits

    def _check(self, ids: Sequence[int]) -> None:
        if self._spoilt:
            raise UsageError("the state was left in the middle of a step", where=self.path, hint="reset the session")
        if not len(ids):
            raise UsageError("no token to feed", where="token ids")
        vocabulary = self.config.vocab_size
        wrong = next((token for token in ids if not _is_id(token, vocabulary)), None)
        if wrong is not None:
            raise UsageError("token id out of range", where="token ids", expected=f"0 to {vocabulary - 1}", found=wrong)
        needed = self._state.position + len(ids)
        if needed > self.context:
            raise UsageError(
                "more tokens than the state can hold",
                where="--context",
                expected=f"at least {needed}",
                found=self.context,
            )


def _is_id(token: object, vocabulary: int) -> bool:
    return isinstance(token, int | np.integer) and not isinstance(token, bool) and 0 <= int(token) < vocabulary


@dataclass
class _Work:
    """Tokens and seconds so far."""

    tokens: int = field(default=0)
    seconds: float = field(default=0.0)


def open_session(path: str | Path, options: Options | None = None) -> Session:
    """Open a container or a checkpoint directory for running.

    Raises:
        As :func:`runtime.opening.open_weights`.
    """
    options = options or Options()
    with ExitStack() as stack:
        weights = open_weights(Path(path), options, stack)
        return Session(Path(path), options, weights, stack.pop_all())
