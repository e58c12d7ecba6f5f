"""A local model that writes prompts: a transformers directory or a policy of this package."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from grpo_trainable.config import GRPOConfig
from grpo_trainable.engines.checks import check_groups
from grpo_trainable.engines.engine import EngineSetup, build_engine
from grpo_trainable.engines.selection import chosen_engine
from grpo_trainable.models.directory import check_policy
from grpo_trainable.models.hf.chat import ChatTemplate, chat_template
from grpo_trainable.protocol.rollout import Request, SamplingLimits
from grpo_trainable.tools.prompt_sets.keyword import MOST_ATTEMPTS, Item


class LocalWriter:
    """A writer that samples with an engine of this package.

    Every random draw is a function of (seed, attempt, item), so a repeated command writes the same
    set.

    Raises:
        ValueError: If the model cannot be used, or if `chat` needs a chat template that the model
            does not have. The message is one line that names the option.
    """

    def __init__(
        self, path: str, *, chat: bool, seed: int, temperature: float, max_tokens: int, device: str
    ) -> None:
        model = {"path": path, "chat_template": "on" if chat else "off"}
        config = GRPOConfig.from_dict({"model": model, "seed": seed})
        try:
            shape, self._tokenizer = check_policy(config.model)
            self._chat: ChatTemplate | None = chat_template(
                config.model.chat_template, config.model.path, self._tokenizer
            )
        except ValueError as error:
            raise ValueError(f"--model {error}") from None
        setup = EngineSetup(config=config, tokenizer=self._tokenizer, device=torch.device(device))
        self._engine_name = chosen_engine(config).name
        self._engine = build_engine(setup)
        self._shape = shape
        self._limits = SamplingLimits(
            min_new_tokens=1,
            max_new_tokens=max_tokens,
            temperature=temperature,
            end_ids=self._tokenizer.end_ids,
        )

    def write(self, items: Sequence[Item], attempt: int) -> list[str]:
        """Return the model's answer to each item, in order.

        Raises:
            ValueError: If an item does not fit into the context. The message is one line.
        """
        requests = [
            Request(
                stream="train",
                prompt_index=item.index * MOST_ATTEMPTS + attempt,  # a new draw for each attempt
                prompt_ids=tuple(self._encode(item)),
                group_size=1,
                limits=self._limits,
            )
            for item in items
        ]
        longest = max(len(request.prompt_ids) for request in requests)
        if longest + self._limits.max_new_tokens > self._shape.context_length:
            raise ValueError(
                f"--model: the request takes {longest} tokens and the answer up to "
                f"{self._limits.max_new_tokens}, but the context has {self._shape.context_length}; "
                "lower --max-tokens or use another model"
            )
        groups = self._engine.generate(requests, lambda: None)
        vocab_size = self._shape.vocab_size
        check_groups(self._engine_name, self._engine, requests, groups, self._tokenizer, vocab_size)
        return [
            self._tokenizer.decode(group.response_ids[0][group.response_mask[0]].tolist())
            for group in groups
        ]

    def close(self) -> None:
        """Do nothing: there are no resources to release."""

    def _encode(self, item: Item) -> list[int]:
        if self._chat is None:
            return self._tokenizer.encode_prompt(item.beginning)
        return self._chat.encode([{"role": "user", "content": item.instruction}])
