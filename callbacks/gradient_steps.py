"""Records every gradient step, to show how a round drifts from the weights that sampled."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from callbacks.round_writer import RoundWriter
from callbacks.trial_files import cut_parts, trial_directory, write_part
from grpo_trainable.protocol.round_records import RoundDetails
from grpo_trainable.telemetry.metrics import KL_TO

SCHEMA = pa.schema(
    {
        "round": pa.int32(),
        "step": pa.int32(),  # number within the round, from 1
        "version": pa.int32(),  # version of the policy before the step
        "skipped": pa.bool_(),  # loss or gradient was not finite
        "loss": pa.float32(),
        "grad_norm": pa.float32(),
        "entropy_nats": pa.float32(),
        "clip_fraction": pa.float32(),
        "weights_bounded_fraction": pa.float32(),
        "ratio_max": pa.float32(),
        "bounded_tokens": pa.int64(),  # tokens whose ratio was held at e^20
        "lr": pa.float32(),
        # The critic's figures, where there is one; its loss is before any coefficient.
        **{f"critic_{name}": pa.float32() for name in ("loss", "clip_fraction", "grad_norm")},
        # KL of the policy before the step, on the responses it trains on; sums over a response.
        **{f"kl_{other}{kind}_nats": pa.float32() for other in KL_TO for kind in ("", "_k3")},
    }
)


class GradientStepsCallback(RoundWriter):
    """Writes one Parquet part for each round to `steps/`, with a row for each gradient step."""

    def cut(self, trial: Any, last: int) -> None:
        cut_parts(trial_directory(trial) / "steps", last)

    def write(self, trial: Any, iteration: int, details: RoundDetails) -> None:
        table = pa.Table.from_pydict(details.steps, SCHEMA)
        write_part(trial_directory(trial) / "steps", iteration, table)
