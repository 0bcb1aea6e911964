"""One function a parser: any bytes are taken or refused with a reason, and what is taken says the same when written.

Any exception but :class:`~formats.errors.MoepackError` is a fault, :class:`Unfaithful` too. ``repair`` makes digests
right that would otherwise stop every mutation at the first line.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from blake3 import blake3

from formats import codecs, layout, strict_json
from formats.checkpoint import open_checkpoint
from formats.errors import MoepackError
from formats.families import bind
from formats.index import INDEX_ROW_BYTES, pack_index, unpack_index_header, unpack_index_rows
from formats.layout import (
    Matrix,
    align,
    check_trunk_header,
    pack_record_header,
    pack_trunk_header,
    unpack_record_header,
)
from formats.manifest import decode, encode
from formats.shard import read_header
from packer.recipe.recipe import load_recipe, plain, recipe_from_builtins
from packer.storage.journal import read_journal
from tests.support.containers import seal
from tests.support.memory import memory_folder


class Unfaithful(Exception):
    """What was taken does not mean what was read."""


@dataclass(frozen=True)
class Target:
    """A parser.

    Attributes:
        parse: gives the bytes to the parser; raises :class:`~formats.errors.MoepackError` if they are refused.
        repair: makes the digests of an input right, as somebody who wants to be believed would.
        text: whether inputs are text, so that mutations keep words and numbers whole now and then.
        runs: mutations in a short run.
    """

    parse: Callable[[bytes], object]
    repair: Callable[[bytes], bytes] = bytes
    text: bool = False
    runs: int = 1000


def taken(target: Target, data: bytes) -> bool:
    """Whether the parser took ``data``; whatever else happens is a fault and comes through."""
    try:
        target.parse(data)
    except MoepackError as error:
        if not error.line().isprintable() and "\n" in error.line():
            raise Unfaithful("a message of more than one line") from error
        return False
    return True


def insist(condition: bool, what: str) -> None:
    """Raise :class:`Unfaithful` unless ``condition`` holds."""
    if not condition:
        raise Unfaithful(what)


@cache
def holder() -> tempfile.TemporaryDirectory[str]:
    """Keeps the folder of :func:`scratch` until the process ends."""
    return memory_folder()


def scratch() -> Path:
    """A folder for parsers that read files."""
    return Path(holder().name)


def parse_manifest(data: bytes) -> None:
    manifest, container_id = decode(data)
    insist(container_id == blake3(data[:-83]).hexdigest(), "container id is not the digest of what it seals")
    again, _ = decode(encode(manifest))
    insist(again == manifest, "manifest differs when it is written and read again")


def reseal(data: bytes) -> bytes:
    return seal(data[:-83])


def parse_index(data: bytes) -> None:
    count = unpack_index_header(data, where="index.bin")
    rows = unpack_index_rows(data[INDEX_ROW_BYTES:], where="index.bin")
    if len(rows) == count:
        insist(pack_index(rows) == data, "index differs when it is written again")
    for row in rows:
        codecs.unpack_parameters(row.codec, row.parameters, where="row")


def parse_record_header(data: bytes) -> None:
    header = unpack_record_header(data, where="bank")
    insist(pack_record_header(header) == data[: layout.RECORD_HEADER_BYTES], "header differs when it is written again")
    codecs.unpack_parameters(header.codec, header.parameters, where="bank")


def parse_record(data: bytes) -> None:
    """Header and all sections, decoded as a reader does that looks at no digest."""
    header = unpack_record_header(data, where="bank")
    insist(header.record_bytes == align(header.payload_bytes, layout.PAGE), "record of another length")
    if len(data) < header.record_bytes:
        return
    view = memoryview(data)
    for matrix in Matrix:
        entry = header.matrices[matrix]
        values = codecs.decode_matrix(header, lambda item: view[item.offset : item.offset + item.bytes], matrix)
        insist(values.shape == (entry.rows, entry.cols), "matrix of another shape")


def parse_trunk_header(data: bytes) -> None:
    check_trunk_header(data, 61_440, where="trunk.bin")
    insist(data[:4096] == pack_trunk_header(61_440), "trunk header differs when it is written again")


def parse_shard(data: bytes) -> None:
    path = scratch() / "shard"
    path.write_bytes(data)
    fd = os.open(path, os.O_RDONLY)
    try:
        shard, tensors = read_header(fd, len(data), name="shard")
    finally:
        os.close(fd)
    insist(shard.bytes == len(data), "shard of another length")
    end = 8 + int.from_bytes(data[:8], "little")
    for tensor in tensors:
        insist(tensor.offset == end, "tensors do not tile the data")
        end += tensor.bytes
    insist(end == len(data), "tensors do not fill the data")


def lengthen(data: bytes) -> bytes:
    """The right length of the header in front, and data that fill it."""
    body = data[8:]
    end = body.rfind(b"}") + 1
    return end.to_bytes(8, "little") + body


def parse_json(data: bytes) -> None:
    value = strict_json.parse(data, where="document")
    again = strict_json.parse(json.dumps(value).encode(), where="document")
    insist(again == value, "document differs when it is written and read again")


CONFIG, WEIGHT_INDEX = "config.json", "model.safetensors.index.json"


@cache
def metadata(family: str) -> Path:
    """A folder with configuration and index of a family from the corpus, without shards."""
    folder = scratch() / family
    folder.mkdir()
    (folder / CONFIG).write_bytes((CORPUS / f"config/{family}.json").read_bytes())
    (folder / WEIGHT_INDEX).write_bytes((CORPUS / f"weight-index/{family}.json").read_bytes())
    return folder


def parse_beside(name: str, family: str, data: bytes) -> None:
    """Bind a checkpoint of metadata in which ``data`` stands in the place of one file."""
    place = metadata(family) / name
    before = place.read_bytes()
    try:
        place.write_bytes(data)
        model = bind(open_checkpoint(metadata(family), need_headers=False))
    finally:
        place.write_bytes(before)
    insist(len(list(model.names())) == model.tensor_count, "names are not as many as tensors")


def parse_config(data: bytes) -> None:
    parse_beside(CONFIG, "k3" if b"text_config" in data else "linear", data)


def parse_weight_index(data: bytes) -> None:
    parse_beside(WEIGHT_INDEX, "k3" if b"language_model." in data else "linear", data)


def parse_journal(data: bytes) -> None:
    path = scratch() / "journal.jsonl"
    path.write_bytes(data)
    contents = read_journal(path)
    insist(contents.whole_bytes + contents.torn_bytes == len(data), "bytes of the journal without a fate")
    insist(data[: contents.whole_bytes].count(b"\n") == 1 + len(contents.entries), "lines without an entry")


def recheck(data: bytes) -> bytes:
    """Every line with the check of what stands before it."""
    lines = []
    for line in data.split(b"\n"):
        body = re.sub(rb',"check":"[^"]*"\}\Z', b"", line)
        lines.append(body if body == line else b'%s,"check":"%s"}' % (body, blake3(body).hexdigest()[:16].encode()))
    return b"\n".join(lines)


def parse_recipe(data: bytes) -> None:
    path = scratch() / "mine.toml"
    path.write_bytes(data)
    recipe = load_recipe(str(path))
    insist(recipe_from_builtins(plain(recipe), where="again") == recipe, "recipe differs when it comes back from JSON")


CORPUS = Path(__file__).parent / "corpus"

TARGETS: dict[str, Target] = {
    "manifest": Target(parse_manifest, reseal, text=True, runs=1000),
    "index": Target(parse_index, runs=3000),
    "record-header": Target(parse_record_header, runs=3000),
    "record": Target(parse_record, runs=1500),
    "trunk-header": Target(parse_trunk_header, runs=1500),
    "shard": Target(parse_shard, lengthen, text=True, runs=1500),
    "json": Target(parse_json, text=True, runs=3000),
    "config": Target(parse_config, text=True, runs=800),
    "weight-index": Target(parse_weight_index, text=True, runs=800),
    "journal": Target(parse_journal, recheck, text=True, runs=700),
    "recipe": Target(parse_recipe, text=True, runs=1500),
}
