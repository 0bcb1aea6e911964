"""Reading a tensor as if it had some of its rows only: the router of a layer that keeps some of its experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Read = Callable[[int, int], bytes]  # start and stop


def reader_of_rows(read: Read, rows: Sequence[int], row_bytes: int) -> Read:
    """Reads ranges of the chosen rows' bytes, one row after the other.

    Args:
        read: of ranges of the whole tensor.
        rows: their numbers, ascending; neighbours are read together.
        row_bytes: of one row, at least 1.

    >>> reader_of_rows(lambda start, stop: b"aabbccdd"[start:stop], [0, 2, 3], 2)(1, 6)
    b'accdd'
    """

    def read_rows(start: int, stop: int) -> bytes:
        pieces = []
        while start < stop:
            place, inside = divmod(start, row_bytes)
            last = place
            while (last + 1) * row_bytes < stop and rows[last + 1] == rows[last] + 1:
                last += 1
            end = min(stop, (last + 1) * row_bytes)
            first = rows[place] * row_bytes + inside
            pieces.append(read(first, first + end - start))
            start = end
        return b"".join(pieces)

    return read_rows
