"""The pipeline of one trial: which prompts are sampled when, by whom and with which weights.

`loop` runs the rounds. The `ledger` knows which prompt belongs to which rollout batch, the `fleet`
gives generators work and weights, `open_calls` waits for their answers.
"""

from grpo_trainable.pipeline.evaluation import Evaluation
from grpo_trainable.pipeline.loop import Pipeline
from grpo_trainable.pipeline.report import RoundReport

__all__ = ["Evaluation", "Pipeline", "RoundReport"]
