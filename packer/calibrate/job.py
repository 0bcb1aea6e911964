"""A calibration that survives interruption: after each layer its sums and the tokens' states are durable.

A work folder beside the result holds ``identity.json`` (what is counted), the states between layers, the sums of each
layer that is done, and ``done.json``, written last, with what is done and the digests of these files. The same command
given again goes on behind it, once every file that it needs is seen to be what was written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from formats.errors import FormatError, Interrupted
from formats.spelling import counted
from packer.calibrate.finished import (
    DONE,
    FileProof,
    Finished,
    check_file,
    check_names,
    ending_the_work,
    proven_sums,
    read_finished,
    write_finished,
)
from packer.calibrate.folder import IDENTITY, check_output, work_folder, working_in
from packer.calibrate.layerwise import embed, pass_layer
from packer.calibrate.scratch import Scratch, StatesFile, states_name
from packer.calibrate.sums import LayerSums, empty_sums
from packer.calibrate.texts import Sample
from packer.progress import Progress
from packer.statistics.file import Statistics, open_statistics, write_layer, write_statistics
from packer.statistics.types import LayerStatistics, Provenance, check_provenance
from packer.storage.system import SYSTEM, NoSpace, System
from runtime.models.kimi import Decoder
from runtime.opening import Weights


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
        return self.layers_with_experts[-1]

    @property
    def layers_with_experts(self) -> list[int]:
        """Layers that have sums, ascending."""
        return [layer for layer, experts in enumerate(self.weights.store.layer_experts) if experts]

    @property
    def identity(self) -> dict[str, Any]:
        """What is counted: work on the same weights, text and windows can be gone on with."""
        return {**json.loads(msgspec.json.encode(self.provenance)), "weights": self.weights.identity}


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
        FormatError: the model's arithmetic leaves float32, or the work folder is damaged; the latter shows before
            anything is computed.
        EnvironmentProblem: no space, or a device that fails; the same command goes on.
    """
    check_output(job.out)
    check_provenance(job.provenance, where="sample text")
    _check_space(job, system)
    with working_in(job.folder, job.identity, system=system):
        config = job.weights.store.config
        scratch = Scratch(job.folder, job.sample.tokens, config.hidden_size, config.residual_blocks, system)
        with _continuable(job):
            finished = _checked(job, scratch, system)
            if finished.layers:
                resumed(finished.layers)
            finished = _pass_all(job, scratch, finished, progress, system)
            layers = job.layers_with_experts
            sums = (_proven(job, layer, finished, system).layer(layer) for layer in layers)
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
        done = read_finished(job.folder, job.last_layer + 1).layers
        if not done:
            raise
        raise Interrupted(
            f"stopped before the statistics were complete: {done} of {counted(job.last_layer + 1, 'layer')} done",
            where=job.out,
        ) from None


def _remove_work(job: Job) -> None:
    """Delete what this job made, by name, and nothing else: first what speaks of the rest, last what it was work on."""
    layers = range(job.last_layer + 2)
    names = [path(layer) for layer in layers for path in (states_name, sums_name)]
    for name in (DONE, *names, IDENTITY):
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


def _checked(job: Job, scratch: Scratch, system: System) -> Finished:
    """What earlier runs have done, once all files that the rest of this run needs are proven."""
    finished = read_finished(job.folder, job.last_layer + 1)
    if not finished.layers:
        return finished
    states = _states(job, scratch, finished.layers)
    check_names(job.folder, finished, _needed(job, scratch, finished.layers))
    for layer in states:
        recorded = finished.files[states_name(layer)]
        if recorded.bytes != scratch.file_bytes:
            with ending_the_work():
                raise FormatError(
                    f"note of finished layers is malformed: {states_name(layer)} has another length",
                    where=job.folder / DONE,
                    expected=f"{scratch.file_bytes} bytes",
                    found=f"{recorded.bytes} bytes",
                )
        check_file(scratch.path(layer), recorded, system=system)
    for layer in job.layers_with_experts:
        if layer < finished.layers:
            _proven(job, layer, finished, system)
    return finished


def _states(job: Job, scratch: Scratch, done: int) -> list[int]:
    """The layers before which states are needed once ``done`` layers are done: none once all are."""
    return [*scratch.blocks(done), done] if done <= job.last_layer else []


def _needed(job: Job, scratch: Scratch, done: int) -> list[str]:
    """The files that the rest needs once ``done`` layers are done."""
    states = [states_name(layer) for layer in _states(job, scratch, done)]
    return states + [sums_name(layer) for layer in job.layers_with_experts if layer < done]


def _proven(job: Job, layer: int, finished: Finished, system: System) -> Statistics:
    name = sums_name(layer)
    return proven_sums(job.folder / name, layer, job.provenance, finished.files[name], system=system)


def _pass_all(
    job: Job, scratch: Scratch, finished: Finished, progress: Callable[[Progress], None], system: System
) -> Finished:
    """All layers that are not done yet."""
    decoder = Decoder(job.weights.store, job.weights.workers, look_ahead=0)
    layers = job.last_layer + 1
    proofs = dict(finished.files)
    if not finished.layers:
        with scratch.writing(0) as target:
            embed(decoder, job.sample, job.group, target)
        proofs[states_name(0)] = target.proof()
    for layer in range(finished.layers, layers):

        def report(tokens: int, layer: int = layer) -> None:
            total = job.sample.tokens
            progress(Progress(layer * total + tokens, layers * total, f"layer {layer}"))

        proofs.update(_one_layer(job, decoder, layer, scratch, report, system))
        needed = _needed(job, scratch, layer + 1)
        finished = Finished(layers=layer + 1, files={name: proofs[name] for name in needed})
        write_finished(job.folder, finished, system=system)
        scratch.drop(layer)
    return finished


def _one_layer(
    job: Job, decoder: Decoder, layer: int, scratch: Scratch, report: Callable[[int], None], system: System
) -> dict[str, FileProof]:
    """Push all tokens through a layer; the files that came of it, durable and proven, by name."""
    experts = job.weights.store.layer_experts[layer]
    config = job.weights.store.config
    sums = None
    if experts:
        sums = empty_sums(len(job.sample.labels), experts, config.expert_input, config.expert_width)
    writing: AbstractContextManager[StatesFile | None] = nullcontext()
    if layer < job.last_layer:
        writing = scratch.writing(layer + 1)
    with writing as target:
        pass_layer(decoder, layer, job.sample, job.group, scratch, target, sums, report)
    made = {}
    if target is not None:
        made[states_name(layer + 1)] = target.proof()
    if sums is not None:
        path = job.folder / sums_name(layer)
        digest = write_layer(path, job.provenance, layer, _statistics(sums), system=system)
        made[path.name] = FileProof(bytes=path.stat().st_size, blake3=digest)
    return made


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


def sums_name(layer: int) -> str:
    """The file of a layer's sums, in the folder."""
    return f"layer-{layer:05d}.safetensors"
