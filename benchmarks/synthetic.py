"""A container of Kimi K3's architecture and record size with random weights: ``python -m benchmarks.synthetic OUT``.

Streaming needs records of the real size and more of them than fit into memory, not weights that mean something. The
container is planned by the packer like any other and passes every check; it holds fewer layers and experts, and, unless
``--full-width`` is given, a trunk that is narrower where the experts do not depend on it. The same seed gives the same
bytes.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from formats import codecs, layout, manifest
from formats.assets import INDEX_NAME
from formats.checkpoint import CONFIG_NAME, open_checkpoint
from formats.codecs import group_int, rvq
from formats.families import Model, bind, kimi_k3
from formats.index import IndexRow, pack_index
from formats.layout import LINE, PAGE, MatrixEntry, RecordHeader, Section, SectionKind, align
from packer.assemble import complete_manifest, index_rows
from packer.planning.plan import Plan, make_plan
from packer.planning.plan import TensorPlan as Tensor
from packer.recipe.recipe import default_recipe
from packer.storage.journal import RecordDone, TensorDone

CONFIG = Path(__file__).parents[1] / "tests" / "data" / "k3-metadata" / CONFIG_NAME
SHARD = "model.safetensors"
ERROR = 0.0  # nothing was encoded, so nothing was lost

# What a narrow trunk has instead of the released widths; the latent in which experts work stays as it is.
NARROW = {
    "hidden_size": 1024,
    "vocab_size": 8192,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "q_lora_rank": 256,
    "kv_lora_rank": 128,
    "num_shared_experts": 1,
}
NARROW_KDA_HEADS = 8


@dataclass(frozen=True)
class Size:
    """What to make: layers in all, of which the first is dense, experts of each other one, the trunk's width.

    There should be more than a few layers: at the beginning and at the end of a token nothing can be read early, and
    what a model of 92 such layers does not feel is a tenth of the time of one with four, and 4 % with eight.
    """

    layers: int = 17
    experts: int = 48
    per_token: int = 16
    full_width: bool = False


def make(out: Path, size: Size, seed: int = 0) -> Plan:
    """Write the container into ``out``, which must not exist."""
    config = _config(size)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder)
        (source / CONFIG_NAME).write_text(json.dumps(config, indent=1))
        names = dict.fromkeys(_names(config), SHARD)
        (source / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": names}))
        with open_checkpoint(source, need_headers=False) as checkpoint:
            model = bind(checkpoint)
            plan = make_plan(checkpoint, model, default_recipe(model.architecture.family))
            _write(out, plan, model, source, seed)
    return plan


def _config(size: Size) -> dict[str, Any]:
    """The released configuration with fewer layers and experts; every fourth layer keeps full attention."""
    config: dict[str, Any] = json.loads(CONFIG.read_text())
    text = config["text_config"]
    config.pop("vision_config", None)
    numbers = range(1, size.layers + 1)
    text["linear_attn_config"] |= {
        "kda_layers": [number for number in numbers if number % 4],
        "full_attn_layers": [number for number in numbers if number % 4 == 0],
    }
    text |= {
        "num_hidden_layers": size.layers,
        "num_experts": size.experts,
        "num_experts_per_token": size.per_token,
    }
    if not size.full_width:
        text |= NARROW
        text["linear_attn_config"]["num_heads"] = NARROW_KDA_HEADS
    return config


def _names(config: dict[str, Any]) -> Iterator[str]:
    """Every tensor that the configuration promises."""
    inventory = kimi_k3.inventory(config, CONFIG_NAME)
    for expected in inventory.trunk:
        yield expected.name
    for layer in inventory.architecture.moe_layers:
        for expert in range(inventory.architecture.experts):
            for tensors in inventory.expert_tensors.values():
                yield from (tensor.name(layer, expert) for tensor in tensors)


def _write(out: Path, plan: Plan, model: Model, source: Path, seed: int) -> None:
    """Everything, the manifest last."""
    (out / manifest.EXPERTS_DIR).mkdir(parents=True)
    records: dict[tuple[int, int], RecordDone] = {}
    for bank in plan.layers:
        with (out / manifest.bank_name(bank.layer)).open("wb") as file:
            for record in bank.records:
                rng = np.random.default_rng([seed, bank.layer, record.expert])
                data, header = _record(bank.layer, record.expert, model, rng)
                assert len(data) == record.bytes
                file.write(data)
                digest = blake3(data).hexdigest()
                records[bank.layer, record.expert] = RecordDone(record.expert, digest, (ERROR,) * 3, header.rel_error)
    rows: list[IndexRow] = index_rows(plan.layers, records)
    (out / manifest.INDEX_NAME).write_bytes(pack_index(rows))
    tensors = _write_trunk(out / manifest.TRUNK_NAME, plan, model.architecture.decay_heads, seed)
    assets = {}
    for asset in plan.draft.assets:
        target = out / asset.path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / target.relative_to(out / manifest.ASSETS_DIR), target)
        assets[asset.path] = blake3(target.read_bytes()).hexdigest()
    shards = {shard.name: manifest.BLANK_DIGEST for shard in plan.draft.source.shards}
    complete = complete_manifest(plan.draft, rows, tensors=tensors, shards=shards, assets=assets)
    (out / manifest.FILE_NAME).write_bytes(manifest.encode(complete))


def _record(layer: int, expert: int, model: Model, rng: np.random.Generator) -> tuple[bytes, RecordHeader]:
    """A record of the codec rvq: normal codebooks, scales that give weights of variance 1/columns, random codes."""
    shapes = model.architecture.expert_shapes
    parameters = rvq.Parameters(stages=3, entries=256, scope="expert")
    expected = codecs.record_sections(layout.Codec.RVQ, parameters, shapes)
    offsets = codecs.section_offsets([length for _, _, length in expected])
    parts = []
    for kind, matrix, length in expected:
        rows, cols = shapes[matrix % 3]
        if kind == SectionKind.CODEBOOKS:
            part = (rng.standard_normal(length // 2) / math.sqrt(parameters.stages)).astype("<f2").tobytes()
        elif kind == SectionKind.SCALES:
            part = np.full(rows, 1.0 / math.sqrt(cols), "<f2").tobytes()
        else:
            codes = np.frombuffer(rng.bytes(length), np.uint8).reshape(-1, -(-cols // 8), parameters.stages, 64).copy()
            codes[-1, :, :, rows - 64 * (codes.shape[0] - 1) :] = 0  # rows that fill up the last block
            part = codes.tobytes()
        parts.append(part)
    sections = tuple(
        Section(kind, matrix, offset, len(part), blake3(part).digest())
        for (kind, matrix, _), offset, part in zip(expected, offsets, parts, strict=True)
    )
    payload = offsets[-1] + len(parts[-1])
    gate, up, down = (MatrixEntry(rows, cols, 0, ERROR, bytes(32)) for rows, cols in shapes)
    header = RecordHeader(
        layer,
        expert,
        expert,
        layout.Codec.RVQ,
        parameters.pack(),
        align(payload, PAGE),
        payload,
        ERROR,
        (gate, up, down),
        sections,
    )
    data = bytearray(header.record_bytes)
    data[: layout.RECORD_HEADER_BYTES] = layout.pack_record_header(header)
    for offset, part in zip(offsets, parts, strict=True):
        data[offset : offset + len(part)] = part
    return bytes(data), header


def _write_trunk(path: Path, plan: Plan, heads: int, seed: int) -> dict[str, TensorDone]:
    """``trunk.bin``, and what the manifest says of its tensors."""
    done = {}
    with path.open("wb") as file:
        file.write(layout.pack_trunk_header(plan.draft.trunk.bytes))
        file.truncate(plan.draft.trunk.bytes)
        for segment in plan.segments:
            for tensor in segment.tensors:
                data = _tensor(tensor, heads, np.random.default_rng([seed, *tensor.name.encode()]))
                assert len(data) == tensor.bytes
                file.seek(tensor.offset)
                file.write(data)
                digest = blake3(data).hexdigest()
                done[tensor.name] = TensorDone(tensor.name, digest, digest, ERROR, 0)
    return done


def _tensor(tensor: Tensor, heads: int, rng: np.random.Generator) -> bytes:
    """A trunk tensor as it is stored: norms of one, decays of ``heads`` heads, all else of variance 1/columns."""
    rows, cols = codecs.tensor_extents(tensor.shape)
    deviation = 1.0 / math.sqrt(cols)
    if isinstance(tensor.parameters, group_int.Parameters):
        codes, scales = codecs.trunk_sections(tensor.codec, tensor.parameters, tensor.shape, where=tensor.name)
        stored, spread = _integers(tensor.parameters.bits, codes.bytes, rng)
        scale = np.full(scales.bytes // 2, deviation / spread, "<f2")
        return stored.ljust(align(codes.bytes, LINE), b"\0") + scale.tobytes()
    if tensor.role == "norm" or tensor.name.endswith("_res_norm.weight"):
        values = np.ones(rows * cols, np.float32)
    elif tensor.name.endswith("A_log"):
        values = np.zeros(cols, np.float32)
        values[:heads] = np.log(rng.uniform(1, 16, heads))
    else:
        values = rng.standard_normal(rows * cols, np.float32) * np.float32(deviation)
    if tensor.dtype == "BF16":
        return (values.view("<u4") >> 16).astype("<u2").tobytes()
    return values.astype("<f4").tobytes()


def _integers(bits: int, count: int, rng: np.random.Generator) -> tuple[bytes, float]:
    """Bytes of integers whose mean is 0, and their standard deviation.

    A mean of half an integer would do no harm in one product, but it grows from layer to layer until all tokens are
    alike and choose the same experts.
    """
    if bits == 8:
        return rng.integers(-127, 128, count, np.int8).tobytes(), math.sqrt(127 * 128 / 3)
    low, high = (rng.integers(1, 16, count, np.uint8) for _ in range(2))  # 8 stands for 0
    return (low | high << 4).tobytes(), math.sqrt(7 * 8 / 3)


def main() -> None:
    """Write one."""
    size = Size()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=size.layers, help="of which the first has no experts")
    parser.add_argument("--experts", type=int, default=size.experts, help="a layer")
    parser.add_argument("--per-token", type=int, default=size.per_token)
    parser.add_argument("--full-width", action="store_true", help="the released widths in the trunk too")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    plan = make(given.out, Size(given.layers, given.experts, given.per_token, given.full_width), given.seed)
    print(f"{given.out}: {plan.draft.experts.count} records of {plan.layers[0].records[0].bytes:,} bytes,")
    print(f"{plan.draft.experts.bytes / 1e9:.2f} GB of experts and {plan.draft.trunk.bytes / 1e9:.2f} GB of trunk")


if __name__ == "__main__":
    main()
