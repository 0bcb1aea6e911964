"""The views of ``moepack inspect`` as text for people."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from formats.codecs import rvq
from formats.manifest_types import TensorInfo
from formats.spelling import counted, spelled
from packer.inspect.views import (
    ExpertView,
    FileSize,
    LayerView,
    MatrixView,
    Spread,
    Summary,
    TrunkView,
    Unfinished,
)
from packer.output import Output, human_bytes, human_number

_LINE = 400  # characters of a journal's strings that are shown
_WELL_ABOVE = 1.05
_BAR = " .:-=+*#%@"
_BINS = 32


def show_summary(output: Output, container: Path, view: Summary | Unfinished) -> None:
    """One screen about the whole container."""
    if isinstance(view, Unfinished):
        _show_unfinished(output, container, view)
        return
    source = view.source
    output.line(f"container     {view.container_id}")
    output.line(f"format        version {view.format_version}, written by {view.tool['name']} {view.tool['version']}")
    output.line(f"model         {_model(view.architecture)}")
    output.line(f"source        {_source(source)}")
    output.line(f"recipe        {view.recipe.get('name')}: {view.recipe.get('summary') or '-'}")
    if view.experts:
        output.line(
            f"experts       {view.experts} in {counted(view.layers, 'layer')},"
            f" {view.architecture['experts_per_token']} a token,"
            f" as {', '.join(f'{codec} ({count})' for codec, count in view.codecs.items())}"
        )
        bits = bits_text(view.bits_per_weight, view.recipe, view.codecs)
        output.line(f"record        up to {human_bytes(view.record_bytes)}, {bits}")
        show_pruned(output, view)
    else:
        output.line("experts       no experts in this container")
    if view.partial is not None:
        output.line(f"partial       {_selection(view.partial)}")
    coverage = view.coverage
    output.line(
        f"tensors       {coverage['packed']} packed, {coverage['copied']} copied, {coverage['dropped']} dropped,"
        f" {coverage['omitted']} omitted"
    )
    show_errors(output, view)
    rows = [
        ("experts", human_bytes(view.expert_bytes), _share(view.expert_bytes, view.container_bytes)),
        ("trunk", human_bytes(view.trunk_bytes), _share(view.trunk_bytes, view.container_bytes)),
        *(
            (f"  {role}", human_bytes(count), _share(count, view.container_bytes))
            for role, count in sorted(view.roles.items(), key=lambda item: -item[1])
        ),
        ("other", human_bytes(view.other_bytes), _share(view.other_bytes, view.container_bytes)),
        ("total", human_bytes(view.container_bytes), _share(view.container_bytes, view.container_bytes)),
    ]
    output.table("", ("section", ">bytes", ">share"), rows)
    output.detail("files:")
    for name, length in collapsed(view.files):
        output.detail(f"  {name}  {length}")


def show_pruned(output: Output, view: Summary) -> None:
    """The line about what a plan left of the experts; none where there was no plan."""
    found = view.pruned
    if found is None:
        return
    kept = f"{found.kept_min}" if found.kept_min == found.kept_max else f"{found.kept_min} to {found.kept_max}"
    text = f"{found.dropped} of {counted(found.source_experts, 'expert')} dropped, {kept} a layer kept"
    if found.lossless:
        text += f", {found.lossless} of them lossless"
    output.line(f"pruned        {text}")


def collapsed(files: Sequence[FileSize]) -> list[tuple[str, str]]:
    """Files with their sizes, all banks in one line."""
    banks = [file for file in files if file.name.endswith(".bank")]
    lines = [(file.name, human_bytes(file.bytes)) for file in files if file not in banks]
    if banks:
        lines.append(
            (f"experts/layer-*.bank ({counted(len(banks), 'file')})", human_bytes(sum(file.bytes for file in banks)))
        )
    return lines


def _show_unfinished(output: Output, container: Path, view: Unfinished) -> None:
    output.line(f"unfinished    {container}")
    if view.architecture is not None:
        output.line(f"model         {_model(view.architecture)}"[:_LINE])
    if view.source is not None:
        output.line(f"source        {_source(view.source)}"[:_LINE])
    if view.recipe is not None:
        output.line(f"recipe        {view.recipe.get('name')}: {view.recipe.get('summary') or '-'}"[:_LINE])
    records = counted(view.records_done, "expert record")
    if view.records_planned:
        records = f"{view.records_done} of {counted(view.records_planned, 'expert record')}"
        records += f" ({_share(view.records_done, view.records_planned)})"
    files = counted(len(view.files_done), "file")
    output.line(f"durable       {records}, {counted(view.units_done, 'unit')} of work, {files}")
    if view.matrix_errors.count:
        output.line(f"expert errors {spread_text(view.matrix_errors, 'matrices')}")
    rows = [*collapsed(view.files), *((name, "in work") for name in view.files_in_work)]
    output.table("", ("file", ">bytes"), rows)
    output.hint("give the same pack command again, it continues")


def show_trunk(output: Output, view: TrunkView) -> None:
    """The tensors of the trunk."""
    output.line(f"trunk: {counted(len(view.tensors), 'tensor')} in {view.file}, {human_bytes(view.bytes)}")
    _show_tensors(output, view.tensors)


def _show_tensors(output: Output, tensors: Sequence[TensorInfo]) -> None:
    output.table(
        "",
        ("tensor", "role", "codec", "dtype", ">shape", ">offset", ">bytes", ">error"),
        [
            (
                tensor.name,
                tensor.role,
                f"{tensor.codec} {_parameters(tensor.parameters)}".rstrip(),
                tensor.dtype,
                " x ".join(str(extent) for extent in tensor.shape),
                tensor.offset,
                tensor.bytes,
                human_number(tensor.rel_error, 4),
            )
            for tensor in tensors
        ],
    )


def show_layer(output: Output, view: LayerView) -> None:
    """The records of a layer, and its tensors in the trunk."""
    if view.file is None:
        output.line(f"layer {view.layer}: no experts, {counted(len(view.tensors), 'tensor')} in the trunk")
    else:
        _show_records(output, view)
    _show_tensors(output, view.tensors)


def _show_records(output: Output, view: LayerView) -> None:
    dropped = f", without source experts {spelled(view.dropped_experts)}" if view.dropped_experts else ""
    size = human_bytes(view.bytes)
    experts = counted(view.experts, "expert")
    output.line(f"layer {view.layer}: {len(view.records)} of {experts} in {view.file}, {size}{dropped}")
    output.table(
        "",
        (">expert", ">source", "codec", ">offset", ">bytes", ">error", ">gate", ">up", ">down", "blake3"),
        [
            (
                record.expert,
                record.source_expert,
                record.codec,
                record.offset,
                record.bytes,
                *(human_number(error, 4) for error in (record.rel_error, *record.matrix_errors)),
                record.blake3[:16],
            )
            for record in view.records
        ],
    )


def show_expert(output: Output, view: ExpertView) -> None:
    """The header of a record."""
    output.line(f"layer {view.layer} expert {view.expert} (source expert {view.source_expert})")
    output.line(f"codec    {view.codec} {_parameters(view.parameters)}")
    output.line(f"place    {view.file}, byte {view.offset}, {view.bytes} bytes of which {view.payload_bytes} are used")
    output.line(f"error    {human_number(view.rel_error, 4)}")
    output.line(f"blake3   {view.blake3}")
    output.table(
        "",
        ("matrix", ">rows", ">columns", ">exponent", ">error", "source blake3"),
        [
            (
                matrix.name,
                matrix.rows,
                matrix.cols,
                matrix.scale_exponent,
                human_number(matrix.rel_error, 4),
                matrix.source_blake3[:16],
            )
            for matrix in view.matrices
        ],
    )
    for matrix in view.matrices:
        for name in matrix.source_tensors:
            output.line(f"{matrix.name:<6} from {name}")
    output.table(
        "",
        ("section", ">offset", ">bytes", "blake3"),
        [(section.name, section.offset, section.bytes, section.blake3[:16]) for section in view.sections],
    )


def show_matrix(output: Output, view: MatrixView) -> None:
    """A decoded matrix."""
    output.line(f"layer {view.layer} expert {view.expert} {view.matrix}: {view.rows} x {view.cols}")
    output.line(f"source   {', '.join(view.source_tensors)}")
    output.line(f"codec    {view.codec} {_parameters(view.parameters)}, scale exponent {view.scale_exponent}")
    output.line(f"error    {human_number(view.rel_error, 4)}")
    output.line(
        f"values   mean {human_number(view.mean)}, deviation {human_number(view.standard_deviation)},"
        f" from {human_number(view.smallest)} to {human_number(view.largest)}, {view.zeros} zeros"
    )
    if view.scales:
        output.line(f"scales   {' '.join(human_number(scale, 5) for scale in view.scales)} ...")
    output.table(
        "",
        [f">{column}" for column in range(len(view.corner[0]))],
        [[human_number(v, 5) for v in row] for row in view.corner],
    )
    if view.codebooks:
        output.table(
            "",
            (">stage", ">entries", ">unused", ">bits used", ">norms from", ">mean", ">to", "use of the entries"),
            [
                (
                    book["stage"],
                    book["entries"],
                    book["unused"],
                    human_number(book["entropy_bits"]),
                    human_number(book["norm_min"]),
                    human_number(book["norm_mean"]),
                    human_number(book["norm_max"]),
                    histogram(book["histogram"]),
                )
                for book in view.codebooks
            ],
        )


def histogram(counts: Sequence[int]) -> str:
    """Counts as a line of characters, runs of neighbours added up, the fullest as ``@``."""
    size = max(1, -(-len(counts) // _BINS))
    bins = [sum(counts[start : start + size]) for start in range(0, len(counts), size)]
    most = max(bins, default=0)
    return "".join(_BAR[-(-count * (len(_BAR) - 1) // most)] for count in bins) if most else ""


def _model(architecture: dict[str, Any]) -> str:
    """A model in one line; of an unfinished pack any member may be absent."""
    name, family, depth = (architecture.get(key) for key in ("name", "family", "hidden_layers"))
    return f"{name} ({family}), {_counted(depth, 'layer')}, width {architecture.get('hidden_size')}"


def _source(source: dict[str, Any]) -> str:
    name = source["repository"] or "local directory"
    commit = f" at {source['commit']}" if source["commit"] else ""
    size = human_bytes(source["bytes"]) if type(source["bytes"]) is int else "? bytes"
    return f"{name}{commit}, {_counted(source['tensors'], 'tensor')}, {size}, {counted(len(source['shards']), 'shard')}"


def _counted(count: object, noun: str) -> str:
    return counted(count, noun) if type(count) is int else f"? {noun}s"


def _selection(partial: dict[str, Any]) -> str:
    experts = "" if partial["experts"] is None else f", experts {spelled(partial['experts'])}"
    return f"layers {spelled(partial['layers'])}{experts}"


def show_errors(output: Output, view: Summary) -> None:
    """The lines about the recorded errors; none where nothing was compared."""
    if view.matrix_errors.count:
        output.line(f"expert errors {spread_text(view.matrix_errors, 'matrices')}")
    if view.tensor_errors.count:
        output.line(f"trunk errors  {spread_text(view.tensor_errors, 'tensors')}")


def spread_text(spread: Spread, what: str) -> str:
    """How the errors of ``what`` are distributed, in one line."""
    numbers = (spread.min, spread.median, spread.p99, spread.max)
    names = ("min", "median", "99th percentile", "max")
    return (
        ", ".join(f"{name} {human_number(value, 4)}" for name, value in zip(names, numbers, strict=True))
        + f" (of {spread.count} {what})"
    )


def bits_text(bits: float | None, recipe: dict[str, Any], codecs: Collection[str]) -> str:
    """Bits an expert weight takes; where they are well above what a recipe's codes alone take, why.

    Args:
        bits: measured; None without experts.
        recipe: the resolved one, as JSON values.
        codecs: those that experts are stored with.
    """
    text = f"{human_number(bits, 4)} bits a weight"
    if len(codecs) > 1:
        return f"{text}, all codecs together"
    experts = recipe.get("experts")
    if bits is None or not isinstance(experts, dict) or experts.get("codec") != "rvq" or "rvq" not in codecs:
        return text
    stages, entries = experts.get("stages"), experts.get("entries")
    if type(stages) is not int or type(entries) is not int or entries < 1:
        return text  # whoever wrote the manifest
    codes = stages * math.log2(entries) / rvq.DIMENSION
    return f"{text}, codebooks, scales and padding included" if bits > _WELL_ABOVE * codes else text


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _parameters(parameters: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in parameters.items())
