"""What a message says of the settings that an output was begun with."""

from __future__ import annotations

from pathlib import Path

import pytest

from formats.errors import UsageError
from packer.storage.identity import check_identity


def refusal(begun: dict[str, object], identity: dict[str, object]) -> str:
    with pytest.raises(UsageError) as caught:
        check_identity(begun, identity, Path("journal"))
    return str(caught.value)


def test_the_same_settings_pass_whatever_their_order() -> None:
    check_identity({"a": 1, "b": [1, {"c": "x"}]}, {"b": (1, {"c": "x"}), "a": 1}, Path("journal"))


def test_what_differs_is_named_and_another_recipe_first() -> None:
    text = refusal({"a": 1, "recipe": {"name": "x"}, "b": 2}, {"a": 1, "recipe": {"name": "y"}, "c": [3]})
    assert 'begun with: recipe.name was "x", is "y"; b was 2, is absent; c.0 was absent, is 3' in text


def test_what_follows_from_another_difference_is_left_out() -> None:
    fast, best = (
        {"fitting": {"method": f"effort {effort}"}, "recipe": {"summary": f"changed: {effort}", "effort": effort}}
        for effort in ("fast", "max")
    )
    assert refusal(fast, best).endswith('begun with: recipe.effort was "fast", is "max"')
    for alone in ({"fitting": {"method": "x"}}, {"recipe": {"summary": "x"}}):
        assert ' was absent, is "x"' in refusal({}, alone)


def test_of_a_long_value_the_start_is_shown() -> None:
    text = refusal({"summary": "x" * 100}, {"summary": "y" * 78})  # with its quotes as long as can be shown whole
    assert f'summary was "{"x" * 79}..., is "{"y" * 78}"' in text


def test_of_many_differences_some_are_named() -> None:
    before, after = ({f"key{number:02}": number + add for number in range(20)} for add in (0, 1))
    text = refusal(before, after)
    assert "key07 was 7, is 8; and 12 more" in text
    assert "key08" not in text
