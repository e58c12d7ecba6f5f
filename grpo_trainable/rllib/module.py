"""A language model as an RLlib `RLModule`: from the tokens so far, the law of the next one."""

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

NO_TOKEN = -1  # fills a row after its tokens so far


def token_spaces(shape: PolicyShape) -> tuple[Box, Discrete]:
    """Observations: ids of prompt and response so far, then NO_TOKEN, (context_length,) int32.
    Actions: the id of the next token."""
    observations = Box(NO_TOKEN, shape.vocab_size - 1, (shape.context_length,), dtype=np.int32)
    return observations, Discrete(shape.vocab_size)


class LanguageModel(TorchRLModule, InferenceOnlyAPI, ValueFunctionAPI):
    """The policy that the settings `model_config["grpo"]` name, and a value head beside it.

    There is no KV cache: each token costs a forward pass of all tokens before it.
    """

    def setup(self) -> None:
        settings = GRPOConfig.from_dict(self.model_config["grpo"])  # pyright: ignore
        self.policy, _ = build_trained_policy(settings.model, settings.seed)
        self.temperature = settings.rollout.temperature
        self.value_head = nn.Linear(self.policy.head_weight.shape[1], 1)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def get_non_inference_attributes(self) -> list[str]:
        return ["value_head"]

    def _forward(self, batch: dict[str, Any], **_: Any) -> dict[str, Any]:
        return {Columns.ACTION_DIST_INPUTS: self._logits(self._last_hidden(batch))}

    def _forward_train(self, batch: dict[str, Any], **_: Any) -> dict[str, Any]:
        hidden = self._last_hidden(batch)
        return {Columns.ACTION_DIST_INPUTS: self._logits(hidden), Columns.EMBEDDINGS: hidden}

    def compute_values(self, batch: dict[str, Any], embeddings: Tensor | None = None) -> Tensor:
        """The expected reward of the response, (B,)."""
        hidden = self._last_hidden(batch) if embeddings is None else embeddings
        return self.value_head(hidden).squeeze(-1)

    def _last_hidden(self, batch: dict[str, Any]) -> Tensor:
        """Hidden states of the last token so far, (B, D)."""
        tokens = batch[Columns.OBS].long()  # (B, S)
        lengths = (tokens != NO_TOKEN).sum(dim=1)  # (B,)
        ids = tokens[:, : int(lengths.max())].clamp(min=0)  # no position sees a later one
        hidden = self.policy.hidden_states(ids)  # (B, S, D)
        return hidden[torch.arange(len(ids), device=ids.device), lengths - 1]

    def _logits(self, hidden: Tensor) -> Tensor:
        """Logits of the law that responses are sampled by, (B, V)."""
        states, head = self.policy.head_operands(hidden)
        return states @ head.t() / self.temperature


def language_model_spec(grpo: Mapping[str, Any]) -> RLModuleSpec:
    """What `AlgorithmConfig.rl_module(rl_module_spec=…)` takes for the policy of these settings."""
    return RLModuleSpec(module_class=LanguageModel, model_config={"grpo": dict(grpo)})


def trained_language_model(config: GRPOConfig, trained: Mapping[str, Tensor]) -> LanguageModel:
    """The policy of a trial with the weights that its learner has, without a value head."""
    observations, actions = token_spaces(policy_shape(config.model))
    module = LanguageModel(
        observation_space=observations,
        action_space=actions,
        inference_only=True,
        model_config={"grpo": config.to_dict()},
    )
    copy_parameters(module.policy.trained(), dict(trained), source="the learner")
    return module
