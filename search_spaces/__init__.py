"""Search spaces (questions, each with the arms that answer it), and presets of settings."""

from search_spaces.columns import Column
from search_spaces.search_space import SearchSpace
from search_spaces.spaces import SPACES
from search_spaces.system import system_space

__all__ = ["SPACES", "Column", "SearchSpace", "system_space"]
