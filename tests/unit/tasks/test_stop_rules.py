"""The rules that end a response: the settings, the task and the tokenizer of a trial."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_trainable.config import GRPOConfig
from grpo_trainable.generator.generator import Generator
from grpo_trainable.learner.learner import Learner
from grpo_trainable.models.directory import read_tokenizer
from grpo_trainable.tasks.prompts import Prompts, build_task
from grpo_trainable.tasks.stop_rules import stop_strings
from grpo_trainable.transports.in_process import InProcess

TOKENIZER = read_tokenizer(None)
EOS, PAD = TOKENIZER.eos_id, TOKENIZER.pad_id


def config_of(stop: Any = None, **rollout: Any) -> GRPOConfig:
    sizes = {"prompts": 4, "group_size": 4, "max_new_tokens": 40}
    return GRPOConfig.from_dict({"rollout": {"stop": stop, **sizes, **rollout}})


def task(*stop: str) -> Any:
    return SimpleNamespace(stop=stop)


def test_the_task_is_asked_where_the_settings_say_nothing():
    assert stop_strings(config_of(), TOKENIZER, task("</answer>")) == ("</answer>",)
    assert stop_strings(config_of([]), TOKENIZER, task("</answer>")) == ()
    assert stop_strings(config_of("END"), TOKENIZER, task("</answer>")) == ("END",)
    assert stop_strings(config_of(), TOKENIZER, build_task(config_of())) == ()


def test_a_special_token_among_the_strings_stands_for_its_id():
    config = config_of(["<|pad|>", "END", "<|endoftext|>"])
    assert TOKENIZER.end_ids_with(config.rollout.stop) == (EOS, PAD)
    assert stop_strings(config, TOKENIZER, task()) == ("END",)
    assert TOKENIZER.end_ids_with(("END",)) == (EOS,)


def test_a_task_cannot_ask_for_a_special_token():
    with pytest.raises(ValueError, match=r"^task.name=keyword: asks to stop at the special token"):
        stop_strings(config_of(), TOKENIZER, task("<|pad|>"))


def test_a_tokenizer_whose_tokens_cannot_be_searched_is_refused_only_if_they_are():
    class WordPiece:
        special_tokens: dict[str, int] = {}  # noqa: RUF012

        @property
        def token_bytes(self) -> list[bytes]:
            raise ValueError("its decoder (WordPiece) is not supported")

    odd: Any = WordPiece()
    assert stop_strings(config_of(), odd, task()) == ()
    with pytest.raises(ValueError, match=r'^rollout.stop=\["END"\]: cannot be found in the tokens'):
        stop_strings(config_of("END"), odd, task())


@pytest.mark.slow
def test_stories_end_with_their_first_sentence():
    config = config_of([".", "!", "?"])
    prompts = Prompts(config, build_task(config), TOKENIZER)
    requests = [prompts.request("train", index) for index in range(4)]
    threads = torch.get_num_threads()
    generator = Generator(config, InProcess())
    groups = generator.generate(requests).groups
    generator.close()
    torch.set_num_threads(threads)
    ended = 0
    for group in groups:
        for row, mask in enumerate(group.response_mask):
            text = TOKENIZER.decode(group.response_ids[row][mask].tolist())
            assert not any(mark in text[:-1] for mark in ".!?")
            assert bool(group.finished[row]) == (text[-1] in ".!?")
            ended += bool(group.finished[row])
    assert ended > 8


def test_the_learner_knows_every_token_that_cannot_come_early():
    config = config_of("<|pad|>", min_new_tokens=3)
    threads = torch.get_num_threads()
    learner = Learner(config, InProcess())
    torch.set_num_threads(threads)
    ids = torch.tensor([[5, 6, 7, 8]])
    batch = SimpleNamespace(
        input_ids=ids, target_ids=torch.tensor([[6, PAD, EOS, PAD]]), response_mask=ids > 0
    )
    log_probs, _ = learner._log_probs.with_entropy(learner.policy, batch)  # type: ignore[arg-type]
    assert torch.isneginf(log_probs).tolist() == [[False, True, False, False]]
