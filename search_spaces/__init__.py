"""Questions asked as grids: each module defines the arms between which its question decides."""

from search_spaces.async_vs_sync import ASYNC_VS_SYNC
from search_spaces.baselines import BASELINES
from search_spaces.columns import Column
from search_spaces.gradient_steps import GRADIENT_STEPS
from search_spaces.lag import LAG
from search_spaces.learning_rate import LEARNING_RATE
from search_spaces.length_norm import LENGTH_NORM
from search_spaces.losses import LOSSES
from search_spaces.objectives_by_lag import OBJECTIVES_BY_LAG
from search_spaces.replay import REPLAY
from search_spaces.search_space import SearchSpace
from search_spaces.std_norm import STD_NORM
from search_spaces.transport import TRANSPORT

SPACES: dict[str, SearchSpace] = {
    space.name: space
    for space in (
        *(ASYNC_VS_SYNC, GRADIENT_STEPS, LAG, REPLAY, TRANSPORT),
        *(LOSSES, BASELINES, LENGTH_NORM, STD_NORM, LEARNING_RATE, OBJECTIVES_BY_LAG),
    )
}

__all__ = ["SPACES", "Column", "SearchSpace"]
