"""Small tokenizers for tests: the 256 bytes and a few merges, with special tokens above."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

BYTES = tuple(bytes((byte,)) for byte in range(256))
MERGES = (b"he", b"ll", b"hell", b"hello", b" w", b"or", b" wor", b"ld", b" world", "é".encode(), "漢".encode()[:2])
SPECIALS = {"[BOS]": 0, "[EOS]": 1, "<|im_end|>": 4}  # counted from the end of the ranks


def rank_file(tokens: Sequence[bytes] = (*BYTES, *MERGES)) -> bytes:
    """``tiktoken.model`` with these tokens in the order of their ranks."""
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))


def config_file(ranks: int = len(BYTES) + len(MERGES), **members: Any) -> bytes:
    """``tokenizer_config.json`` with the special tokens as the releases have them."""
    decoder = {str(ranks + place): {"content": name, "special": True} for name, place in SPECIALS.items()}
    return json.dumps({"added_tokens_decoder": decoder, **members}).encode()


def tokenizer_files(**members: Any) -> Mapping[str, bytes]:
    """Both files, by name."""
    return {"tiktoken.model": rank_file(), "tokenizer_config.json": config_file(**members)}
