"""Questions asked as grids: each module defines the arms between which its question decides."""

from search_spaces.async_vs_sync import ASYNC_VS_SYNC
from search_spaces.base import SearchSpace
from search_spaces.columns import Column
from search_spaces.gradient_steps import GRADIENT_STEPS
from search_spaces.lag import LAG
from search_spaces.replay import REPLAY
from search_spaces.transport import TRANSPORT

SPACES: dict[str, SearchSpace] = {
    space.name: space for space in (ASYNC_VS_SYNC, GRADIENT_STEPS, LAG, REPLAY, TRANSPORT)
}

__all__ = ["SPACES", "Column", "SearchSpace"]
