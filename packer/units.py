"""The unit of packing work: from the source and the plan to durable bytes and a journal entry.

A unit is a range of one layer's experts or one segment of the trunk. It is a pure function: what it writes depends on
the checkpoint, the plan and its own name only, never on other units, threads or time. Whoever calls it journals it.
"""

from __future__ import annotations

import math
import threading

import numpy as np

from formats import dtypes, families
from formats.checkpoint import Checkpoint
from formats.errors import Interrupted
from formats.families import MATRICES, Model
from formats.layout import Codec
from formats.source import read_matrix
from packer.encoding.encode import encode_expert
from packer.encoding.encode_trunk import EncodedTensor, encode_tensor
from packer.planning.plan import LayerPlan, Plan, RecordPlan, TensorPlan, Unit
from packer.prune.row_selection import reader_of_rows
from packer.statistics.column_weights import column_weights
from packer.storage.durable import Output, write_at
from packer.storage.journal import RecordDone, TensorDone, UnitDone
from packer.storage.system import SYSTEM, System, translated


def run_unit(
    checkpoint: Checkpoint,
    model: Model,
    plan: Plan,
    unit: Unit,
    output: Output,
    *,
    stop: threading.Event,
    system: System = SYSTEM,
) -> UnitDone:
    """Encode a unit into its place in ``output`` and flush it.

    Args:
        checkpoint, model, plan: where from, and what to make of it.
        unit: which part.
        output: the open temporary of the unit's file, at its full length; other units write to other places of it.
        stop: when set, the unit is abandoned at the next record or tensor.
        system: the system calls.

    Raises:
        Interrupted: ``stop`` was set; nothing of the unit counts.
        FormatError: the source is damaged or not finite.
        EnvironmentProblem: the output cannot be written.
    """
    records: list[RecordDone] = []
    tensors: list[TensorDone] = []
    if unit.layer is not None:
        layer = plan.layer(unit.layer)
        for record in plan.records_of(unit):
            _check_stop(stop)
            records.append(_pack_record(checkpoint, model, plan, layer, record, output, system))
    else:
        for tensor in plan.tensors_of(unit):
            _check_stop(stop)
            tensors.append(_pack_tensor(checkpoint, model, tensor, output, stop, system))
    with translated("flush", output.temporary, system=system):
        system.fsync(output.fd)
    return UnitDone(unit.name, tuple(records), tuple(tensors))


def _check_stop(stop: threading.Event) -> None:
    if stop.is_set():
        raise Interrupted("stopped")


def _pack_record(
    checkpoint: Checkpoint,
    model: Model,
    plan: Plan,
    layer: LayerPlan,
    record: RecordPlan,
    output: Output,
    system: System,
) -> RecordDone:
    sources = tuple(read_matrix(checkpoint, model, layer.layer, record.source_expert, matrix) for matrix in MATRICES)
    weights = None
    if plan.statistics is not None and record.codec == Codec.RVQ:
        weights = column_weights(plan.statistics, layer.layer, record.source_expert)
    encoded = encode_expert(
        (sources[0], sources[1], sources[2]),
        layer=layer.layer,
        expert=record.expert,
        source_expert=record.source_expert,
        codec=record.codec,
        parameters=record.parameters,
        seed=plan.recipe.fitting.seed,
        effort=plan.recipe.fitting.effort,
        bias=plan.recipe.source.mxfp4_bias,
        weights=weights,
    )
    write_at(output, record.offset, encoded.record, system=system)
    return RecordDone(
        record.expert, encoded.digest.hex(), encoded.matrix_errors, encoded.rel_error, encoded.weighted_error
    )


def _pack_tensor(
    checkpoint: Checkpoint, model: Model, tensor: TensorPlan, output: Output, stop: threading.Event, system: System
) -> TensorDone:
    dtype = dtypes.by_name(tensor.dtype, where=tensor.name)

    def read_all(start: int, end: int) -> bytes:
        _check_stop(stop)
        return checkpoint.read(tensor.name, start, end)

    row_bytes = math.prod(tensor.shape[1:]) * dtype.itemsize
    read = read_all if tensor.rows is None else reader_of_rows(read_all, tensor.rows, row_bytes)

    def write(offset: int, data: bytes) -> None:
        write_at(output, tensor.offset + offset, data, system=system)

    if tensor.role == "decay" and tensor.name.endswith("A_log"):
        values = dtypes.to_float32(checkpoint.read(tensor.name), dtype)
        families.check_decay(tensor.name, np.asarray(values), model.architecture.decay_heads, tensor.shard)
    done: EncodedTensor = encode_tensor(
        tensor.name, dtype, tensor.shape, tensor.codec, tensor.parameters, read=read, write=write
    )
    return TensorDone(tensor.name, done.blake3, done.source_blake3, done.rel_error, done.scale_exponent)
