"""The stages of alignment: their data formats, their trainers in TRL, and the names of metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A kind of training that TRL does."""

    name: str  # on the command line
    trainer: str  # class in TRL
    config: str  # class in TRL
    head: str  # auto class in transformers that reads the trained model
    layouts: tuple[tuple[str, ...], ...]  # columns of a row, for each valid layout
    accuracy: str  # TRL's name for the metric
    margin: str | None = None  # TRL's name for the metric; None: rows are not pairs

    @property
    def has_pairs(self) -> bool:
        """True if a row has a chosen and a rejected response."""
        return self.margin is not None

    @property
    def writes_text(self) -> bool:
        """True if the trained model is a language model."""
        return self.head == "AutoModelForCausalLM"


_PAIRS = (("prompt", "chosen", "rejected"), ("chosen", "rejected"))
STAGES = {
    stage.name: stage
    for stage in (
        Stage(
            name="sft",
            trainer="SFTTrainer",
            config="SFTConfig",
            head="AutoModelForCausalLM",
            layouts=(("prompt", "completion"), ("messages",), ("text",)),
            accuracy="mean_token_accuracy",
        ),
        Stage(
            name="reward-model",
            trainer="RewardTrainer",
            config="RewardConfig",
            head="AutoModelForSequenceClassification",
            layouts=_PAIRS,
            accuracy="accuracy",
            margin="margin",
        ),
        Stage(
            name="dpo",
            trainer="DPOTrainer",
            config="DPOConfig",
            head="AutoModelForCausalLM",
            layouts=_PAIRS,
            accuracy="rewards/accuracies",
            margin="rewards/margins",
        ),
    )
}
