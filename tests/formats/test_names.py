"""The grammar of file names: what must pass, and one case for each rule that can be broken."""

from __future__ import annotations

import pytest

from formats.errors import FormatError
from formats.names import check_distinct, check_relative_name


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "figures/x.png",
        "a b/c d.txt",
        "été/漢字.jinja",
        "cons.d/console",
        "common",
        "nul-terminated.txt",
        "COM10",
        "/".join("abcdefghijklmnop"),
        "x" * 255,
        "-dash",
        "..a",
        "a..b",
    ],
)
def test_safe_names_pass(name: str) -> None:
    assert check_relative_name(name) == name


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("", "length"),
        ("../../x", "leaves its directory"),
        ("a/../b", "leaves its directory"),
        (".", "leaves its directory"),
        ("/etc/passwd", "absolute"),
        ("a//b", "empty component"),
        ("a/", "empty component"),
        ("C:\\x", "forbidden character"),
        ("C:x", "forbidden character"),
        ("a\\..\\b", "forbidden character"),
        ("what?", "forbidden character"),
        ("a*b", "forbidden character"),
        ('a"b', "forbidden character"),
        ("a<b", "forbidden character"),
        ("a|b", "forbidden character"),
        ("file:stream", "forbidden character"),
        ("a\nb", "control character"),
        ("a\x00b", "control character"),
        ("a\x1b[31mb", "control character"),
        ("a\x7fb", "control character"),
        ("a\x85b", "control character"),
        ("a\u2028b", "control character"),
        ("gnp\u202etxt.exe", "control character"),
        (" a", "blank"),
        ("a ", "blank"),
        ("b/a /c", "blank"),
        ("a\u3000", "blank"),
        ("a.", "trailing dot"),
        ("a./b", "trailing dot"),
        ("NUL", "device"),
        ("con.txt", "device"),
        ("x/Aux.tar.gz", "device"),
        ("com1", "device"),
        ("LPT¹.x", "device"),
        ("nul .txt", "device"),
        ("CONOUT$", "device"),
        ("e\u0301", "normal form"),
        ("\ud800", "Unicode"),
        ("x" * 256, "above 255 bytes"),
        ("é" * 128, "above 255 bytes"),
        ("/".join("abcdefghijklmnopq"), "components"),
        ("/".join(["x" * 200] * 6), "length"),
    ],
)
def test_fet_10_unsafe_names_are_refused(name: str, rule: str) -> None:
    with pytest.raises(FormatError, match=rf"index: unsafe file name: .*{rule}"):
        check_relative_name(name, where="index")


def test_distinct_names_pass() -> None:
    check_distinct(["a", "b", "a/b", "A1", "a2"])


@pytest.mark.parametrize(
    "names", [["a", "a"], ["README.md", "readme.MD"], ["straße", "STRASSE"], ["é", "e\u0301"], ["x/É", "X/é"]]
)
def test_names_that_collide_are_refused(names: list[str]) -> None:
    with pytest.raises(FormatError, match="two names for one file"):
        check_distinct(["z", *names], where="assets")
