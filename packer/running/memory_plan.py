"""What running a container takes at the least, part by part: with the trunk held in memory, and with it streamed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from formats.container import open_container
from formats.manifest import ASSETS_DIR
from formats.spelling import counted
from packer.output import Output, human_bytes
from runtime.budget import MIB, Floor, Part, Shape, floor_of
from runtime.description import describe_container
from runtime.stream.container import container_needs
from runtime.tokenizer import TOKEN_BYTES
from runtime.tokenizer_files import RANKS_NAME


@dataclass(frozen=True)
class MemoryPlan:
    """The floor of a container.

    Attributes:
        container_id: of the container.
        context, chunk, threads: what it is for.
        floor: the parts.
        experts: how many there are.
        expert_bytes: what one more of them in memory takes.
    """

    container_id: str
    context: int
    chunk: int
    threads: int
    floor: Floor
    experts: int
    expert_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """The document of ``plan CONTAINER --json``."""
        return {
            "container_id": self.container_id,
            "context": self.context,
            "chunk": self.chunk,
            "threads": self.threads,
            "resident": _parts(self.floor.resident),
            "resident_bytes": self.floor.resident_bytes,
            "streamed": _parts(self.floor.streamed),
            "streamed_bytes": self.floor.streamed_bytes,
            "floor_bytes": min(self.floor.resident_bytes, self.floor.streamed_bytes),
            "experts": self.experts,
            "expert_bytes": self.expert_bytes,
        }


def plan_memory(path: Path, *, context: int, chunk: int, threads: int) -> MemoryPlan:
    """The floor of running a container. Reads manifest, index and configuration.

    Raises:
        FormatError: the container cannot be opened, or is partial.
    """
    with open_container(path) as container:
        description = describe_container(container)
        needs = container_needs(container, description)
        speaks = any(asset.path == f"{ASSETS_DIR}/{RANKS_NAME}" for asset in container.manifest.assets)
        reserved = TOKEN_BYTES * description.config.vocab_size if speaks else 0
        floor = floor_of(description, needs, Shape(context, chunk, threads, reserved))
        return MemoryPlan(container.container_id, context, chunk, threads, floor, needs.experts, needs.slot_bytes)


def show_memory(output: Output, plan: MemoryPlan) -> None:
    """The floor for people."""
    output.line(f"container  {plan.container_id}")
    context, threads = counted(plan.context, "token"), counted(plan.threads, "thread")
    output.line(f"for        {context} of context, {plan.chunk} at a time, {threads}")
    names = dict.fromkeys(part.name for part in (*plan.floor.resident, *plan.floor.streamed))
    resident, streamed = (
        {part.name: part.bytes for part in parts} for parts in (plan.floor.resident, plan.floor.streamed)
    )
    rows = [
        (name, *(human_bytes(side[name]) if name in side else "" for side in (resident, streamed))) for name in names
    ]
    floors = (plan.floor.resident_bytes, plan.floor.streamed_bytes)
    rows.append(("the least --budget", *(f"{-(-size // MIB)} MiB" for size in floors)))  # as it can be typed
    rows.append(("", *(f"{size} bytes" for size in floors)))
    output.table("", ("part", ">trunk resident", ">trunk streamed"), rows)
    if plan.experts:
        whole = plan.experts * plan.expert_bytes
        output.line(f"cache      each expert more takes {human_bytes(plan.expert_bytes)}, all {human_bytes(whole)}")


def _parts(parts: tuple[Part, ...]) -> list[dict[str, Any]]:
    return [{"name": part.name, "bytes": part.bytes} for part in parts]
