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
with it. A few tokens before the measured ones warm each cache up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from formats.container import open_container
from formats.errors import FormatError, UsageError
from runtime.assets import is_container, unfinished_hint
from runtime.bench_alone import Caching, Layers, PlainReads, PresentExperts, measure_cache
from runtime.budget import RESIDENT, BudgetPlan
from runtime.models import kimi
from runtime.models.observer import Observer
from runtime.opening import Options, Weights, open_weights
from runtime.sampling import Sampling, choose
from runtime.stream.statistics import StreamStatistics
from runtime.threads import Workers

WARM_TOKENS = 4

Step = Callable[[int], NDArray[np.float32]]  # feeds one token; its logits [vocab]


@dataclass(frozen=True)
class Together:
    """Decoding as it is: seconds of all measured tokens, and what was read meanwhile."""

    seconds: float
    stream: StreamStatistics
    trunk_bytes: int
    trunk_stall_seconds: float

    @property
    def bytes_read(self) -> int:
        """Of experts and trunk."""
        return self.stream.bytes_read + self.trunk_bytes

    @property
    def stall_seconds(self) -> float:
        """In which arithmetic waited for bytes."""
        return self.stream.stall_seconds + self.trunk_stall_seconds


@dataclass(frozen=True)
class Reading:
    """Plain reads of what all measured tokens need: of experts, and of the trunk where it is streamed."""

    expert_seconds: float
    expert_bytes: int
    trunk_seconds: float
    trunk_bytes: int

    @property
    def seconds(self) -> float:
        """Of everything."""
        return self.expert_seconds + self.trunk_seconds


@dataclass(frozen=True)
class Bench:
    """What was measured.

    Attributes:
        container_id: of the container.
        tokens: measured.
        threads: for arithmetic.
        plan: how the budget was divided.
        together, reading, caching: see there.
        computing_seconds: arithmetic alone; None where the trunk does not fit into memory.
        apart_seconds: reading and arithmetic at once, neither waiting for the other; None likewise.
        notes: of the reading, for example that direct reads are not possible here.
    """

    container_id: str
    tokens: int
    threads: int
    plan: BudgetPlan
    together: Together
    reading: Reading
    caching: Caching
    computing_seconds: float | None
    apart_seconds: float | None
    notes: tuple[str, ...]

    @property
    def ratio(self) -> float | None:
        """Together, in proportion to the larger of reading alone and computing alone."""
        return self._over_larger(self.together.seconds)

    @property
    def apart_ratio(self) -> float | None:
        """The same of both at once."""
        return self._over_larger(self.apart_seconds)

    def _over_larger(self, seconds: float | None) -> float | None:
        if seconds is None or self.computing_seconds is None:
            return None
        return seconds / max(self.reading.seconds, self.computing_seconds)


def bench(path: Path, options: Options, *, tokens: int, seed: int = 0, tell: Callable[[str], None] = print) -> Bench:
    """Measure a container.

    Args:
        path: the container.
        options: how it is run; the context is chosen here.
        tokens: how many are measured, at least one.
        seed: of the tokens that the model draws.
        tell: told what is being measured.

    Raises:
        UsageError: not a container, no tokens, or a budget that is too small.
        FormatError: the container is damaged or partial.
    """
    if tokens < 1:
        raise UsageError("nothing to measure", where="-n", expected="1 or more", found=tokens)
    if not is_container(path):
        raise FormatError("not a container", where=path, hint=unfinished_hint(path) or "make one with moepack pack")
    options = replace(options, context=WARM_TOKENS + tokens)
    tell("decoding, reading alone and computing alone, token by token")
    with ExitStack() as stack:
        weights = open_weights(path, options, stack)
        plan, threads, container_id = weights.plan, weights.workers.threads, weights.container_id or ""
        together, reading, computing, apart, trace = _in_turn(path, weights, options, tokens, seed, stack)
        notes = weights.notes()
    tell("the cache alone")
    with open_container(path) as container, Workers(threads) as workers:
        caching = measure_cache(container, plan, trace, WARM_TOKENS, workers)
    return Bench(container_id, tokens, threads, plan, together, reading, caching, computing, apart, notes)


@dataclass
class _Routes(Observer):
    """Notes which experts were chosen, token by token."""

    tokens: list[dict[int, tuple[int, ...]]] = field(default_factory=list)

    def routes(self, layer: int, first: int, chosen: NDArray[np.int64], weights: NDArray[np.float32]) -> None:
        self.tokens[-1][layer] = tuple(int(expert) for expert in chosen[0])


def _steps(weights: Weights, options: Options, observer: Observer | None) -> Step:
    """A function that feeds one token of a new conversation and returns its logits [vocab]."""
    look_ahead = weights.store.config.experts_per_token if options.look_ahead else 0
    decoder = kimi.Decoder(weights.store, weights.workers, look_ahead)
    state = kimi.new_state(weights.store.config, options.context)

    def step(token: int) -> NDArray[np.float32]:
        with np.errstate(all="ignore"):
            logits: NDArray[np.float32] = weights.store.trunk.head(decoder.step((token,), state, observer))[0]
        return logits

    return step


@dataclass
class _Totals:
    """Seconds of all measured tokens so far, each way, and the bytes of the experts that they need."""

    together: float = 0.0
    experts: float = 0.0
    trunk: float = 0.0
    computing: float = 0.0
    apart: float = 0.0
    expert_bytes: int = 0


def _in_turn(
    path: Path, weights: Weights, options: Options, tokens: int, seed: int, stack: ExitStack
) -> tuple[Together, Reading, float | None, float | None, Sequence[Layers]]:
    """Measure token by token; together, reading alone, computing alone, both at once, and the routes of all tokens."""
    sampling = Sampling(temperature=1.0, seed=seed)
    generator = sampling.generator()
    routes = _Routes()
    step = _steps(weights, options, routes)
    alone = _alone(path, weights, options, stack)
    plain = stack.enter_context(closing(PlainReads(stack.enter_context(open_container(path)), weights.plan.slots)))
    token = int(generator.integers(weights.store.config.vocab_size))
    totals = _Totals()
    before, trunk = StreamStatistics(), weights.trunk.statistics()
    for place in range(WARM_TOKENS + tokens):
        if place == WARM_TOKENS:
            totals, before, trunk = _Totals(), weights.stream.statistics(), weights.trunk.statistics()
        routes.tokens.append({})
        read = weights.trunk.statistics().bytes_read
        began = time.perf_counter()
        logits = step(token)
        totals.together += time.perf_counter() - began
        experts = plain.needed(routes.tokens[-1])
        others = plain.trunk(weights.trunk.statistics().bytes_read - read)
        totals.expert_bytes += sum(piece.bytes for piece in experts)
        totals.experts += plain.read(experts)
        totals.trunk += plain.read(others)
        if alone is not None:
            began = time.perf_counter()
            alone(token)
            totals.computing += time.perf_counter() - began
            began = time.perf_counter()
            reads = plain.begin([*experts, *others])
            alone(token)
            for done in reads:
                done.result()
            totals.apart += time.perf_counter() - began
        token = choose(logits, sampling, generator)
    after = weights.trunk.statistics()
    trunk_bytes = after.bytes_read - trunk.bytes_read
    stalled = after.stall_seconds - trunk.stall_seconds
    together = Together(totals.together, weights.stream.statistics() - before, trunk_bytes, stalled)
    reading = Reading(totals.experts, totals.expert_bytes, totals.trunk, trunk_bytes)
    if alone is None:
        return together, reading, None, None, routes.tokens
    return together, reading, totals.computing, totals.apart, routes.tokens


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
    twice = replace(options, look_ahead=False, context=2 * options.context)  # for each token is fed twice
    step = _steps(held, twice, None)

    def alone(token: int) -> NDArray[np.float32]:
        experts.renew()
        return step(token)

    return alone
