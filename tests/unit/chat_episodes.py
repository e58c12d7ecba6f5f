"""Many episodes as conversations, under a chat template that drops earlier reasoning.

Tests of several engines call `check_many_episodes`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from hf_models import tokenizer as their_tokenizer
from hf_models import write_hf_model

from grpo_trainable.config import GRPOConfig
from grpo_trainable.engines.engine import Action, EngineSetup, build_engine
from grpo_trainable.generator.episodes import EpisodePlayer
from grpo_trainable.models.directory import policy_tokenizer
from grpo_trainable.models.model_config import ModelConfig
from grpo_trainable.models.scoring import response_log_probs
from grpo_trainable.models.store import build_policy, save_policy
from grpo_trainable.models.tokenizer import Tokenizer
from grpo_trainable.models.transformer import TransformerLM
from grpo_trainable.protocol.rollout import RolloutGroup, collate
from grpo_trainable.tasks.prompts import Prompts, build_task

GROUP_SIZE, AT_ONCE, TURNS = 8, 25, 3
OURS = "ours"  # a policy of this package; other kinds are families of Hugging Face models

# In earlier messages of the assistant, the text before the last "|" is reasoning and is left out.
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


def config_of(
    directory: Path, kind: str, settings: Mapping[str, Any], shape: Mapping[str, Any]
) -> GRPOConfig:
    (directory / "talk.py").write_text(FILE)
    (directory / "template.jinja").write_text(TEMPLATE)
    policy = directory / "policy"
    write_ours(policy) if kind == OURS else write_theirs(policy, kind, **shape)
    return GRPOConfig.from_dict(
        {
            "seed": 3,
            "model": {
                "path": str(directory / "policy"),
                "chat_template": str(directory / "template.jinja"),
            },
            "task": {"name": f"{directory}/talk.py:Talk"},
            "env": {"name": f"{directory}/talk.py:Env"},
            "rollout": {"group_size": GROUP_SIZE, "max_new_tokens": 160, "temperature": 1.0},
            "eval": {"prompts": 1},
            **settings,
        }
    )


def write_ours(path: Path) -> None:
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
    with torch.no_grad():
        model.embedding.weight.mul_(3)
        model.embedding.weight[:] += 0.5 * torch.randn(16, generator=_generator())
        model.embedding.weight[_likely(tokenizer)] *= 3
    save_policy(path, model, tokenizer, torch.float32)


def write_theirs(path: Path, family: str, **shape: Any) -> None:
    import transformers

    write_hf_model(path, family, max_position_embeddings=256, **shape)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(path)
    ids = torch.randint(0, 290, (20, 100), generator=_generator())
    with torch.no_grad():
        hidden = model.model(ids).last_hidden_state.flatten(0, 1)
        # In any context, this raises the logits of the likely tokens by about 4.
        raised = torch.linalg.lstsq(hidden, torch.full((len(hidden), 1), 4.0)).solution[:, 0]
        model.lm_head.weight[_likely(their_tokenizer())] += raised
    model.save_pretrained(path)


def _likely(tokenizer: Tokenizer) -> list[int]:
    """Return ids of tokens that the policies often sample: "|", "a" and the end of a message."""
    return [tokenizer.eos_id, *tokenizer.encode("|"), *tokenizer.encode("a")]


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


class Overheard:
    """A wrapper of an engine that records every action as it was sampled."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.actions: list[tuple[int, Action]] = []

    def play(self, requests, between_tokens, partner):
        act = partner.act

        def overheard(action: Action) -> None:
            self.actions.append((requests[action.row // GROUP_SIZE].prompt_index, action))
            act(action)

        partner.act = overheard
        groups = self._engine.play(requests, between_tokens, partner)
        # This breaks a reference cycle. vLLM has to be freed before the next vLLM starts.
        del partner.act
        return groups


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


def rendered_again(tokenizer: Tokenizer, prompts: Prompts, group: RolloutGroup, said: list[str]):
    """Render all messages of a conversation except the last again, and return the ids."""
    messages = [{"role": "user", "content": f"go {group.prompt_index}"}]
    for text in said[:-1]:
        messages.append({"role": "assistant", "content": text})
        messages.append({"role": "user", "content": f"{len(text)} of {group.prompt_index}"})
    assert prompts._chat is not None
    return prompts._chat.encode(messages) + tokenizer.encode(said[-1])


def check_many_episodes(
    directory: Path,
    kind: str,
    groups: int,
    *,
    settings: Mapping[str, Any] | None = None,
    shape: Mapping[str, Any] | None = None,
) -> None:
    """Play episodes, and check their tokens and the log-probs of their actions.

    No token may be tokenised again, and the log-probs must equal the learner's to 1e-4.

    Args:
        directory: A directory for the policy and the environment.
        kind: Kind of the policy: `OURS` or a family of Hugging Face models.
        groups: Number of groups, of `GROUP_SIZE` episodes each.
        settings: Further settings, such as the engine.
        shape: Further values for the config.json of a Hugging Face model.
    """
    config = config_of(directory, kind, settings or {}, shape or {})
    tokenizer = policy_tokenizer(config.model)
    setup = EngineSetup(config=config, tokenizer=tokenizer, device=torch.device("cpu"))
    engine = Overheard(build_engine(setup))
    prompts = Prompts(config, build_task(config), tokenizer)
    player = EpisodePlayer(config.env, prompts, tokenizer)
    played: list[RolloutGroup] = []
    try:
        for first in range(0, groups, AT_ONCE):
            wanted = [prompts.request("train", i) for i in range(first, first + AT_ONCE)]
            played += player.play(engine, wanted, lambda: None)[0]
    finally:
        player.close()
    of_row: dict[tuple[int, int], list[Action]] = {}
    for index, action in engine.actions:
        of_row.setdefault((index, action.row % GROUP_SIZE), []).append(action)

    retokenised = whole = otherwise = 0
    for group in played:
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
                again = rendered_again(tokenizer, prompts, group, said)
                otherwise += [*group.prompt_ids.tolist(), *found[:-1]] != again
    assert len(played) * GROUP_SIZE >= 200
    assert retokenised == 0
    assert whole > 0.3 * groups * GROUP_SIZE
    # Many conversations would have different tokens if they were rendered again. So the test would
    # fail if the player rendered them again.
    assert otherwise > 0.1 * groups * GROUP_SIZE

    model, _ = build_policy(config.model, config.seed)
    batch = collate(played, [torch.zeros(GROUP_SIZE)] * groups, tokenizer.pad_id)
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
