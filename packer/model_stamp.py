"""Which model a file beside a checkpoint is about: a few figures, and the digest of the model's configuration."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from blake3 import blake3
from msgspec import Meta

from formats.checkpoint import Checkpoint
from formats.errors import UsageError
from formats.families import Architecture
from formats.families.kimi_config import MAX_EXPERTS, MAX_LAYERS

Digest: TypeAlias = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
Text: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f\x7f-\x9f]*\Z")]
Figure: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_EXPERTS)]


class ModelStamp(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A model. ``config_blake3`` is the BLAKE3 of the bytes of ``config.json``."""

    family: Text
    hidden_layers: Annotated[int, Meta(ge=1, le=MAX_LAYERS)]
    experts: Figure
    experts_per_token: Figure
    config_blake3: Digest


def stamp_of(config_bytes: bytes, architecture: Architecture) -> ModelStamp:
    """The stamp of a model with experts.

    Args:
        config_bytes: ``config.json`` as stored.
        architecture: of the checkpoint.

    Raises:
        UsageError: the model has no routed experts.
    """
    if not architecture.moe_layers:
        raise UsageError("the model has no routed experts", where=architecture.family)
    return ModelStamp(
        family=architecture.family,
        hidden_layers=architecture.hidden_layers,
        experts=architecture.experts,
        experts_per_token=architecture.experts_per_token,
        config_blake3=blake3(config_bytes).hexdigest(),
    )


def check_same_model(stamp: ModelStamp, checkpoint: Checkpoint, architecture: Architecture, *, what: str) -> None:
    """Insist that a file is about this checkpoint.

    Args:
        stamp: from the file.
        checkpoint, architecture: of the source.
        what: the file is, for messages: ``statistics``, ``prune plan``.

    Raises:
        UsageError: it is about another model; what differs is named.
    """
    here = stamp_of(checkpoint.config_bytes, architecture)
    for name in here.__struct_fields__:
        expected, found = getattr(here, name), getattr(stamp, name)
        if expected != found:
            raise UsageError(
                f"{what} of another model",
                where=name,
                expected=expected,
                found=found,
                hint=f"make the {what} from this checkpoint: even its configuration must be the same file",
            )
