"""Find the settings of a model that a second implementation of it does not support.

`model.py` computes every model. The decoder, the page's JavaScript and score attribution compute
what it does a second time, and each lists the settings that it takes into account.
"""

from collections.abc import Collection, Mapping
from dataclasses import fields

from common.settings import format_value
from config import GPTConfig

# Numbers of a model that each computation of it takes as they are.
MODEL_NUMBERS = {
    "vocab_size",
    "block_size",
    "n_layer",
    "n_head",
    "n_kv_head",
    "n_embd",
    "head_dim",
    "value_head_dim",
    "mlp_hidden",
    "mlp_ratio",
    "norm_eps",
    "rope_theta",
    "rope_factor",
    "rope_trained",
    "rope_share",
    "dropout",
    "vocab_multiple",
    "ngrams",
    "ngram_size",
    "ngram_count",
    "ngram_rows",
}


def find_unknown_setting(
    config: GPTConfig, known: Mapping[str, tuple], irrelevant: Collection[str] = ()
) -> str | None:
    """Return the first setting that a computation of the model does not know; None: all known.

    It is neither at its default, nor one of `MODEL_NUMBERS`, nor irrelevant, nor is its value
    listed as known. It is returned as it is typed, such as model.mlp=swiglu.
    """
    for field in fields(config):
        value = getattr(config, field.name)
        is_known = field.name in MODEL_NUMBERS or field.name in irrelevant
        if not is_known and value not in known.get(field.name, (field.default,)):
            return f"model.{field.name}={format_value(value)}"
    return None
