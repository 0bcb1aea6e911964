"""A measurement of a container, for people and for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from formats.spelling import counted
from packer.output import Output, human_bytes, human_number
from runtime.measured import Bench, Spread

SHORT_TOKEN = 0.05  # seconds; of shorter ones a good part is calls of functions and of the system
FEW_TOKENS = 4  # have no quartiles worth telling


def bench_document(found: Bench) -> dict[str, Any]:
    """What ``bench --json`` prints. Rates over nothing are None; all seconds are of all measured tokens together."""
    tokens, caching, stream = found.tokens, found.caching, found.stream
    return {
        "container_id": found.container_id,
        "warm_tokens": found.warm,
        "tokens": len(tokens),
        "threads": found.threads,
        "seconds": found.seconds,
        "tokens_per_second": _rate(len(tokens), found.seconds),
        "bytes_read": found.bytes_read,
        "bytes_read_per_token": found.bytes_read / len(tokens),
        "cache_hit_rate": stream.hit_rate if stream.asked else None,
        "look_ahead": {"reads": stream.ahead_reads, "used": stream.ahead_used},
        "proofs": {"records": stream.proofs, "thread_seconds": stream.proof_seconds},
        "read_bandwidth": _rate(caching.bytes, caching.seconds),
        "read_bandwidth_plain": _rate(caching.bytes, caching.plain_seconds),
        "compute_seconds": found.computing_seconds,
        "stall_seconds": found.stall_seconds,
        "reading_alone": {
            "seconds": found.reading_seconds,
            "expert_bytes": sum(token.expert_bytes for token in tokens),
            "expert_seconds": sum(token.experts for token in tokens),
            "trunk_bytes": sum(token.trunk_bytes for token in tokens),
            "trunk_seconds": sum(token.trunk for token in tokens),
        },
        "apart_seconds": found.apart_seconds,
        "larger_of_each_token_seconds": found.larger_seconds,
        "ratio_to_larger": found.ratio,
        "ratio_to_larger_of_each_token": found.paced_ratio,
        "ratio_to_larger_by_token": _quartiles(found.token_ratio),
        "apart_ratio_to_larger": found.apart_ratio,
        "apart_ratio_to_larger_of_each_token": found.apart_paced_ratio,
        "apart_ratio_to_larger_by_token": _quartiles(found.apart_token_ratio),
        "budget": {
            "bytes": found.plan.total,
            "trunk": found.plan.trunk,
            "slots": found.plan.slots,
            "parts": [{"name": part.name, "bytes": part.bytes} for part in found.plan.parts],
        },
    }


def show_bench(output: Output, found: Bench) -> None:
    """The measurement for people."""
    tokens, caching, plan, stream = len(found.tokens), found.caching, found.plan, found.stream
    output.line(f"container  {found.container_id}")
    output.line(f"memory     {human_bytes(plan.total)}: trunk {plan.trunk}, room for {counted(plan.slots, 'expert')}")
    output.line(f"tokens     {tokens} after {found.warm} to warm up, {counted(found.threads, 'thread')}")
    rows = [
        _row("reading alone", tokens, found.reading_seconds, found.bytes_needed),
        _row("computing alone", tokens, found.computing_seconds, 0),
        _row("together", tokens, found.seconds, found.bytes_read),
        _row("at once, but apart", tokens, found.apart_seconds, found.bytes_needed),
        _row("experts through the cache", tokens, caching.seconds, caching.bytes),
        _row("the same, plainly", tokens, caching.plain_seconds, caching.bytes),
    ]
    output.table("", ("", ">ms a token", ">tokens a second", ">bytes a token", ">bandwidth"), rows)
    share = human_number(100 * stream.hit_rate) if stream.asked else "-"
    output.line(f"cache      {share} % of {stream.asked} experts found in memory or on the way")
    output.line(f"           {stream.ahead_reads} read before they were asked for")
    output.line(f"           {stream.ahead_used} asked for that had been read so, some of them for earlier tokens")
    proving = 1000 * stream.proof_seconds / tokens
    output.line(f"proved     {counted(stream.proofs, 'record')} read for the first time, {proving:.2f} ms a token")
    output.line(f"waiting    {1000 * found.stall_seconds / tokens:.2f} ms a token")
    if found.ratio is None or found.apart_ratio is None:
        return
    output.line(f"ratio      {found.ratio:.2f} times the larger of reading alone and computing alone")
    if found.seconds < SHORT_TOKEN * tokens:
        output.line("           which says little where a token takes so short a time")
    _show_by_token(output, found, found.paced_ratio, found.token_ratio)
    output.line(f"at once    {found.apart_ratio:.2f} where neither waits for the other: what this machine can do")
    _show_by_token(output, found, found.apart_paced_ratio, found.apart_token_ratio)


def _quartiles(spread: Spread | None) -> dict[str, float] | None:
    return None if spread is None else asdict(spread)


def _show_by_token(output: Output, found: Bench, ratio: float | None, spread: Spread | None) -> None:
    if ratio is None or spread is None or len(found.tokens) < FEW_TOKENS:
        return
    output.line(f"           {ratio:.2f} times the larger of the two of each token, summed")
    middle = f"half of them {spread.lower_quartile:.2f} to {spread.upper_quartile:.2f}"
    output.line(f"           {spread.median:.2f} in the median of the tokens, {middle}")


def _row(name: str, tokens: int, seconds: float | None, count: int) -> tuple[str, ...]:
    if not seconds:
        return (name, "-", "-", "-", "-")
    bandwidth = f"{human_bytes(round(count / seconds))}/s" if count else "-"
    size = human_bytes(round(count / tokens)) if count else "-"
    return (name, f"{1000 * seconds / tokens:.2f}", human_number(tokens / seconds), size, bandwidth)


def _rate(amount: float, seconds: float) -> float | None:
    return amount / seconds if amount and seconds else None
