"""Generating on a model whose next token is known: lengths, ends, stop strings, context."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from formats.errors import FormatError, UsageError
from runtime.generate import Piece, Wishes, end_ids, generate
from runtime.sampling import Sampling
from runtime.tokenizer import Tokenizer, make_tokenizer
from tests.support.fake_model import FakeModel
from tests.support.vocabularies import tokenizer_files

A, Z = ord("a"), ord("z")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return make_tokenizer(tokenizer_files(), 300)


def pieces(model: FakeModel, tokenizer: Tokenizer | None, prompt: list[int], wishes: Wishes) -> list[Piece]:
    return list(generate(model, tokenizer, prompt, wishes, wishes.sampling.generator()))


def text(found: list[Piece]) -> str:
    return "".join(piece.text for piece in found)


def wishes(tokens: int, **more: object) -> Wishes:
    return Wishes(tokens, Sampling(), **more)  # type: ignore[arg-type]


def test_tokens_follow_each_other_up_to_the_length(tokenizer: Tokenizer) -> None:
    model = FakeModel()
    found = pieces(model, tokenizer, [Z, A], wishes(3))
    assert [(piece.token, piece.ending) for piece in found] == [(A + 1, None), (A + 2, None), (A + 3, "length")]
    assert text(found) == "bcd"
    assert model.fed == [Z, A, A + 1, A + 2]  # the last one is for whoever goes on


def test_run_10_no_tokens_asked_gives_nothing_and_feeds_nothing(tokenizer: Tokenizer) -> None:
    model = FakeModel()
    assert pieces(model, tokenizer, [A], wishes(0)) == []
    assert model.fed == []


@pytest.mark.parametrize("count", [0, 5])
def test_run_10_empty_prompt_is_refused(count: int) -> None:
    with pytest.raises(UsageError, match="prompt is empty"):
        pieces(FakeModel(), None, [], wishes(count))


@pytest.mark.parametrize(("prompt", "tokens", "fits"), [(4, 5, True), (4, 6, False), (8, 1, True), (9, 0, False)])
def test_run_08_context_is_refused_before_anything_is_computed(prompt: int, tokens: int, fits: bool) -> None:
    """Eight positions: the last token of the answer is not fed and needs none."""
    model = FakeModel(context=8)
    if fits:
        assert len(pieces(model, None, [A] * prompt, wishes(tokens))) == tokens
    else:
        with pytest.raises(UsageError, match=r"expected at most 8 positions, found 9"):
            pieces(model, None, [A] * prompt, wishes(tokens))
        assert model.fed == []


def test_run_08_counts_the_past(tokenizer: Tokenizer) -> None:
    model = FakeModel(context=8, fed=[A] * 5)
    with pytest.raises(UsageError, match="do not fit into the context"):
        pieces(model, tokenizer, [A, A], wishes(3))


def test_end_tokens_end_and_are_not_shown(tokenizer: Tokenizer) -> None:
    found = pieces(FakeModel(), tokenizer, [A], wishes(9, end_ids=frozenset({A + 3})))
    assert (text(found), found[-1].ending, found[-1].token) == ("bc", "end", A + 3)


@pytest.mark.parametrize(
    ("stops", "expected"),
    [
        (("de",), "bc"),
        (("xy", "ef"), "bcd"),
        (("ef", "cdef"), "b"),
        (("bcx", "cd"), "b"),
        (("b",), ""),
        (("zz",), "bcdefgh"),
    ],
)
def test_stop_strings_over_several_tokens(tokenizer: Tokenizer, stops: tuple[str, ...], expected: str) -> None:
    found = pieces(FakeModel(), tokenizer, [A], wishes(7, stops=stops))
    assert text(found) == expected
    assert found[-1].ending == ("length" if expected == "bcdefgh" else "stop")


def test_beginning_of_a_stop_string_is_held_back_and_given_out_when_it_is_none(tokenizer: Tokenizer) -> None:
    found = pieces(FakeModel(), tokenizer, [A], wishes(5, stops=("bcdX",)))
    assert [piece.text for piece in found] == ["", "", "", "bcde", "f"]
    found = pieces(FakeModel(), tokenizer, [A], wishes(2, stops=("bcdX",)))
    assert [piece.text for piece in found] == ["", "bc"]


def test_stop_string_within_one_token_cuts_it(tokenizer: Tokenizer) -> None:
    hello = tokenizer.encode("hello")[0]
    found = pieces(FakeModel(follow={A: hello}), tokenizer, [A], wishes(7, stops=("l",)))
    assert (text(found), len(found)) == ("he", 1)


def test_incomplete_character_at_the_end_is_marked(tokenizer: Tokenizer) -> None:
    found = pieces(FakeModel(follow={A: 0xE6}), tokenizer, [A], wishes(1))
    assert text(found) == "\ufffd"


def test_without_a_tokenizer_there_are_tokens_alone() -> None:
    assert [piece.text for piece in pieces(FakeModel(), None, [A], wishes(3))] == ["", "", ""]


@pytest.mark.parametrize(
    "settings", [{"tokens": -1}, {"tokens": 1, "stops": ("",)}, {"tokens": 1, "stops": ("x",) * 65}]
)
def test_wishes_out_of_range_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        Wishes(sampling=Sampling(), **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("generation", "model", "expected"),
    [
        ({"eos_token_id": 5}, {"eos_token_id": 6}, {5}),
        ({"eos_token_id": [5, 7]}, {}, {5, 7}),
        ({}, {"eos_token_id": 6}, {6}),
        (None, {"text_config": {"eos_token_id": 6}}, {6}),
        ({"eos_token_id": None}, {}, set()),
    ],
)
def test_end_tokens_come_from_the_configuration(
    tmp_path: Path, generation: object, model: object, expected: set[int]
) -> None:
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "config.json").write_text(json.dumps(model))
    assert end_ids(tmp_path) == expected


@pytest.mark.parametrize("value", [-1, "5", True, [1, 2.0]])
def test_end_tokens_of_other_kinds_are_refused(tmp_path: Path, value: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(FormatError, match="eos_token_id is no token id"):
        end_ids(tmp_path)
