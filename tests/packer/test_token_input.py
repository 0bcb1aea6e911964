"""Token ids from lists, files and texts."""

from __future__ import annotations

from pathlib import Path

import pytest

from formats.errors import MoepackError, UsageError
from packer.running.token_input import TokenInput, parse_ids, read_tokens


def test_lists_have_commas_or_blanks_between_ids() -> None:
    assert parse_ids("1,2,3", 9, where="x") == [1, 2, 3]
    assert parse_ids(" 1 ,2\n\t3,, 08 ", 9, where="x") == [1, 2, 3, 8]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "no token ids"),
        (" ,\n", "no token ids"),
        ("1,9", r"entry 2 is no token id \(expected 0 to 8, found '9'\)"),
        ("1,-1", "entry 2"),
        ("1.0", "entry 1"),
        ("0x1", "entry 1"),
        ("٣", "entry 1"),
        ("99999999999999999999", "entry 1"),
    ],
)
def test_run_10_other_lists_are_refused(text: str, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        parse_ids(text, 9, where="x")


def test_ids_may_be_a_list_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("some").write_text("4 5\n")
    Path("7").write_text("6")
    assert read_tokens(TokenInput(ids="1,2"), 9, None) == [1, 2]
    assert read_tokens(TokenInput(ids="some"), 9, None) == [4, 5]
    assert read_tokens(TokenInput(ids="7"), 9, None) == [6]  # a file of that name is what is meant
    assert read_tokens(TokenInput(ids="8"), 9, None) == [8]
    assert read_tokens(TokenInput(ids_file=Path("some")), 9, None) == [4, 5]


def test_texts_are_encoded_as_they_stand(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes("é\r\n".encode())
    assert read_tokens(TokenInput(text=path), 9, lambda text: [ord(char) for char in text]) == [0xE9, 13, 10]


@pytest.mark.parametrize(
    ("tokens", "code", "what"),
    [
        (TokenInput(), 2, "found none of them"),
        (TokenInput(window=5), 2, "found none of them"),
        (TokenInput(ids="1", text=Path("x")), 2, "found --ids, --text"),
        (TokenInput(ids="1", ids_file=Path("x")), 2, "found --ids, --ids-file"),
        (TokenInput(ids="absent"), 2, "absent: no such file"),
        (TokenInput(ids="3.txt"), 2, "3.txt: no such file"),
        (TokenInput(ids="1,a"), 2, "--ids: entry 2 is no token id"),
        (TokenInput(ids="-1"), 2, "--ids: entry 1 is no token id"),
        (TokenInput(ids="1.5"), 2, "1.5: no such file"),
        (TokenInput(text=Path("empty/text")), 2, "empty/text: no such file"),
        (TokenInput(ids_file=Path("folder")), 2, "not a regular file"),
        (TokenInput(ids_file=Path("latin")), 2, "latin at byte 2: not UTF-8"),
        (TokenInput(text=Path("latin")), 2, "not UTF-8"),
        (TokenInput(text=Path("empty")), 2, "text is empty"),
        (TokenInput(ids_file=Path("empty")), 2, "no token ids"),
    ],
)
def test_other_input_is_refused(
    tokens: TokenInput, code: int, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("latin").write_bytes(b"1 \xe9")
    Path("empty").write_bytes(b"")
    with pytest.raises(MoepackError, match=what) as caught:
        read_tokens(tokens, 9, lambda text: [1] * len(text))
    assert caught.value.exit_code == code


def test_too_long_files_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "long"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UsageError, match="file is too long"):
        read_tokens(TokenInput(ids_file=path), 9, None)


def test_a_list_that_looks_like_a_name_is_told_what_a_list_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MoepackError) as caught:
        read_tokens(TokenInput(ids="1.5"), 9, None)
    assert caught.value.hint == "give a list, as in 1,2,3, or the name of a file with one"
