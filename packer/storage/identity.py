"""Whether a run may continue what another began: only with the same identity, which decides the container's bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from formats.errors import UsageError

_NAME = "recipe.name"  # it explains the other differences
_FOLLOWING = ("recipe.summary", "fitting.method", "fitting.seed")  # from the rest of the recipe
_SHOWN = 8  # differences listed in a message
_SHOWN_CHARACTERS = 80  # of a value


def check_identity(begun: Mapping[str, Any], identity: Mapping[str, Any], path: Path) -> None:
    """Insist that what was begun has this identity.

    Args:
        begun, identity: documents of JSON values.
        path: of the journal, for the message.

    Raises:
        UsageError: they differ; in what is named, another recipe first, for it explains the rest.
    """
    different = differences(begun, identity)
    if different:
        raise UsageError(
            f"settings differ from those that this output was begun with: {different}",
            where=path,
            hint="use the same settings or another output, or --restart to begin anew",
        )


def differences(begun: Mapping[str, Any], identity: Mapping[str, Any]) -> str:
    """What differs between two identities, or parts of them, in words; empty if nothing does. Of many some are named.

    What only follows from a setting that is named is left out.
    """
    before, after = (dict(_leaves("", json.loads(json.dumps(dict(one))))) for one in (begun, identity))
    keys = [key for key in [*before, *(key for key in after if key not in before)] if before.get(key) != after.get(key)]
    if any(key.startswith("recipe.") and key not in (_NAME, *_FOLLOWING) for key in keys):
        keys = [key for key in keys if key not in _FOLLOWING]
    keys.sort(key=lambda key: key != _NAME)
    told = [f"{key} was {_short(before.get(key, 'absent'))}, is {_short(after.get(key, 'absent'))}" for key in keys]
    return "; ".join(told[:_SHOWN]) + (f"; and {len(told) - _SHOWN} more" if len(told) > _SHOWN else "")


def _short(value: str) -> str:
    """A value; of a long one the start."""
    return f"{value[:_SHOWN_CHARACTERS]}..." if len(value) > _SHOWN_CHARACTERS else value


def _leaves(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """Dotted keys of a document with their values as JSON; empty objects and lists count as values."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    empty = True
    for name, item in items:
        empty = False
        yield from _leaves(f"{key}.{name}" if key else str(name), item)
    if empty:
        yield key, json.dumps(value, sort_keys=True, ensure_ascii=False)
