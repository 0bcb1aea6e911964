"""Hit rates of cache policies on a model's real routes: ``python -m benchmarks.hit_rates MODEL TEXT``.

A model (a container or a checkpoint) is fed a text token by token. What it asks of its experts, and what its look-ahead
expects, is recorded, and played to every policy with several numbers of slots.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from benchmarks.errors import told
from packer.running.token_input import decoded, read_file
from runtime.models import kimi
from runtime.opening import Options, open_weights
from runtime.stream.replay import Recorder, Request, compare, contenders
from runtime.tokenizer import load_tokenizer

HALF_LIVES = (8.0, 16.0, 32.0, 128.0, float("inf"))


def record(model: Path, text: str, tokens: int) -> tuple[list[Request], tuple[int, ...], list[int]]:
    """Requests of feeding the first tokens of a text one by one, the experts of each layer, and the tokens."""
    with ExitStack() as closing:
        weights = open_weights(model, Options(context=tokens), closing)
        recorder = Recorder(weights.store.experts)
        config = weights.store.config
        decoder = kimi.Decoder(replace(weights.store, experts=recorder), weights.workers, config.experts_per_token)
        state = kimi.new_state(config, tokens)
        ids = load_tokenizer(model, config.vocab_size).encode(text)[:tokens]
        for token in ids:
            decoder.step([token], state)
        return recorder.requests, weights.store.layer_experts, ids


def precision(requests: Sequence[Request], count: int) -> float:
    """How many of the first ``count`` experts that were expected of a layer were then chosen."""
    found = []
    for request, following in pairwise(requests):
        if request.expected is not None and request.expected[0] == following.layer:
            guesses = request.expected[1][:count]
            found.append(len(set(guesses) & set(following.chosen)) / len(guesses))
    return sum(found) / len(found)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path, help="a text file")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--ahead", type=int, nargs="+", default=[2, 4])
    given = parser.parse_args()
    with told(parser):
        text = decoded(read_file(given.text), where=given.text)
        requests, layer_experts, ids = record(given.model, text, given.tokens)
    total, a_token = sum(layer_experts), sum(len(request.chosen) for request in requests) // len(ids)
    sizes = sorted(
        {max(len(r.chosen) for r in requests), a_token // 2, a_token, total // 4, total // 2, 3 * total // 4}
    )
    print(f"{len(ids)} tokens, {a_token} of {total} experts a token")
    deepest = max(len(request.expected[1]) for request in requests if request.expected)
    depths = [2**power for power in range(deepest.bit_length())]
    shares = ", ".join(f"{precision(requests, depth):.1%} of the first {depth}" for depth in depths)
    print(f"of what is expected of the next layer it chooses {shares}\n")
    print("| policy | " + " | ".join(f"{size} slots" for size in sizes) + " |")
    print("|---" * (len(sizes) + 1) + "|")
    shown = set()
    for ahead in given.ahead:
        for contender, outcomes in compare(requests, layer_experts, sizes, contenders(ahead, HALF_LIVES)):
            if contender.name in shown:
                continue
            shown.add(contender.name)
            cells = []
            for outcome in outcomes:
                early = f" ({outcome.ahead_used / outcome.ahead_reads:.0%})" if outcome.ahead_reads else ""
                cells.append(f"{outcome.hit_rate:.1%}, {outcome.reads / len(ids):.1f} reads{early}")
            print(f"| {contender.name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
