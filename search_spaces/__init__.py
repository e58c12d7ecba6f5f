"""Questions as grids of arms, and presets of settings to use with them."""

from search_spaces.columns import Column
from search_spaces.search_space import SearchSpace
from search_spaces.spaces import SPACES

__all__ = ["SPACES", "Column", "SearchSpace"]
