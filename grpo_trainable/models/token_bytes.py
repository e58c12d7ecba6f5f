"""The bytes of a text that each token of a tokenizer stands for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tokenizers

# What the decoders of SentencePiece tokenizers are made of. `Strip` takes away a space at the very
# beginning of a text, and is left out here: a response follows its prompt.
_SENTENCE_PIECE = {"Replace", "Metaspace", "ByteFallback", "Fuse", "Strip"}
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def token_bytes(backend: tokenizers.Tokenizer, vocab_size: int) -> list[bytes]:
    """The bytes that each token adds to a text, by token id; none for a special token, which
    decoding leaves out, and for an id without a token.

    Raises:
        ValueError: what a token stands for depends on others, as with WordPiece.
    """
    decoder = json.loads(backend.to_str())["decoder"]
    read = _reader(decoder)
    added = backend.get_added_tokens_decoder()
    special = {index for index, token in added.items() if token.special}
    tokens = (
        None if index in special else backend.id_to_token(index) for index in range(vocab_size)
    )
    return [b"" if token is None else read(token) for token in tokens]


def _reader(decoder: Mapping[str, Any] | None) -> Callable[[str], bytes]:
    """What turns the spelling of a token into its bytes."""
    parts = _parts(decoder)
    kinds = [part["type"] for part in parts]
    if kinds == ["ByteLevel"]:
        return _byte_level(_byte_of_character())
    if kinds and _SENTENCE_PIECE.issuperset(kinds):
        return _sentence_piece(parts)
    raise ValueError(
        f"its decoder ({' + '.join(kinds) or 'none'}) is neither byte-level nor SentencePiece's"
    )


def _parts(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def _byte_level(byte_of: Mapping[str, int]) -> Callable[[str], bytes]:
    def read(token: str) -> bytes:
        # An added token may hold characters that stand for no byte; it is meant literally then.
        known = all(character in byte_of for character in token)
        return bytes(byte_of[character] for character in token) if known else token.encode()

    return read


def _byte_of_character() -> dict[str, int]:
    """GPT-2's spelling of bytes: those that print stand for themselves, the others follow 255."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {
        chr(256 + place): byte for place, byte in enumerate(others)
    }


def _sentence_piece(parts: Sequence[Mapping[str, Any]]) -> Callable[[str], bytes]:
    replaced = [_replacement(part) for part in parts if part["type"] in ("Replace", "Metaspace")]
    has_bytes = any(part["type"] == "ByteFallback" for part in parts)

    def read(token: str) -> bytes:
        if has_bytes and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], base=16)])
        for old, new in replaced:
            token = token.replace(old, new)
        return token.encode()

    return read


def _replacement(part: Mapping[str, Any]) -> tuple[str, str]:
    """Which characters a decoder replaces, and by what."""
    if part["type"] == "Metaspace":
        return part["replacement"], " "
    return part["pattern"]["String"], part["content"]
