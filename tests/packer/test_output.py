"""The sink and the progress line: what comes from files is escaped, and results stay apart from the rest."""

from __future__ import annotations

import io
import json
import math
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from formats.errors import FormatError
from packer.output import Output, escape, human_bytes, human_number, human_seconds, json_text, make_output
from packer.progress import HEARTBEAT_SECONDS, Progress, ProgressLine, heartbeat


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def sink(**options: Any) -> Output:
    return Output(io.StringIO(), io.StringIO(), **options)


def text(stream: Any) -> str:
    return str(stream.getvalue())


# CLI-03: strings from files

HOSTILE = "\x1b[31m[red]name[/red]\n\r\t\x00\x7f\x9b2J\u202eevil\u2028\udcff :smile: é漢🙂"
SHOWN = "\\x1b[31m[red]name[/red]\\n\\r\\t\\x00\\x7f\\x9b2J\\u202eevil\\u2028\\xff :smile: é漢🙂"


def test_escape() -> None:
    assert escape(HOSTILE) == SHOWN
    assert escape("plain [text]") == "plain [text]"
    assert escape("\U000e0001") == "\\U000e0001"


@given(st.text())
@settings(derandomize=True, deadline=None, max_examples=300)
def test_what_is_escaped_is_one_printable_line(value: str) -> None:
    shown = escape(value)
    assert "\n" not in shown
    assert all(char.isprintable() or char == " " or char.isspace() for char in shown)
    assert escape(shown) == shown


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_every_way_out_escapes(stream: type[io.StringIO]) -> None:
    out, err = stream(), stream()
    output = Output(out, err, verbose=True, color=False)
    output.line(HOSTILE)
    output.table(HOSTILE[:20], ["name", ">size"], [(HOSTILE, 1)])
    output.note(HOSTILE)
    output.detail(HOSTILE)
    output.hint(HOSTILE)
    output.failure(HOSTILE)
    output.error(FormatError("bad", where=HOSTILE, found=HOSTILE, hint=HOSTILE))
    for written in (out.getvalue(), err.getvalue()):
        assert not set(written) & set("\x00\x7f\x9b\u202e\u2028\udcff\r\t")
        assert "\x1b[31m" not in written
        assert "[red]" in written.replace("\n", "")
        assert ":smile:" in written


def test_json_is_escaped_too() -> None:
    document = json_text({"name": HOSTILE})
    assert document.isascii()
    assert "\x1b" not in document
    assert json.loads(document) == {"name": HOSTILE}


# CLI-07: one valid document


def test_json_has_no_undefined_numbers() -> None:
    document = {"rate": math.inf, "list": [math.nan, {"x": -math.inf}], "tuple": (1.5, None), "n": 1 << 60}
    assert json.loads(json_text(document)) == {
        "rate": None,
        "list": [None, {"x": None}],
        "tuple": [1.5, None],
        "n": 1 << 60,
    }


def test_results_and_the_rest_stay_apart() -> None:
    output = sink(json=True)
    output.note("a note")
    output.hint("a hint")
    output.failure("a failure")
    output.result({"ok": True})
    assert json.loads(text(output.stdout)) == {"ok": True}
    assert text(output.stderr) == "a note\nhint: a hint\nerror: a failure\n"


def test_quiet_keeps_errors() -> None:
    output = sink(quiet=True, verbose=True)
    output.note("a note")
    output.hint("a hint")
    output.detail("a detail")
    output.error(FormatError("is wrong", where="file", offset=7, expected=1, found=2, hint="do this"))
    assert text(output.stderr) == "error: file at byte 7: is wrong (expected 1, found 2)\nhint: do this\n"


def test_long_lines_are_not_folded_where_nobody_watches() -> None:
    output = sink()
    output.table("", ["name"], [("x" * 5000,)])
    output.failure("y" * 5000)
    assert "x" * 5000 in text(output.stdout)
    assert "y" * 5000 in text(output.stderr)


def test_colours_can_be_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = Output(Terminal(), Terminal())
    coloured.failure("x")
    assert "\x1b[" in text(coloured.stderr)
    plain = Output(Terminal(), Terminal(), color=False)
    plain.failure("x")
    assert "31m" not in text(plain.stderr)
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert make_output().color
    monkeypatch.setenv("NO_COLOR", "1")
    assert not make_output().color


def test_the_first_frame_of_a_bar_has_its_total(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    output = Output(Terminal(), Terminal(), color=False)
    with ProgressLine(output, "pack"):
        assert text(output.stderr) == ""
    assert text(output.stderr) == ""
    with ProgressLine(output, "pack") as line:
        line(Progress(0, 1024, "x"))
    assert "?" not in text(output.stderr).replace("\x1b[?", "")


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_tables_are_not_folded_and_have_no_trailing_blanks(
    stream: type[io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    output = Output(stream(), io.StringIO(), color=False)
    output.table("", ["name", "what"], [("model.layers.3.block_sparse_moe.experts.17", "x"), ("short", "")])
    lines = text(output.stdout).splitlines()
    assert any("model.layers.3.block_sparse_moe.experts.17" in line for line in lines)
    assert "short" in lines


def test_where_nobody_can_be_told_the_work_goes_on() -> None:
    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(28, "No space left on device")

    output = Output(io.StringIO(), Full())
    output.note("a note")
    output.failure("a failure")


# Numbers for people


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        (12_419_072, "11.8 MiB"),
        (1_023_728_943_104, "953 GiB"),
        (1 << 70, "1024 EiB"),
    ],
)
def test_human_bytes(count: int, shown: str) -> None:
    assert human_bytes(count) == shown


def test_human_numbers() -> None:
    assert [human_number(value) for value in (None, math.nan, math.inf, 0.19637, 0.0)] == ["-", "-", "-", "0.196", "0"]
    assert [human_seconds(value) for value in (0, 59.4, 60, 3599, 3700, 200_000)] == [
        "0 s", "59 s", "1 min 00 s", "59 min 59 s", "1 h 01 min", "2 d 07 h",
    ]  # fmt: skip


# CLI-04: progress


def test_heartbeat_counts_this_run_only() -> None:
    """50 of 100 MiB are done, 10 of them in the 20 seconds of this run: the other 50 take 100 seconds more."""
    line = heartbeat("pack", Progress(50 << 20, 100 << 20, "layer 3"), 20.0, 10 << 20)
    assert line == "pack: 50.0 % (50.0 MiB of 100 MiB), layer 3, about 1 min 40 s left"
    assert "left" not in heartbeat("pack", Progress(50, 100, "layer 3"), 20.0, 0)
    assert heartbeat("pack", Progress(0, 0, "x"), 0.0, 0).startswith("pack: 100.0 %")


def test_lines_come_at_intervals() -> None:
    now = [0.0]
    output = sink()
    with ProgressLine(output, "pack", clock=lambda: now[0]) as line:
        for second in range(100):
            now[0] = float(second)
            line(Progress(second, 200, "bank \x1b[2J"))
    lines = text(output.stderr).splitlines()
    assert len(lines) == int(99 / HEARTBEAT_SECONDS)
    assert lines[0] == "pack: 15.0 % (30 bytes of 200 bytes), bank \\x1b[2J, about 2 min 50 s left"
    assert text(output.stdout) == ""


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    output = Output(Terminal(), Terminal(), color=False)
    with ProgressLine(output, "pack") as line:
        line(Progress(512, 1024, "[red]evil[/red]\x1b]0;title\x07"))
    written = text(output.stderr)
    assert "[red]evil" in written
    assert "\x1b]0;" not in written
    assert text(output.stdout) == ""


def test_a_measurement_moves_nothing_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    output, now = Output(Terminal(), Terminal(), color=False), iter((0.0, 1.0, HEARTBEAT_SECONDS))
    with ProgressLine(output, "bench", clock=now.__next__, spell=str, moving=False) as line:
        line(Progress(1, 4, "measuring"))
        assert text(output.stderr) == ""
        line(Progress(2, 4, "measuring"))
    assert text(output.stderr) == "bench: 50.0 % (2 of 4), measuring, about 58 s left\n"


def test_quiet_shows_no_progress() -> None:
    output = Output(Terminal(), Terminal(), quiet=True)
    with ProgressLine(output, "pack", clock=iter(range(0, 10_000, 100)).__next__) as line:
        line(Progress(1, 2, "x"))
        line(Progress(2, 2, "x"))
    assert text(output.stderr) == ""
