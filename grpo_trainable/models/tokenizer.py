"""Conversion between text and token ids, defined by a JSON file of the library `tokenizers`."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"


class Tokenizer:
    """A tokenizer with an id for padding, and with ids that end a response.

    Special tokens are only ever added by id. If a text spells out a special token, the characters
    are encoded like any other text.
    """

    eos_id: int  # the first of `end_ids`
    end_ids: tuple[int, ...]  # each of these ids ends a response
    pad_id: int  # fills positions without a token; may be one of `end_ids`
    vocab_size: int  # every id is below this number

    def __init__(
        self, backend: tokenizers.Tokenizer, *, end_ids: Sequence[int], pad_id: int
    ) -> None:
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = True
        self._backend = backend
        self._prefix = _prefix(backend)
        self.eos_id, self.end_ids, self.pad_id = end_ids[0], tuple(end_ids), pad_id
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values())

    @classmethod
    def train(
        cls, texts: Iterable[str], vocab_size: int, *, digits_alone: bool = False
    ) -> Tokenizer:
        """Train a byte-level BPE of at most `vocab_size` tokens.

        The tokens are the 256 byte values, end-of-text, padding, and merges learned from `texts`.
        For any text, `decode(encode(text))` returns the text unchanged. A newline is always a
        separate token, so the ids of a prompt that ends in a newline are a prefix of the ids of
        prompt + response.

        Args:
            texts: Texts to learn the merges from.
            vocab_size: Maximum number of tokens, at least 258.
            digits_alone: Make each digit a separate token, as newlines are.

        Raises:
            ValueError: `vocab_size` is too small.
        """
        if vocab_size < 258:
            raise ValueError(f"vocab_size={vocab_size}: must be >= 258 (256 bytes, 2 special)")
        backend = tokenizers.Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split("\n", behavior="isolated"),
                *([pre_tokenizers.Digits(individual_digits=True)] if digits_alone else []),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT, PAD],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        backend.train_from_iterator(texts, trainer)
        return cls.of_ours(backend)

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read a tokenizer that was made by `train` and written by `save`.

        Raises:
            ValueError: The file cannot be read or does not contain a tokenizer of this package. The
                message is one line.
        """
        backend = read_backend(path)
        try:
            return cls.of_ours(backend)
        except ValueError as error:
            raise ValueError(f"{path}: not a tokenizer file ({error})") from error

    @classmethod
    def of_ours(cls, backend: tokenizers.Tokenizer) -> Tokenizer:
        """Wrap a tokenizer that has the special tokens of this package.

        Raises:
            ValueError: The tokenizer lacks one of these tokens.
        """
        eos_id, pad_id = backend.token_to_id(END_OF_TEXT), backend.token_to_id(PAD)
        if eos_id is None or pad_id is None:
            missing = END_OF_TEXT if eos_id is None else PAD
            raise ValueError(f"the tokenizer has no special token {missing}")
        return cls(backend, end_ids=(eos_id,), pad_id=pad_id)

    def save(self, path: str | Path) -> None:
        """Write the tokenizer as JSON."""
        Path(path).write_text(self._backend.to_str(pretty=False) + "\n", encoding="utf-8")

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text` alone, without added special tokens."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids that the tokenizer puts before every text, followed by the ids of `text`.

        Llama's tokenizer, for example, puts a beginning-of-text token before every text.
        """
        return [*self._prefix, *self.encode(text)]

    def encode_rendered(self, text: str) -> list[int]:
        """Return the ids of a text in which a chat template has spelled out special tokens."""
        self._backend.encode_special_tokens = False
        try:
            return self.encode(text)
        finally:
            self._backend.encode_special_tokens = True

    def end_ids_with(self, stop: Sequence[str] | None) -> tuple[int, ...]:
        """Return `end_ids` and the ids of special tokens that `stop` spells out, each id once."""
        asked = (self.special_tokens.get(text) for text in stop or ())
        ids = (*self.end_ids, *(index for index in asked if index is not None))
        return tuple(dict.fromkeys(ids))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, omitting special tokens and ids outside the vocabulary.

        Ids outside the vocabulary can be sampled if a policy's head has more rows than the
        tokenizer has tokens.
        """
        known = [int(i) for i in ids if 0 <= i < self.vocab_size]
        return self._backend.decode(known, skip_special_tokens=True)

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """The bytes of each token, by id; empty for special tokens.

        Raises:
            ValueError: The bytes of a token depend on other tokens.
        """
        return token_bytes(self._backend, self.vocab_size)

    def is_part_of(self, other: Tokenizer) -> bool:
        """Return True if every token of this tokenizer has the same id in `other`."""
        own, others = (t._backend.get_vocab(with_added_tokens=True) for t in (self, other))
        return own.items() <= others.items()

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """The ids of the special tokens, by spelling. These tokens are only ever added by id."""
        added = self._backend.get_added_tokens_decoder()
        return {token.content: index for index, token in added.items() if token.special}


@functools.lru_cache(maxsize=4)
def _parsed(content: str) -> tokenizers.Tokenizer:
    """Parse the content of a tokenizer file, once per process.

    Several components of a process read the same file. They can share the result, because encoding
    and decoding do not change it.
    """
    return tokenizers.Tokenizer.from_str(content)


def read_backend(path: str | Path) -> tokenizers.Tokenizer:
    """Read a tokenizer.json.

    Raises:
        ValueError: The file cannot be read or is not a tokenizer file. The message is one line.
    """
    try:
        return _parsed(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot read the tokenizer ({error.strerror})") from error
    # The Rust library raises a bare Exception for JSON that it cannot interpret.
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path}: not a tokenizer file ({reason})") from error


def _prefix(backend: tokenizers.Tokenizer) -> list[int]:
    """Return the ids that the tokenizer's template puts before a text."""
    encoded = backend.encode("a", add_special_tokens=True)
    marked = zip(encoded.ids, encoded.special_tokens_mask, strict=True)
    return [token for token, _ in takewhile(lambda pair: pair[1], marked)]


# ---- The bytes of each token ---------------------------------------------------------------------


# The parts that the decoder of a SentencePiece tokenizer may have. `Strip`, which removes a space
# at the very beginning of a text, is ignored here, because a response follows its prompt.
_SENTENCE_PIECE = {"Replace", "Metaspace", "ByteFallback", "Fuse", "Strip"}
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def token_bytes(backend: tokenizers.Tokenizer, vocab_size: int) -> list[bytes]:
    """Return the bytes that each token adds to a text, by token id.

    The bytes are empty for special tokens, which decoding omits, and for ids without a token.

    Raises:
        ValueError: The bytes of a token depend on other tokens, as with WordPiece.
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
    """Return the function that turns the spelling of a token into its bytes."""
    parts = _parts(decoder)
    kinds = [part["type"] for part in parts]
    if kinds == ["ByteLevel"]:
        return _byte_level(_byte_of_character())
    if kinds and _SENTENCE_PIECE.issuperset(kinds):
        return _sentence_piece(parts)
    raise ValueError(
        f"its decoder ({' + '.join(kinds) or 'none'}) is neither a byte-level nor a "
        "SentencePiece decoder"
    )


def _parts(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def _byte_level(byte_of: Mapping[str, int]) -> Callable[[str], bytes]:
    def read(token: str) -> bytes:
        # An added token may contain characters that represent no byte. Such a token is literal
        # text.
        known = all(character in byte_of for character in token)
        return bytes(byte_of[character] for character in token) if known else token.encode()

    return read


def _byte_of_character() -> dict[str, int]:
    """Return GPT-2's spelling of bytes, as a mapping from character to byte.

    Printable bytes are spelled as themselves, and all other bytes as the characters with code
    points from 256 on.
    """
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
    """Return the characters that a decoder replaces, and their replacement."""
    if part["type"] == "Metaspace":
        return part["replacement"], " "
    return part["pattern"]["String"], part["content"]
