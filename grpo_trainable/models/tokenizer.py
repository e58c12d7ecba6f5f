"""Text to token ids and back: a byte-level BPE, stored as one JSON file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"


class Tokenizer:
    """Byte-level BPE with an end-of-text and a padding token.

    Any text survives `decode(encode(text))`. A newline is always a token of its own, so the ids
    of a prompt that ends in one are a prefix of the ids of prompt + response. Special tokens are
    only ever added by id: spelt out in a text they are ordinary characters.
    """

    eos_id: int
    pad_id: int
    vocab_size: int

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        eos_id, pad_id = backend.token_to_id(END_OF_TEXT), backend.token_to_id(PAD)
        if eos_id is None or pad_id is None:
            missing = END_OF_TEXT if eos_id is None else PAD
            raise ValueError(f"the tokenizer has no special token {missing}")
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = True
        self._backend = backend
        self.eos_id, self.pad_id = eos_id, pad_id
        self.vocab_size = backend.get_vocab_size()

    @classmethod
    def train(
        cls, texts: Iterable[str], vocab_size: int, *, digits_alone: bool = False
    ) -> Tokenizer:
        """Trains at most `vocab_size` tokens: 256 bytes, two special ones, merges of `texts`.

        With `digits_alone` no merge holds a digit: each is a token of its own wherever it stands.
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
        return cls(backend)

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Reads a tokenizer that `save` has written.

        Raises:
            ValueError: the file cannot be read or is not such a tokenizer, in one line.
        """
        try:
            return cls(tokenizers.Tokenizer.from_str(Path(path).read_text(encoding="utf-8")))
        except OSError as error:
            raise ValueError(f"{path}: cannot read the tokenizer ({error.strerror})") from error
        # The Rust library raises a bare Exception for JSON that it does not understand.
        except Exception as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"{path}: not a tokenizer file ({reason})") from error

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self._backend.to_str(pretty=False) + "\n", encoding="utf-8")

    def encode(self, text: str) -> list[int]:
        """Ids of `text` alone: no end-of-text is added."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`. Special tokens and ids outside the vocabulary are left out.

        A policy's head may be wider than the tokenizer, so such ids can be sampled.
        """
        known = [int(i) for i in ids if 0 <= i < self.vocab_size]
        return self._backend.decode(known, skip_special_tokens=True)
