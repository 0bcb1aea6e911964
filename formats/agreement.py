"""What the parts of a container say of each other must agree: index rows with the manifest, records with both."""

from __future__ import annotations

from formats import codecs
from formats.codecs import mxfp4
from formats.errors import FormatError
from formats.index import INDEX_ROW_BYTES, IndexRow
from formats.layout import RecordHeader
from formats.manifest import LayerInfo, Manifest


def check_rows(rows: tuple[IndexRow, ...], info: LayerInfo, *, where: str) -> None:
    """Index rows of one layer: ascending experts, records that fill the bank without a gap (SPEC section 5.3)."""
    end = 0
    previous = -1
    dropped = set(info.dropped_experts)
    sources: set[int] = set()
    for number, row in enumerate(rows):
        at = INDEX_ROW_BYTES * (1 + info.first_row + number)

        def require(condition: bool, what: str, expected: object, found: object, at: int = at) -> None:
            if not condition:
                raise FormatError(what, where=where, offset=at, expected=expected, found=found)

        require(row.layer == info.layer, "index row of another layer", info.layer, row.layer)
        require(
            previous < row.expert < info.experts,
            "experts are not in ascending order",
            f"{previous + 1} to {info.experts - 1}",
            row.expert,
        )
        require(
            row.source_expert < info.source_experts,
            "source expert out of range",
            f"below {info.source_experts}",
            row.source_expert,
        )
        require(
            row.source_expert not in sources and row.source_expert not in dropped,
            "source expert stands twice or was dropped",
            "once",
            row.source_expert,
        )
        require(row.offset == end, "record does not follow the one before", end, row.offset)
        end = row.offset + row.bytes
        previous = row.expert
        sources.add(row.source_expert)
    if end != info.bytes:
        raise FormatError("records do not fill the bank", where=info.file, expected=info.bytes, found=end)


def check_header(header: RecordHeader, row: IndexRow, manifest: Manifest, *, where: str) -> None:
    """A record header against its index row, the manifest and the rules of its codec (SPEC section 6.6)."""
    pairs = {
        "layer": (row.layer, header.layer),
        "expert": (row.expert, header.expert),
        "source expert": (row.source_expert, header.source_expert),
        "codec": (row.codec.label, header.codec.label),
        "codec parameters": (row.parameters.hex(), header.parameters.hex()),
        "record length": (row.bytes, header.record_bytes),
        "errors": (
            (*row.matrix_errors, row.rel_error),
            (*(entry.rel_error for entry in header.matrices), header.rel_error),
        ),
        "shapes": (manifest.experts.shapes, tuple((entry.rows, entry.cols) for entry in header.matrices)),
    }
    for name, (expected, found) in pairs.items():
        if expected != found:
            raise FormatError(f"record header disagrees about its {name}", where=where, expected=expected, found=found)
    parameters = codecs.check_sections(header)
    bias = manifest.source.scale_bias
    if isinstance(parameters, mxfp4.Parameters) and parameters.bias != bias:
        raise FormatError("bias is not source.scale_bias", where=where, expected=bias, found=parameters.bias)
