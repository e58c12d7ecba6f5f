from __future__ import annotations

import functools
import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from grpo_trainable.models.model_config import PRESETS, ModelConfig
from grpo_trainable.models.store import load_policy
from grpo_trainable.models.transformer import TransformerLM
from grpo_trainable.tasks.keyword import word_inclusion_reward_fn
from grpo_trainable.tools.pretraining import (
    arithmetic_corpus,
    file_corpus,
    measuring,
    story_corpus,
    training,
)
from grpo_trainable.tools.pretraining.corpus import Document, Row
from grpo_trainable.tools.pretraining.problems import Problem, Step
from grpo_trainable.tools.pretraining.recipe import ArithmeticRecipe, Recipe, StoryRecipe
from grpo_trainable.tools.pretraining.training import NO_LOSS
from launch import pretrain

pytestmark = pytest.mark.slow  # these tests generate corpora

ONE_LAYER = ModelConfig(
    vocab_size=400, context_length=160, d_model=16, num_layers=1, num_heads=2, d_ff=16
)


@pytest.fixture
def one_layer(monkeypatch: pytest.MonkeyPatch):
    """Use a one-layer policy and few measured responses, so that seconds become milliseconds."""
    monkeypatch.setitem(PRESETS, "tiny", ONE_LAYER)
    monkeypatch.setitem(PRESETS, "arithmetic", ONE_LAYER)
    monkeypatch.setattr(story_corpus, "HELD_OUT_STORIES", 25)
    monkeypatch.setattr(story_corpus, "SAMPLED_KEYWORDS", 5)
    monkeypatch.setattr(story_corpus, "RESPONSES_PER_KEYWORD", 2)
    monkeypatch.setattr(arithmetic_corpus, "HELD_OUT_DOCUMENTS", 25)
    monkeypatch.setattr(arithmetic_corpus, "TRAIN_PROBLEMS", 30)
    monkeypatch.setattr(arithmetic_corpus, "HELD_OUT_PROBLEMS", 20)
    monkeypatch.setattr(arithmetic_corpus, "SAMPLED_PROBLEMS", 5)
    monkeypatch.setattr(arithmetic_corpus, "RESPONSES_PER_PROBLEM", 2)
    for module in (story_corpus, arithmetic_corpus):
        monkeypatch.setattr(module, "LIMITS", replace(module.LIMITS, max_new_tokens=8))


def write_corpus(path: Path, lines: list[object]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def error_of(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Return the line that the command prints for `argv` when it ends with status 2."""
    try:
        status = pretrain.main(argv)
    except SystemExit as exit_:
        status = exit_.code
    assert status == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    return error


def test_a_small_run_writes_a_policy_that_loads_and_a_complete_card(
    one_layer: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "policy"
    assert pretrain.main(["--out", str(out), "--steps", "3", "--batch-size", "8"]) == 0
    assert "held-out loss" in capsys.readouterr().out
    assert {path.name for path in out.iterdir()} == {
        "config.json",
        "policy.safetensors",
        "tokenizer.json",
        "card.json",
        "card.md",
    }
    model, tokenizer = load_policy(out)
    assert model.config == replace(ONE_LAYER, vocab_size=tokenizer.vocab_size)
    card = json.loads((out / "card.json").read_text())
    assert card["command"].endswith(f"--out {out} --steps 3 --batch-size 8")
    assert card["documents"] == 24
    assert 0 < card["response_tokens_seen"] < card["tokens_seen"]
    assert card["held_out_inclusion_responses"] == 10
    length = card["mean_length"]
    assert length["all"]["responses"] == 10
    assert 1 <= length["all"]["tokens"] <= 8
    assert length["with_keyword"] is None, "an untrained policy copies nothing"
    assert length["without_keyword"] == length["all"]
    assert 3 <= length["corpus"]["sentences"] <= 5
    assert len(card["samples"]) == 20
    assert "20 samples" in (out / "card.md").read_text()


def test_the_same_seed_gives_the_same_files(one_layer: None, tmp_path: Path):
    for name, seed in (("a", "5"), ("b", "5"), ("c", "6")):
        argv = ["--out", str(tmp_path / name), "--steps", "2", "--batch-size", "4"]
        assert pretrain.main([*argv, "--seed", seed]) == 0
    for file in ("policy.safetensors", "tokenizer.json"):
        contents = [(tmp_path / name / file).read_bytes() for name in "abc"]
        assert contents[0] == contents[1] != contents[2]


def test_a_corpus_of_ones_own_is_learned(one_layer: None, tmp_path: Path):
    lines = [{"prompt": f"Count to {n % 5}", "response": "one two three " * 3} for n in range(40)]
    corpus = write_corpus(tmp_path / "corpus.jsonl", lines)
    argv = ["--corpus", str(corpus), "--out", str(tmp_path / "out"), "--batch-size", "8"]
    assert pretrain.main([*argv, "--steps", "60", "--lr", "0.03"]) == 0
    card = json.loads((tmp_path / "out" / "card.json").read_text())
    assert card["documents"] == 38
    assert card["held_out_documents"] == 2
    assert card["held_out_loss_nats"] < 1.0
    assert "corpus.jsonl" in card["measured_how"]["held_out_loss_nats"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"not json", "not JSON"),
        (b"[1]", "must be an object with `prompt` and `response`, got list"),
        (b'{"prompt": "x"}', "response must be non-empty text"),
        (b'{"response": "x"}', "prompt must be non-empty text"),
        (b'{"prompt": "x", "response": " "}', "response must be non-empty text"),
        (b'{"prompt": "x", "response": 7}', "response must be non-empty text"),
        (b'{"prompt": "x", "response": "\\ud800"}', "response contains an unpaired surrogate"),
        (b'{"prompt": "\xff", "response": "x"}', "not UTF-8 (byte 0xff)"),
    ],
)
def test_a_bad_line_of_the_corpus_is_named(
    line: bytes, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    corpus = tmp_path / "corpus.jsonl"
    good = b'{"prompt": "a", "response": "b"}\n'
    corpus.write_bytes(good + b"\n" + line + b"\n" + good)
    error = error_of(capsys, "--out", str(tmp_path / "out"), "--corpus", str(corpus))
    assert f"{corpus}:3: " in error
    assert reason in error


def test_a_prompt_longer_than_the_context_is_named(
    one_layer: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    lines = [{"prompt": "a", "response": "b"}] * 5
    lines.insert(2, {"prompt": "".join(map(chr, range(200, 400))), "response": "b"})
    corpus = write_corpus(tmp_path / "corpus.jsonl", lines)
    error = error_of(capsys, "--out", str(tmp_path / "out"), "--corpus", str(corpus))
    assert f"{corpus}:3: a prompt of " in error
    assert "context of 160" in error


def test_a_missing_or_too_small_corpus_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = str(tmp_path / "out")
    missing = str(tmp_path / "none.jsonl")
    assert "none.jsonl: cannot be read" in error_of(capsys, "--out", out, "--corpus", missing)
    corpus = write_corpus(tmp_path / "one.jsonl", [{"prompt": "a", "response": "b"}])
    assert "has 1 document;" in error_of(capsys, "--out", out, "--corpus", str(corpus))


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--steps", "0"], '--steps: must be an integer >= 1, got "0"'),
        (["--steps", "two"], "--steps: must be an integer >= 1, got two"),
        (["--lr", "nan"], "--lr: must be a number in"),
        (["--keyword-share", "1.5"], "--keyword-share: must be a number in [0, 1], got"),
        (["--seed", "-1"], "--seed: must be an integer in"),
        (["--preset", "huge"], "invalid choice: 'huge'"),
        (["--no-such"], "unrecognized arguments: --no-such"),
    ],
)
def test_bad_options_are_one_line_and_status_2(
    argv: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert words in error_of(capsys, "--out", str(tmp_path / "out"), *argv)


def test_help_explains_every_option(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exit_:
        pretrain.main(["--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    assert "5% of them are held out" in " ".join(text.split())
    for option in (
        "--out",
        "--corpus",
        "--steps",
        "--seed",
        "--threads",
        "--front-share",
        "--largest",
    ):
        assert text.count(option) >= 2


def test_a_diverging_loss_ends_with_advice(
    one_layer: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "token_losses", lambda *_: torch.tensor([torch.nan]))
        argv = ["--out", str(tmp_path / "out"), "--steps", "2", "--batch-size", "4"]
        assert pretrain.main(argv) == 2
    assert "the loss is nan at step 0: use a smaller --lr" in capsys.readouterr().err
    assert not list((tmp_path / "out").iterdir())


def test_an_out_directory_that_cannot_be_made_is_named_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "file").write_text("")
    assert str(tmp_path / "file") in error_of(capsys, "--out", str(tmp_path / "file"))


def test_a_prompt_gets_its_closing_newline_once(tmp_path: Path):
    lines = [{"prompt": "a", "response": "b"}, {"prompt": "a\n", "response": "b"}]
    documents = file_corpus.read_documents(write_corpus(tmp_path / "corpus.jsonl", lines))
    assert list(documents.values()) == [Document("a\n", "b")] * 2


def test_prompt_and_padding_have_no_target():
    input_ids, targets = training.collate([Row([5, 6, 7, 8, 0], 2), Row([5, 9, 0], 1)], pad_id=1)
    assert input_ids.tolist() == [[5, 6, 7, 8], [5, 9, 1, 1]]
    assert targets.tolist() == [[NO_LOSS, 7, 8, 0], [9, 0, NO_LOSS, NO_LOSS]]


def test_the_loss_of_a_row_does_not_depend_on_its_neighbours():
    model = TransformerLM(ONE_LAYER, seed=0)
    rows = [Row([5, 6, 7, 8, 0], 2), Row([5, 9, 0], 1)]
    alone = [measuring.mean_loss(model, [row], pad_id=1) for row in rows]
    together = measuring.mean_loss(model, rows, pad_id=1)
    assert together == pytest.approx((3 * alone[0] + 2 * alone[1]) / 5, rel=1e-5)


def test_only_response_tokens_are_scored():
    model = TransformerLM(ONE_LAYER, seed=0)
    input_ids, targets = training.collate([Row([5, 6, 7, 8, 0], 2)], pad_id=1)
    log_probs = torch.log_softmax(model(input_ids)[0], dim=-1)
    by_hand = [-log_probs[i, token].item() for i, token in ((1, 7), (2, 8), (3, 0))]
    losses = training.token_losses(model, input_ids, targets).tolist()
    assert losses == pytest.approx(by_hand, rel=1e-5)


def test_story_batches_keep_the_order_of_the_corpus():
    rows = [Row([i, 0], 1) for i in range(6)]
    recipe = Recipe(steps=2, batch_size=3)
    seen = [row for batch in training.batches(rows, recipe, shuffle=False) for row in batch]
    assert seen == rows


def test_shuffled_batches_use_every_row_once_an_epoch():
    rows = [Row([i, 0], 1) for i in range(5)]
    recipe = Recipe(steps=5, batch_size=2)
    seen = [row.ids[0] for b in training.batches(rows, recipe, shuffle=True) for row in b]
    assert sorted(seen[:5]) == sorted(seen[5:]) == [0, 1, 2, 3, 4]


def inclusion_share(documents: list[Document]) -> float:
    keywords = [d.prompt.rstrip("\n").split(": ")[1].split(", ") for d in documents]
    pairs = zip(documents, keywords, strict=True)
    return sum(word_inclusion_reward_fn(d.response, k) for d, k in pairs) / len(documents)


@functools.cache
def two_thousand_stories() -> tuple[list[Document], list[Document]]:
    """Return a corpus, and held-out documents. The first part of the corpus has 800 documents."""
    recipe = StoryRecipe(steps=20, batch_size=100, front_share=0.4, keyword_share=0.2)
    return story_corpus.story_documents(recipe)


def test_the_corpus_always_holds_the_keywords_first_and_then_for_the_share_asked_for():
    documents, held_out = two_thousand_stories()
    assert len(documents) == 2000
    assert inclusion_share(documents[:800]) == 1.0
    assert inclusion_share(documents[800:]) == pytest.approx(0.2, abs=0.05)
    assert inclusion_share(held_out) == pytest.approx(0.2, abs=0.05)
    assert not {d.response for d in held_out} & {d.response for d in documents}


def test_the_corpus_stays_the_one_that_the_shipped_policy_was_made_from(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(story_corpus, "HELD_OUT_STORIES", 1)
    documents, _ = story_corpus.story_documents(StoryRecipe(steps=30, batch_size=10))
    text = "".join(f"{document.prompt}{document.response}\n" for document in documents)
    digest = hashlib.sha256(text.encode()).hexdigest()
    assert digest == "5fd863c8ad9c1ed9ed7704ba1b720710f043723810e8e4fe204b2576d72e3fbc"


def test_both_parts_of_the_corpus_have_one_length():
    """Mean word counts agree within 5 %, although the first part has more keywords per prompt."""
    documents, _ = two_thousand_stories()
    words = [len(document.response.split()) for document in documents]
    assert sum(words[:800]) / 800 == pytest.approx(sum(words[800:]) / 1200, rel=0.05)


def test_mean_length_is_over_tokens_and_sentences():
    responses = [
        measuring.Response("One day. It rained.", 7, True),
        measuring.Response("It was cut", 4, False),
    ]
    expected = {"responses": 2, "tokens": 5.5, "sentences": 1.0}
    assert measuring.mean_length(responses, story_corpus.UNITS) == expected
    assert measuring.mean_length([], story_corpus.UNITS) is None


def test_learning_rate_warms_up_and_comes_down():
    recipe = Recipe(steps=1000, lr=1.0)
    rates = [training.learning_rate(step, recipe) for step in range(1000)]
    assert rates[0] < 0.05
    assert max(rates) == pytest.approx(1.0)
    assert rates[-1] == pytest.approx(training.FINAL_LR_SHARE, abs=5e-3)
    assert training.learning_rate(0, Recipe(steps=1)) > 0


def test_distinct_trigram_share_counts_within_texts():
    assert measuring.distinct_trigram_share(["a b c d", "a b c, e"]) == 3 / 4
    assert measuring.distinct_trigram_share(["a b", "c"]) == 0.0


def test_an_arithmetic_policy_brings_its_problems(
    one_layer: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "policy"
    argv = ["--corpus", "arithmetic", "--out", str(out), "--steps", "3", "--batch-size", "8"]
    assert pretrain.main([*argv, "--largest", "20", "--format-share", "0.5"]) == 0
    said = capsys.readouterr().out
    assert "held-out problems solved in 0.000 of 10 responses" in said
    assert f"--set task.name=math --set task.train_file={out}/train.jsonl" in said
    model, tokenizer = load_policy(out)
    assert model.config == replace(ONE_LAYER, vocab_size=tokenizer.vocab_size)
    assert len(tokenizer.encode("1234")) == 4
    lines = {
        name: [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "heldout")
    }
    assert [len(rows) for rows in lines.values()] == [30, 20]
    for row in (*lines["train"], *lines["heldout"]):
        assert set(row) == {"question", "answer"}
        assert 1 <= int(row["answer"]) <= 20
    card = json.loads((out / "card.json").read_text())
    assert card["recipe"]["largest"] == 20
    assert card["documents"] == 24
    assert (card["problems"], card["responses"]) == (5, 10)
    assert card["right_share"] == card["format_share"] == 0.0, "an untrained policy solves nothing"
    assert card["mean_length"]["right"] is None
    assert card["samples"][0]["prompt"].startswith(f"User: {lines['heldout'][0]['question']}\n")
    assert "right answers, given the format" in (out / "card.md").read_text()


def test_documents_are_problems_of_the_train_side_only(one_layer: None):
    recipe = ArithmeticRecipe(steps=100, batch_size=10, largest=30, careful_share=1.0)
    made = arithmetic_corpus.arithmetic_corpus(recipe)
    asked = {json.loads(line)["question"] for line in made.files["heldout.jsonl"].splitlines()}
    questions = {d.prompt.removeprefix("User: ").partition("\n")[0] for d in made.documents}
    assert len(asked) == 20
    assert questions.isdisjoint(asked)
    for documents, held_out in ((made.documents[:600], False), (made.held_out, True)):
        for document in documents:
            steps = re.findall(r"(\d+) (\S) (\d+) = \d+\.", document.response)
            true = tuple(Step.of(int(left), sign, int(right)) for left, sign, right in steps)
            assert Problem(document.prompt, true).is_held_out == held_out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (
            ["--corpus", "arithmetic", "--keyword-share", "0.5"],
            "--keyword-share: has no effect with ",
        ),
        (["--largest", "30"], "--largest: has no effect with --corpus stories; needs --corpus ar"),
        (["--corpus", "x.jsonl", "--front-share", "1"], "needs --corpus stories or arithmetic"),
        (
            ["--corpus", "arithmetic", "--largest", "5"],
            "--largest: must be an integer in [10, 999]",
        ),
    ],
)
def test_a_setting_of_another_corpus_is_refused(
    argv: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert words in error_of(capsys, "--out", str(tmp_path / "out"), *argv)
    assert not (tmp_path / "out").exists()
