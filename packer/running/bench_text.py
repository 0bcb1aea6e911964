"""A measurement of a container, for people and for programs."""

from __future__ import annotations

from typing import Any

from formats.spelling import counted
from packer.output import Output, human_bytes, human_number
from runtime.bench import Bench


def bench_document(found: Bench) -> dict[str, Any]:
    """What ``bench --json`` prints. Rates over nothing are None; all seconds are of all measured tokens together."""
    together, reading, stream = found.together, found.reading, found.together.stream
    return {
        "container_id": found.container_id,
        "tokens": found.tokens,
        "threads": found.threads,
        "seconds": together.seconds,
        "tokens_per_second": _rate(found.tokens, together.seconds),
        "bytes_read": together.bytes_read,
        "bytes_read_per_token": together.bytes_read / found.tokens,
        "cache_hit_rate": stream.hit_rate if stream.asked else None,
        "look_ahead": {"reads": stream.ahead_reads, "used": stream.ahead_used},
        "read_bandwidth": _rate(reading.expert_bytes, reading.cached_seconds),
        "compute_seconds": found.computing_seconds,
        "stall_seconds": together.stall_seconds,
        "reading_alone": {
            "seconds": reading.seconds,
            "expert_bytes": reading.expert_bytes,
            "plain_seconds": reading.plain_seconds,
            "plain_bandwidth": _rate(reading.expert_bytes, reading.plain_seconds),
            "cached_seconds": reading.cached_seconds,
            "trunk_bytes": reading.trunk_bytes,
            "trunk_seconds": reading.trunk_seconds,
        },
        "ratio_to_larger": found.ratio,
        "budget": {
            "bytes": found.plan.total,
            "trunk": found.plan.trunk,
            "slots": found.plan.slots,
            "parts": [{"name": part.name, "bytes": part.bytes} for part in found.plan.parts],
        },
    }


def show_bench(output: Output, found: Bench) -> None:
    """The measurement for people."""
    together, reading, plan = found.together, found.reading, found.plan
    output.line(f"container  {found.container_id}")
    output.line(f"memory     {human_bytes(plan.total)}: trunk {plan.trunk}, room for {counted(plan.slots, 'expert')}")
    output.line(f"tokens     {found.tokens}, {counted(found.threads, 'thread')}")
    rows = [
        _row("reading alone, plainly", found.tokens, reading.seconds, reading.expert_bytes + reading.trunk_bytes),
        _row("experts through the cache", found.tokens, reading.cached_seconds, reading.expert_bytes),
        _row("computing alone", found.tokens, found.computing_seconds, 0),
        _row("together", found.tokens, together.seconds, together.bytes_read),
    ]
    output.table("", ("", ">ms a token", ">tokens a second", ">bytes a token", ">bandwidth"), rows)
    stream = together.stream
    share = human_number(100 * stream.hit_rate) if stream.asked else "-"
    output.line(f"cache      {share} % of {stream.asked} experts found in memory or on the way")
    output.line(f"           {stream.ahead_reads} read ahead now, {stream.ahead_used} that had been were used")
    output.line(f"waiting    {1000 * together.stall_seconds / found.tokens:.2f} ms a token")
    if found.ratio is not None:
        output.line(f"ratio      {found.ratio:.2f} times the larger of reading alone and computing alone")


def _row(name: str, tokens: int, seconds: float | None, count: int) -> tuple[str, ...]:
    if not seconds:
        return (name, "-", "-", "-", "-")
    bandwidth = f"{human_bytes(round(count / seconds))}/s" if count else "-"
    size = human_bytes(round(count / tokens)) if count else "-"
    return (name, f"{1000 * seconds / tokens:.2f}", human_number(tokens / seconds), size, bandwidth)


def _rate(amount: float, seconds: float) -> float | None:
    return amount / seconds if amount and seconds else None
