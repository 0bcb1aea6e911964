"""A calibration that survives interruption: after each layer its sums and the tokens' states are durable.

A work folder beside the result holds ``identity.json`` (what is counted), the states between layers, the sums of each
layer that is done, and ``done.json``, whose number is raised last. The same command given again goes on behind it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from formats import strict_json
from formats.errors import FormatError, Interrupted, UsageError
from formats.spelling import counted
from packer.calibrate.layerwise import embed, pass_layer
from packer.calibrate.scratch import Scratch, states_name
from packer.calibrate.sums import LayerSums, empty_sums
from packer.calibrate.texts import Sample
from packer.progress import Progress
from packer.running.token_input import read_file
from packer.statistics.file import (
    Statistics,
    open_statistics,
    read_layer,
    write_layer,
    write_statistics,
)
from packer.statistics.types import LayerStatistics, Provenance, check_provenance
from packer.storage.durable import make_directory, temporary_path, write_file
from packer.storage.identity import differences
from packer.storage.lock import exclusive
from packer.storage.new_file import check_free
from packer.storage.system import SYSTEM, NoSpace, System
from runtime.models.kimi import Decoder
from runtime.opening import Weights

WORK_SUFFIX = ".work"
_IDENTITY, _DONE, _LOCK = "identity.json", "done.json", "lock"


@dataclass(frozen=True)
class Job:
    """A calibration to be made.

    Attributes:
        weights: of the model, opened for states of one window and steps of ``group`` tokens.
        sample: windows of tokens.
        provenance: of model and text, as it will stand in the result.
        out: the statistics file.
        group: tokens that go through a layer's experts together.
    """

    weights: Weights
    sample: Sample
    provenance: Provenance
    out: Path
    group: int

    @property
    def folder(self) -> Path:
        """Where work in progress lies."""
        return work_folder(self.out)

    @property
    def last_layer(self) -> int:
        """The last layer with experts; what comes behind it is not computed."""
        return max(layer for layer, experts in enumerate(self.weights.store.layer_experts) if experts)


def work_folder(out: Path) -> Path:
    """Where work in progress lies."""
    return out.with_name(out.name + WORK_SUFFIX)


def scratch_bytes(job: Job) -> int:
    """At most what the work folder takes besides sums: the states before each block of layers, and two more."""
    config = job.weights.store.config
    block = config.residual_blocks
    kept = 0 if block is None else -(-(job.last_layer + 1) // block)
    return 4 * job.sample.tokens * config.hidden_size * (kept + 2)


def calibrate(
    job: Job,
    *,
    progress: Callable[[Progress], None] = lambda progress: None,
    resumed: Callable[[int], None] = lambda layers: None,
    system: System = SYSTEM,
) -> Statistics:
    """Count, or go on counting, and write the statistics file.

    Args:
        progress: called from several threads, one at a time.
        resumed: called with the layers that an earlier run has done, if there are any.

    Raises:
        Interrupted: by KeyboardInterrupt, and there is something to go on from.
        UsageError: the result exists already, or other work lies in its folder.
        FormatError: the model's arithmetic leaves float32, or the work folder is damaged.
        EnvironmentProblem: no space, or a device that fails; the same command goes on.
    """
    check_free(job.out)
    check_provenance(job.provenance, where="sample text")
    _check_space(job, system)
    make_directory(job.folder, system=system)
    with exclusive(job.folder / _LOCK, system=system):
        _check_identity(job, system)
        config = job.weights.store.config
        scratch = Scratch(job.folder, job.sample.tokens, config.hidden_size, config.residual_blocks, system)
        with _continuable(job):
            _pass_all(job, scratch, progress, resumed, system)
            layers = [layer for layer, experts in enumerate(job.weights.store.layer_experts) if experts]
            sums = (read_layer(job.folder / sums_name(layer), layer) for layer in layers)
            write_statistics(job.out, job.provenance, layers, sums, system=system)
        _remove_work(job)
    with suppress(OSError):
        job.folder.rmdir()  # stays if somebody put something else into it
    return open_statistics(job.out)


@contextmanager
def _continuable(job: Job) -> Iterator[None]:
    """Turns an interruption into one that says that the same command goes on, once a layer is durable."""
    try:
        yield
    except KeyboardInterrupt:
        done = _done(job)
        if not done:
            raise
        raise Interrupted(
            f"stopped before the statistics were complete: {done} of {counted(job.last_layer + 1, 'layer')} done",
            where=job.out,
        ) from None


def _remove_work(job: Job) -> None:
    """Delete what this job made, by name, and nothing else."""
    layers = range(job.last_layer + 2)
    names = [path(layer) for layer in layers for path in (states_name, sums_name)]
    for name in (*names, _DONE, _IDENTITY):
        (job.folder / name).unlink(missing_ok=True)


def _check_space(job: Job, system: System) -> None:
    needed, free = scratch_bytes(job), system.available(job.out.parent)
    if not job.folder.exists() and needed > free:
        raise NoSpace(
            "not enough free space for the tokens' states",
            where=job.out.parent,
            expected=f"{needed} bytes",
            found=f"{free} bytes",
            hint="use less text, or name a result on another disk",
        )


def _check_identity(job: Job, system: System) -> None:
    """The folder is new, or holds work on the same weights, text and windows."""
    wanted = {**json.loads(msgspec.json.encode(job.provenance)), "weights": job.weights.identity}
    path = job.folder / _IDENTITY
    if not os.path.lexists(path):
        ours = (_LOCK, temporary_path(path).name)
        others = sorted(item.name for item in job.folder.iterdir() if item.name not in ours)
        if others:
            raise UsageError(
                "the folder for work in progress holds something else",
                where=job.folder,
                found=", ".join(others[:3]),
                hint="name another result, or move that folder away",
            )
        write_file(path, [json.dumps(wanted, indent=1, sort_keys=True).encode()], system=system)
        return
    found = _read_note(path)
    differing = differences(found, wanted)
    if differing:
        raise UsageError(
            f"an unfinished calibration of something else lies here: {differing}",
            where=job.folder,
            hint="give the same command again, name another result, or remove the folder",
        )


def _pass_all(
    job: Job,
    scratch: Scratch,
    progress: Callable[[Progress], None],
    resumed: Callable[[int], None],
    system: System,
) -> None:
    """All layers that are not done yet."""
    decoder = Decoder(job.weights.store, job.weights.workers, look_ahead=0)
    done = _done(job)
    layers = job.last_layer + 1
    if done == 0:
        target = scratch.create(0)
        try:
            embed(decoder, job.sample, job.group, target)
            target.finish()
        except BaseException:
            target.close()
            raise
    missing = [layer for layer in (*scratch.blocks(done), done) if not scratch.is_whole(layer)]
    if missing and done < layers:
        raise FormatError(
            f"the tokens' states before layer {missing[0]} are absent or cut short",
            where=job.folder,
            hint="remove the folder and start again",
        )
    if done:
        resumed(done)
    for layer in range(done, layers):

        def report(tokens: int, layer: int = layer) -> None:
            total = job.sample.tokens
            progress(Progress(layer * total + tokens, layers * total, f"layer {layer}"))

        _one_layer(job, decoder, layer, scratch, report, system)
        write_file(job.folder / _DONE, [json.dumps({"layers": layer + 1}).encode()], system=system)
        scratch.drop(layer)


def _one_layer(
    job: Job, decoder: Decoder, layer: int, scratch: Scratch, report: Callable[[int], None], system: System
) -> None:
    experts = job.weights.store.layer_experts[layer]
    config = job.weights.store.config
    sums = None
    if experts:
        sums = empty_sums(len(job.sample.labels), experts, config.expert_input, config.expert_width)
    target = scratch.create(layer + 1) if layer < job.last_layer else None
    try:
        pass_layer(decoder, layer, job.sample, job.group, scratch, target, sums, report)
        if target is not None:
            target.finish()
    except BaseException:
        if target is not None:
            target.close()
        raise
    if sums is not None:
        write_layer(job.folder / sums_name(layer), job.provenance, layer, _statistics(sums), system=system)


def _statistics(sums: LayerSums) -> LayerStatistics:
    return LayerStatistics(
        tokens=sums.tokens,
        gate=sums.gate,
        saliency=sums.saliency,
        halves=sums.halves,
        input=sums.all_inputs,
        activation=np.add.reduce(sums.activations, axis=0),
        expert_input=sums.inputs.astype(np.float32),
        expert_activation=sums.activations.astype(np.float32),
    )


def _done(job: Job) -> int:
    """Layers whose sums and states are durable."""
    path = job.folder / _DONE
    if not os.path.lexists(path):
        return 0
    layers = _read_note(path).get("layers")
    if type(layers) is not int or not 0 <= layers <= job.last_layer + 1:
        raise FormatError(
            "note of finished layers is malformed", where=path, expected=f"0 to {job.last_layer + 1}", found=layers
        )
    return layers


def _read_note(path: Path) -> dict[str, Any]:
    return strict_json.parse_object(read_file(path), where=str(path))


def sums_name(layer: int) -> str:
    """The file of a layer's sums, in the folder."""
    return f"layer-{layer:05d}.safetensors"
