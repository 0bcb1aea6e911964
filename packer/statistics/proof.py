"""One pass over a whole file of statistics: its digest, and sums that are numbers.

The digest says that the bytes are those that were written, not that a sound tool wrote them. Since all bytes pass by
here anyway, sums that are no numbers are told before hours of work are built on them, not at the layer that needs them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from blake3 import blake3

from formats.errors import FormatError
from formats.files import read_exactly
from formats.shard import SourceTensor
from packer.statistics.types import check_sums

HASH_BYTES = 8 << 20  # of which a number of any type is a part
DIGEST_BYTES = 32
SUMS = {"F64": "<f8", "F32": "<f4"}


def proven_digest(fd: int, size: int, tensors: Iterable[SourceTensor], where: str) -> str:
    """BLAKE3 of a whole file in hex, once its end is seen to be the digest of all before it.

    Args:
        fd: the open file.
        size: of it.
        tensors: in the order of the file, without gaps, up to its end.
        where: its name, for messages.

    Raises:
        FormatError: another digest, or sums that are not finite or below zero.
    """
    hasher, end = blake3(), size - DIGEST_BYTES
    problem = None
    for start, length, tensor in _pieces(tensors, end):
        data = read_exactly(fd, start, length, where=where)
        hasher.update(data)
        if problem is None and tensor is not None and tensor.dtype in SUMS:
            sums = np.frombuffer(data, SUMS[tensor.dtype])
            first = (start - tensor.offset) // sums.itemsize
            try:
                check_sums(sums, where=f"{where}: {tensor.name}", shape=tensor.shape, first=first)
            except FormatError as error:
                problem = error  # said below, unless it comes of damage
    stored, found = read_exactly(fd, end, DIGEST_BYTES, where=where), hasher.digest()
    if found != stored:
        raise FormatError(
            "statistics are damaged: they have another digest than their own",
            where=where,
            expected=stored.hex(),
            found=found.hex(),
            hint="copy the file again, or make it again with moepack calibrate",
        )
    if problem is not None:
        raise problem
    return hasher.update(stored).hexdigest()


def _pieces(tensors: Iterable[SourceTensor], end: int) -> Iterator[tuple[int, int, SourceTensor | None]]:
    """Start, length and tensor of pieces to read, from the first byte of the file to ``end``."""
    spans = [(tensor.offset, tensor.offset + tensor.bytes, tensor) for tensor in tensors]
    for first, last, tensor in ((0, spans[0][0], None), *spans):
        stop = min(last, end)
        for start in range(first, stop, HASH_BYTES):
            yield start, min(HASH_BYTES, stop - start), tensor
