"""Memory is divided by arithmetic that can be done by hand, and refused below the floor with the floor's size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from formats.errors import EnvironmentProblem, UsageError
from formats.families import read_text_model
from runtime.budget import AUTO, RESIDENT, STREAMED, Shape, StoreNeeds, divide, floor_of
from runtime.description import Description
from runtime.models import kimi

GIB = 1 << 30
K3 = Path(__file__).parent.parent / "data" / "k3-metadata" / "config.json"
NEEDS = StoreNeeds(slot_bytes=12_419_072, experts=82_432, tables=1000, resident_trunk=30 * GIB, streamed_trunk=GIB)
SHAPE = Shape(context=4096, chunk=64, threads=2)


@pytest.fixture(scope="module")
def k3() -> Description:
    release, config = read_text_model(json.loads(K3.read_bytes()), "config.json")
    moe = frozenset(config.moe_layers)
    return Description(release, config, tuple(896 if layer in moe else 0 for layer in range(config.hidden_layers)))


def test_states_of_kimi_k3(k3: Description) -> None:
    """69 kda layers of 96 heads of 128 x 128, with three inputs for each of three convolutions; 24 mla layers."""
    recurrent, cached = kimi.state_bytes(k3.config, 4096)
    assert recurrent == 4 * 69 * (96 * 128 * 128 + 3 * 3 * 96 * 128)
    assert cached == 4 * 24 * 4096 * (512 + 64)
    assert round(cached / GIB, 2) == 0.21  # what others measured


def test_the_floor_has_every_part(k3: Description) -> None:
    floor = floor_of(k3, NEEDS, SHAPE)
    parts = {part.name: part.bytes for part in floor.resident}
    assert parts["16 experts"] == 16 * 12_419_072
    assert parts["trunk, resident"] == 30 * GIB
    assert floor.resident_bytes - floor.streamed_bytes == 29 * GIB
    assert floor.resident_bytes == sum(parts.values())


def test_what_is_left_goes_to_experts(k3: Description) -> None:
    floor = floor_of(k3, NEEDS, SHAPE).streamed_bytes
    plan = divide(k3, NEEDS, SHAPE, budget=floor + 10 * 12_419_072 + 5, available=None, trunk=AUTO)
    assert (plan.trunk, plan.slots) == (STREAMED, 26)
    assert sum(part.bytes for part in plan.parts) == plan.total - 5


def test_a_resident_trunk_where_it_fits(k3: Description) -> None:
    floor = floor_of(k3, NEEDS, SHAPE).resident_bytes
    assert divide(k3, NEEDS, SHAPE, budget=floor, available=None, trunk=AUTO).trunk == RESIDENT
    assert divide(k3, NEEDS, SHAPE, budget=floor - 1, available=None, trunk=AUTO).trunk == STREAMED
    assert divide(k3, NEEDS, SHAPE, budget=floor, available=None, trunk=STREAMED).trunk == STREAMED


@pytest.mark.parametrize("trunk", [AUTO, RESIDENT, STREAMED])
def test_below_the_floor_is_refused_with_its_size(k3: Description, trunk: str) -> None:
    floor = floor_of(k3, NEEDS, SHAPE)
    least = floor.resident_bytes if trunk == RESIDENT else floor.streamed_bytes
    divide(k3, NEEDS, SHAPE, budget=least, available=None, trunk=trunk)
    with pytest.raises(UsageError, match=f"expected at least {least} bytes"):
        divide(k3, NEEDS, SHAPE, budget=least - 1, available=None, trunk=trunk)


def test_without_a_budget_the_machine_decides(k3: Description) -> None:
    assert divide(k3, NEEDS, SHAPE, budget=None, available=64 * GIB, trunk=AUTO).total == 56 * GIB  # less an eighth
    with pytest.raises(EnvironmentProblem, match="free memory is below"):
        divide(k3, NEEDS, SHAPE, budget=None, available=GIB, trunk=AUTO)
    everything = floor_of(k3, NEEDS, SHAPE).resident_bytes + 82_432 * NEEDS.slot_bytes
    assert divide(k3, NEEDS, SHAPE, budget=None, available=None, trunk=AUTO).total == everything


def test_no_more_slots_than_experts(k3: Description) -> None:
    plan = divide(k3, NEEDS, SHAPE, budget=1 << 50, available=None, trunk=AUTO)
    assert plan.slots == 82_432
