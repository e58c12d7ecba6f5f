"""The keyword task: matching, files, split and order."""

import json
import logging
import re

import pytest

from grpo_trainable.config import TaskSettings
from grpo_trainable.tasks import (
    Example,
    KeywordTask,
    Score,
    keyword_inclusion_reward_fn,
    keyword_prompt,
    split_of,
)
from grpo_trainable.tasks.keyword import read_keywords, word_inclusion_reward_fn

WORDS = [f"{a}{b}" for a in "bcdfghjklm" for b in ("at", "en", "ill", "ong")]  # 40 words
TRAIN = [word for word in WORDS if split_of(word) == "train"]
HELD_OUT = [word for word in WORDS if split_of(word) == "heldout"]


@pytest.fixture
def words_file(tmp_path):
    path = tmp_path / "words.txt"
    path.write_text("\n".join(WORDS))
    return str(path)


def write_jsonl(path, rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return str(path)


def stories(count):
    return [{"prompt": f"Story {i}\n", "answer": f"word{i}"} for i in range(count)]


# ---- Matching --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "keywords", "reward"),
    [
        ("The Apple fell.", ["apple"], 1.0),
        ("the apple fell", ["APPLE"], 1.0),
        ("Pineapples!", ["apple"], 1.0),
        ("an apple", ["apple", "pear"], 0.0),
        ("an apple, a pear", ["apple", "pear"], 1.0),
        ("", ["apple"], 0.0),
        ("a map", "apple", 0.0),
    ],
)
def test_keyword_inclusion_is_containment_whatever_the_case(response, keywords, reward):
    assert keyword_inclusion_reward_fn(response, keywords) == reward


@pytest.mark.parametrize(
    ("response", "keyword", "reward"),
    [
        ("when will it end", "hen", 0.0),
        ("The hen, of course.", "hen", 1.0),
        ("HEN", "hen", 1.0),
        ("two apples", "apple", 0.0),
        ("a pineapple", "apple", 0.0),
        ("an apple2", "apple", 0.0),
        ("an apple-pie", "apple", 1.0),
        ("the apple's core", "apple", 1.0),
        ("the apple\N{RIGHT SINGLE QUOTATION MARK}s core", "apple", 1.0),
        ("'apple'", "apple", 1.0),
        ("_apple_ and *pear*", "apple", 1.0),
        ("apple\N{EM DASH}the red one", "apple", 1.0),
        ("I can't", "can", 0.0),
        ("at five o'clock", "clock", 0.0),
        ("at five O\N{RIGHT SINGLE QUOTATION MARK}Clock", "o'clock", 1.0),
        ("a merry-go-round", "merry-go-round", 1.0),
        ("a merry go round", "merry-go-round", 0.0),
        ("the fire\n  engine came", "fire engine", 1.0),
        ("the fire engines came", "fire engine", 0.0),
        ("a cafe\N{COMBINING ACUTE ACCENT}", "caf\N{LATIN SMALL LETTER E WITH ACUTE}", 1.0),
        ("a cafe\N{COMBINING ACUTE ACCENT}", "cafe", 0.0),
        ("she writes c++ daily", "c++", 1.0),
        ("a.c", "a.c", 1.0),
        ("abc", "a.c", 0.0),
    ],
)
def test_whole_word_matching(response, keyword, reward):
    assert word_inclusion_reward_fn(response, [keyword]) == reward
    assert word_inclusion_reward_fn(response, keyword) == reward


def keyword_task(*, seed: int, **settings) -> KeywordTask:
    return KeywordTask(TaskSettings(**settings), seed)


def test_match_chooses_between_words_and_substrings(words_file):
    by_word = keyword_task(seed=0, keywords_file=words_file)
    by_substring = keyword_task(seed=0, keywords_file=words_file, match="substring")
    assert by_word.reward("when", ["hen"]) == Score(0.0, 1.0, 0.0)
    assert by_substring.reward("when", ["hen"]) == Score(1.0, 1.0, 1.0)


def test_every_keyword_must_be_there(words_file):
    task = keyword_task(seed=0, keywords_file=words_file)
    assert task.reward("a cat and a dog", ["dog", "cat"]).reward == 1.0
    assert task.reward("a cat and a cow", ["dog", "cat"]).reward == 0.0


# ---- Prompts, split, order -------------------------------------------------------------------


def test_prompts_are_the_ones_the_policy_was_pretrained_on():
    assert keyword_prompt(["apple"]) == "Write a story that includes the word: apple\n"
    assert keyword_prompt(["a", "b"]) == "Write a story that includes the words: a, b\n"


def test_the_split_is_the_same_for_ever():
    # If the split changed, an old policy could be evaluated on words that it was trained on.
    assert [split_of(word) for word in ("apple", "Apple")] == ["heldout"] * 2
    assert [split_of(word) for word in ("hen", "river", "Kite", "anchor")] == ["train"] * 4


def test_about_a_quarter_of_the_words_is_held_out():
    sides = [split_of(f"word{i}") for i in range(2000)]
    assert 0.22 < sides.count("heldout") / len(sides) < 0.28


def test_evaluation_never_sees_a_trained_keyword(words_file):
    task = keyword_task(seed=3, keywords_file=words_file)
    trained = {task.train_example(prompt_index).ground_truth[0] for prompt_index in range(200)}
    evaluated = {example.ground_truth[0] for example in task.eval_examples(50)}
    assert trained == set(TRAIN)
    assert evaluated == set(HELD_OUT)


def test_each_epoch_uses_every_word_once_in_an_order_of_its_own(words_file):
    task = keyword_task(seed=0, keywords_file=words_file)
    size = len(TRAIN)
    epochs = [
        [task.train_example(epoch * size + i).ground_truth[0] for i in range(size)]
        for epoch in range(3)
    ]
    assert all(sorted(epoch) == sorted(TRAIN) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_a_training_example_depends_only_on_seed_and_prompt_index(words_file):
    forwards = [keyword_task(seed=7, keywords_file=words_file).train_example(i) for i in range(100)]
    task = keyword_task(seed=7, keywords_file=words_file)
    assert [task.train_example(i) for i in reversed(range(100))] == forwards[::-1]
    other = keyword_task(seed=8, keywords_file=words_file)
    assert [other.train_example(i) for i in range(100)] != forwards


def test_evaluation_is_the_same_for_every_seed_and_a_prefix_of_a_longer_one(words_file):
    first = keyword_task(seed=0, keywords_file=words_file).eval_examples(12)
    second = keyword_task(seed=1, keywords_file=words_file).eval_examples(30)
    assert first == second[:12]
    distinct = {example.prompt for example in second[: len(HELD_OUT)]}
    assert len(distinct) == len(HELD_OUT)


def test_several_keywords_a_prompt_are_distinct_and_make_new_combinations(words_file):
    task = keyword_task(seed=0, keywords_file=words_file, keywords_per_prompt=3)
    examples = [task.train_example(prompt_index) for prompt_index in range(100)]
    assert all(len(set(example.ground_truth)) == 3 for example in examples)
    assert examples[0].prompt == keyword_prompt(examples[0].ground_truth)
    assert len({example.prompt for example in examples}) > 90


def test_the_shipped_nouns_are_the_default():
    task = KeywordTask(TaskSettings(), 0)
    (keyword,) = task.train_example(0).ground_truth
    assert split_of(keyword) == "train"
    assert len({example.prompt for example in task.eval_examples(128)}) == 128


# ---- Files -----------------------------------------------------------------------------------


def test_comments_blank_lines_spaces_and_duplicates_are_not_keywords(tmp_path):
    path = tmp_path / "words.txt"
    path.write_bytes(b"\xef\xbb\xbf# nouns\r\napple\r\n\r\n  fire   engine \r\nApple\n\tpear\n#x\n")
    assert read_keywords(path) == ["apple", "fire engine", "pear"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no keyword"),
        (b"# only a comment\n\n", "has no keyword"),
        (b"apple\npear\ncaf\xe9\n", "line 3 is not UTF-8"),
        (b"apple\n", "too few words"),
    ],
)
def test_a_bad_keyword_file_is_an_error_of_one_line_that_names_it(tmp_path, content, message):
    path = tmp_path / "words.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(f"task.keywords_file={path}: ")) as error:
        keyword_task(seed=0, keywords_file=str(path))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_an_error_that_names_key_and_path(tmp_path):
    path = str(tmp_path / "none")
    for key in ("keywords_file", "train_file", "eval_file"):
        with pytest.raises(ValueError, match=re.escape(f"task.{key}={path}: cannot be read")):
            keyword_task(seed=0, **{key: path})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"match": "regex"}, "task.match=regex: must be one of word, substring"),
        ({"keywords_per_prompt": 0}, "task.keywords_per_prompt=0: must be"),
        ({"keywords_per_prompt": 30}, "too few words"),
    ],
)
def test_bad_arguments_are_errors_that_name_the_key(words_file, arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        keyword_task(seed=0, keywords_file=words_file, **arguments)


def test_a_training_file_is_split_by_prompt_and_an_eval_file_is_held_out_whole(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", stories(200))
    alone = keyword_task(seed=0, train_file=path)
    trained = {alone.train_example(i).prompt for i in range(200)}
    evaluated = {example.prompt for example in alone.eval_examples(200)}
    assert trained.isdisjoint(evaluated)
    assert len(trained | evaluated) == 200
    assert 25 < len(evaluated) < 55
    assert alone.sources == (
        "from a.jsonl",
        "by a hash of each prompt; task.eval_file=FILE holds out a whole file",
    )

    other = write_jsonl(tmp_path / "b.jsonl", [{"prompt": "One\n", "answer": "one"}])
    both = keyword_task(seed=0, train_file=path, eval_file=other)
    assert len({both.train_example(i).prompt for i in range(200)}) == 200
    assert both.eval_examples(2) == [Example("One\n", "one")] * 2
    assert both.sources == ("from a.jsonl", "all of b.jsonl")


def test_an_eval_file_alone_replaces_only_the_held_out_prompts(tmp_path, words_file):
    path = write_jsonl(tmp_path / "a.jsonl", stories(12))
    for settings, words in (({}, "the shipped nouns"), ({"keywords_file": words_file}, "task.")):
        plain = keyword_task(seed=0, **settings)
        task = keyword_task(seed=0, eval_file=path, **settings)
        assert task.eval_size == len({example.prompt for example in task.eval_examples(12)}) == 12
        assert task.train_size == plain.train_size
        assert [task.train_example(i) for i in range(9)] == [
            plain.train_example(i) for i in range(9)
        ]
        assert task.sources[0].startswith(f"from {words}")
        assert plain.sources is None


def test_rows_give_keywords_or_else_the_answer_as_ground_truth(tmp_path):
    train = write_jsonl(
        tmp_path / "train.jsonl", [{"prompt": "No newline", "answer": "x", "keywords": ["a", "b"]}]
    )
    held_out = write_jsonl(tmp_path / "eval.jsonl", [{"prompt": "Newline\n", "answer": "apple"}])
    task = keyword_task(seed=0, train_file=train, eval_file=held_out)
    assert task.train_example(5) == Example("No newline\n", ["a", "b"])
    (example,) = task.eval_examples(1)
    assert example == Example("Newline\n", "apple")
    assert task.reward("an apple", example.ground_truth).reward == 1.0
    assert task.reward("a p p l e", example.ground_truth).reward == 0.0


def test_a_note_counts_the_held_out_prompts_that_are_also_trained_on(tmp_path, words_file):
    train = write_jsonl(tmp_path / "t.jsonl", [{"prompt": p, "answer": "x"} for p in "abcd"])
    held_out = write_jsonl(tmp_path / "e.jsonl", [{"prompt": p, "answer": "x"} for p in "bcx"])
    (note,) = keyword_task(seed=0, train_file=train, eval_file=held_out).notes()
    assert note.startswith(f"note: 2 of the 3 held-out prompts of task.eval_file={held_out} are")
    assert keyword_task(seed=0, keywords_file=words_file, eval_file=held_out).notes() == []


def test_the_answers_for_a_reward_of_ones_own_are_any_json_value_or_missing(tmp_path):
    rows = [
        {"prompt": "A\n", "answer": {"a": [1, None]}, "task": "math"},
        {"prompt": "B\n", "ground_truth": 3.5},
        {"prompt": "C\n", "reward_model": {"style": "rule", "ground_truth": False}},
        {"prompt": "D\n", "keywords": "one", "answer": "two"},
        {"prompt": "E\n", "answer": None},
    ]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    task = keyword_task(seed=0, train_file=path, eval_file=path, reward="mine:score", strict=True)
    examples = sorted(task.eval_examples(5), key=lambda example: example.prompt)
    assert [example.ground_truth for example in examples] == [
        {"a": [1, None]},
        3.5,
        False,
        "one",
        None,
    ]
    # As in a `datasets.Dataset`, every row has every column.
    columns = ("prompt", "answer", "task", "ground_truth", "reward_model", "keywords")
    for example, row in zip(examples, rows, strict=True):
        assert example.columns == {**dict.fromkeys(columns), **row}


def test_the_columns_of_rows_are_kept_only_for_a_reward_of_ones_own(words_file, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "A\n", "answer": "a", "more": "text"}])
    task = keyword_task(seed=0, train_file=path, eval_file=path)
    assert task.train_example(0) == Example("A\n", "a", {})
    example = keyword_task(seed=0, keywords_file=words_file).train_example(0)
    assert example.columns == {"keywords": example.ground_truth}


BAD_LINES = {
    "{not json": "not JSON",
    "[1, 2]": "must be a JSON object, got list",
    '{"answer": "x"}': "prompt must be",
    '{"prompt": " ", "answer": "x"}': "prompt must be",
    '{"prompt": "\\ud800", "answer": "x"}': "prompt must be",
    '{"prompt": "p"}': "give `answer` as",
    '{"prompt": "p", "answer": 3}': "give `answer` as",
    '{"prompt": "p", "keywords": []}': "keywords must be",
    '{"prompt": "p", "keywords": "apple"}': "keywords must be",
    "[" * 100_000: "not JSON",
}


@pytest.mark.parametrize("line", BAD_LINES, ids=lambda line: line[:30])
def test_a_bad_line_is_skipped_with_a_warning_or_refused_when_strict(tmp_path, caplog, line):
    path = write_jsonl(tmp_path / "a.jsonl", [*stories(50), "", line])
    with caplog.at_level(logging.WARNING):
        task = keyword_task(seed=0, train_file=path)
    assert f"{path}: line 52: {BAD_LINES[line]}" in caplog.text
    assert len({task.train_example(i).prompt for i in range(100)} & {"p\n", " \n"}) == 0
    with pytest.raises(ValueError, match=f"line 52: {re.escape(BAD_LINES[line])}"):
        keyword_task(seed=0, train_file=path, strict=True)


def test_many_bad_lines_are_one_warning_and_a_file_of_them_one_error(tmp_path, caplog):
    bad = ['{"prompt": "p"}'] * 30
    some = write_jsonl(tmp_path / "some.jsonl", [*bad, *stories(50)])
    with caplog.at_level(logging.WARNING):
        keyword_task(seed=0, train_file=some)
        keyword_task(seed=1, train_file=some)
    (record,) = caplog.records  # two trials of a plan read the file, but the user is warned once
    assert "line 1: give `answer` as" in record.getMessage()
    assert "and 29 more bad rows; skipped" in record.getMessage()
    with pytest.raises(ValueError, match=r"has no valid row; line 1: give `answer` as"):
        keyword_task(seed=0, train_file=write_jsonl(tmp_path / "all.jsonl", bad))


def test_a_line_that_is_not_utf8_is_a_bad_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "p", "answer": "x"}\n{"prompt": "caf\xe9"}\n')
    with pytest.raises(ValueError, match="line 2: not UTF-8"):
        keyword_task(seed=0, train_file=str(path), strict=True)


@pytest.mark.parametrize(("rows", "message"), [([], "no valid row"), (stories(1), "too few")])
def test_too_few_rows_are_an_error(tmp_path, rows, message):
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(ValueError, match=message):
        keyword_task(seed=0, train_file=path)
