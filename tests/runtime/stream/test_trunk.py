"""The trunk: resident and streamed give the same tensors, those of the file; damage is named; nothing is read twice."""

from __future__ import annotations

import gc
import os
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from formats.container import Container
from formats.encoded import RawMatrix, decode_rows, multiply
from formats.errors import FormatError, IntegrityError
from formats.families.kimi import text_tensors
from runtime.store import Tensors
from runtime.stream import tensors as tensors_module
from runtime.stream import trunk as trunk_module
from runtime.stream.memory import Area
from runtime.stream.segments import Segment, Segments, container_segments
from runtime.stream.tensors import TrunkSource
from runtime.stream.trunk import ResidentTrunk, StreamedTrunk, resident_bytes, streamed_bytes
from runtime.threads import Workers
from tests.runtime.stream.conftest import NAMES, OpenCheckpoint, OpenContainer, Packed

Open = Callable[[Path], OpenContainer]


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "waited for too long"
        time.sleep(0.001)


@dataclass
class Noted:
    """A source whose reads are noted, and may fail or wait."""

    inner: TrunkSource
    reads: list[tuple[str, int, int]] = field(default_factory=list)
    fail: set[str] = field(default_factory=set)
    gate: threading.Event | None = None

    @property
    def segments(self) -> Segments:
        return self.inner.segments

    @property
    def check(self) -> bool:
        return self.inner.check

    @property
    def where(self) -> str:
        return self.inner.where

    def read(self, segment: Segment, start: int, stop: int, target: memoryview) -> int:
        self.reads.append((segment.name, start, stop))
        if self.gate is not None:
            assert self.gate.wait(20)
        if segment.name in self.fail:
            raise FormatError("cannot be read", where=segment.name)
        return self.inner.read(segment, start, stop, target)

    def whole(self) -> list[str]:
        """Segments that were read as a whole, in order."""
        lengths = {segment.name: segment.bytes for segment in self.segments}
        return [name for name, start, stop in self.reads if (start, stop) == (0, lengths[name])]


@pytest.fixture
def workers() -> Iterator[Workers]:
    with Workers(2) as workers:
        yield workers


def streamed(source: TrunkSource, workers: Workers, closing: ExitStack, *, read_ahead: bool = True) -> StreamedTrunk:
    trunk = StreamedTrunk(source, workers, read_ahead=read_ahead)
    closing.callback(trunk.close)
    return trunk


def snapshot(tensors: Tensors) -> dict[str, np.ndarray]:
    """Every tensor, decoded and copied."""
    found = {name: decode_rows(matrix, np.arange(matrix.rows)) for name, matrix in tensors.matrices.items()}
    return found | {name: values.copy() for name, values in tensors.vectors.items()}


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def expected_tensors(container: Container, opened: OpenContainer) -> dict[int | None, dict[str, np.ndarray]]:
    """By layer what the container's own reader decodes, by the names that a model asks for; of A_log the heads."""
    prefix, config = opened.description.release.prefix, opened.description.config
    found: dict[int | None, dict[str, np.ndarray]] = {None: {}, **{layer: {} for layer in range(config.hidden_layers)}}
    known = {expected.name for expected in text_tensors(config, opened.description.release)}
    for info in container.manifest.tensors:
        if info.name not in known:
            continue
        values = container.tensor_values(info)
        if info.name.endswith("A_log"):
            values = values.reshape(-1)[: config.kda_heads]
        name = info.name.removeprefix(prefix)
        name = name.removeprefix("model." if info.layer is None else f"model.layers.{info.layer}.")
        found[info.layer][name] = values
    return found


@pytest.mark.parametrize("name", NAMES)
def test_all_tensors_however_they_are_read(
    name: str, packed: Callable[[str], Packed], container_at: Open, workers: Workers, closing: ExitStack
) -> None:
    opened = container_at(packed(name).container)
    expected = expected_tensors(opened.container, opened)
    layers = range(opened.description.config.hidden_layers)
    trunks = [
        ResidentTrunk(opened.trunk(), workers),
        ResidentTrunk(opened.trunk(check=False), workers),
        streamed(opened.trunk(), workers, closing),
        streamed(opened.trunk(check=False), workers, closing, read_ahead=False),
    ]
    for trunk in trunks:
        for layer in [*layers, *layers]:
            assert same(snapshot(trunk.layer(layer)), expected[layer]), (name, layer)
        last = snapshot(trunk.output())
        for tensor, values in last.items():
            assert np.array_equal(values, expected[None][tensor])
        assert set(last) | {"lm_head.weight", "embed_tokens.weight"} == set(expected[None]) | {"lm_head.weight"}


@pytest.mark.parametrize("name", NAMES)
def test_embedding_and_head(
    name: str,
    packed: Callable[[str], Packed],
    container_at: Open,
    workers: Workers,
    closing: ExitStack,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In pieces of a few rows too; a tied head is the embedding."""
    opened = container_at(packed(name).container)
    expected = expected_tensors(opened.container, opened)[None]
    embedding = expected["embed_tokens.weight"]
    assert ("lm_head.weight" in expected) == (name != "k3-tied")
    resident = ResidentTrunk(opened.trunk(), workers)
    ids = np.array([5, 0, 5, embedding.shape[0] - 1, 7], np.int64)
    assert np.array_equal(resident.embed(ids), embedding[ids])
    inputs = np.random.default_rng(0).standard_normal((3, embedding.shape[1]), np.float32)
    logits = resident.head(inputs)
    head = expected.get("lm_head.weight", embedding)
    assert np.allclose(logits, inputs @ head.T, rtol=1e-4, atol=1e-4)
    for piece_bytes in (1, 3000, 1 << 20):
        monkeypatch.setattr(trunk_module, "PIECE_BYTES", piece_bytes)
        for read_ahead in (True, False):
            trunk = streamed(opened.trunk(), workers, closing, read_ahead=read_ahead)
            assert np.array_equal(trunk.embed(ids), embedding[ids])
            assert trunk.embed(np.zeros(0, np.int64)).shape == (0, embedding.shape[1])
            for _ in range(2):
                assert np.array_equal(trunk.head(inputs), logits)
            assert np.array_equal(trunk.head(inputs[1:2]), logits[1:2])


def test_a_checkpoint_and_its_lossless_parts(
    packed: Callable[[str], Packed],
    container_at: Open,
    checkpoint_at: Callable[[Path], OpenCheckpoint],
    workers: Workers,
    closing: ExitStack,
) -> None:
    """The source's values: everything that the container copied is equal, and both ways of reading are."""
    places = packed("k3-tiny")
    container, checkpoint = container_at(places.container), checkpoint_at(places.source)
    stored = {info.name: info.codec for info in container.container.manifest.tensors}
    resident, stream = ResidentTrunk(checkpoint.trunk(), workers), streamed(checkpoint.trunk(), workers, closing)
    copied = ResidentTrunk(container.trunk(), workers)
    compared = 0
    for layer in range(checkpoint.description.config.hidden_layers):
        found = snapshot(resident.layer(layer))
        assert same(found, snapshot(stream.layer(layer)))
        packed_layer = snapshot(copied.layer(layer))
        assert found.keys() == packed_layer.keys()
        for name, values in found.items():
            if stored[f"language_model.model.layers.{layer}.{name}"] == "raw":
                assert np.array_equal(values, packed_layer[name])
                compared += 1
    assert compared > 50
    ids = np.array([3, 1], np.int64)
    assert np.array_equal(resident.embed(ids), stream.embed(ids))
    inputs = np.ones((1, checkpoint.description.config.hidden_size), np.float32)
    assert np.array_equal(resident.head(inputs), stream.head(inputs))
    assert same(snapshot(stream.output()), {n: v for n, v in snapshot(resident.output()).items() if "head" not in n})


def test_the_decay_is_that_of_the_heads(packed: Callable[[str], Packed], container_at: Open, workers: Workers) -> None:
    opened = container_at(packed("k3-tiny").container)
    trunk = ResidentTrunk(opened.trunk(), workers)
    config = opened.description.config
    kda = config.attention.index("kda")
    assert trunk.layer(kda).vectors["self_attn.A_log"].shape == (config.kda_heads,)


def test_a_resident_trunk_reads_each_segment_once(
    packed: Callable[[str], Packed], container_at: Open, workers: Workers
) -> None:
    source = Noted(container_at(packed("k3-tiny").container).trunk())
    trunk = ResidentTrunk(source, workers)
    assert source.whole() == [segment.name for segment in source.segments]
    assert len(source.reads) == len(source.whole())
    assert trunk.statistics().bytes_read == sum(segment.bytes for segment in source.segments)


def test_a_streamed_trunk_reads_ahead_and_around(
    packed: Callable[[str], Packed], container_at: Open, workers: Workers, closing: ExitStack
) -> None:
    source = Noted(container_at(packed("k3-tiny").container).trunk())
    trunk = streamed(source, workers, closing)
    assert source.whole() == []
    assert trunk.layer(0) is trunk.layer(0)
    until(lambda: source.whole() == ["layer.0", "layer.1"])
    for layer in range(1, 7):
        trunk.layer(layer)
    until(lambda: source.whole()[-1] == "layer.0")
    assert source.whole() == [*(f"layer.{layer}" for layer in range(7)), "layer.0"]
    trunk.layer(0)
    until(lambda: source.whole()[-1] == "layer.1")
    assert len(source.whole()) == 9


def test_without_read_ahead_nothing_is_read_early(
    packed: Callable[[str], Packed], container_at: Open, workers: Workers, closing: ExitStack
) -> None:
    source = Noted(container_at(packed("k3-tiny").container).trunk())
    threads = threading.active_count()
    trunk = streamed(source, workers, closing, read_ahead=False)
    trunk.layer(0), trunk.layer(1)
    assert source.whole() == ["layer.0", "layer.1"]
    assert trunk.router(1) is not None
    assert trunk.router(2) is None
    assert threading.active_count() == threads


def test_layers_out_of_order(
    packed: Callable[[str], Packed], container_at: Open, workers: Workers, closing: ExitStack
) -> None:
    """After an error a model begins anew: what was read ahead is not what is needed."""
    opened = container_at(packed("k3-tiny").container)
    expected = expected_tensors(opened.container, opened)
    trunk = streamed(opened.trunk(), workers, closing)
    for layer in (0, 1, 4, 0, 0, 6, 5, 6, 0, 1):
        assert same(snapshot(trunk.layer(layer)), expected[layer])


def test_the_router_of_the_next_layer(
    packed: Callable[[str], Packed], container_at: Open, workers: Workers, closing: ExitStack
) -> None:
    opened = container_at(packed("k3-tiny").container)
    expected = expected_tensors(opened.container, opened)
    needed = ["block_sparse_moe.gate.weight", "block_sparse_moe.gate.e_score_correction_bias"]
    needed.append("post_attention_layernorm.weight")

    def check(tensors: Tensors | None, layer: int) -> None:
        assert tensors is not None
        found = snapshot(tensors)
        for name in needed:
            assert np.array_equal(found[name], expected[layer][name])

    resident = ResidentTrunk(opened.trunk(), workers)
    assert resident.router(0) is None  # a dense layer
    check(resident.router(3), 3)
    source = Noted(opened.trunk(), gate=threading.Event())
    assert source.gate is not None
    source.gate.set()
    trunk = streamed(source, workers, closing)
    trunk.layer(0)
    until(lambda: trunk.router(1) is not None)
    check(trunk.router(1), 1)
    assert trunk.router(0) is None
    assert trunk.router(2) is None
    source.gate.clear()
    trunk.layer(1)
    assert trunk.router(2) is None  # it is being read
    source.gate.set()
    until(lambda: trunk.router(2) is not None)
    check(trunk.router(2), 2)
    trunk.layer(2)


def test_an_error_of_a_read_ahead_comes_with_its_layer(
    packed: Callable[[str], Packed], container_at: Open, workers: Workers, closing: ExitStack
) -> None:
    opened = container_at(packed("k3-tiny").container)
    expected = expected_tensors(opened.container, opened)
    for read_ahead in (True, False):
        source = Noted(opened.trunk(), fail={"layer.1"})
        trunk = streamed(source, workers, closing, read_ahead=read_ahead)
        trunk.layer(0)
        for _ in range(2):
            with pytest.raises(FormatError, match=r"layer\.1"):
                trunk.layer(1)
            assert trunk.router(1) is None
        source.fail.clear()
        assert same(snapshot(trunk.layer(1)), expected[1])


@pytest.mark.parametrize("name", ["layer.3", "embedding", "output"])
def test_an_error_of_a_resident_trunk(
    name: str, packed: Callable[[str], Packed], container_at: Open, workers: Workers
) -> None:
    threads = threading.active_count()
    source = Noted(container_at(packed("k3-tiny").container).trunk(), fail={name})
    with pytest.raises(FormatError, match=name):
        ResidentTrunk(source, workers)
    assert threading.active_count() == threads


def test_closing_ends_the_thread(
    packed: Callable[[str], Packed], container_at: Open, workers: Workers, closing: ExitStack
) -> None:
    threads = threading.active_count()
    trunk = StreamedTrunk(container_at(packed("k3-tiny").container).trunk(), workers)
    trunk.layer(0)
    trunk.close()
    trunk.close()
    assert threading.active_count() == threads


# Damage.

PLACES = {
    "matrix of a layer": "language_model.model.layers.2.self_attn.q_proj.weight",
    "vector of a layer": "language_model.model.layers.2.input_layernorm.weight",
    "embedding": "language_model.model.embed_tokens.weight",
    "head": "language_model.lm_head.weight",
    "last norm": "language_model.model.norm.weight",
}


@pytest.mark.parametrize("place", PLACES)
def test_a_flipped_bit_is_named_by_its_tensor(
    place: str,
    tmp_path: Path,
    packed: Callable[[str], Packed],
    container_at: Open,
    workers: Workers,
    closing: ExitStack,
) -> None:
    path = shutil.copytree(packed("k3-tiny").container, tmp_path / "container")
    opened = container_at(path)
    info = opened.container.tensor(PLACES[place])
    at = info.offset + info.bytes // 2
    trunk_file = path / "trunk.bin"
    with trunk_file.open("r+b") as file:
        byte = os.pread(file.fileno(), 1, at)
        os.pwrite(file.fileno(), bytes([byte[0] ^ 1]), at)

    def use_all(make: type[ResidentTrunk | StreamedTrunk], *, check: bool) -> None:
        trunk = make(opened.trunk(check=check), workers)
        closing.callback(trunk.close)
        for layer in range(7):
            trunk.layer(layer)

    for make in (ResidentTrunk, StreamedTrunk):
        with pytest.raises(IntegrityError, match=info.name) as caught:
            use_all(make, check=True)
        assert (caught.value.where, caught.value.offset) == ("trunk.bin", info.offset)
        use_all(make, check=False)


def test_a_trunk_that_is_cut_while_in_use(
    tmp_path: Path, packed: Callable[[str], Packed], container_at: Open, workers: Workers, closing: ExitStack
) -> None:
    path = shutil.copytree(packed("k3-tiny").container, tmp_path / "container")
    source = container_at(path).trunk()
    trunk = streamed(source, workers, closing)
    trunk.layer(0)
    os.truncate(path / "trunk.bin", source.segments.layers[4].start)
    with pytest.raises(FormatError, match=r"trunk\.bin: file changed while it was in use"):
        trunk.layer(3)  # which is whole, but a file that somebody writes to is not the one that was proved
    with pytest.raises(FormatError, match=r"trunk.bin: segment layer\.4") as caught:
        trunk.layer(4)
    assert caught.value.offset == source.segments.layers[4].start


def test_digests_of_a_streamed_layer_are_proved_once(
    packed: Callable[[str], Packed],
    container_at: Open,
    workers: Workers,
    closing: ExitStack,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    proved: list[str] = []
    original = tensors_module.prove
    monkeypatch.setattr(
        tensors_module,
        "prove",
        lambda source, placed, found: (proved.append(placed.info.name), original(source, placed, found)),
    )
    opened = container_at(packed("k3-tiny").container)
    trunk = streamed(opened.trunk(), workers, closing, read_ahead=False)
    for layer in [*range(7), *range(7)]:
        trunk.layer(layer)
    known = {tensor.info.name for segment in opened.trunk().segments.layers for tensor in segment.tensors.values()}
    assert sorted(proved) == sorted(known)


def test_a_dtype_without_arithmetic_is_refused(packed: Callable[[str], Packed], container_at: Open) -> None:
    opened = container_at(packed("k3-tiny").container)
    manifest = opened.container.manifest
    name = PLACES["vector of a layer"]
    for dtype in ("F64", "I16", "U8", "F8_E4M3", "BOOL"):
        changed = msgspec.structs.replace(
            manifest,
            tensors=tuple(
                msgspec.structs.replace(info, dtype=dtype) if info.name == name else info for info in manifest.tensors
            ),
        )
        with pytest.raises(FormatError, match=name) as caught:
            container_segments(changed, opened.description)
        assert caught.value.found == dtype


def test_a_tensor_in_a_segment_where_it_does_not_belong(packed: Callable[[str], Packed], container_at: Open) -> None:
    opened = container_at(packed("k3-tiny").container)
    manifest = opened.container.manifest
    trunk = msgspec.structs.replace(
        manifest.trunk,
        segments=tuple(
            msgspec.structs.replace(
                segment, name={"layer.1": "layer.2", "layer.2": "layer.1"}.get(segment.name, segment.name)
            )
            for segment in manifest.trunk.segments
        ),
    )
    with pytest.raises(FormatError, match="another segment"):
        container_segments(msgspec.structs.replace(manifest, trunk=trunk), opened.description)
    trunk = msgspec.structs.replace(manifest.trunk, segments=manifest.trunk.segments[1:])
    with pytest.raises(FormatError, match="no such segment"):
        container_segments(msgspec.structs.replace(manifest, trunk=trunk), opened.description)


# Memory.


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("piece_bytes", [3000, 32 << 20])
def test_no_more_memory_than_said(
    name: str,
    piece_bytes: int,
    packed: Callable[[str], Packed],
    container_at: Open,
    checkpoint_at: Callable[[Path], OpenCheckpoint],
    workers: Workers,
    closing: ExitStack,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Mappings that are alive, and the vectors beside them, are what the plan of memory counts."""
    alive: weakref.WeakSet[Any] = weakref.WeakSet()

    class Noting(Area):
        def __init__(self, length: int) -> None:
            super().__init__(length)
            alive.add(self._pages)

    for module in (trunk_module, tensors_module):
        monkeypatch.setattr(module, "Area", Noting)
    monkeypatch.setattr(trunk_module, "PIECE_BYTES", piece_bytes)
    places = packed(name)
    sources = (container_at(places.container).trunk(), checkpoint_at(places.source).trunk())
    for source in sources:
        resident = ResidentTrunk(source, workers)
        own = sum(
            values.nbytes
            for layer in range(len(source.segments.layers))
            for values in resident.layer(layer).vectors.values()
            if values.flags.writeable
        )
        own += sum(values.nbytes for values in resident.output().vectors.values() if values.flags.writeable)
        gc.collect()
        taken = sum(len(pages) for pages in alive)
        assert own <= resident_bytes(source.segments) - taken <= own + 4096  # decoded A_log keeps its padding
        del resident
        gc.collect()
        assert not alive
        stream = streamed(source, workers, closing, read_ahead=False)
        for layer in range(len(source.segments.layers)):
            stream.layer(layer)
        gc.collect()
        taken = sum(len(pages) for pages in alive)
        last = sum(values.nbytes for values in stream.output().vectors.values())
        assert taken + last <= streamed_bytes(source.segments) <= taken + last + 2 * 65536
        closing.pop_all().close()
        del stream
        gc.collect()
        assert not alive


def test_multiply_of_a_part_is_the_part() -> None:
    """What the pieces of a head rely on: a row's product does not depend on which rows are multiplied with it."""
    rng = np.random.default_rng(1)
    values = rng.standard_normal((50, 33), np.float32)
    inputs = rng.standard_normal((2, 33), np.float32)
    whole = multiply(RawMatrix(50, 33, "F32", values), inputs)
    part = multiply(RawMatrix(7, 33, "F32", values[20:27]), inputs)
    assert np.array_equal(part, whole[:, 20:27])
