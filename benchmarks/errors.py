"""Errors of what a benchmark was given, told as the commands tell them: in a line, and not as a traceback."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import contextmanager

from formats.errors import MoepackError


@contextmanager
def told(parser: ArgumentParser) -> Iterator[None]:
    """End the program with the message of a :class:`MoepackError`: no container, too small a budget and the like."""
    try:
        yield
    except MoepackError as error:
        parser.error(str(error))
