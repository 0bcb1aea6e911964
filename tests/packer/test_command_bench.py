"""``moepack bench`` and ``moepack plan CONTAINER``: documents, counts that follow from the model, and refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from formats.container import open_container
from formats.errors import UsageError
from packer.commands import run
from runtime.bench import bench
from runtime.bench_alone import Caching
from runtime.budget import BudgetPlan
from runtime.measured import Bench, Spread, Token
from runtime.opening import Options
from runtime.session import open_session
from runtime.stream.statistics import StreamStatistics, TrunkStatistics
from tests.support.speaking import DATA, Speaking, make_speaking

MOE_LAYERS, EXPERTS, PER_TOKEN = 6, 16, 4  # of k3-tiny
TOKENS, WARM = 5, 4


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Speaking:
    return make_speaking(tmp_path_factory.mktemp("speaking"))


def ignore(*what: object) -> None:
    """Told in vain."""


def document(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def floor_of(container: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert run(["plan", str(container), *options, "--json"]) == 0
    return document(capsys)


@pytest.mark.parametrize("trunk", ["resident", "streamed"])
def test_bench_document(trunk: str, speaking: Speaking, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", str(speaking.container), "-n", str(TOKENS), "--trunk", trunk, "--json", "--quiet"]) == 0
    found = document(capsys)
    assert found["warm_tokens"] == 32
    keys = {"tokens_per_second", "bytes_read_per_token", "cache_hit_rate", "read_bandwidth", "compute_seconds"}
    assert keys | {"stall_seconds"} <= set(found)
    assert found["tokens"] == TOKENS
    assert found["tokens_per_second"] == pytest.approx(TOKENS / found["seconds"])
    assert found["bytes_read_per_token"] == found["bytes_read"] / TOKENS
    assert 0 <= found["cache_hit_rate"] <= 1
    assert found["compute_seconds"] > 0
    assert found["budget"]["trunk"] == trunk
    assert (found["reading_alone"]["trunk_bytes"] > 0) == (trunk == "streamed")
    larger = max(found["reading_alone"]["seconds"], found["compute_seconds"])
    assert found["ratio_to_larger"] == pytest.approx(found["seconds"] / larger)
    assert found["apart_ratio_to_larger"] == pytest.approx(found["apart_seconds"] / larger)
    least = found["larger_of_each_token_seconds"]
    assert least >= larger
    assert found["ratio_to_larger_of_each_token"] == pytest.approx(found["seconds"] / least)
    assert found["apart_ratio_to_larger_of_each_token"] == pytest.approx(found["apart_seconds"] / least)
    for name in ("ratio_to_larger_by_token", "apart_ratio_to_larger_by_token"):
        spread = found[name]
        assert 0 < spread["lower_quartile"] <= spread["median"] <= spread["upper_quartile"]


def test_every_choice_is_asked_for_and_every_miss_is_read(speaking: Speaking) -> None:
    """With a cache of one token's experts and no look-ahead: what is not a hit is a read of one record."""
    with open_container(speaking.container) as container:
        record = container.largest_record(1)
    least = floor_bytes(speaking.container)
    options = Options(budget=least, look_ahead=False, trunk="resident")
    found = bench(speaking.container, options, tokens=TOKENS, warm=WARM, tell=ignore, progress=ignore)
    stream = found.stream
    assert found.plan.slots == PER_TOKEN
    assert stream.asked == MOE_LAYERS * PER_TOKEN * TOKENS
    assert stream.bytes_read == record * (stream.asked - stream.hits)
    assert found.caching.bytes == stream.bytes_read  # a cache is asked the same again
    assert found.bytes_needed == stream.bytes_read  # and a cache without bytes
    assert found.trunk.bytes_read == 0


@pytest.mark.parametrize("warm", [0, 1, 2, 3, 40])
def test_every_record_is_proved_once(warm: int, speaking: Speaking) -> None:
    """With room for all: each expert's first use is a read and a proof, and what was warmed up is neither."""
    options = Options(look_ahead=False, trunk="resident")
    found = bench(speaking.container, options, tokens=TOKENS, warm=warm, tell=ignore, progress=ignore)
    assert (found.warm, len(found.tokens)) == (warm, TOKENS)
    stream = found.stream
    assert stream.proofs == stream.reads == stream.misses
    assert stream.asked == MOE_LAYERS * PER_TOKEN * TOKENS
    if warm == 0:
        assert MOE_LAYERS * PER_TOKEN <= stream.proofs <= MOE_LAYERS * EXPERTS
    if warm == 40:
        assert stream.proofs < MOE_LAYERS * PER_TOKEN
    unchecked = replace(options, check_records=False)
    found = bench(speaking.container, unchecked, tokens=TOKENS, warm=warm, tell=ignore, progress=ignore)
    assert (found.stream.proofs, found.stream.proof_seconds) == (0, 0.0)


@pytest.mark.parametrize("warm", [0, 1, 5])
def test_progress_ends_at_its_total(warm: int, speaking: Speaking) -> None:
    told: list[tuple[int, int, str]] = []
    options = Options(trunk="resident")
    bench(speaking.container, options, tokens=2, warm=warm, tell=ignore, progress=lambda *step: told.append(step))
    done = [step[0] for step in told]
    assert done == sorted(set(done))
    assert {step[1] for step in told} == {done[-1]}
    assert [what for _, _, what in told][-1] == "the cache alone"
    assert len(told) == 2 * (warm + 2)  # each token is decoded, or measured, and then asked of the cache


def test_ratios_by_hand() -> None:
    """Of three tokens one waits for bytes and two for arithmetic: by themselves 4/3, 5/4 and 4/4 of the larger."""
    tokens = (
        Token(4.0, 2.0, 1.0, 1.0, 3.0, 10, 2),
        Token(5.0, 2.0, 0.0, 4.0, 6.0, 10, 0),
        Token(4.0, 0.0, 0.0, 4.0, 4.0, 0, 0),
    )
    plan = BudgetPlan(0, (), "resident", 0)
    found = Bench("", 0, tokens, 1, plan, StreamStatistics(), TrunkStatistics(), Caching(0.0, 0.0, 0), ())
    assert (found.seconds, found.reading_seconds, found.computing_seconds, found.apart_seconds) == (13, 5, 9, 13)
    assert (found.ratio, found.apart_ratio, found.bytes_needed) == (13 / 9, 13 / 9, 22)
    assert found.larger_seconds == 3 + 4 + 4
    assert (found.paced_ratio, found.apart_paced_ratio) == (13 / 11, 13 / 11)
    assert found.token_ratio == Spread(1.125, 1.25, pytest.approx((5 / 4 + 4 / 3) / 2))
    assert found.apart_token_ratio == Spread(1.0, 1.0, 1.25)
    unknown = replace(found, tokens=(tokens[0], replace(tokens[1], computing=None, apart=None)))
    assert (unknown.ratio, unknown.apart_ratio, unknown.token_ratio, unknown.apart_token_ratio) == (None,) * 4
    assert (unknown.larger_seconds, unknown.paced_ratio, unknown.apart_paced_ratio) == (None,) * 3


def floor_bytes(container: Path) -> int:
    """The least budget with a resident trunk, as the refusal names it."""
    with pytest.raises(UsageError) as caught:
        open_session(container, Options(budget=1, context=WARM + TOKENS, trunk="resident"))
    return int(str(caught.value.expected).split()[2])


def test_bench_table(speaking: Speaking, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", str(speaking.container), "-n", "2"]) == 0
    captured = capsys.readouterr()
    assert captured.err.splitlines() == [
        "decoding 32 tokens to warm up",
        "decoding, reading alone and computing alone, token by token",
        "the cache alone",
    ]
    names = [line[:25].rstrip() for line in captured.out.splitlines()]
    for name in ("reading alone", "experts through the cache", "computing alone", "together", "at once, but apart"):
        assert name in names
    assert "in the median" not in captured.out  # of two tokens


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["CONTAINER", "--warm", "-1"], 2, "--warm"),
        ([str(DATA / "k3-tiny")], 3, "this is a checkpoint, not a container"),
        ([str(DATA)], 3, "not a container: it has no manifest"),
        (["absent"], 2, "absent: no such directory"),
        (["CONTAINER", "-n", "0"], 2, "-n"),
        (["CONTAINER", "--budget", "1KiB"], 2, "budget is below what this model needs"),
    ],
)
def test_bench_refuses(
    arguments: list[str], code: int, message: str, speaking: Speaking, capsys: pytest.CaptureFixture[str]
) -> None:
    filled = [str(speaking.container) if item == "CONTAINER" else item for item in arguments]
    assert run(["bench", *filled, "--quiet"]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err.splitlines()[0]


# plan CONTAINER


def test_floor_is_what_run_insists_on(speaking: Speaking, capsys: pytest.CaptureFixture[str]) -> None:
    """The two sums are the smallest budgets that open; one byte less does not."""
    found = floor_of(speaking.container, capsys, "--context", "100", "--chunk", "8", "--jobs", "2")
    vocabulary = sum(part["bytes"] for part in found["resident"] if part["name"] == "vocabulary")
    assert vocabulary > 0  # this container has a tokenizer
    for trunk in ("resident", "streamed"):
        least = found[f"{trunk}_bytes"]
        assert least == sum(part["bytes"] for part in found[trunk])
        shape = {"context": 100, "chunk": 8, "threads": 2, "trunk": trunk, "reserved": vocabulary}
        with open_session(speaking.container, Options(budget=least, **shape)) as session:
            assert session.plan.slots == PER_TOKEN
        with pytest.raises(UsageError, match=f"expected at least {least} bytes"):
            open_session(speaking.container, Options(budget=least - 1, **shape))
    assert found["floor_bytes"] == min(found["resident_bytes"], found["streamed_bytes"])


def test_longer_contexts_take_more(speaking: Speaking, capsys: pytest.CaptureFixture[str]) -> None:
    """The latent cache of the MLA layers: latent and shared key in float32, a token and layer."""
    config = json.loads((DATA / "k3-tiny" / "config.json").read_text())["text_config"]
    layers = len(config["linear_attn_config"]["full_attn_layers"])
    width = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    parts = [
        {
            part["name"]: part["bytes"]
            for part in floor_of(speaking.container, capsys, "--context", str(size))["resident"]
        }
        for size in (1000, 4000)
    ]
    cached = [next(size for name, size in part.items() if name.startswith("mla cache")) for part in parts]
    assert cached == [4 * layers * width * 1000, 4 * layers * width * 4000]


def test_floor_for_people(speaking: Speaking, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(speaking.container)]) == 0
    shown = capsys.readouterr().out
    assert "4096 tokens of context" in shown
    for name in ("trunk, resident", "trunk, streamed", "kda states", "4 experts", "the least --budget"):
        assert f"\n{name} " in shown


def test_options_that_mean_nothing_are_refused(speaking: Speaking, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(speaking.container), "--recipe", "kimi-k3"]) == 2
    assert "options about packing mean nothing here" in capsys.readouterr().err
    assert run(["plan", str(DATA / "k3-tiny"), "--context", "4096"]) == 2
    assert "are about running a container" in capsys.readouterr().err
