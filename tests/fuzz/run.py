"""The long run: ``python -m tests.fuzz.run --seconds 600``, all targets in turn, or one with ``--target``.

An input that makes a parser raise what it must not is written to ``build/fuzz/`` and the run ends with exit code 1; put
the input, made small, into ``tests/fuzz/corpus/`` together with the fix. With ``--atheris`` and one target, coverage
leads the mutations, where that package is installed; arguments behind ``--`` are libFuzzer's.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from blake3 import blake3

from tests.fuzz.mutate import mutated
from tests.fuzz.targets import CORPUS, TARGETS, Target, taken

KEPT = 200  # inputs that were taken and serve for further mutations


def corpus(name: str) -> list[bytes]:
    """The inputs of a target that stand in the repository, by name."""
    return [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]


def runs(name: str, seed: int, enough: Callable[[int], bool]) -> tuple[int, int]:
    """Mutate and parse until ``enough`` says so, told how often it was.

    Returns:
        How many inputs there were, and how many were taken.

    Raises:
        Exception: whatever a parser must not raise; the input is its last argument's attribute ``fuzz_input``.
    """
    target = TARGETS[name]
    dice = random.Random(f"{name} {seed}")
    pool = corpus(name)
    count = good = 0
    while not enough(count):
        data = mutated(dice.choice(pool), pool, dice, text=target.text)
        if dice.random() < 0.8:
            data = target.repair(data)
        count += 1
        if once(target, data):
            good += 1
            if len(pool) < KEPT:
                pool.append(data)
    return count, good


def once(target: Target, data: bytes) -> bool:
    """Give one input to a target; an exception that comes through carries the input."""
    try:
        return taken(target, data)
    except Exception as error:
        error.fuzz_input = data  # type: ignore[attr-defined]
        raise


def keep(name: str, data: bytes) -> Path:
    """Write an input that did harm where it can be found."""
    folder = Path("build") / "fuzz"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{blake3(data).hexdigest()[:12]}"
    path.write_bytes(data)
    return path


def with_atheris(name: str, arguments: Sequence[str]) -> None:
    """Let coverage lead the mutations."""
    import atheris  # type: ignore[import-not-found]

    atheris.instrument_all()
    atheris.Setup(
        [sys.argv[0], str(CORPUS / name), *arguments], lambda data: once(TARGETS[name], TARGETS[name].repair(data))
    )
    atheris.Fuzz()


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description="Give mutated inputs to the parsers.")
    parser.add_argument("--seconds", type=float, default=600.0, help="in all")
    parser.add_argument("--target", choices=sorted(TARGETS), action="append", help="only this one; may be repeated")
    parser.add_argument("--seed", type=int, default=None, help="by default another one each time")
    parser.add_argument("--atheris", action="store_true", help="coverage-guided; needs one --target")
    options, rest = parser.parse_known_args()
    names = options.target or sorted(TARGETS)
    if options.atheris:
        with_atheris(names[0], rest)
        return 0
    seed = random.SystemRandom().getrandbits(32) if options.seed is None else options.seed
    print(f"seed {seed}")
    for name in names:
        end = time.monotonic() + options.seconds / len(names)
        try:
            count, good = runs(name, seed, lambda _, end=end: time.monotonic() >= end)
        except Exception as error:
            traceback.print_exc()
            print(f"{name}: {keep(name, error.fuzz_input)}")  # type: ignore[attr-defined]
            return 1
        print(f"{name}: {count} inputs, {good} of them taken, no fault")
    return 0


if __name__ == "__main__":
    sys.exit(main())
