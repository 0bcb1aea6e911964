"""A measurement of a container, for people and for programs."""

from __future__ import annotations

from typing import Any

from formats.spelling import counted
from packer.output import Output, human_bytes, human_number
from runtime.bench import Bench

SHORT_TOKEN = 0.01  # seconds; of shorter ones a good part is calls of functions and of the system


def bench_document(found: Bench) -> dict[str, Any]:
    """What ``bench --json`` prints. Rates over nothing are None; all seconds are of all measured tokens together."""
    together, reading, caching, stream = found.together, found.reading, found.caching, found.together.stream
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
        "read_bandwidth": _rate(caching.bytes, caching.seconds),
        "read_bandwidth_plain": _rate(caching.bytes, caching.plain_seconds),
        "compute_seconds": found.computing_seconds,
        "stall_seconds": together.stall_seconds,
        "reading_alone": {
            "seconds": reading.seconds,
            "expert_bytes": reading.expert_bytes,
            "expert_seconds": reading.expert_seconds,
            "trunk_bytes": reading.trunk_bytes,
            "trunk_seconds": reading.trunk_seconds,
        },
        "apart_seconds": found.apart_seconds,
        "ratio_to_larger": found.ratio,
        "apart_ratio_to_larger": found.apart_ratio,
        "budget": {
            "bytes": found.plan.total,
            "trunk": found.plan.trunk,
            "slots": found.plan.slots,
            "parts": [{"name": part.name, "bytes": part.bytes} for part in found.plan.parts],
        },
    }


def show_bench(output: Output, found: Bench) -> None:
    """The measurement for people."""
    together, reading, caching, plan = found.together, found.reading, found.caching, found.plan
    needed = reading.expert_bytes + reading.trunk_bytes
    output.line(f"container  {found.container_id}")
    output.line(f"memory     {human_bytes(plan.total)}: trunk {plan.trunk}, room for {counted(plan.slots, 'expert')}")
    output.line(f"tokens     {found.tokens}, {counted(found.threads, 'thread')}")
    rows = [
        _row("reading alone", found.tokens, reading.seconds, needed),
        _row("computing alone", found.tokens, found.computing_seconds, 0),
        _row("together", found.tokens, together.seconds, together.bytes_read),
        _row("at once, but apart", found.tokens, found.apart_seconds, needed),
        _row("experts through the cache", found.tokens, caching.seconds, caching.bytes),
        _row("the same, plainly", found.tokens, caching.plain_seconds, caching.bytes),
    ]
    output.table("", ("", ">ms a token", ">tokens a second", ">bytes a token", ">bandwidth"), rows)
    stream = together.stream
    share = human_number(100 * stream.hit_rate) if stream.asked else "-"
    output.line(f"cache      {share} % of {stream.asked} experts found in memory or on the way")
    output.line(f"           {stream.ahead_reads} read before they were asked for, {stream.ahead_used} of such used")
    output.line(f"waiting    {1000 * together.stall_seconds / found.tokens:.2f} ms a token")
    if found.ratio is not None:
        output.line(f"ratio      {found.ratio:.2f} times the larger of reading alone and computing alone")
        if together.seconds < SHORT_TOKEN * found.tokens:
            output.line("           which says little where a token takes so short a time")
    if found.apart_ratio is not None:
        output.line(
            f"           {found.apart_ratio:.2f} where neither waits for the other: what this machine can do at once"
        )


def _row(name: str, tokens: int, seconds: float | None, count: int) -> tuple[str, ...]:
    if not seconds:
        return (name, "-", "-", "-", "-")
    bandwidth = f"{human_bytes(round(count / seconds))}/s" if count else "-"
    size = human_bytes(round(count / tokens)) if count else "-"
    return (name, f"{1000 * seconds / tokens:.2f}", human_number(tokens / seconds), size, bandwidth)


def _rate(amount: float, seconds: float) -> float | None:
    return amount / seconds if amount and seconds else None
