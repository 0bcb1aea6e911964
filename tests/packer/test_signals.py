"""The second signal ends a command at once, and leaves the terminal as it was."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys

import pytest

CHILD = """
import time
from packer.commands.signals import stop_on_signals
with stop_on_signals("stopping"):
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_shows_the_cursor_again(number: signal.Signals) -> None:
    master, slave = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, stderr=slave) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        child.send_signal(number)
        written = b""
        while b"stopping" not in written:
            written += os.read(master, 1000)
        child.send_signal(number)
        assert child.wait(30) == 130
    os.close(slave)
    while not written.endswith(b"\x1b[?25h\r\n"):  # reading on where nothing more comes fails
        written += os.read(master, 1000)
    os.close(master)
