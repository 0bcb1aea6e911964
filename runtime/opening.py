"""Opening a model's weights behind a budget: container or checkpoint, trunk held or streamed, a cache of experts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from formats.checkpoint import Checkpoint, open_checkpoint
from formats.container import open_container
from formats.errors import UsageError
from formats.families import bind
from runtime.assets import is_container
from runtime.budget import AUTO, RESIDENT, STREAMED, BudgetPlan, Shape, StoreNeeds, divide
from runtime.description import Description, describe_checkpoint, describe_container
from runtime.machine import available_memory, processors
from runtime.store import WeightStore
from runtime.stream.checkpoint import CheckpointExperts, CheckpointTrunk, checkpoint_needs
from runtime.stream.container import ContainerExperts, ContainerTrunk, container_needs
from runtime.stream.direct import DirectReads
from runtime.stream.experts import ExpertLoader, ExpertStream
from runtime.stream.trunk import ResidentTrunk, StreamedTrunk, TrunkSource
from runtime.threads import Workers

DEFAULT_CONTEXT = 4096
DEFAULT_CHUNK = 64


@dataclass(frozen=True)
class Options:
    """How a model is run. None of them changes a bit of its output.

    Attributes:
        budget: bytes that caches, buffers, states and activations may take together; None to choose by the machine.
        context: tokens that the state holds.
        chunk: tokens that are computed together when many are fed.
        threads: for arithmetic; None for as many as there are processors.
        look_ahead: ask early for the experts that the next layer will probably choose.
        read_ahead: read the next layer of a streamed trunk early.
        trunk: ``resident``, ``streamed``, or ``auto`` for resident where it fits.
        check_records: prove what is read from a container for the first time against its digests.
        reserved: bytes of the budget that the caller itself takes, for example for a vocabulary.
        models: that share the budget, or what the machine has, in equal parts; each is opened with the same options.
    """

    budget: int | None = None
    context: int = DEFAULT_CONTEXT
    chunk: int = DEFAULT_CHUNK
    threads: int | None = None
    look_ahead: bool = True
    read_ahead: bool = True
    trunk: str = AUTO
    check_records: bool = True
    reserved: int = 0
    models: int = 1

    def __post_init__(self) -> None:
        for name, least in (("context", 1), ("chunk", 1), ("threads", 1), ("reserved", 0), ("models", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UsageError(f"{name} is out of range", expected=f"at least {least}", found=value)
        if self.trunk not in (AUTO, RESIDENT, STREAMED):
            raise UsageError("unknown kind of trunk", expected=f"{AUTO}, {RESIDENT} or {STREAMED}", found=self.trunk)


@dataclass(frozen=True)
class Weights:
    """Opened weights.

    Attributes:
        store: what the forward pass sees.
        plan: how the budget is divided.
        stream: behind ``store.experts``, for its statistics.
        trunk: behind ``store.trunk``, likewise.
        workers: threads for arithmetic.
        container_id: None for a checkpoint.
        identity: stands for these very weights: the container id, or a digest of the shards' names, lengths and times.
        notes: what a user should know by now, for example that direct reads are not possible here.
    """

    store: WeightStore
    plan: BudgetPlan
    stream: ExpertStream
    trunk: ResidentTrunk | StreamedTrunk
    workers: Workers
    container_id: str | None
    identity: str
    notes: Callable[[], tuple[str, ...]]


@dataclass(frozen=True)
class _Source:
    """Something opened, nothing of it read yet."""

    description: Description
    needs: StoreNeeds
    experts: ExpertLoader
    trunk: TrunkSource
    container_id: str | None
    identity: str
    notes: Callable[[], tuple[str, ...]]


def open_weights(path: Path, options: Options, closing: ExitStack) -> Weights:
    """Open a container or a checkpoint directory.

    Args:
        closing: gets all that is to be closed.

    Raises:
        UsageError: no such folder, or a budget below what the model needs.
        FormatError: neither container nor checkpoint, damaged, partial, or of an unknown family.
        EnvironmentProblem: not enough memory, or a device that fails.
    """
    source = (_from_container if is_container(path) else _from_checkpoint)(path, options, closing)
    threads = options.threads or processors()
    plan = divide(
        source.description,
        source.needs,
        Shape(options.context, options.chunk, threads, options.reserved),
        budget=options.budget,
        available=available_memory(),
        trunk=options.trunk,
        models=options.models,
    )
    workers = closing.enter_context(Workers(threads))
    stream = ExpertStream(source.experts, slots=plan.slots, workers=workers)
    closing.callback(stream.close)
    if plan.trunk == RESIDENT:
        trunk: ResidentTrunk | StreamedTrunk = ResidentTrunk(source.trunk, workers)
    else:
        trunk = StreamedTrunk(source.trunk, workers, read_ahead=options.read_ahead)
    closing.callback(trunk.close)
    description = source.description
    store = WeightStore(description.release.family, description.config, description.layer_experts, trunk, stream)
    return Weights(store, plan, stream, trunk, workers, source.container_id, source.identity, source.notes)


def _from_container(path: Path, options: Options, closing: ExitStack) -> _Source:
    container = closing.enter_context(open_container(path))
    description = describe_container(container)
    reads = DirectReads()
    closing.callback(reads.close)
    return _Source(
        description,
        container_needs(container, description),
        ContainerExperts(container, reads, check=options.check_records),
        ContainerTrunk(container, reads, description, check=options.check_records),
        container.container_id,
        container.container_id,
        lambda: reads.notes,
    )


def _from_checkpoint(path: Path, options: Options, closing: ExitStack) -> _Source:
    checkpoint = closing.enter_context(open_checkpoint(path))
    model = bind(checkpoint)
    description = describe_checkpoint(checkpoint, model)
    return _Source(
        description,
        checkpoint_needs(checkpoint, model, description),
        CheckpointExperts(checkpoint, model),
        CheckpointTrunk(checkpoint, description),
        None,
        _shard_stamps(checkpoint),
        tuple,
    )


def _shard_stamps(checkpoint: Checkpoint) -> str:
    """BLAKE3 of what the file system says of a checkpoint's shards, in hex."""
    stamps = []
    for shard in checkpoint.shards:
        status = (checkpoint.directory / shard.name).stat()
        stamps.append(f"{shard.name} {status.st_size} {status.st_mtime_ns}")
    return blake3("\n".join(stamps).encode()).hexdigest()
