"""Read what a caller in Python gives: texts or token ids, names of heads, numbers of tokens."""

from collections.abc import Callable, Iterable, Mapping, Set
from reprlib import repr as quote
from typing import Any

import numpy as np

from common.errors import UserError
from common.text import pluralize
from config import GPTConfig
from glass.heads.measure.interventions import Output
from run.row import Head, parse_head

Text = str | int | Iterable[Any]  # or token ids, also an array, a tensor, a mapping with input_ids
Texts = Text | Iterable[Text]
Off = str | Head | Iterable[str | Head]
Positions = int | Iterable[int]


def list_texts(texts: Texts) -> list[Text] | None:
    """Return the texts of a list, or None for one text."""
    values = list_values(_input_ids(texts))
    is_list = not isinstance(texts, str | bytes) and any(isinstance(v, Iterable) for v in values)
    return values if is_list else None


def read_ids(
    name: str, text: Text, encode: Callable[[str], list[int]], vocab_size: int
) -> list[int]:
    """Return the token ids of a text, or those that are given.

    Raises:
        UserError: There is more than one text, or something that is no token of the vocabulary.
    """
    values = list_values(_input_ids(text))
    if values in ([], [""]):
        raise UserError(f"{name}={quote(text)} is empty: use a text of at least one token")
    if len(values) == 1 and isinstance(values[0], str):
        values = encode(values[0])
    for value in values:
        if type(value) is not int or not 0 <= value < vocab_size:
            raise UserError(
                f"{name} has {quote(value)}, which is not a token id: use one text, or whole "
                f"numbers from 0 to {vocab_size - 1}"
            )
    return values


def read_off(off: Off, config: GPTConfig) -> tuple[Output, ...]:
    """Return the outputs that one name, or several, stand for, in a fixed order."""
    named = _name_outputs(config)
    last = config.n_layer - 1
    outputs: set[Output] = set()
    for value in [off] if isinstance(off, Head) else list_values(off, "off"):
        if str(value) not in named:
            mlps = "" if config.mlp == "none" else f", an MLP (L0MLP to L{last}MLP)"
            raise UserError(
                f"off={quote(value)} is not a part of this model: use a head (L0H0 to "
                f"{Head(last, config.n_head - 1)}){mlps} or a layer (L0 to L{last})"
            )
        outputs.update(named[str(value)])
    return tuple(sorted(outputs, key=str))


def _name_outputs(config: GPTConfig) -> dict[str, list[Output]]:
    """Return the outputs of each head, such as L2H0, each MLP, L2MLP, and each layer, L2."""
    named: dict[str, list[Output]] = {}
    for layer in range(config.n_layer):
        heads = [Head(layer, number) for number in range(config.n_head)]
        mlp: list[Output] = [] if config.mlp == "none" else [("mlp", layer)]
        named |= {str(head): [head] for head in heads}
        named |= {f"L{layer}MLP": [output] for output in mlp}
        named[f"L{layer}"] = [*heads, ("attention", layer), *mlp]
    return named


def read_head(name: str, value: Any, config: GPTConfig) -> Head:
    """Return a head of the model by its name."""
    last = Head(config.n_layer - 1, config.n_head - 1)
    head = parse_head(str(value))
    if head is None or head.layer > last.layer or head.number > last.number:
        raise UserError(f"{name}={quote(value)} is not a head of this model: use L0H0 to {last}")
    return head


def read_positions(hidden: Positions, length: int) -> tuple[int, ...]:
    """Return the numbers of tokens of a text with `length` tokens, in order."""
    values = list_values(hidden, "hidden")
    for value in values:
        if type(value) is not int or not 0 <= value < length:
            raise UserError(
                f"hidden={quote(value)} is not the number of a token: use whole numbers from 0 to "
                f"{length - 1}"
            )
    return tuple(sorted(set(values)))


def read_token(token: int, length: int, first: int = 0) -> int:
    """Return the number of a token from `first` on, which may be given as counted from the end."""
    values = list_values(token, "token")
    is_one = len(values) == 1 and type(values[0]) is int
    if not is_one or not -length <= values[0] < length or values[0] % length < first:
        raise UserError(
            f"token={quote(token)} is not the number of a token from {first} on: the text has "
            f"{pluralize(length, 'token')}"
        )
    return values[0] % length


def _input_ids(text: Any) -> Any:
    """Return the token ids of what a tokenizer of transformers returns; anything else as it is."""
    if not isinstance(text, Mapping) or "input_ids" not in text:
        return text
    if 0 in np.hstack(text.get("attention_mask", [1])):
        raise UserError("attention_mask hides padding tokens: use texts without padding")
    return text["input_ids"]


def list_values(given: Any, name: str = "text") -> list:
    """Return the values of an iterable, or of the only row of an array, as Python's types."""
    if isinstance(given, Mapping | Set) or hasattr(given, "columns"):  # those of a table
        raise UserError(f"{name} cannot be a {type(given).__name__}: use a list")
    if hasattr(given, "tolist"):
        given = given.tolist()
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        return [given]
    values = [value.tolist() if hasattr(value, "tolist") else value for value in given]
    has_one_row = len(values) == 1 and isinstance(values[0], list)
    return values[0] if has_one_row else values
