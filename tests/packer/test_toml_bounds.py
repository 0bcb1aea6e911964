"""TOML documents: what would take the parser long, or Python's own words, is refused before it; the rest is parsed."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from formats.errors import UsageError
from packer.documents import parsed_toml
from packer.toml_bounds import MAX_DOTS, MAX_KEY_PARTS, MAX_WORD, check_bounds

ROOT = Path(__file__).parents[2]


def checked(text: str) -> None:
    check_bounds(text, what="recipe", where="file")


DOTS = ".a" * 40

# Legal TOML in which dots, brackets, hashes and quotes stand where they mean nothing.
SOUND = {
    "strings": f"a = \"x{DOTS}\"\nb = 'x{DOTS}'\n",
    "keys in quotes": f"\"x{DOTS}\".'y{DOTS}' = 1\n",
    "a quote in a string": f'a = "\\"x{DOTS}"\n',
    "a backslash at the end": f'a = "\\\\" # x{DOTS}\n',
    "another's quote": f"a = '\"' # {DOTS}\nb = \"'\" # {DOTS}\n",
    "a comment": f'# x{DOTS} " \n',
    "a hash in a string": f'a = "#{DOTS}"\n',
    "many lines": f'a = """\nx{DOTS}\n\\""" ""{DOTS}"""\n',
    "many lines, plain": f"a = '''\nx{DOTS}\n\\ '' {DOTS}'''\n",
    "quotes before the end": f'a = """"x{DOTS}"""""\nb = 1\n',
    "an empty one": f'a = """"""\nb = \'\'\n# {DOTS}\n',
    "numbers in a list": f"a = [{'1.5, ' * 400}]\n",
    "numbers on lines": "".join(f"a{n} = {n}.5\n" for n in range(400)),
    "a table inside": "a = {b.c = 1.5, d.e = 2.5, f.g = 3.5, h.i = 4.5, j.k = 5.5}\n",
    "dates": "a = [1979-05-27T07:32:00.5Z, 1979-05-27 07:32:00.999999]\n",
    "the longest key": f"a{'.a' * (MAX_KEY_PARTS - 1)} = 1.5\n",
    "the longest header": f"[a{'.a' * (MAX_KEY_PARTS - 1)}]\nb.c = 1.5\n",
    "the longest number": f"a = {'9' * MAX_WORD}\n",
    "long texts": f'a = "{"9" * 5000}"\n',
}


@pytest.mark.parametrize("name", SOUND)
def test_what_is_sound_is_parsed_as_it_stands(name: str) -> None:
    assert parsed_toml(SOUND[name].encode(), what="recipe", where="file") == tomllib.loads(SOUND[name])


@pytest.mark.parametrize("path", sorted(ROOT.glob("recipes/*.toml")), ids=lambda path: path.name)
def test_the_projects_own_files(path: Path) -> None:
    assert parsed_toml(path.read_bytes(), what="recipe", where="file") == tomllib.loads(path.read_text())


LONG_KEYS = {
    "a key": (f"a{'.a' * MAX_KEY_PARTS} = 1", 1),
    "a header": (f"\n\n[a{'.a' * MAX_KEY_PARTS}]", 3),
    "of a list of tables": (f"[[a{'.a' * MAX_KEY_PARTS}]]", 1),
    "with blanks": (f"a{' . a' * MAX_KEY_PARTS} = 1", 1),
    "with quotes": ("a" + ".'b.c'" * MAX_KEY_PARTS + " = 1", 1),
    "after a text of three lines": (f'x = """\n\n"""\na{".a" * MAX_KEY_PARTS} = 1', 4),
    "in a table inside": (f"x = {{a{'.a' * MAX_KEY_PARTS} = 1}}", 1),
    "in a list": (f"x = [\n{{a{'.a' * MAX_KEY_PARTS} = 1}}]", 2),
    "after a comment": (f"# it's\na{'.a' * MAX_KEY_PARTS} = 1", 2),
    "after a quote in quotes": (f'x = "\'"\na{".a" * MAX_KEY_PARTS} = 1', 2),
    "after an end of four quotes": (f'x = ["""y"""", {{a{".a" * MAX_KEY_PARTS} = 1}}]', 1),
    "after an end of four others": (f"x = ['''y'''', {{a{'.a' * MAX_KEY_PARTS} = 1}}]", 1),
    "after two quotes": (f"x = ''\na{'.a' * MAX_KEY_PARTS} = ''", 2),
}


@pytest.mark.parametrize("name", LONG_KEYS)
def test_keys_of_many_parts_are_refused(name: str) -> None:
    text, line = LONG_KEYS[name]
    tomllib.loads(text)  # TOML has nothing against it
    with pytest.raises(UsageError, match="recipe has a key of too many parts") as found:
        checked(text)
    assert found.value.where == f"file: line {line}"


def test_dots_in_all_are_bounded() -> None:
    lines = [f"a{n}.b.c.d.e.f.g.h = 1" for n in range(MAX_DOTS // 7)]
    checked("\n".join(lines))
    with pytest.raises(UsageError, match=rf"too many dots .*at most {MAX_DOTS}"):
        checked("\n".join([*lines, *("x" + line for line in lines)]))


@pytest.mark.parametrize("word", ["9" * (MAX_WORD + 1), "0x" + "f" * 5000, "-" + "9" * 5000, "1." + "5" * 5000])
def test_numbers_that_python_will_not_show_are_refused(word: str) -> None:
    with pytest.raises(UsageError, match="line 2: recipe has a number or a key that is too long"):
        checked(f"a = 1\nb = {word}\n")


@pytest.mark.parametrize("text", ["a = " + "[" * 20_000, "a = " + "{a=" * 20_000, "a = " + "[{a=" * 10_000])
def test_depth_is_told_in_our_words(text: str) -> None:
    with pytest.raises(UsageError, match=r"recipe has lists or tables that are nested too deeply$"):
        parsed_toml(text.encode(), what="recipe", where="file")


def test_a_byte_order_mark_is_passed_over() -> None:
    assert parsed_toml(b"\xef\xbb\xbfa = 1\n", what="recipe", where="file") == {"a": 1}
    with pytest.raises(UsageError, match="not TOML"):
        parsed_toml(b"\xef\xbb\xbf\xef\xbb\xbfa = 1\n", what="recipe", where="file")


@pytest.mark.parametrize("text", ['"' + "a" * 200_000, "'" * 200_001, '"""' + '""\\"' * 50_000, "." * 200_000])
def test_looking_takes_time_that_grows_with_the_length(text: str) -> None:
    """In no time: a test that hangs is ended."""
    with pytest.raises(UsageError):
        parsed_toml(text.encode(), what="recipe", where="file")
