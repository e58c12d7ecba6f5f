"""GRPO for RLlib: an `Algorithm`, its `AlgorithmConfig`, and a text environment.

The environment lets other RLlib algorithms train on text generation. Importing this package
registers "GRPO-RLlib" with Tune. The package needs the extra `rllib`.
"""

try:
    import ray.rllib.algorithms.algorithm  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"grpo_trainable.rllib needs RLlib ({error}); install it with: "
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
