"""What a better look-ahead could still save: ``python -m benchmarks.overlap CONTAINER --budget 2.15GB``.

Each token is done in the ways of ``moepack bench``, and decoded once more from a cache of its own by somebody who knows
beforehand which experts the next layers of that token will choose, at no cost. It is what this stream does with perfect
guesses, not the least that any scheduler of reads could reach.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.errors import told
from packer.commands.size import parse_size
from runtime.bench import UNCOUNTED_TOKENS, Routes, Run, conversation
from runtime.measured import Token, larger_of, over
from runtime.opening import Options, open_weights
from runtime.store import Expert, Experts


@dataclass(frozen=True)
class Foreknowing:
    """Experts whose next layers' choices are known once a layer's own are.

    Attributes:
        experts: that serve.
        routes: the last token's are those that will be chosen.
        layers: how many layers ahead they are known.
    """

    experts: Experts
    routes: Routes
    layers: int

    @property
    def complete(self) -> bool:
        """Nothing need be guessed."""
        return True

    def compute(
        self,
        layer: int,
        chosen: Sequence[int],
        work: Callable[[Expert], None],
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """As in :class:`runtime.store.Experts`; the next layers' reads are asked for behind this one's."""

        def knowing() -> None:
            self.foretell(layer + 1)
            if meanwhile is not None:
                meanwhile()

        self.experts.compute(layer, chosen, work, knowing)

    def expect(self, layer: int, likely: Sequence[int]) -> None:
        """Nothing is guessed."""

    def foretell(self, first: int) -> None:
        """Expect what layers will choose, the first of them ``first`` or the next one that has experts."""
        known = self.routes.tokens[-1]
        for layer in sorted(layer for layer in known if layer >= first)[: self.layers]:
            self.experts.expect(layer, known[layer])


def foreknowing(path: Path, options: Options, routes: Routes, layers: int, stack: ExitStack) -> Callable[[int], float]:
    """A function that decodes a token, whose routes are the last ones, with foreknowledge; the seconds."""
    weights = open_weights(path, options, stack)
    experts = Foreknowing(weights.store.experts, routes, layers)
    knowing = replace(weights, store=replace(weights.store, experts=experts))
    step = conversation(knowing, options, None)

    def decode(token: int) -> float:
        began = time.perf_counter()
        experts.foretell(0)
        step(token)
        return time.perf_counter() - began

    return decode


def measure(path: Path, budget: int, warm: int, tokens: int, layers: int) -> list[tuple[Token, float]]:
    """Tokens in the ways of ``bench``, and the seconds of each with foreknowledge."""
    options = Options(budget=budget, context=warm + tokens)
    measured = []
    with ExitStack() as stack:
        run = Run(path, options, 0, stack)
        print(f"a cache of {run.weights.plan.slots} of {sum(run.weights.store.layer_experts)} experts")
        known = foreknowing(path, options, run.routes, layers, stack)
        for place in range(warm + tokens):
            token = run.token
            if place < warm - UNCOUNTED_TOKENS:
                run.decode()
                known(token)
                continue
            done, seconds = run.measure(), known(token)
            if place >= warm:
                measured.append((done, seconds))
    return measured


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("container", type=Path)
    parser.add_argument(
        "--budget", type=partial(parse_size, where="--budget"), required=True, help="of each of two models, e.g. 2.15GB"
    )
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--warm", type=int, default=32)
    parser.add_argument("--layers", type=int, default=1, help="how many layers ahead are known")
    given = parser.parse_args()
    with told(parser):
        measured = measure(given.container, given.budget, given.warm, given.tokens, given.layers)
    ways = {
        "reading alone": [token.reading for token, _ in measured],
        "computing alone": [token.computing for token, _ in measured],
        "both at once, neither waiting": [token.apart for token, _ in measured],
        "decoding as it is": [token.together for token, _ in measured],
        f"layers known ahead: {given.layers}": [seconds for _, seconds in measured],
    }
    sums = {name: np.array(seconds, np.float64).sum() for name, seconds in ways.items()}  # nan where not measured
    if np.isnan(sums["computing alone"]):
        parser.error("the trunk does not fit into memory: computing alone cannot be measured")
    larger = larger_of(sums["reading alone"], sums["computing alone"])
    larger_by_token = float(np.sum([token.larger for token, _ in measured]))
    print("| way | ms a token | over the larger of the first two | of each token's larger | the same in the median |")
    print("|---|---|---|---|---|")
    for name, seconds in ways.items():
        ratio, paced = over(sums[name], larger), over(sums[name], larger_by_token)
        own = np.median([token.over_larger(each) for (token, _), each in zip(measured, seconds, strict=True)])
        print(f"| {name} | {1e3 * sums[name] / len(measured):.0f} | {ratio:.2f} | {paced:.2f} | {own:.2f} |")


if __name__ == "__main__":
    main()
