"""Whether a run may continue what another began: only with the same identity, which decides the container's bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from formats.errors import UsageError

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
    before, after = (dict(_leaves("", json.loads(json.dumps(dict(one))))) for one in (begun, identity))
    differences = [
        f"{key} was {_short(before.get(key, 'absent'))}, is {_short(after.get(key, 'absent'))}"
        for key in [*before, *(key for key in after if key not in before)]
        if before.get(key) != after.get(key)
    ]
    if differences:
        differences.sort(key=lambda text: not text.startswith("recipe.name "))
        more = f"; and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
        raise UsageError(
            "settings differ from those that this output was begun with: " + "; ".join(differences[:_SHOWN]) + more,
            where=path,
            hint="use the same settings or another output, or --restart to begin anew",
        )


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
