"""Mutations of inputs, from nothing but a random generator that is passed in: the same seed gives the same inputs."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

NUMBERS = (0, 1, -1, 2, 7, 8, 63, 64, 65, 127, 128, 255, 256, 4095, 4096, 65_535, 65_536, (1 << 31) - 1, 1 << 31)
NUMBERS += ((1 << 32) - 1, 1 << 32, (1 << 53) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 4096, (1 << 64) - 1, 1 << 64)
WORDS = (b"null", b"true", b"false", b"[]", b"{}", b'""', b"1.5", b"1e999", b"-0", b"NaN", b'"\\u0000"', b'"\\ud800"')
WORDS += (b"9" * 30, b"[" * 40, b'{"a":' * 10, b"inf", b"nan", b'"' + b"x" * 300 + b'"', b'"../x"', b"\xff\xfe")
TOKEN = re.compile(rb'-?[0-9][0-9.e+-]*|"(?:[^"\\\n]|\\.)*"|true|false|null')
LARGEST = 1 << 20


def mutated(data: bytes, others: Sequence[bytes], dice: random.Random, *, text: bool) -> bytes:
    """``data`` after one to four changes; ``others`` are inputs to take pieces from."""
    for _ in range(dice.choice((1, 1, 1, 2, 2, 4))):
        data = _token(data, others, dice) if text and dice.random() < 0.6 else _bytes(data, others, dice)
    return data[:LARGEST]


def _token(data: bytes, others: Sequence[bytes], dice: random.Random) -> bytes:
    """Another value in the place of a value."""
    places = [match.span() for match in TOKEN.finditer(data)]
    if not places:
        return _bytes(data, others, dice)
    start, end = dice.choice(places)
    kind = dice.randrange(5)
    if kind == 0:
        new = str(dice.choice(NUMBERS)).encode()
    elif kind == 1:
        new = dice.choice(WORDS)
    elif kind == 2:
        first, last = dice.choice(places)
        new = data[first:last]
    elif kind == 3:
        old = data[start:end]
        new = (
            str(int(old) + dice.choice((-4096, -64, -1, 1, 64, 4096))).encode()
            if old.isdigit() and len(old) < 30
            else b""
        )
    else:
        new = data[start:end] + b"," + data[start:end]
    return data[:start] + new + data[end:]


def _bytes(data: bytes, others: Sequence[bytes], dice: random.Random) -> bytes:
    """Bytes changed, put in, taken out, or copied from elsewhere."""
    at = dice.randrange(len(data) + 1)
    size = dice.choice((1, 1, 2, 4, 8, 32, 128))
    kind = dice.randrange(9)
    if kind == 0 and at < len(data):
        return data[:at] + bytes([data[at] ^ 1 << dice.randrange(8)]) + data[at + 1 :]
    if kind == 1:
        width = dice.choice((1, 2, 4, 8))
        number = dice.choice(NUMBERS) % (1 << 8 * width)
        at -= at % width
        return data[:at] + number.to_bytes(width, "little") + data[at + width :]
    if kind == 2:
        return data[:at] + dice.randbytes(size) + data[at + size :]
    if kind == 3:
        return data[:at] + dice.randbytes(size) + data[at:]
    if kind == 4:
        return data[:at] + data[at + size :]
    if kind == 5:
        return data[:at]
    if kind == 6:
        return data[:at] + bytes(size) + data[at + size :]
    if kind == 7:
        start = dice.randrange(len(data) + 1)
        return data[:at] + data[start : start + 4 * size] + data[at:]
    other = dice.choice(others)
    return data[:at] + other[min(at, len(other)) :]
