"""The stages of alignment: their data formats, their trainers in TRL, and the names of metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A kind of training that TRL provides."""

    name: str  # on the command line
    trainer: str  # class in TRL
    config: str  # class in TRL
    writes_text: bool  # True: the trained model is a language model. False: a reward model
    layouts: tuple[tuple[str, ...], ...]  # columns of a row, for each valid layout
    # TRL's names for metrics of pairs. None: rows are not pairs.
    accuracy: str | None = None
    margin: str | None = None

    @property
    def has_pairs(self) -> bool:
        """True if a row has a chosen and a rejected response."""
        return self.margin is not None


_PAIRS = (("prompt", "chosen", "rejected"), ("chosen", "rejected"))
STAGES = {
    stage.name: stage
    for stage in (
        Stage(
            name="sft",
            trainer="SFTTrainer",
            config="SFTConfig",
            writes_text=True,
            layouts=(("prompt", "completion"), ("messages",), ("text",)),
        ),
        Stage(
            name="reward-model",
            trainer="RewardTrainer",
            config="RewardConfig",
            writes_text=False,
            layouts=_PAIRS,
            accuracy="accuracy",
            margin="margin",
        ),
        Stage(
            name="dpo",
            trainer="DPOTrainer",
            config="DPOConfig",
            writes_text=True,
            layouts=_PAIRS,
            accuracy="rewards/accuracies",
            margin="rewards/margins",
        ),
    )
}
