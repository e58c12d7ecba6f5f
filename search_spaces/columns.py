"""The columns that a search space's report shows in addition to the held-out reward.

A column is data, not a function. It is stored with the experiment, so a report needs neither the
file that defined the space nor any of its code.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# Ways to reduce the values of a trial's rounds to one value -> the description in reports.
OVER = {
    "last": "the value in the last round",
    "mean": "the mean over the rounds",
    "median": "the median over the rounds",
    "max": "the maximum over the rounds",
    "late": "the mean over the last eighth of the rounds",
}
# The report of every space shows the shares of these stages in a round.
SHOWN_STAGES = ("rollout", "optimize", "reference", "sync")
# Figures of a whole trial that are not metrics of a round, each with its meaning.
DERIVED = {
    "early_reward": "the held-out reward at the evaluation nearest to a quarter of the rounds",
    "samples_per_s": "responses per second, over the rounds that other processes did not disturb; "
    "with callbacks.leave_out_disturbed=false, over all rounds",
    "lag_of_bound": "the mean lag as a share of the largest lag that the trial allows",
    "uses_per_group": "the number of rounds that trained on a group, averaged over the groups that "
    "were trained on",
    "never_trained": "the share of the groups that were dropped, or still waiting when the trial "
    "ended",
    **dict.fromkeys(
        (f"{stage}_share" for stage in SHOWN_STAGES),
        "the median over the rounds of the stage's share of a round's work, excluding evaluation",
    ),
}
FORM = re.compile(r"\{:\+?,?(\.\d)?[efg%]\}")


@dataclass(frozen=True, kw_only=True)
class Column:
    """One figure of every trial. A cell shows the median over the seeds.

    Raises:
        ValueError: `over`, `form` or `metric` is invalid.
    """

    name: str  # key of the column in report.json
    title: str  # heading of the column in tables
    metric: str  # a metric listed in docs/metrics.md, or a key of DERIVED
    over: str = "last"  # a key of OVER; DERIVED figures do not use it
    factor: float = 1.0  # multiplies the value, to change its unit or sign
    form: str = "{:.2f}"

    def __post_init__(self) -> None:
        if "/" not in self.metric and self.metric not in DERIVED:
            valid = f"a metric listed in docs/metrics.md, or one of {', '.join(DERIVED)}"
            raise ValueError(f"column {self.name}: metric={self.metric}: must be {valid}")
        if self.over not in OVER:
            raise ValueError(
                f"column {self.name}: over={self.over}: must be one of {', '.join(OVER)}"
            )
        if not FORM.fullmatch(self.form):
            raise ValueError(
                f"column {self.name}: form={self.form!r}: must be like '{{:.2f}}' or '{{:+.1%}}'"
            )

    @property
    def is_speed(self) -> bool:
        """Return True for speed metrics, which are invalid on a busy machine."""
        return self.metric == "samples_per_s" or self.metric.startswith("throughput/")

    @property
    def how(self) -> str:
        """The way in which a trial's figure is computed, as a report describes it."""
        return DERIVED.get(self.metric) or OVER[self.over]


# Columns that the report shows for every space.
ALWAYS = ("reward", "against", "early_reward", *(f"{stage}_share" for stage in SHOWN_STAGES))

# This is a rate and not a time, because the times of trials that were cut short cannot be compared.
SPEED = Column(name="samples_per_s", title="samples/s", metric="samples_per_s", form="{:.0f}")
DRIFT = (
    Column(
        name="kl_reference_nats",
        title="KL to reference",
        metric="kl/reference_nats",
        over="late",
        form="{:.1f}",
    ),
    Column(
        name="reference_nll_nats",
        title="reference NLL",
        metric="response/reference_nll_nats",
        over="late",
    ),
)
OFF_POLICY = (
    # KL(sampler || policy). The rollouts are samples from the sampler, so k1 with its sign reversed
    # is an unbiased estimate. k3 would be biased, because k3 is meant for samples from the policy.
    Column(
        name="kl_sampler_nats",
        title="KL from sampler",
        metric="kl/behaviour_nats",
        over="median",
        factor=-1.0,
        form="{:.2g}",
    ),
    Column(
        name="clip_fraction",
        title="clipped",
        metric="loss/clip_fraction",
        over="mean",
        form="{:.1%}",
    ),
)
LEARNING = (
    Column(
        name="entropy_nats",
        title="entropy",
        metric="policy/entropy_nats",
        over="late",
        form="{:.2f}",
    ),
    Column(
        name="grad_norm",
        title="gradient norm",
        metric="optim/grad_norm",
        over="median",
        form="{:.2g}",
    ),
    Column(
        name="skipped_steps",
        title="steps skipped",
        metric="optim/skipped_steps",
        form="{:.0f}",
    ),
)
LENGTH = (
    Column(
        name="length",
        title="tokens per response",
        metric="response/length_mean",
        over="late",
        form="{:.1f}",
    ),
    Column(
        name="truncated",
        title="cut off",
        metric="response/truncated_fraction",
        over="late",
        form="{:.1%}",
    ),
)
SIGNAL = (
    Column(
        name="reward_std",
        title="spread of rewards",
        metric="reward/train_std",
        over="mean",
    ),
    Column(
        name="no_signal",
        title="groups without signal",
        metric="group/zero_advantage_fraction",
        over="mean",
        form="{:.0%}",
    ),
)
ESS = Column(
    name="ess_fraction",
    title="effective sample size",
    metric="off_policy/ess_fraction",
    over="mean",
    form="{:.0%}",
)
IMPORTANCE = (
    Column(
        name="weights_bounded",
        title="weights bounded",
        metric="loss/weights_bounded_fraction",
        over="mean",
        form="{:.1%}",
    ),
)
STEPS = Column(
    name="gradient_steps", title="gradient steps", metric="version/learner", form="{:.0f}"
)
STALENESS = (
    Column(name="lag", title="mean lag", metric="lag/mean", over="mean"),
    Column(name="lag_of_bound", title="share of the bound", metric="lag_of_bound", form="{:.0%}"),
    Column(name="lag_max", title="largest lag", metric="lag/max", over="max", form="{:.0f}"),
)
REUSE = (
    Column(name="uses", title="uses of a trained group", metric="uses_per_group"),
    Column(name="age", title="mean age", metric="buffer/age_mean", over="mean"),
    Column(name="never_trained", title="never trained", metric="never_trained", form="{:.0%}"),
)
SHARES = tuple(
    Column(name=f"{stage}_share", title=stage, metric=f"{stage}_share", form="{:.0%}")
    for stage in SHOWN_STAGES
)
SYNC = (
    Column(
        name="sync_ms",
        title="sync, ms",
        metric="time/sync_s",
        over="median",
        factor=1000.0,
        form="{:.1f}",
    ),
    Column(
        name="sync_round_share",
        title="sync / round",
        metric="sync_share",
        form="{:.2%}",
    ),
    Column(
        name="first_sync_ms",
        title="first sync, ms",
        metric="sync/first_s",
        over="median",
        factor=1000.0,
        form="{:.0f}",
    ),
    Column(name="gb_per_s", title="GB/s", metric="sync/gb_per_s", over="median"),
)
