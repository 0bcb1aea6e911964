"""How fast a container runs here, and what holds it up: reading alone, computing alone, and both together.

Devices and processors of shared machines wander by a tenth and more within seconds, so what is compared is measured in
turn, token by token:

1. Together: as ``run`` does it. The model chooses its own token, and which experts it needs is noted.
2. Reading alone: what a cache of that size without look-ahead has to read for this token, as plain parallel reads. A
   streamed trunk is read as well.
3. Computing alone: the same token with experts that are in memory. Those that are stand in for the others: the time is
   the same, the numbers mean nothing. The trunk is held in memory.
4. Both at once, neither waiting for the other: the same reads while the same is computed. It is what this machine can
   do at the most where reading and computing are in each other's way.

Afterwards a cache is asked for the same experts without any arithmetic, and each token's reads are done plainly in turn
with it.

Tokens before the measured ones fill the caches. What is read for the first time is proved as well, which is work that
computing alone has none of; with enough of such tokens little of it is left, and how much is told.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from formats.container import open_container
from formats.errors import UsageError
from formats.spelling import counted
from runtime.bench_alone import PlainReads, PresentExperts, measure_cache
from runtime.budget import RESIDENT
from runtime.measured import Bench, Token
from runtime.models import kimi
from runtime.models.observer import Observer
from runtime.opening import Options, Weights, open_weights
from runtime.sampling import Sampling, choose
from runtime.stream.plain import Piece
from runtime.threads import Workers

UNCOUNTED_TOKENS = 2  # the last ones before those that count are measured as they are, so that nothing is done first
WAYS = 4  # of doing a measured token

Step = Callable[[int], NDArray[np.float32]]  # feeds one token; its logits [vocab]


def bench(
    path: Path,
    options: Options,
    *,
    tokens: int,
    warm: int,
    seed: int = 0,
    tell: Callable[[str], None],
    progress: Callable[[int, int, str], None],
) -> Bench:
    """Measure a container.

    Args:
        path: the container.
        options: how it is run; the context is chosen here.
        tokens: how many are measured, at least one.
        warm: how many are decoded before them, to fill the cache.
        seed: of the tokens that the model draws.
        tell: told what is begun.
        progress: told after each token how many passes over one have been made, of how many, and what is being done.

    Raises:
        UsageError: no such folder, no tokens, or a budget that is too small.
        FormatError: not a container, or a damaged or partial one.
    """
    if tokens < 1 or warm < 0:
        raise UsageError("nothing to measure", where="-n", expected="1 or more", found=tokens)
    options = replace(options, context=warm + tokens)
    uncounted = min(warm, UNCOUNTED_TOKENS)
    steps = _Steps(warm - uncounted + WAYS * (uncounted + tokens) + warm + tokens, progress)
    with ExitStack() as stack:
        run = Run(path, options, seed, stack)
        if warm:
            tell(f"decoding {counted(warm, 'token')} to warm up")
        for _ in range(warm - uncounted):
            run.decode()
            steps.made(1, "warming up")
        for _ in range(uncounted):
            run.measure()
            steps.made(WAYS, "warming up")
        tell("decoding, reading alone and computing alone, token by token")
        before, trunk = run.weights.stream.statistics(), run.weights.trunk.statistics()
        measured = []
        for _ in range(tokens):
            measured.append(run.measure())
            steps.made(WAYS, "measuring")
        weights = run.weights
        done, read = weights.stream.statistics() - before, weights.trunk.statistics() - trunk
        notes = weights.notes()
    tell("the cache alone")
    plan, threads = weights.plan, weights.workers.threads
    with open_container(path) as container, Workers(threads) as workers:
        trace = run.routes.tokens
        caching = measure_cache(container, plan, trace, warm, workers, lambda: steps.made(1, "the cache alone"))
    return Bench(weights.container_id or "", warm, tuple(measured), threads, plan, done, read, caching, notes)


@dataclass
class _Steps:
    """Passes over a token that have been made, of all of them."""

    total: int
    progress: Callable[[int, int, str], None]
    done: int = 0

    def made(self, count: int, what: str) -> None:
        self.done += count
        self.progress(self.done, self.total, what)


@dataclass
class Routes(Observer):
    """Notes which experts were chosen.

    Attributes:
        tokens: of each, the chosen experts by layer.
    """

    tokens: list[dict[int, tuple[int, ...]]] = field(default_factory=list)

    def routes(self, layer: int, first: int, chosen: NDArray[np.int64], weights: NDArray[np.float32]) -> None:
        self.tokens[-1][layer] = tuple(int(expert) for expert in chosen[0])


def conversation(weights: Weights, options: Options, observer: Observer | None) -> Step:
    """A function that feeds one token of a new conversation and returns its logits [vocab]."""
    look_ahead = weights.store.config.experts_per_token if options.look_ahead else 0
    decoder = kimi.Decoder(weights.store, weights.workers, look_ahead)
    state = kimi.new_state(weights.store.config, options.context)

    def step(token: int) -> NDArray[np.float32]:
        with np.errstate(all="ignore"):
            logits: NDArray[np.float32] = weights.store.trunk.head(decoder.step((token,), state, observer))[0]
        return logits

    return step


class Run:
    """A conversation that the model has with itself, and the other ways of doing each of its tokens.

    Attributes:
        weights: of the model.
        routes: of all tokens so far.
        token: the next one.
    """

    def __init__(self, path: Path, options: Options, seed: int, stack: ExitStack) -> None:
        """``stack`` closes what is opened."""
        container = stack.enter_context(open_container(path))  # first: nothing else says as well what is none
        self.weights = open_weights(path, options, stack)
        self.routes = Routes()
        self._step = conversation(self.weights, options, self.routes)
        self._alone = _alone(path, self.weights, options, stack)
        self._plain = stack.enter_context(closing(PlainReads(container, self.weights.plan.slots)))
        self._sampling = Sampling(temperature=1.0, seed=seed)
        self._generator = self._sampling.generator()
        self.token = int(self._generator.integers(self.weights.store.config.vocab_size))

    def decode(self) -> tuple[int, float, list[Piece]]:
        """Decode the next token; it, the seconds, and the records that a cache without look-ahead reads for it."""
        token = self.token
        self.routes.tokens.append({})
        began = time.perf_counter()
        logits = self._step(token)
        seconds = time.perf_counter() - began
        self.token = choose(logits, self._sampling, self._generator)
        return token, seconds, self._plain.needed(self.routes.tokens[-1])

    def measure(self) -> Token:
        """Decode the next token, and do it in the other ways."""
        before = self.weights.trunk.statistics().bytes_read
        token, together, experts = self.decode()
        others = self._plain.trunk(self.weights.trunk.statistics().bytes_read - before)
        reads = (self._plain.read(experts), self._plain.read(others))
        computing = apart = None
        if self._alone is not None:
            began = time.perf_counter()
            self._alone(token)
            computing = time.perf_counter() - began
            began = time.perf_counter()
            under_way = self._plain.begin([*experts, *others])
            self._alone(token)
            for read in under_way:
                read.result()
            apart = time.perf_counter() - began
        sizes = [sum(piece.bytes for piece in pieces) for pieces in (experts, others)]
        return Token(together, *reads, computing, apart, *sizes)


def _alone(path: Path, weights: Weights, options: Options, stack: ExitStack) -> Step | None:
    """Computes a token with what is in memory; None where a streamed trunk does not fit there."""
    held = weights
    if weights.plan.trunk != RESIDENT:
        try:
            held = open_weights(path, replace(options, trunk=RESIDENT, budget=None), stack)
        except UsageError:
            return None
    experts = PresentExperts(weights.stream, weights.workers)
    held = replace(held, workers=weights.workers, store=replace(held.store, experts=experts))
    twice = replace(options, context=2 * options.context)  # for each token is fed twice
    step = conversation(held, twice, None)

    def alone(token: int) -> NDArray[np.float32]:
        experts.renew()
        return step(token)

    return alone
