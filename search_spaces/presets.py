"""The presets by name: those of a course, and the published algorithms."""

from __future__ import annotations

from grpo_trainable.config import ConfigError
from grpo_trainable.text import did_you_mean
from search_spaces import SPACES
from search_spaces.algorithms import ALGORITHMS
from search_spaces.preset import Preset

# The settings of assignment 5 of Stanford's course CS336.
COURSE_KEYWORD = Preset(
    name="course_keyword",
    meaning="the course's settings for stories with a keyword",
    settings={
        "task.name": "keyword",
        "rounds": 100,
        "rollout.group_size": 4,
        "rollout.temperature": 0.8,
        "rollout.max_new_tokens": 60,
        "loss.type": "grpo_clip",
        "loss.advantage": "group_std",
        "loss.advantage_eps": 1e-8,
        "optim.lr": 5e-4,
    },
)
COURSE_MATH = Preset(
    name="course_math",
    meaning="the course's settings for MATH with Qwen2.5-Math-1.5B",
    needs=("task.train_file", "task.eval_file"),
    settings={
        "model.path": "Qwen/Qwen2.5-Math-1.5B",
        "model.dtype": "bfloat16",
        "task.name": "math",
        "task.template": "r1_zero",
        "rounds": 200,
        "rollout.prompts": 32,  # 256 responses a round
        "rollout.group_size": 8,
        "rollout.temperature": 1.0,
        "rollout.min_new_tokens": 4,
        "rollout.max_new_tokens": 1024,
        "eval.temperature": 1.0,
        "loss.advantage": "group_std",
        "loss.advantage_eps": 1e-6,
        "optim.lr": 1e-5,
        "optim.betas": (0.9, 0.95),
        "optim.weight_decay": 0.0,
        "optim.grad_clip": 1.0,
        "optim.microbatch": 2,  # 128 accumulation steps
    },
)

PRESETS: dict[str, Preset] = {
    **{preset.name: preset for preset in (COURSE_KEYWORD, COURSE_MATH)},
    **ALGORITHMS,
}


def find_preset(name: str) -> Preset:
    """The preset of this name.

    Raises:
        ConfigError: there is none, in one line.
    """
    if name in PRESETS:
        return PRESETS[name]
    if name in SPACES:
        raise ConfigError(f"--preset {name}: that is a search space: --space {name}")
    # REINFORCE++ is spoken as it is spelled here.
    hint = did_you_mean(name.replace("+", "p"), PRESETS) or f"valid: {', '.join(PRESETS)}"
    raise ConfigError(f"--preset {name}: unknown; {hint}")
