"""``moepack run``: text, its figures, and the state that interactive prompts share."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from formats.errors import FormatError
from packer.commands import run
from packer.running.writing import Writer
from runtime.sampling import Sampling, choose
from runtime.session import Options, open_session
from runtime.tokenizer import load_tokenizer
from tests.support.speaking import DATA, Speaking, make_speaking

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Speaking:
    return make_speaking(tmp_path_factory.mktemp("speaking"))


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Any:
    def give(data: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))

    return give


def process(*arguments: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "packer", *arguments], cwd=ROOT, capture_output=True, check=False, timeout=120, **options
    )


def expected_ids(path: Path, prompt: list[int], count: int, sampling: Sampling) -> list[int]:
    """The same, token by token with the runtime's own functions."""
    generator, ids = sampling.generator(), []
    with open_session(path, Options(context=100)) as session:
        logits = session.feed(prompt)
        for _ in range(count):
            ids.append(choose(logits, sampling, generator))
            logits = session.feed(ids[-1:])
    return ids


def test_text_is_that_of_the_tokens(speaking: Speaking, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = load_tokenizer(speaking.container, 512)
    ids = expected_ids(speaking.source, tokenizer.encode("hello"), 12, Sampling(0.8, 0.95, 0))
    assert run(["run", str(speaking.container), "hello", "-n", "12", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ids"] == ids
    assert document["text"] == tokenizer.decode(token for token in ids if token not in tokenizer.names)
    assert (document["tokens"], document["prompt_tokens"], document["ending"]) == (12, 1, "length")
    assert document["tokens_per_second"] > 0
    assert 0 <= document["cache_hit_rate"] <= 1
    assert document["bytes_read"] > 0


def test_output_bytes_do_not_depend_on_how_it_is_run(speaking: Speaking) -> None:
    arguments = ["run", str(speaking.container), "hello world", "-n", "20", "--seed", "1", "--temperature", "1.5"]
    first = process(*arguments)
    assert (first.returncode, first.stdout[-1:]) == (0, b"\n")
    ways = [
        ("--budget", "1GiB", "--threads", "1"),
        ("--trunk", "streamed", "--no-look-ahead", "--no-read-ahead", "--no-record-check", "--threads", "2"),
    ]
    for way in ways:
        assert process(*arguments, *way).stdout == first.stdout
    assert process(*arguments[:-4], "--seed", "2", "--temperature", "1.5").stdout != first.stdout
    figures = first.stderr.decode().splitlines()[-1]
    assert figures.startswith("20 tokens, ")
    assert "experts found in memory" in figures
    assert process(*arguments, "--quiet").stderr == b""


def test_tok_04_prompts_are_utf_8_under_any_locale(speaking: Speaking) -> None:
    arguments = ["run", str(speaking.container), "é漢🙂", "-n", "1", "--json", "--quiet"]
    for locale in ("C", "POSIX", "C.UTF-8"):
        environment = {**os.environ, "LC_ALL": locale, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
        done = process(*arguments, env=environment)
        assert json.loads(done.stdout)["prompt_tokens"] == 1 + 2 + 4
    bad = process("run", str(speaking.container), os.fsdecode(b"\xff"), "-n", "1")
    assert (bad.returncode, bad.stderr.decode()) == (2, "error: PROMPT: prompt is not UTF-8\n")


def test_terminal_codes_in_text_are_escaped(capsys: pytest.CaptureFixture[str], speaking: Speaking) -> None:
    from packer.output import make_output

    make_output().text("a\x1b[2J\tb\n\u202e\u200d漢\r")
    assert capsys.readouterr().out == "a\\x1b[2J\tb\n\\u202e\u200d漢\\r"


def test_stop_strings_and_end_tokens(speaking: Speaking, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["run", str(speaking.container), "hello", "-n", "40", "--temperature", "1.5", "--json", "--quiet"]
    assert run(arguments) == 0
    document = json.loads(capsys.readouterr().out)
    stop = next(char for char in document["text"][3:] if char.isascii() and char.isalpha())
    assert run([*arguments, "--stop", stop, "--stop", "never seen"]) == 0
    stopped = json.loads(capsys.readouterr().out)
    assert stopped["text"] == document["text"].split(stop)[0]
    assert stopped["ending"] == "stop"


def test_run_10_no_tokens_asked_gives_an_empty_result(speaking: Speaking, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["run", str(speaking.container), "hello", "-n", "0"]) == 0
    assert capsys.readouterr() == ("", "")
    assert run(["run", str(speaking.container), "hello", "-n", "0", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["text"], document["ids"], document["tokens_per_second"]) == ("", [], None)


def test_ids_are_answered_with_text_where_there_is_a_tokenizer(
    speaking: Speaking, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["-n", "5", "--temperature", "0", "--json"]
    assert run(["run", str(speaking.container), "--ids", "1,2", *options]) == 0
    document = json.loads(capsys.readouterr().out)
    tokenizer = load_tokenizer(speaking.container, 512)
    assert document["prompt_tokens"] == 2  # no token that begins a text is put before given ids
    assert document["text"] == tokenizer.decode(token for token in document["ids"] if token not in tokenizer.names)


def test_there_is_no_text_to_stop_in_without_a_tokenizer(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["run", str(DATA / "k3-tiny"), "--ids", "1", "--stop", "x"]) == 2
    assert "there is no text to stop in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "one prompt wanted"),
        (["hello", "--interactive"], 2, "one prompt wanted"),
        (["hello", "--ids", "1"], 2, "one prompt wanted"),
        ([""], 2, "PROMPT: prompt is empty"),
        (["hello", "-n", "-1"], 2, "-n"),
        (["hello", "--temperature", "-1"], 2, "temperature is out of range"),
        (["hello", "--temperature", "nan"], 2, "temperature is out of range"),
        (["hello", "--top-p", "0"], 2, "top-p is out of range"),
        (["hello", "--seed", "-1"], 2, "seed is out of range"),
        (["hello", "--stop", ""], 2, "a stop string is empty"),
        (["--ids", "512"], 2, "entry 1 is no token id"),
        (["hello", "-n", "9", "--context", "8"], 2, "do not fit into the context"),
        (["--interactive", "--json"], 2, "--json prints one object"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    arguments: list[str], code: int, message: str, speaking: Speaking, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["run", str(speaking.container), *arguments, "--quiet"]) == code
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if not line.startswith("hint: ")]
    assert captured.out == ""
    assert len(lines) == 1
    assert message in lines[0]


def test_a_prompt_before_its_container_is_told(speaking: Speaking, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["run", "def f(n):", str(speaking.container)]) == 2
    assert "the container comes first, then the prompt" in capsys.readouterr().err
    assert run(["run", str(speaking.container)]) == 2
    assert f'hint: moepack run {speaking.container} "Once upon a time"' in capsys.readouterr().err


def test_models_without_a_tokenizer_take_ids(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["run", str(DATA / "k3-tiny"), "hello"]) == 3
    assert "without a tokenizer" in capsys.readouterr().err
    assert run(["run", str(DATA / "k3-tiny"), "--ids", "1,2", "-n", "3", "--quiet", "--temperature", "0"]) == 0
    shown = [int(token) for token in capsys.readouterr().out.split()]
    assert shown == expected_ids(DATA / "k3-tiny", [1, 2], 3, Sampling())


def test_interactive_prompts_share_their_state(
    speaking: Speaking, stdin: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second answer follows on prompt, answer and prompt: as if all of that were one prompt."""
    tokenizer = load_tokenizer(speaking.container, 512)
    arguments = ["run", str(speaking.container), "--temperature", "0", "-n", "4", "--quiet"]
    first = expected_ids(speaking.source, tokenizer.encode("hello"), 4, Sampling())
    everything = [*tokenizer.encode("hello"), *first, *tokenizer.encode(" world")]
    second = expected_ids(speaking.source, everything, 4, Sampling())
    stdin(b"hello\r\n\n  \n world")
    assert run([*arguments, "--interactive"]) == 0
    lines = [tokenizer.decode(token for token in ids if token not in tokenizer.names) for ids in (first, second)]
    from packer.output import make_output

    shown = capsys.readouterr().out
    for line in lines:
        make_output().text(line)
        make_output().line()
    assert shown == capsys.readouterr().out


def test_run_08_a_full_state_ends_the_conversation(
    speaking: Speaking, stdin: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    stdin(b"hello\nworld\n")
    arguments = ["run", str(speaking.container), "--interactive", "-n", "4", "--context", "5"]
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out.endswith("\n")
    assert "do not fit into the context" in captured.err
    assert "hint: all that was said before counts" in captured.err


def test_prompts_that_are_not_utf_8_are_refused(
    speaking: Speaking, stdin: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    stdin(b"\xff\n")
    assert run(["run", str(speaking.container), "--interactive", "--quiet"]) == 2
    assert "stdin: prompt is not UTF-8" in capsys.readouterr().err


def test_a_slip_at_the_keyboard_does_not_end_the_conversation(
    speaking: Speaking, stdin: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["run", str(speaking.container), "--interactive", "-n", "4", "--temperature", "0"]
    stdin(b"hello\n")
    assert run(arguments) == 0
    wanted = capsys.readouterr().out
    stdin(b"\xff\nhello\n")
    monkeypatch.setattr(sys.modules["packer.commands.run"], "is_terminal", lambda stream: True)
    assert run(arguments) == 0
    captured = capsys.readouterr()
    assert captured.out == wanted
    assert "prompt is not UTF-8: what was typed is left out" in captured.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_cli_05_stopping_keeps_what_was_written(number: int, speaking: Speaking) -> None:
    command = [sys.executable, "-m", "packer", "run", str(speaking.container), "hello", "-n", "1000000"]
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    begun = child.stdout.read(8)
    time.sleep(0.2)
    child.send_signal(number)
    rest, error = child.communicate(timeout=60)
    assert child.returncode == 130
    assert len(begun) == 8
    assert rest.endswith(b"\n")
    lines = error.decode().splitlines()
    assert " tokens, " in lines[0]
    assert lines[1:] == ["error: interrupted", f"hint: start again with: moepack {' '.join(command[3:])}"]


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_an_error_after_some_text_begins_a_line_of_its_own(
    options: list[str], speaking: Speaking, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(self: Writer, model: object, prompt: str | None = None) -> Iterator[str]:
        yield "half a"
        yield " line"
        raise FormatError("record was changed", where="layer 1 expert 2")

    monkeypatch.setattr(Writer, "write", write)
    assert run(["run", str(speaking.container), "hello", *options]) == 3
    captured = capsys.readouterr()
    assert captured.out == ("" if options else "half a line\n")
    assert "record was changed" in captured.err


def test_damage_ends_the_run_with_the_record_s_name(speaking: Speaking, tmp_path: Path) -> None:
    import shutil

    from formats.container import open_container

    copy = tmp_path / "damaged.moepack"
    shutil.copytree(speaking.container, copy)
    with open_container(copy) as container:
        bank = copy / container.layer(3).file
    data = bytearray(bank.read_bytes())
    for place in range(8192, len(data), 8192):
        data[place] ^= 1
    bank.write_bytes(data)
    done = process("run", str(copy), "hello", "-n", "30")
    assert done.returncode == 3
    assert b"experts/layer-00003.bank at byte" in done.stderr
    assert b"record of layer 3 expert" in done.stderr
    assert b"Traceback" not in done.stderr


def test_run_loads_neither_the_network_nor_training_libraries(speaking: Speaking) -> None:
    script = (
        "import sys; from packer.cli import main; code = main(sys.argv[1:]);"
        "print(code, sorted({'torch', 'huggingface_hub', 'sklearn', 'requests', 'tqdm', 'jinja2'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "run", str(speaking.container), "hello", "-n", "1", "-q"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "0 []"
