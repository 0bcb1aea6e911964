"""What all tests have in common."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Tests interrupt themselves and processes that they start.

    A shell's background job ignores SIGINT, and hands that on to whatever it starts.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
