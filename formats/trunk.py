"""A trunk tensor as the manifest describes it: its codec, its parameters, and what it must take (SPEC section 4.4)."""

from __future__ import annotations

import dataclasses

from formats import codecs, dtypes
from formats.codecs import group_int, raw
from formats.errors import FormatError
from formats.layout import Codec
from formats.manifest import TensorInfo

WEIGHT_DTYPES = ("F32", "F16", "BF16")  # those whose values are weights as they stand


def parameter_fields(parameters: group_int.Parameters | raw.Parameters) -> dict[str, int | str]:
    """The ``parameters`` member of a tensor entry; empty for ``raw``, whose one parameter is the tensor's dtype."""
    return {} if isinstance(parameters, raw.Parameters) else dataclasses.asdict(parameters)


def tensor_codec(info: TensorInfo, *, where: str) -> tuple[Codec, group_int.Parameters | raw.Parameters]:
    """Codec and parameters of a tensor entry.

    Raises:
        FormatError: an unknown codec or dtype, a codec that the trunk does not use or that is not for this dtype, or
            parameters that its page does not allow.
    """
    fields = info.parameters
    dtypes.by_name(info.dtype, where=where)
    if info.codec == Codec.GROUP_INT.label:
        if info.dtype not in WEIGHT_DTYPES:
            raise FormatError(
                "codec group_int is not for this dtype",
                where=where,
                expected=", ".join(WEIGHT_DTYPES),
                found=info.dtype,
            )
        if set(fields) != {"bits", "group"} or not all(type(value) is int for value in fields.values()):
            raise FormatError(
                "codec parameters are malformed", where=where, expected="integers bits and group", found=fields
            )
        try:
            return Codec.GROUP_INT, group_int.Parameters(bits=int(fields["bits"]), group=int(fields["group"]))
        except FormatError as error:
            raise FormatError(error.what, where=where, expected=error.expected, found=error.found) from None
    if info.codec != Codec.RAW.label:
        raise FormatError("unknown trunk codec", where=where, expected="raw or group_int", found=repr(info.codec))
    if fields:
        raise FormatError("codec parameters are malformed", where=where, expected="none", found=fields)
    if info.scale_exponent:
        raise FormatError("codec raw has no scale exponent", where=where, expected=0, found=info.scale_exponent)
    return Codec.RAW, raw.Parameters(info.dtype)


def check_tensor_bytes(info: TensorInfo, *, where: str) -> None:
    """Insist that a tensor entry takes what its codec, parameters and shape give.

    Raises:
        FormatError: naming both lengths.
    """
    codec, parameters = tensor_codec(info, where=where)
    expected = codecs.trunk_bytes(codec, parameters, info.shape, where=where)
    if info.bytes != expected:
        raise FormatError(
            "tensor has another length than its codec gives", where=where, expected=expected, found=info.bytes
        )
