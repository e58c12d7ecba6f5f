"""The pipeline of one trial.

The pipeline decides which prompts are sampled, when, by which generator and with which weights.

`loop` runs the rounds. `ledger` assigns prompts to rollout batches. `fleet` sends work and weights
to the generators. `open_calls` waits for the actors' answers.
"""

from grpo_trainable.pipeline.evaluation import Evaluation
from grpo_trainable.pipeline.loop import Pipeline
from grpo_trainable.pipeline.report import RoundReport

__all__ = ["Evaluation", "Pipeline", "RoundReport"]
