"""A language model as an RLlib `RLModule`: it maps the tokens so far to the next-token logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete  # pyright: ignore[reportMissingImports]
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.apis import InferenceOnlyAPI, ValueFunctionAPI
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.core.rl_module.torch import TorchRLModule
from torch import Tensor, nn

from grpo_trainable.config import GRPOConfig
from grpo_trainable.models.directory import policy_shape
from grpo_trainable.models.parameters import copy_parameters
from grpo_trainable.models.shape import PolicyShape
from grpo_trainable.models.store import build_trained_policy

NO_TOKEN = -1  # fills a row of token ids after its last token


def token_spaces(shape: PolicyShape) -> tuple[Box, Discrete]:
    """Return the observation space and the action space.

    An observation is (context_length,) int32: the token ids of the prompt and of the response so
    far, then NO_TOKEN. An action is the id of the next token.
    """
    observations = Box(NO_TOKEN, shape.vocab_size - 1, (shape.context_length,), dtype=np.int32)
    return observations, Discrete(shape.vocab_size)


class LanguageModel(TorchRLModule, InferenceOnlyAPI, ValueFunctionAPI):
    """The policy named by the settings in `model_config["grpo"]`, with a value head.

    There is no KV cache: each token costs a forward pass over all tokens before it.
    """

    def setup(self) -> None:
        """Build the policy, and a value head whose parameters start at zero."""
        settings = GRPOConfig.from_dict(self.model_config["grpo"])  # pyright: ignore
        self.policy, _ = build_trained_policy(settings.model, settings.seed)
        self.temperature = settings.rollout.temperature
        self.value_head = nn.Linear(self.policy.head_weight.shape[1], 1)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def get_non_inference_attributes(self) -> list[str]:
        """Return the names of the attributes that only training needs."""
        return ["value_head"]

    def _forward(self, batch: dict[str, Any], **_: Any) -> dict[str, Any]:
        return {Columns.ACTION_DIST_INPUTS: self._logits(self._last_hidden(batch))}

    def _forward_train(self, batch: dict[str, Any], **_: Any) -> dict[str, Any]:
        hidden = self._last_hidden(batch)
        return {Columns.ACTION_DIST_INPUTS: self._logits(hidden), Columns.EMBEDDINGS: hidden}

    def compute_values(self, batch: dict[str, Any], embeddings: Tensor | None = None) -> Tensor:
        """Return the expected reward of the response, (B,)."""
        hidden = self._last_hidden(batch) if embeddings is None else embeddings
        return self.value_head(hidden).squeeze(-1)

    def _last_hidden(self, batch: dict[str, Any]) -> Tensor:
        """Return the hidden state of the last token of each row, (B, D)."""
        tokens = batch[Columns.OBS].long()  # (B, S)
        lengths = (tokens != NO_TOKEN).sum(dim=1)  # (B,)
        # Any id may replace NO_TOKEN, because attention is causal.
        ids = tokens[:, : int(lengths.max())].clamp(min=0)
        hidden = self.policy.hidden_states(ids)  # (B, S, D)
        return hidden[torch.arange(len(ids), device=ids.device), lengths - 1]

    def _logits(self, hidden: Tensor) -> Tensor:
        """Return the logits from which the next token is sampled, (B, V)."""
        states, head = self.policy.head_operands(hidden)
        return states @ head.t() / self.temperature


def language_model_spec(grpo: Mapping[str, Any]) -> RLModuleSpec:
    """Return an `rl_module_spec` for the policy that the settings `grpo` configure."""
    return RLModuleSpec(module_class=LanguageModel, model_config={"grpo": dict(grpo)})


def trained_language_model(config: GRPOConfig, trained: Mapping[str, Tensor]) -> LanguageModel:
    """Return a trial's policy, with the weights `trained` and without a value head."""
    observations, actions = token_spaces(policy_shape(config.model))
    module = LanguageModel(
        observation_space=observations,
        action_space=actions,
        inference_only=True,
        model_config={"grpo": config.to_dict()},
    )
    copy_parameters(module.policy.trained(), dict(trained), source="the learner")
    return module
