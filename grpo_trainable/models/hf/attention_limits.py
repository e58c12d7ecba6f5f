"""The layers of a Hugging Face model that do not attend to all earlier tokens.

Such layers have a sliding window, chunks, a selection of tokens, or a recurrent state.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from grpo_trainable.plugins import one_line

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Names that configs use for a layer that attends to all earlier tokens.
ATTENDS_TO_ALL = {"full_attention", "attention", "global"}
# Config attributes with a number of tokens. They limit every layer, unless the config lists the
# kind of each layer.
LIMITS = ("sliding_window", "attention_chunk_size")


def attention_limit(directory: Path) -> str | None:
    """Return the attribute of a model's config that limits attention, or None if there is none.

    `transformers` reads the config, because a config.json may leave out settings that have a
    default value.

    Raises:
        ValueError: `transformers` cannot read the config. The message is one line.
    """
    from transformers import AutoConfig  # this import loads torch and takes seconds

    try:
        config = AutoConfig.from_pretrained(
            directory, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # transformers has no common error class
        raise ValueError(f"{directory}: transformers cannot read it ({one_line(error)})") from error
    return limit_in(config.get_text_config(decoder=True))


def limit_in(config: PreTrainedConfig) -> str | None:
    """Return `attribute: value` for the attribute that limits attention, or None if there is none.

    Architectures use different names for the list that names each layer's kind, such as
    `layer_types`, `layers_block_type` and `attention_layers`. All of these names contain "layer".
    """
    lists = {
        name: kinds
        # Some configs have `layer_types` only as a property.
        for name in dict.fromkeys(("layer_types", *vars(config)))
        if "layer" in name and "mlp" not in name
        for kinds in [getattr(config, name, None)]
        if isinstance(kinds, list | tuple) and any(isinstance(kind, str) for kind in kinds)
    }
    for name, kinds in lists.items():
        limited = next((kind for kind in kinds if kind not in ATTENDS_TO_ALL), None)
        if limited is not None:
            return f"{name}: {limited}"
    if lists:
        return None
    sizes = ((name, getattr(config, name, None)) for name in LIMITS)
    return next((f"{name}: {size}" for name, size in sizes if size is not None), None)
