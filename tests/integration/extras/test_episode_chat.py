"""A thousand episodes as conversations, under a chat template that drops earlier reasoning."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from grpo_trainable.config import GRPOConfig
from grpo_trainable.engines.engine import Action
from grpo_trainable.engines.torch_engine import TorchEngine
from grpo_trainable.generator.episodes import EpisodePlayer
from grpo_trainable.models.model_config import ModelConfig
from grpo_trainable.models.scoring import response_log_probs
from grpo_trainable.models.store import save_policy
from grpo_trainable.models.tokenizer import Tokenizer
from grpo_trainable.models.transformer import TransformerLM
from grpo_trainable.protocol.rollout import RolloutGroup, collate
from grpo_trainable.tasks.prompts import Prompts, build_task

GROUPS, GROUP_SIZE, AT_ONCE, TURNS = 125, 8, 25, 3

# In an earlier message, the text before the last "|" is reasoning and is left out.
TEMPLATE = """\
{%- for message in messages -%}
{%- set old = message.role == 'assistant' and not loop.last -%}
{{ message.role }}: {{ message.content.split('|')[-1] if old else message.content }}<|endoftext|>
{% endfor -%}
{%- if add_generation_prompt %}assistant: {% endif -%}
"""
FILE = """
from grpo_trainable.environments import Turn
from grpo_trainable.tasks import Example


class Talk:
    def __init__(self, seed):
        pass

    def train_example(self, prompt_index):
        return Example([{"role": "user", "content": f"go {prompt_index}"}], prompt_index)

    def eval_examples(self, count):
        return [self.train_example(0)] * count


class Env:
    def reset(self, spec):
        self.spec, self.turns = spec, 0
        return f"go {spec}"

    def step(self, action):
        self.turns += 1
        return Turn(f"{len(action)} of {self.spec}", float("a" in action), self.turns == TURNS)

    def close(self):
        pass
""".replace("TURNS", str(TURNS))


@pytest.fixture
def config(tmp_path: Path) -> GRPOConfig:
    (tmp_path / "talk.py").write_text(FILE)
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    tokenizer = Tokenizer.train(["user: go 12345 of 67890", "assistant: a|b", "aab|ba"] * 20, 290)
    model = TransformerLM(
        ModelConfig(
            vocab_size=tokenizer.vocab_size,
            context_length=256,
            d_model=16,
            num_layers=1,
            num_heads=1,
            d_ff=16,
        )
    )
    likely = [tokenizer.eos_id, *tokenizer.encode("|"), *tokenizer.encode("a")]
    with torch.no_grad():  # make "|" and the end of a message likely
        model.embedding.weight.mul_(3)
        model.embedding.weight[:] += 0.5 * torch.randn(16, generator=_generator())
        model.embedding.weight[likely] *= 3
    save_policy(tmp_path / "policy", model, tokenizer, torch.float32)
    return GRPOConfig.from_dict(
        {
            "model": {
                "path": str(tmp_path / "policy"),
                "chat_template": str(tmp_path / "template.jinja"),
            },
            "task": {"name": f"{tmp_path}/talk.py:Talk"},
            "env": {"name": f"{tmp_path}/talk.py:Env"},
            "rollout": {"group_size": GROUP_SIZE, "max_new_tokens": 160, "temperature": 1.0},
            "eval": {"prompts": 1},
        }
    )


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


class Overheard(TorchEngine):
    """An engine that keeps every action as it was sampled."""

    actions: list[tuple[int, Action]]

    def play(self, requests, between_tokens, partner):
        act = partner.act

        def overheard(action: Action) -> None:
            self.actions.append((requests[action.row // GROUP_SIZE].prompt_index, action))
            act(action)

        partner.act = overheard
        return super().play(requests, between_tokens, partner)


def by_hand(
    tokenizer: Tokenizer, prompt_index: int, actions: list[Action]
) -> tuple[list[int], list[bool]]:
    """Build the ids and the mask of a response by hand, up to its last complete action.

    The actions have the sampled tokens. Between two actions is a user message, as the template
    renders it.
    """
    ids: list[int] = []
    mask: list[bool] = []
    for number, action in enumerate(actions):
        if number:
            said = f"{len(tokenizer.decode(actions[number - 1].ids))} of {prompt_index}"
            between = [
                *tokenizer.encode(f"\nuser: {said}"),
                tokenizer.eos_id,
                *tokenizer.encode("\nassistant: "),
            ]
            ids, mask = [*ids, *between], [*mask, *[False] * len(between)]
        ids, mask = [*ids, *action.ids], [*mask, *[True] * len(action.ids)]
    return ids, mask


def rendered_anew(tokenizer: Tokenizer, prompts: Prompts, group: RolloutGroup, said: list[str]):
    """Return the ids of a conversation. All messages before the last are rendered again."""
    messages = [{"role": "user", "content": f"go {group.prompt_index}"}]
    for text in said[:-1]:
        messages.append({"role": "assistant", "content": text})
        messages.append({"role": "user", "content": f"{len(text)} of {group.prompt_index}"})
    assert prompts._chat is not None
    return prompts._chat.encode(messages) + tokenizer.encode(said[-1])


@pytest.mark.slow
def test_nothing_is_tokenised_again_in_a_thousand_episodes(config: GRPOConfig) -> None:
    tokenizer = Tokenizer.load(Path(str(config.model.path)) / "tokenizer.json")
    from grpo_trainable.models.store import build_policy

    model, _ = build_policy(config.model, 0)
    assert isinstance(model, TransformerLM)
    engine = Overheard(model, tokenizer, seed=3)
    engine.actions = []
    prompts = Prompts(config, build_task(config), tokenizer)
    player = EpisodePlayer(config.env, prompts, tokenizer)
    groups: list[RolloutGroup] = []
    try:
        for first in range(0, GROUPS, AT_ONCE):
            wanted = [prompts.request("train", i) for i in range(first, first + AT_ONCE)]
            groups += player.play(engine, wanted, lambda: None)[0]
    finally:
        player.close()
    of_row: dict[tuple[int, int], list[Action]] = {}
    for index, action in engine.actions:
        of_row.setdefault((index, action.row % GROUP_SIZE), []).append(action)

    retokenised = whole = otherwise = 0
    for group in groups:
        for g, found in enumerate(group.responses()):
            actions = of_row.get((group.prompt_index, g), [])
            ids, mask = by_hand(tokenizer, group.prompt_index, actions)
            sampled = group.response_mask[g].tolist()
            retokenised += sum(a != b for a, b in zip(found, ids, strict=False))
            assert found[: len(ids)] == ids
            assert sampled[: len(mask)] == mask
            finished = bool(group.finished[g])
            assert finished == (len(actions) == TURNS)
            whole += finished
            if finished:
                assert len(found) == len(ids)
                said = [tokenizer.decode(action.ids) for action in actions]
                anew = rendered_anew(tokenizer, prompts, group, said)
                otherwise += [*group.prompt_ids.tolist(), *found[:-1]] != anew
    assert len(groups) * GROUP_SIZE == 1000
    assert retokenised == 0
    assert whole > 300
    # More than 100 conversations would have different tokens if they were rendered again. So the
    # test would notice if the player did this.
    assert otherwise > 100

    batch = collate(groups, [torch.zeros(GROUP_SIZE)] * GROUPS, tokenizer.pad_id)
    with torch.no_grad():
        for rows in torch.arange(batch.num_rows).split(50):
            part = batch.select(rows)
            log_probs, _ = response_log_probs(
                model,
                part.input_ids,
                part.target_ids,
                part.response_mask,
                temperature=1.0,
                min_new_tokens=1,
                end_ids=tokenizer.end_ids,
            )
            torch.testing.assert_close(log_probs, part.behaviour_log_probs, atol=1e-4, rtol=0)
