"""How the result of a pack is shown, to people and to programs."""

from __future__ import annotations

import dataclasses
from typing import Any

from formats.spelling import counted
from packer.inspect.reading import spread
from packer.inspect.text import bits_text, show_errors, show_pruned, spread_text
from packer.inspect.views import Summary
from packer.output import Output, human_bytes
from packer.pipeline import PackResult

SHOWN_OVER_LIMIT = 20


def show_notes(output: Output, result: PackResult, *, restart: bool, release: bool) -> None:
    """What was left undone, and why."""
    if result.already_complete:
        output.note("complete already; its bytes were not checked again")
        if restart:
            output.note("--restart changes nothing: a finished container is never overwritten, remove it first")
        if release:
            output.note("--release-source changes nothing: shards go while they are packed, and nothing was packed")
    elif result.resumed_units:
        output.note(f"continued: {counted(result.resumed_units, 'unit')} done before")


def pack_document(result: PackResult, summary: Summary) -> dict[str, Any]:
    """What ``--json`` prints."""
    return {
        "path": str(result.path),
        "container_id": result.container_id,
        "container_bytes": result.container_bytes,
        "experts": result.records,
        "bits_per_weight": summary.bits_per_weight,
        "rel_error": dataclasses.asdict(summary.matrix_errors),
        "trunk_rel_error": dataclasses.asdict(summary.tensor_errors),
        "weighted_error": dataclasses.asdict(spread(result.weighted_errors)) if result.weighted_errors else None,
        "pruned": None if summary.pruned is None else dataclasses.asdict(summary.pruned),
        "prune": _applied(summary, "prune"),
        "statistics": _applied(summary, "statistics"),
        "resumed_units": result.resumed_units,
        "already_complete": result.already_complete,
        "released": list(result.released),
        "freed_bytes": result.freed_bytes,
        "over_limit": [dataclasses.asdict(item) for item in result.over_limit],
    }


def _applied(summary: Summary, key: str) -> str | None:
    """The digest of a file that was applied beside the recipe, or None."""
    applied = summary.recipe.get(key)
    return applied["blake3"] if isinstance(applied, dict) else None


def show_pack(output: Output, result: PackResult, summary: Summary) -> None:
    """The result for people."""
    output.line(f"container     {result.container_id}")
    output.line(f"bytes         {result.container_bytes} ({human_bytes(result.container_bytes)})")
    if summary.experts:
        bits = bits_text(summary.bits_per_weight, summary.recipe, summary.codecs)
        output.line(f"experts       {summary.experts}, {bits}")
        show_pruned(output, summary)
    show_errors(output, summary)
    if result.weighted_errors:
        output.line(f"weighted      {spread_text(spread(result.weighted_errors), 'experts, columns weighted')}")
    if result.released:
        size = human_bytes(result.freed_bytes)
        output.line(f"released      {counted(len(result.released), 'shard')} of the source, {size} came back")
    for item in result.over_limit[:SHOWN_OVER_LIMIT]:
        output.line(f"over limit    {item.where}: error {item.error:.6g}, limit {item.limit:g}")
    if len(result.over_limit) > SHOWN_OVER_LIMIT:
        output.line(f"              and {len(result.over_limit) - SHOWN_OVER_LIMIT} more")
