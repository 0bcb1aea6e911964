"""The entry point ``moepack``: makes sure that the right modules run, then hands over to :mod:`packer.commands`.

Only the standard library is imported at the top. The packages have common names, and if another ``formats`` came
first on the path, importing it would fail in strange ways before anybody could say why.
"""

from __future__ import annotations

import importlib.util
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

_PACKAGES = ("formats", "packer", "recipes", "runtime")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        arguments: without the program's name; those of the process by default.
    """
    try:
        open_missing_streams()
        use_utf8()
        intruder = find_intruder()
        if intruder is not None:
            sys.stderr.write(f"error: {intruder}\nhint: start moepack without PYTHONPATH, from another folder\n")
            return 4
        from packer.commands import run

        return run(sys.argv[1:] if arguments is None else list(arguments))
    except KeyboardInterrupt:  # while importing, mostly: later ones are met where there is more to say
        sys.stderr.write("error: interrupted\n")
        return 130


def find_intruder() -> str | None:
    """What is wrong if one of our packages would come from elsewhere than this file's distribution; else None."""
    home = Path(__file__).resolve().parent.parent
    for name in _PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is None:
            return f"package {name} of moepack is not installed (expected in {str(home)!a})"
        places = [Path(place) for place in spec.submodule_search_locations or [spec.origin or "?"]]
        if any(place.resolve().parent != home for place in places):
            return f"another package called {name} is in the way (expected in {str(home)!a}, found {str(places[0])!a})"
    return None


def open_missing_streams() -> None:
    """Give a process that was started without stdin, stdout or stderr ones that hold and take nothing."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 - for the whole process


def use_utf8() -> None:
    """Write UTF-8 whatever the locale says; what UTF-8 cannot hold is written as an escape."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


if __name__ == "__main__":
    sys.exit(main())
