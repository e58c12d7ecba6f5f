"""How responses are sampled: the table of engines.

Only the standard library is imported here, so that the config can list them.
"""

from __future__ import annotations

# Name -> what builds it, as `module:name`: called with an `EngineSetup`, returns an `Engine`.
ENGINES: dict[str, str] = {"torch": "grpo_trainable.engines.torch_engine:build_torch_engine"}
