"""Questions as grids: each module asks one, as arms that differ in what the question is about."""

from search_spaces.async_vs_sync import ASYNC_VS_SYNC
from search_spaces.base import SearchSpace

SPACES: dict[str, SearchSpace] = {space.name: space for space in (ASYNC_VS_SYNC,)}

__all__ = ["SPACES", "SearchSpace"]
