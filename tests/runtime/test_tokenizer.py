"""The tokenizer: hostile files, special tokens, Unicode, and the ids of the release's own vocabulary."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from formats.errors import FormatError, IntegrityError, UsageError
from runtime.tokenizer import TextStream, Tokenizer, load_tokenizer, make_tokenizer
from runtime.tokenizer_files import PATTERN, read_config, read_pattern, read_ranks
from tests.support.vocabularies import BYTES, MERGES, rank_file, tokenizer_files

ROOT = Path(__file__).parents[2]
RANKS = len(BYTES) + len(MERGES)
HELLO, WORLD = RANKS - 11 + 3, RANKS - 11 + 8
TEXT = "Hello é漢🙂 world's 12345\r\n\n  ÀÉß don't 中文English混合 \t x"


@pytest.fixture(scope="module")
def small() -> Tokenizer:
    return make_tokenizer(tokenizer_files(), 300)


# Ids


def test_merges_follow_ranks(small: Tokenizer) -> None:
    """By hand: `hello` is he+ll -> hell -> hello, ` world` is one token, `x` its byte."""
    assert small.encode("hello worldx") == [HELLO, WORLD, ord("x")]
    assert small.encode("") == []


def test_decoding_undoes_encoding(small: Tokenizer) -> None:
    assert small.decode(small.encode(TEXT)) == TEXT


def test_tok_04_the_stored_ids_under_any_locale() -> None:
    """The prompt of the failure catalogue in a process with a C locale: é is one token, 漢 one and a byte."""
    script = (
        "from runtime.tokenizer import make_tokenizer; from tests.support.vocabularies import tokenizer_files;"
        "import sys; print(make_tokenizer(tokenizer_files(), 300).encode(sys.argv[1]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "é漢🙂"],
        cwd=ROOT,
        env={"LC_ALL": "C", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == [RANKS - 2, RANKS - 1, 0xA2, *"🙂".encode()]


def test_kimi_vocabulary_agrees_with_another_implementation(tmp_path: Path) -> None:
    """The release's own 163,584 ranks, bundled with splintr, which has its own BPE and pattern engine."""
    splintr = pytest.importorskip("splintr", reason="splintr-rs, which bundles Kimi's vocabulary, is not installed")
    oracle = splintr.Tokenizer.from_pretrained("kimi_k3")
    ranks = [bytes(oracle.decode_bytes([rank])) for rank in range(163_584)]
    ours = make_tokenizer({"tiktoken.model": rank_file(ranks)}, 163_840)
    samples = [TEXT, Path(__file__).read_text(encoding="utf-8"), "漢字 かな 한국어 عربى ไทย", " \n \r\n\t\n", "'s'T'RE"]
    samples += [(ROOT / "README.md").read_text(encoding="utf-8"), "a" * 1000, "<|im_end|>[EOS]"]
    for text in samples:
        assert ours.encode(text) == oracle.encode_ordinary(text)
    assert ours.encode("Hello, world!") == [19180, 11, 2695, 0]  # stored by the maintainers of splintr


def test_long_runs_are_cut_where_the_release_cuts_them(small: Tokenizer) -> None:
    """Its rule, written out slowly here: never more than 25,000 blanks or others in a row, nor 400,000 characters."""

    def cut(text: str) -> list[str]:
        parts = []
        for begin in range(0, len(text), 400_000):
            part = text[begin : begin + 400_000]
            start = run = 0
            blank = part[0].isspace()
            for place, char in enumerate(part):
                if char.isspace() != blank:
                    blank, run = char.isspace(), 1
                    continue
                run += 1
                if run > 25_000:
                    parts.append(part[start:place])
                    start, run = place, 1
            parts.append(part[start:])
        return parts

    text = "x" * 60_001 + " " * 25_000 + "hello" * 80_000 + "\n" * 25_001 + "hello"
    pieces = [token for part in cut(text) for token in small._encoding.encode_ordinary(part)]
    assert small.encode(text) == pieces
    assert small.encode(text) != small._encoding.encode_ordinary(text)


def test_surrogates_are_no_text(small: Tokenizer) -> None:
    with pytest.raises(UsageError, match="character 1: text is not valid Unicode"):
        small.encode("a\udc80")


# Special tokens


def test_tok_01_tokens_of_the_config_are_one_id_each(small: Tokenizer) -> None:
    assert [small.encode_special(name) for name in ("[BOS]", "[EOS]", "<|im_end|>")] == [RANKS, RANKS + 1, RANKS + 4]
    assert small.encode_special(f"<|reserved_token_{RANKS + 2}|>") == RANKS + 2
    assert small.vocabulary == 300
    assert small.decode([RANKS + 4, HELLO, 299]) == "<|im_end|>hello<|reserved_token_299|>"


def test_tok_02_both_forms_are_read() -> None:
    entries = [{"id": 300, "content": "[BOS]"}, {"id": 302, "content": "<|im_end|>"}]
    listed = json.dumps({"added_tokens_decoder": entries, "extra_special_tokens": ["<|im_end|>"]}).encode()
    assert read_config(listed, ranks=300, vocabulary=310).names == {300: "[BOS]", 302: "<|im_end|>"}
    keyed = json.dumps({"added_tokens_decoder": {"301": "[EOS]"}, "extra_special_tokens": {"eos": "[EOS]"}}).encode()
    assert read_config(keyed, ranks=300, vocabulary=310).names == {301: "[EOS]"}
    assert read_config(b"{}", ranks=300, vocabulary=310).names == {}


@pytest.mark.parametrize(
    ("member", "value", "what"),
    [
        ("added_tokens_decoder", "x", "neither an object nor a list"),
        ("added_tokens_decoder", ["[BOS]"], "entry has no id"),
        ("added_tokens_decoder", {"x": "[BOS]"}, "key is no token id"),
        ("added_tokens_decoder", {"²": "[BOS]"}, "key is no token id"),
        ("added_tokens_decoder", {"300": {"content": 7}}, "token has no spelling"),
        ("added_tokens_decoder", {"300": ""}, "token has no spelling"),
        ("added_tokens_decoder", {"299": "[BOS]"}, "out of range"),
        ("added_tokens_decoder", {"310": "[BOS]"}, "out of range"),
        ("added_tokens_decoder", {"300": "[BOS]", "301": "[BOS]"}, "two special tokens with one spelling"),
        ("added_tokens_decoder", {"300": "[BOS]", "0300": "[EOS]"}, "two special tokens with one id"),
        ("extra_special_tokens", ["<|lost|>"], "special token without an id"),
        ("additional_special_tokens", 7, "neither a list nor an object"),
        ("add_bos_token", "yes", "not a boolean"),
        ("add_bos_token", True, "token has no spelling"),
    ],
)
def test_tok_02_other_forms_are_refused(member: str, value: Any, what: str) -> None:
    with pytest.raises(FormatError, match=what):
        read_config(json.dumps({member: value}).encode(), ranks=300, vocabulary=310)


def test_reserved_spelling_of_another_id_is_refused() -> None:
    config = json.dumps({"added_tokens_decoder": {str(RANKS): f"<|reserved_token_{RANKS + 1}|>"}}).encode()
    with pytest.raises(FormatError, match="spelling of a reserved one"):
        make_tokenizer({"tiktoken.model": rank_file(), "tokenizer_config.json": config}, 300)


def test_tok_06_text_never_becomes_a_special_token(small: Tokenizer) -> None:
    text = "hello<|im_end|>[EOS]<|reserved_token_299|>"
    ids = small.encode(text)
    assert max(ids) < RANKS
    assert small.decode(ids) == text


def test_begin_token_only_where_the_release_asks_for_it(small: Tokenizer) -> None:
    assert small.begin is None
    assert make_tokenizer(tokenizer_files(bos_token="[BOS]"), 300).begin is None
    assert make_tokenizer(tokenizer_files(bos_token="[BOS]", add_bos_token=True), 300).begin == RANKS
    with pytest.raises(FormatError, match="bos_token is no special token"):
        make_tokenizer(tokenizer_files(bos_token="<s>", add_bos_token=True), 300)


def test_unknown_names_and_ids_are_usage_errors(small: Tokenizer) -> None:
    with pytest.raises(UsageError, match="no such special token"):
        small.encode_special("hello")
    for token in (-1, 300):
        with pytest.raises(UsageError, match="no such token"):
            small.token_bytes(token)


# The rank file


def damaged(line: int, text: bytes) -> bytes:
    lines = rank_file().splitlines(keepends=True)
    lines[line - 1] = text
    return b"".join(lines)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (damaged(129, b""), "rank is out of range"),  # the entry of byte 0x80 is gone: one rank too many
        (damaged(129, base64.b64encode(b"zz") + b" 128\n"), "no token for byte 0x80"),
        (damaged(2, base64.b64encode(b"zz") + b" 0\n"), "line 2: rank stands twice"),
        (damaged(2, base64.b64encode(b"a") + b" 1\n"), "line 98: token stands twice"),
        (damaged(5, b"A=== 4\n"), "line 5: malformed base64|line 5: .*base64"),
        (damaged(5, b"BA==BA== 4\n"), "line 5: "),
        (damaged(5, b"B!A= 4\n"), "line 5: "),
        (damaged(5, b"BA==\n"), "line 5: rank is no number"),
        (damaged(5, b"BA== -4\n"), "line 5: rank is no number"),
        (damaged(5, b"BA== 4 4\n"), "line 5: rank is no number"),
        (damaged(5, b"BA== 99999999999\n"), "line 5: rank is no number"),
        (damaged(5, b"\n"), "line 5: no token and rank"),
        (damaged(5, b" 4\n"), "line 5: no token and rank"),
        (b"", "wrong number of tokens"),
        (b"\n" * 300, "line 1: no token and rank"),
        (b"\n" * 3_000_000, "wrong number of tokens"),
        (rank_file(BYTES[:255]), "wrong number of tokens"),
    ],
)
def test_tok_03_damaged_ranks_are_refused_with_their_line(data: bytes, what: str) -> None:
    with pytest.raises(FormatError, match=what):
        read_ranks(data)


def test_ranks_may_end_without_a_newline_and_with_carriage_returns() -> None:
    expected = {token: rank for rank, token in enumerate((*BYTES, *MERGES))}
    assert read_ranks(rank_file()) == expected
    assert read_ranks(rank_file().removesuffix(b"\n")) == expected
    assert read_ranks(rank_file().replace(b"\n", b"\r\n")) == expected


def test_more_ranks_than_the_model_knows_are_refused() -> None:
    with pytest.raises(FormatError, match="wrong number of tokens"):
        make_tokenizer(tokenizer_files(), RANKS - 1)


# The split pattern


def test_pattern_of_the_code_is_used_and_the_code_never_run(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    code = f'open({str(trap)!r}, "w")\nclass T:\n    pat_str = "|".join([r"[a-z]", "[^a-z]+"])\n'.encode()
    files = {**tokenizer_files(), "tokenization_kimi.py": code}
    assert make_tokenizer(files, 300).encode("hello") == list(b"hello")  # split into letters: nothing merges
    assert not trap.exists()


def test_pattern_of_the_release_is_the_built_in_one() -> None:
    parts = [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
    listed = ",\n".join(f'        r"""{part}"""' for part in parts)
    assert read_pattern(f'class T:\n    pat_str = "|".join([\n{listed},\n    ])\n'.encode()) == PATTERN


def test_pattern_may_be_written_in_pieces() -> None:
    assert read_pattern(b"pat_str: str = 'a' + \"b\" 'c'") == "abc"
    assert read_pattern(b"pat_str = '\\p'") == r"\p"  # Python warns of such an escape, and warnings are errors here


@pytest.mark.parametrize(
    ("code", "what"),
    [
        (b"", "not assigned once"),
        (b"pat_str = 'a'\npat_str = 'b'", "not assigned once"),
        (b"pat_str = open('x').read()", "line 1: split pattern is computed"),
        (b"pat_str = '|'.join(parts)", "computed"),
        (b"pat_str = f'{x}'", "computed"),
        (b"pat_str = 'a' * 10**9", "computed"),
        (b"pat_str = " + b"'a' + " * 5000 + b"'b'", "computed|not a Python source file"),
        (b"pat_str = ''", "odd length"),
        (b"pat_str = '" + b"a" * 20_000 + b"'", "odd length"),
        (b"pat_str = (", "not a Python source file"),
        (b"\0", "not a Python source file"),
        (b"(" * 100_000, "not a Python source file"),
        (b"#" * 2_000_000, "too long"),
    ],
)
def test_other_code_is_refused(code: bytes, what: str) -> None:
    with pytest.raises(FormatError, match=what):
        read_pattern(code)


def test_pattern_that_is_no_expression_is_refused() -> None:
    files = {**tokenizer_files(), "tokenization_kimi.py": b"pat_str = '('"}
    with pytest.raises(FormatError, match="no regular expression"):
        make_tokenizer(files, 300)


def test_pattern_that_gets_nowhere_is_refused_when_it_is_used() -> None:
    files = {**tokenizer_files(), "tokenization_kimi.py": rb"pat_str = r'(?=(a+)+$)(a|a)+\1b'"}
    tokenizer = make_tokenizer(files, 300)
    with pytest.raises(FormatError, match="split pattern failed"):
        tokenizer.encode("a" * 20_000)


@pytest.mark.parametrize("seed", range(2))
def test_mutated_files_are_read_or_refused(seed: int) -> None:
    """100 mutations of each file: bytes changed, cut out or doubled. Nothing but a FormatError comes out."""
    files = {**tokenizer_files(), "tokenization_kimi.py": b'class T:\n    pat_str = "|".join([r"\\p{L}+", r"[^x]"])\n'}
    generator = np.random.default_rng(seed)
    refused = 0
    for name, data in files.items():
        for _ in range(100):
            changed = bytearray(data)
            first, stop = sorted(int(place) for place in generator.integers(0, len(data) + 1, 2))
            way = generator.integers(3)
            if way == 0:
                changed[min(first, len(data) - 1)] ^= 1 << int(generator.integers(8))
            elif way == 1:
                del changed[first:stop]
            else:
                changed[first:first] = changed[first:stop]
            try:
                tokenizer = make_tokenizer({**files, name: bytes(changed)}, 300)
                assert tokenizer.decode(tokenizer.encode("hello")) in ("hello", "") or name == "tokenization_kimi.py"
            except FormatError:
                refused += 1
    assert refused > 100


# Text that comes token by token


def test_tok_05_incomplete_characters_are_held_back(small: Tokenizer) -> None:
    stream = TextStream(small)
    han = "漢".encode()
    assert [stream.push(token) for token in (HELLO, han[0], han[1], han[2], WORLD)] == ["hello", "", "", "漢", " world"]
    assert stream.push(han[0]) == ""
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


def test_bytes_that_are_no_character_do_not_hold_the_rest_back(small: Tokenizer) -> None:
    stream = TextStream(small)
    assert "".join(stream.push(token) for token in (0xFF, 0xE6, ord("a"))) == "\ufffd\ufffda"


def test_special_tokens_are_shown_only_on_request(small: Tokenizer) -> None:
    ids = [HELLO, RANKS + 4, WORLD]
    quiet, loud = TextStream(small), TextStream(small, special=True)
    assert "".join(map(quiet.push, ids)) == "hello world"
    assert "".join(map(loud.push, ids)) == "hello<|im_end|> world"


# Files beside a model


def test_tokenizer_of_a_checkpoint_directory(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"without a tokenizer \(expected tiktoken.model\)"):
        load_tokenizer(tmp_path, 300)
    for name, data in tokenizer_files().items():
        (tmp_path / name).write_bytes(data)
    assert load_tokenizer(tmp_path, 300).encode("hello") == [HELLO]
    (tmp_path / "tokenization_kimi.py").mkdir()
    with pytest.raises(FormatError, match="not a regular file"):
        load_tokenizer(tmp_path, 300)


def test_tokenizer_of_a_container_is_proved(tmp_path: Path) -> None:
    from packer.commands import run

    source = tmp_path / "source"
    shutil.copytree(ROOT / "tests" / "data" / "k3-tiny", source)
    for name, data in tokenizer_files().items():
        (source / name).write_bytes(data)
    container = tmp_path / "tiny.moepack"
    assert run(["pack", str(source), str(container), "--quiet", "--recipe", "kimi-k3-lossless"]) == 0
    assert load_tokenizer(container, 512).encode("hello") == [HELLO]
    asset = container / "assets" / "tiktoken.model"
    asset.write_bytes(asset.read_bytes().replace(b"\n", b" ", 1))
    with pytest.raises(IntegrityError, match=r"assets/tiktoken.model: file was changed"):
        load_tokenizer(container, 512)
