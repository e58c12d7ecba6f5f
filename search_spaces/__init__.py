"""Search spaces (questions, each with the arms that answer it), and presets of settings."""

from search_spaces.columns import Column
from search_spaces.search_space import SearchSpace
from search_spaces.spaces import SPACES

__all__ = ["SPACES", "Column", "SearchSpace"]
