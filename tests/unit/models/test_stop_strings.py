"""The token that completes a stop string, and the bytes of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from grpo_trainable.models.directory import read_tokenizer
from grpo_trainable.models.stop_strings import StopStrings
from grpo_trainable.models.tokenizer import token_bytes


def first(strings: Sequence[str], pieces: Sequence[str | bytes], start: int = 0) -> int | None:
    """Return the index of the first piece that completes a string; each piece is one token."""
    as_bytes = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
    stops = StopStrings(strings, as_bytes, vocab_size=len(pieces) + 3)
    return stops.first_completed(torch.arange(len(pieces)), start)


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (["a", "</answer>"], 1),
        (["</", "answer", ">"], 2),
        (["x</ans", "wer", ">", "</answer>"], 2),
        (["</answer> and more"], 0),
        (["<", "/", "a", "n", "s", "w", "e", "r", ">"], 8),
        (["</answer", "", "", "> "], 3),  # with tokens in between that decode to nothing
        (["</answer", " >"], None),
        (["</answer"], None),
        (["wer>"], None),
        ([">", "wer>", "</ans"], None),
        (["</an", "</answer>"], 1),
    ],
)
def test_the_token_that_completes_a_string_is_found(pieces, expected):
    assert first(["</answer>"], pieces) == expected


def test_the_earliest_of_several_strings_counts():
    assert first(["zebra", "b"], ["a", "xb", "zebra"]) == 1
    assert first(["\n\n"], ["a\n", "b\n", "\n"]) == 2


def test_a_character_may_be_shared_by_tokens():
    sheep = "🐑".encode()
    assert first(["🐑"], [sheep[:1], sheep[1:3], sheep[3:]]) == 2
    assert first(["🐑"], [sheep[:2], sheep[3:]]) is None


def test_what_an_earlier_token_completed_does_not_count_again():
    pieces = ["ab", "", "c", "xab", "d"]
    assert [first(["ab"], pieces, start) for start in range(5)] == [0, 3, 3, 3, None]


@pytest.mark.slow
@given(
    st.lists(st.text(alphabet="abé", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(
        st.sampled_from([b"", b"a", b"b", b"ab", b"ba", b"aab", b"\xc3", b"\xa9", b"\xa9a"]),
        min_size=1,
        max_size=12,
    ),
    st.integers(0, 11),
)
def test_it_is_found_where_all_of_the_text_is_searched(strings, pieces, start):
    def completed(t: int) -> bool:
        before, text = b"".join(pieces[:t]), b"".join(pieces[: t + 1])
        ends = (
            place + len(s.encode())
            for s in strings
            for place in range(len(text))
            if text.startswith(s.encode(), place)
        )
        return any(end > len(before) for end in ends)

    expected = next((t for t in range(start, len(pieces)) if completed(t)), None)
    assert first(strings, pieces, start) == expected


def test_tokens_of_a_policy_that_its_tokenizer_lacks_stand_for_nothing():
    stops = StopStrings(["ab"], [b"a", b"b"], vocab_size=5)
    assert stops.may_complete.tolist() == [False, True, False, False, False]
    assert stops.completed([0, 4, 3, 1])


# ---- The bytes of tokens ---------------------------------------------------------------------


def test_the_bytes_of_the_shipped_tokenizer_are_what_it_decodes_to():
    tokenizer = read_tokenizer(None)
    draw = Random(0)
    for _ in range(200):
        ids = [draw.randrange(tokenizer.vocab_size) for _ in range(12)]
        text = b"".join(tokenizer.token_bytes[index] for index in ids)
        assert text.decode(errors="replace") == tokenizer.decode(ids)


def sentence_piece() -> tokenizers.Tokenizer:
    """Return a tokenizer like those of Llama 2 and Mistral."""
    pieces = ["<unk>", "<s>", "▁", "▁a", "b", "c▁d", "é"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    vocab |= {f"<0x{byte:02X}>": len(vocab) + place for place, byte in enumerate((0xC3, 0xA9))}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens(["<unk>", "<s>"])
    backend.add_tokens(["<think>"])
    return backend


def test_a_sentence_piece_token_stands_for_its_text_a_byte_or_nothing():
    bytes_ = token_bytes(sentence_piece(), 11)
    words = [b"", b"", b" ", b" a", b"b", b"c d", "é".encode(), b"\xc3", b"\xa9", b"<think>", b""]
    assert bytes_ == words


def test_the_bytes_of_a_sentence_piece_tokenizer_are_what_it_decodes_to():
    backend, draw = sentence_piece(), Random(0)
    bytes_ = token_bytes(backend, 10)
    for _ in range(200):
        # The halves of a character come in pairs, because the decoder treats a lone byte
        # differently.
        ids = [i for _ in range(8) for i in draw.choice(([7, 8], *([i] for i in range(7)), [9]))]
        assert b"".join(bytes_[i] for i in ids).decode() == backend.decode(ids)


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece()])
def test_a_tokenizer_whose_tokens_depend_on_each_other_is_refused(decoder):
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    backend.decoder = decoder
    with pytest.raises(ValueError, match="neither a byte-level nor a SentencePiece decoder"):
        token_bytes(backend, 1)
