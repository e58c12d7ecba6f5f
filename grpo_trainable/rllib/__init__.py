"""GRPO for those who know RLlib: an `Algorithm` and its `AlgorithmConfig`; and text generation as
an environment in which other algorithms of RLlib train.

Importing this makes "GRPO-RLlib" known to Tune. It needs the extra `rllib`.
"""

try:
    import ray.rllib.algorithms.algorithm  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"grpo_trainable.rllib needs RLlib ({error}); install it by: "
        "pip install 'grpo-trainable[rllib]'"
    ) from None

from grpo_trainable.rllib.algorithm import GRPO, NAME, GRPOAlgorithmConfig, register
from grpo_trainable.rllib.module import LanguageModel, language_model_spec
from grpo_trainable.rllib.token_env import TokenEnv

__all__ = [
    "GRPO",
    "NAME",
    "GRPOAlgorithmConfig",
    "LanguageModel",
    "TokenEnv",
    "language_model_spec",
    "register",
]

register()
