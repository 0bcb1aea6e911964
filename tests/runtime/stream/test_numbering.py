"""Numbers of experts over all layers."""

from __future__ import annotations

import pytest

from formats.errors import UsageError
from runtime.stream.numbering import Numbering


def test_numbers_go_on_from_layer_to_layer() -> None:
    counts = (0, 3, 0, 2, 4)
    numbering = Numbering(counts)
    names = [(layer, expert) for layer, count in enumerate(counts) for expert in range(count)]
    assert [numbering.key(*name) for name in names] == list(range(9))


@pytest.mark.parametrize("name", [(0, 0), (1, 3), (1, -1), (-1, 0), (5, 0), (2, 0)])
def test_who_does_not_exist_has_no_number(name: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match="no such expert"):
        Numbering((0, 3, 0, 2, 4)).key(*name)
