"""What tests of reports share."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest


@pytest.fixture
def without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes matplotlib as if it were not installed, from when it is called until the test ends."""

    def hide() -> None:
        for name in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_svg"):
            monkeypatch.setitem(sys.modules, name, None)

    return hide
