from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from grpo_trainable.models.directory import SHIPPED_POLICY
from grpo_trainable.models.tokenizer import Tokenizer
from grpo_trainable.tasks.keyword import NOUNS_FILE, read_keywords
from grpo_trainable.tools.pretraining.stories import Storyteller


@pytest.fixture(scope="module")
def texts() -> list[str]:
    teller = Storyteller(read_keywords(NOUNS_FILE), Random(0))
    documents = [teller.document(0.5) for _ in range(300)]
    return [d.prompt + d.response for d in documents]


@pytest.fixture(scope="module")
def tokenizer(texts: list[str]) -> Tokenizer:
    return Tokenizer.train(texts, 600)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "One day, Mia found an apple.",
        "a\n\nb\n",
        "\n",
        " two  spaces ",
        "\t\r\n",
        "naïve café 狐狸 🦊",
        "\x00\x7f",
        "<|endoftext|> and <|pad|>",
        "don't 3.14",
    ],
)
def test_any_text_survives_encoding_and_decoding(tokenizer: Tokenizer, text: str):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_training_reaches_the_vocabulary_asked_for_and_no_more(texts: list[str]):
    assert Tokenizer.train(texts, 600).vocab_size == 600
    assert 258 <= Tokenizer.train(["a"], 600).vocab_size < 600


def test_every_byte_has_a_token_even_after_training_on_ascii():
    tokenizer = Tokenizer.train(["a story"], 258)
    assert tokenizer.vocab_size == 258
    assert tokenizer.decode(tokenizer.encode("é🦊\n")) == "é🦊\n"


def test_a_vocabulary_too_small_for_the_bytes_is_refused():
    with pytest.raises(ValueError, match="vocab_size=257"):
        Tokenizer.train(["a"], 257)


def test_training_twice_gives_the_same_file(texts: list[str], tmp_path: Path):
    for name in ("a", "b"):
        Tokenizer.train(texts, 700).save(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_prompt_ids_are_a_prefix_of_prompt_and_response_ids(tokenizer: Tokenizer, texts: list[str]):
    odd = ["p: x\n\nsecond line", "p: x\n  indented", "p: x\n", 'p: x\n"Look!"', "p\n\n\n"]
    for text in [*texts, *odd]:
        prompt, newline, response = text.partition("\n")
        joined = tokenizer.encode(prompt + newline) + tokenizer.encode(response)
        assert tokenizer.encode(text) == joined


def test_special_tokens_never_come_from_text(tokenizer: Tokenizer):
    ids = tokenizer.encode("a <|endoftext|> b <|pad|>")
    assert tokenizer.eos_id not in ids
    assert tokenizer.pad_id not in ids
    assert tokenizer.eos_id != tokenizer.pad_id


def test_decoding_leaves_out_special_tokens_and_unknown_ids(tokenizer: Tokenizer):
    ids = tokenizer.encode("a fox")
    unknown = [tokenizer.vocab_size, 50_256, 2**40, -1]
    assert tokenizer.decode([tokenizer.pad_id, *unknown, *ids, tokenizer.eos_id]) == "a fox"
    assert tokenizer.decode(unknown) == ""


def test_half_a_character_decodes_without_an_exception(tokenizer: Tokenizer):
    assert isinstance(tokenizer.decode(tokenizer.encode("🦊")[:1]), str)


def test_a_saved_tokenizer_encodes_as_before(tokenizer: Tokenizer, texts: list[str], tmp_path):
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    assert (loaded.vocab_size, loaded.eos_id, loaded.pad_id) == (
        tokenizer.vocab_size,
        tokenizer.eos_id,
        tokenizer.pad_id,
    )
    for text in [*texts[:50], "<|pad|> é\n"]:
        assert loaded.encode(text) == tokenizer.encode(text)


@pytest.mark.parametrize("content", [b"", b"{}", b"[1, 2", b"\xff\xfe", b'{"a": 1}\n\n'])
def test_a_file_that_is_no_tokenizer_is_a_one_line_error(content: bytes, tmp_path: Path):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer file") as error:
        Tokenizer.load(path)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_a_one_line_error(tmp_path: Path):
    with pytest.raises(ValueError, match="none: cannot read the tokenizer") as error:
        Tokenizer.load(tmp_path / "none")
    assert "\n" not in str(error.value)


def test_a_tokenizer_without_our_special_tokens_is_refused(tokenizer: Tokenizer, tmp_path: Path):
    tokenizer.save(tmp_path / "ours.json")
    content = json.loads((tmp_path / "ours.json").read_text())
    content["added_tokens"] = [t for t in content["added_tokens"] if t["content"] != "<|pad|>"]
    del content["model"]["vocab"]["<|pad|>"]
    (tmp_path / "other.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"no special token <\|pad\|>"):
        Tokenizer.load(tmp_path / "other.json")


@pytest.mark.slow
def test_the_shipped_tokenizer_has_2048_tokens_and_writes_stories_in_few():
    tokenizer = Tokenizer.load(SHIPPED_POLICY / "tokenizer.json")
    assert tokenizer.vocab_size == 2048
    teller = Storyteller(read_keywords(NOUNS_FILE), Random(7))
    lengths = [len(tokenizer.encode(teller.document(0.5).response)) for _ in range(200)]
    assert 34 < sum(lengths) / len(lengths) < 44
