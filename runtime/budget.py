"""How memory is divided: what a model needs at the least, part by part, and what is left for a cache of experts."""

from __future__ import annotations

from dataclasses import dataclass

from formats.errors import EnvironmentProblem, UsageError
from formats.spelling import counted
from runtime.description import Description
from runtime.models import kimi

MIB = 1 << 20
RESERVE = 512 * MIB  # left to the rest of the machine where the budget is chosen here, or an eighth if that is more
RESIDENT, STREAMED, AUTO = "resident", "streamed", "auto"


@dataclass(frozen=True)
class Part:
    """Something that takes memory: its name and its most bytes."""

    name: str
    bytes: int


@dataclass(frozen=True)
class StoreNeeds:
    """What serving a model's weights takes.

    Attributes:
        slot_bytes: of the largest expert, as it is held.
        experts: how many there are in all layers.
        tables: where they lie, and the like.
        resident_trunk: the whole trunk in memory.
        streamed_trunk: the trunk read layer by layer, with the next one read ahead.
    """

    slot_bytes: int
    experts: int
    tables: int
    resident_trunk: int
    streamed_trunk: int


@dataclass(frozen=True)
class Floor:
    """The least memory, with the trunk held or streamed; the same parts in both but the trunk."""

    resident: tuple[Part, ...]
    streamed: tuple[Part, ...]

    @property
    def resident_bytes(self) -> int:
        return sum(part.bytes for part in self.resident)

    @property
    def streamed_bytes(self) -> int:
        return sum(part.bytes for part in self.streamed)


@dataclass(frozen=True)
class BudgetPlan:
    """A division that fits.

    Attributes:
        total: the ceiling.
        parts: what it is for; they add up to at most ``total``.
        trunk: ``resident`` or ``streamed``.
        slots: experts that the cache holds.
    """

    total: int
    parts: tuple[Part, ...]
    trunk: str
    slots: int


@dataclass(frozen=True)
class Shape:
    """How much is computed at a time: positions the state holds, tokens of a step, threads, bytes of the caller's."""

    context: int
    chunk: int
    threads: int
    reserved: int = 0


def floor_of(description: Description, needs: StoreNeeds, shape: Shape) -> Floor:
    """The least memory that a model runs in."""
    recurrent, cached = kimi.state_bytes(description.config, shape.context)
    activations = kimi.activation_bytes(description.config, shape.chunk, shape.context, shape.threads)
    common = (
        Part("kda states", recurrent),
        Part(f"mla cache of {counted(shape.context, 'token')}", cached),
        Part(f"activations of {counted(shape.chunk, 'token')}", activations),
        Part(f"{_least_slots(description, needs)} experts", _least_slots(description, needs) * needs.slot_bytes),
        Part("tables", needs.tables),
        Part("vocabulary", shape.reserved),
    )
    used = tuple(part for part in common if part.bytes)
    return Floor(
        (Part("trunk, resident", needs.resident_trunk), *used), (Part("trunk, streamed", needs.streamed_trunk), *used)
    )


def _least_slots(description: Description, needs: StoreNeeds) -> int:
    """Slots for all experts of one token: fewer would read them one after the other."""
    return min(needs.experts, description.config.experts_per_token if needs.experts else 0)


def divide(
    description: Description,
    needs: StoreNeeds,
    shape: Shape,
    *,
    budget: int | None,
    available: int | None,
    trunk: str,
    models: int = 1,
) -> BudgetPlan:
    """Divide a budget.

    Args:
        budget: bytes, or None to choose one by ``available``.
        available: bytes that the machine has for this process, None if unknown.
        trunk: ``resident``, ``streamed``, or ``auto`` for resident where that fits.
        models: that share the budget in equal parts, of which this is one.

    Raises:
        UsageError: the budget is below the floor, whose size and largest parts it names.
        EnvironmentProblem: the memory that is free is.
    """
    floor = floor_of(description, needs, shape)
    least = floor.resident_bytes if trunk == RESIDENT else min(floor.resident_bytes, floor.streamed_bytes)
    if trunk == STREAMED:
        least = floor.streamed_bytes
    chosen = budget is None
    if budget is None:
        everything = models * (floor.resident_bytes + needs.experts * needs.slot_bytes)
        budget = everything if available is None else min(everything, available - max(RESERVE, available // 8))
    share = budget // models
    if share < least:
        largest = sorted(floor.streamed if trunk != RESIDENT else floor.resident, key=lambda part: -part.bytes)[:3]
        kind = EnvironmentProblem if chosen else UsageError
        raise kind(
            "the free memory is below what this model needs" if chosen else "budget is below what this model needs",
            where=None if chosen else "--budget",
            expected=f"at least {models * least} bytes ({_mib(models * least)})"
            + (f" for {models} models, which share it" if models > 1 else ""),
            found=f"{max(budget, 0)} bytes",
            hint="the largest parts are "
            + ", ".join(f"{part.name} {_mib(part.bytes)}" for part in largest)
            + "; fewer threads (--threads, in verify --jobs) lower it, and so do fewer tokens at a time: --context and"
            " --chunk in run and eval, --window in verify and calibrate, --chunk in bench",
        )
    held = trunk == RESIDENT or (trunk == AUTO and share >= floor.resident_bytes)
    parts, used = (floor.resident, floor.resident_bytes) if held else (floor.streamed, floor.streamed_bytes)
    least_slots = _least_slots(description, needs)
    slots = least_slots
    if needs.slot_bytes:
        slots = min(needs.experts, least_slots + (share - used) // needs.slot_bytes)
    more = Part(f"{slots - least_slots} more experts", (slots - least_slots) * needs.slot_bytes)
    return BudgetPlan(share, (*parts, more) if more.bytes else parts, RESIDENT if held else STREAMED, slots)


def _mib(size: int) -> str:
    return f"{-(-size // MIB)} MiB"
