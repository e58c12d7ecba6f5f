"""Prompt sets: the requests, an endpoint that fails in every way, and interrupted commands."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from endpoints import Reply, endpoint, says, story_about
from hf_models import write_hf_model

from grpo_trainable.config import GRPOConfig
from grpo_trainable.tasks.keyword import NOUNS_FILE, read_keywords, split_of
from grpo_trainable.tasks.prompts import build_task
from grpo_trainable.tools.prompt_sets.endpoint import Endpoint, EndpointError, EndpointWriter
from grpo_trainable.tools.prompt_sets.keyword import Item, is_held_out_word, items, prompt_in
from launch import make_data

FOX = Item(index=0, keywords=("fox",), heldout=False)
AGAIN = {"Retry-After": "0"}


# ---- Requests --------------------------------------------------------------------------------


def test_a_fifth_of_the_words_is_held_out_whatever_their_case():
    words = read_keywords(NOUNS_FILE)
    held_out = [word for word in words if is_held_out_word(word)]

    assert len(held_out) / len(words) == pytest.approx(0.2, abs=0.03)
    assert all(is_held_out_word(word.upper()) for word in held_out)
    # The task's built-in word lists never train on words that this set holds out.
    assert {split_of(word) for word in held_out} == {"heldout"}


def test_the_words_of_a_prompt_are_on_one_side_and_each_is_asked_for_once_a_pass():
    words = read_keywords(NOUNS_FILE)
    pairs = list(items(words, 300, 2, seed=0))

    assert [item.index for item in pairs] == list(range(300))
    for item in pairs:
        assert [is_held_out_word(word) for word in item.keywords] == [item.heldout] * 2
    used = [word for item in pairs for word in item.keywords]
    assert len(set(used)) == len(used) == 600
    assert list(items(words, 10, 2, seed=0)) == pairs[:10]
    assert list(items(words, 10, 2, seed=1)) != pairs[:10]
    assert len(list(items(["fox", "hen"], 5, 1, seed=0))) == 5  # several passes over the words
    with pytest.raises(ValueError, match="--keywords-per-prompt 3: of the 2 words, neither"):
        list(items(["fox", "hen"], 1, 3, seed=0))


@pytest.mark.parametrize(
    ("text", "prompt"),
    [
        ("Tell a story about a fox.", "Tell a story about a fox."),
        ('\n  1. "Tell a story about a Fox."\nAnd so on', "Tell a story about a Fox."),
        ("Prompt: **Tell a story about a fox**", "Tell a story about a fox"),
        ("Tell a story about foxes.", None),
        ("A fox.", None),
        ("fox " * 200, None),
        ("", None),
        (" \n\t\n", None),
    ],
)
def test_a_usable_prompt_is_one_line_with_its_keyword(text, prompt):
    assert prompt_in(text, ["fox"]) == prompt


# ---- The endpoint ----------------------------------------------------------------------------


def writer(url: str, **settings: Any) -> EndpointWriter:
    patience = {"first_wait_s": 0.001, "retries": 3, "timeout_s": 10.0, **settings}
    where = Endpoint(url=url, model="m", **patience)
    return EndpointWriter(where, temperature=0.5, max_tokens=40, workers=4)


def test_an_endpoint_is_asked_as_the_protocol_has_it_and_answers_keep_their_order():
    several = [Item(index=i, keywords=(f"word{i}",), heldout=False) for i in range(9)]
    with endpoint() as server:
        found = writer(server.url + "/", key="secret").write(several, attempt=0)

    for text, own in zip(found, several, strict=True):
        assert prompt_in(text, own.keywords) is not None
    asked = server.asked[0]
    assert asked["path"] == "/v1/chat/completions"
    assert (asked["model"], asked["temperature"], asked["max_tokens"]) == ("m", 0.5, 40)
    assert [message["role"] for message in asked["messages"]] == ["user"]
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer secret"}


@pytest.mark.parametrize(
    "failure",
    [
        Reply(429, b'{"error": {"message": "slow down"}}', AGAIN),
        Reply(429, b"", {"Retry-After": "Mon, 01 Jan 2024 00:00:00 GMT"}),
        Reply(500, b"<html>oops</html>"),
        Reply(503, b"", {"Retry-After": "soon"}),
        Reply(200, b"\xff\x00 garbage"),
        Reply(200, b'{"choices": []}'),
        Reply(200, b'{"choices": [{"message": {"content": 7}}]}'),
        Reply(200, b'{"cut', {"Content-Length": "4000"}),
    ],
    ids=["429", "429-date", "500", "503", "garbage", "no-choice", "no-text", "cut"],
)
def test_a_failure_that_may_pass_is_tried_again(failure):
    with endpoint([failure, failure]) as server:
        assert writer(server.url).write([FOX], attempt=0) == [
            '1. "Write a short story with these: fox."'
        ]
        assert len(server.asked) == 3


@pytest.mark.slow
def test_an_answer_that_does_not_come_in_time_is_asked_for_again():
    late = threading.Event()
    with endpoint([Reply(wait=late)]) as server:
        (text,) = writer(server.url, timeout_s=0.2).write([FOX], attempt=0)
        late.set()
    assert "fox" in text


def test_what_keeps_failing_is_one_line_after_all_retries():
    with (
        endpoint(then=lambda _: Reply(500, b'{"error": "no\\nmemory"}', AGAIN)) as server,
        pytest.raises(EndpointError, match=r"/v1: status 500 \(no memory\) \(attempts: 4\)$"),
    ):
        writer(server.url).write([FOX], attempt=0)
    assert len(server.asked) == 4
    with pytest.raises(EndpointError, match=r"cannot be reached \(.*refused\) \(attempts: 4\)"):
        writer(server.url).write([FOX], attempt=0)  # the server is gone


def test_a_refusal_is_not_tried_again():
    denied = Reply(401, b'{"error": {"message": "no such key"}}')
    with (
        endpoint([denied]) as server,
        pytest.raises(EndpointError, match=r"status 401 \(no such key\)$"),
    ):
        writer(server.url).write([FOX], attempt=0)
    assert len(server.asked) == 1


def test_a_redirect_is_refused_and_the_key_goes_nowhere_else():
    with endpoint() as other:
        moved = Reply(302, b"", {"Location": f"{other.url}/chat/completions"})
        with (
            endpoint([moved]) as server,
            pytest.raises(EndpointError, match=r"/v1: status 302$"),
        ):
            writer(server.url, key="secret").write([FOX], attempt=0)
    assert len(server.asked) == 1
    assert other.asked == []


def test_the_key_is_in_no_text_of_the_endpoint():
    assert "secret" not in repr(Endpoint(url="http://localhost/v1", model="m", key="secret"))


def test_a_model_that_says_nothing_is_no_failure_of_the_endpoint():
    with endpoint([says(None)]) as server:
        assert writer(server.url).write([FOX], attempt=0) == [""]


def test_requests_begin_at_equal_distances():
    with endpoint() as server:
        slow = writer(server.url, per_minute=6000.0)
        first = slow._pace._next
        slow.write([FOX] * 5, attempt=0)
    assert slow._pace._next >= first + 5 * 0.01


@pytest.mark.parametrize("url", ["localhost:8000/v1", "ftp://here/v1", "/v1", "http://"])
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(ValueError, match=r"--endpoint .*must be an address such as"):
        Endpoint(url=url, model="m")


# ---- The command -----------------------------------------------------------------------------


def made(url: str, out: Path, *options: str) -> int:
    return make_data.main(arguments(url, out, *options))


def arguments(url: str, out: Path, *options: str) -> list[str]:
    return [
        *("keyword", str(out), "--endpoint", url, "--named", "m", "--prompts", "60"),
        *("--batch", "8", "--retries", "0", *options),
    ]


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.mark.slow
def test_the_set_is_what_the_keyword_task_reads(tmp_path, capsys):
    with endpoint() as server:
        assert made(server.url, tmp_path / "set") == 0

    train, held_out = rows(tmp_path / "set/train.jsonl"), rows(tmp_path / "set/eval.jsonl")
    assert len(train) + len(held_out) == 60
    assert f"{len(train)} prompts to train on, {len(held_out)} held out" in capsys.readouterr().out
    assert all(is_held_out_word(row["keywords"][0]) for row in held_out)
    assert not any(is_held_out_word(row["keywords"][0]) for row in train)
    table = pq.read_table(tmp_path / "set/prompts.parquet").to_pylist()
    assert [row["prompt"] for row in table if row["heldout"]] == [r["prompt"] for r in held_out]
    files = {name: str(tmp_path / f"set/{name.split('_')[0]}.jsonl") for name in FILES}
    task = build_task(GRPOConfig.from_dict({"task": {**files, "strict": True}}))
    first = task.eval_examples(1)[0]
    assert first.ground_truth in [row["keywords"] for row in held_out]


FILES = ("train_file", "eval_file")


@pytest.mark.slow
def test_a_set_that_was_interrupted_goes_on_where_it_was(tmp_path, capsys):
    out, answered = tmp_path / "set", [0]

    def until_the_twentieth(request: dict[str, Any]) -> Reply:
        answered[0] += 1
        return story_about(request) if answered[0] <= 20 else Reply(401, b"")

    with endpoint(then=until_the_twentieth) as server:
        assert made(server.url, out) == 1
    assert "status 401" in capsys.readouterr().err
    assert not (out / "train.jsonl").exists()
    assert len(rows(out / "written.jsonl")) == 16  # two whole batches
    with (out / "written.jsonl").open("a") as log:
        log.write('{"index": 17, "pro')  # as after a kill

    with endpoint() as server:
        assert made(server.url, out, "--workers", "2", "--timeout", "9") == 0
    assert len(server.asked) == 44
    with endpoint() as server:
        assert made(server.url, tmp_path / "whole") == 0
        assert made(server.url, out) == 0  # nothing is left to request
    assert len(server.asked) == 60
    for name in ("train.jsonl", "eval.jsonl"):
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.slow
def test_a_killed_command_writes_the_same_set_when_it_is_given_again(tmp_path):
    out, thirtieth, over = tmp_path / "set", threading.Event(), threading.Event()
    answered = itertools.count(1)

    def until_the_thirtieth(request: dict[str, Any]) -> Reply:
        if next(answered) >= 30:
            thirtieth.set()
            over.wait(60)
        return story_about(request)

    with endpoint(then=until_the_thirtieth) as server:
        command = subprocess.Popen(
            [sys.executable, make_data.__file__, *arguments(server.url, out)],
            stdout=subprocess.DEVNULL,
        )
        assert thirtieth.wait(60)
        command.kill()
        assert command.wait() == -signal.SIGKILL
        over.set()
    assert not (out / "train.jsonl").exists()
    kept = len(rows(out / "written.jsonl"))
    assert kept == 24  # three whole batches

    with endpoint() as server:
        assert made(server.url, out) == 0
    assert len(server.asked) == 60 - kept
    with endpoint() as server:
        assert made(server.url, tmp_path / "whole") == 0
    for name in ("train.jsonl", "eval.jsonl", "prompts.parquet"):
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.slow
def test_another_set_or_another_file_in_the_directory_is_refused(tmp_path, capsys):
    with endpoint() as server:
        assert made(server.url, tmp_path / "set") == 0
        assert made(server.url, tmp_path / "set", "--seed", "1") == 2
        said = capsys.readouterr().err
        assert "seed was 0 and is 1" in said
        assert "keywords was [" in said  # another seed gives a different order
        assert made(server.url, tmp_path / "set", "--prompts", "90", "--attempts", "2") == 2
        said = capsys.readouterr().err
        assert "attempts was 4 and is 2; keywords was for 60 prompts and is for 90 prompts" in said
        assert "cannot be changed or enlarged: repeat the original command" in said
        (tmp_path / "full").mkdir()
        (tmp_path / "full/notes.txt").write_text("mine")
        assert made(server.url, tmp_path / "full") == 2
        assert "is not empty" in capsys.readouterr().err


@pytest.mark.slow
def test_repeated_and_unusable_prompts_are_left_out(tmp_path, capsys):
    def poor(request: dict[str, Any]) -> Reply:
        return story_about(request) if "fox" in str(request) else says("Tell a story.")

    (tmp_path / "words").write_text("fox\nhen\n")
    words = ("--words", str(tmp_path / "words"), "--attempts", "2")
    with endpoint(then=poor) as server:
        assert made(server.url, tmp_path / "set", *words) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "each side needs one (30 of 60 had no usable answer, 29 were repeated)" in error
    assert len(server.asked) == 30 + 2 * 30


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--endpoint", "here", "--named", "m"], "must be an address"),
        (["--endpoint", "http://h/v1"], "--named"),
        (["--model", "nowhere"], "nowhere"),
        ([], "required"),
        (["--model", "m", "--words", "nowhere"], "nowhere: cannot be read"),
    ],
)
def test_bad_usage_is_one_line_and_writes_nothing(options, word, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert make_data.main(["keyword", "out", *options]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert word in error
    assert not (tmp_path / "out").exists()


# ---- A local model ---------------------------------------------------------------------------


@pytest.mark.slow
def test_a_model_writes_the_same_whatever_was_written_before(tmp_path):
    pytest.importorskip("transformers")
    from grpo_trainable.tools.prompt_sets.local import LocalWriter

    path = write_hf_model(tmp_path / "model", max_position_embeddings=512)
    settings = {"chat": False, "temperature": 1.0, "max_tokens": 8, "device": "cpu"}
    local = LocalWriter(path, seed=3, **settings)
    several = list(items(["fox", "hen", "lamp"], 3, 1, seed=0))
    texts = local.write(several, attempt=0)

    assert len({*texts, *local.write(several, attempt=1)}) == 6
    assert LocalWriter(path, seed=3, **settings).write(several[1:], attempt=0) == texts[1:]
    with pytest.raises(ValueError, match=r"--model .*has no chat template"):
        LocalWriter(path, seed=3, **{**settings, "chat": True})
    narrow = write_hf_model(tmp_path / "narrow", max_position_embeddings=64)
    with pytest.raises(ValueError, match="the context has 64"):
        LocalWriter(narrow, seed=3, **settings).write(several, attempt=0)
