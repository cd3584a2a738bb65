"""Check the parameters of a request: each has its type and range, or a `UserError` is raised."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from common.errors import UserError, not_one_of
from common.text import pluralize
from config import GPTConfig
from glass.heads.interventions import Interventions
from glass.heads.results import Head, parse_head

MAX_ATTENTION_WEIGHTS = 1 << 26  # of one text in all heads: 256 MB in float32
MAX_SHOWN_CHARACTERS = 40  # of a wrong value, in a message


class StepChanged(UserError):
    """The request is about another training step than the one whose weights are loaded."""


def max_tokens(config: GPTConfig) -> int:
    """Return the maximum number of tokens of a text: its attention maps must not be too large."""
    fitting = math.isqrt(MAX_ATTENTION_WEIGHTS // (config.n_layer * config.n_head))
    return max(1, min(config.block_size, fitting))


class Input(NamedTuple):
    """A text that the model reads, and the interventions while it does."""

    ids: list[int]
    interventions: Interventions

    def without_interventions(self) -> "Input":
        """Return the text alone."""
        return Input(self.ids, Interventions())

    def first_tokens(self, length: int) -> "Input":
        """Return the first tokens of the text, with the same interventions."""
        hidden = tuple(j for j in self.interventions.hidden if j < length)
        return Input(self.ids[:length], self.interventions._replace(hidden=hidden))

    def window(self, ids: list[int], start: int) -> "Input":
        """Return the tokens of a continued text from `start` on, with the same interventions."""
        hidden = tuple(j - start for j in self.interventions.hidden if j >= start)
        return Input(ids[start:], self.interventions._replace(hidden=hidden))


class Parameters:
    """The parameters of one request, from its JSON. Each method checks the one that it returns."""

    def __init__(self, values: Mapping[str, Any], config: GPTConfig) -> None:
        self.values = values
        self.config = config

    def model_input(self, step: int) -> Input:
        """Return the text and the interventions of a request about the weights of a step."""
        requested = self.integer("step")
        if requested != step:
            raise StepChanged(
                f"step={requested} is not loaded any more: reload the page, which shows step {step}"
            )
        ids = self.text_ids("ids")
        hidden = self._integers("hidden", len(ids) - 1)
        return Input(ids, Interventions(self._ablated_heads(), tuple(sorted(set(hidden)))))

    def text_ids(self, name: str) -> list[int]:
        """Return the token ids of a text that the model can read at once."""
        ids, maximum = self.ids(name), max_tokens(self.config)
        if not 1 <= len(ids) <= maximum:
            raise UserError(
                f"{name} has {pluralize(len(ids), 'token')}: use a text of 1 to {maximum}"
            )
        return ids

    def ids(self, name: str) -> list[int]:
        """Return token ids of the model's vocabulary."""
        assert self.config.vocab_size is not None  # of every GPT
        return self._integers(name, self.config.vocab_size - 1)

    def token_id(self, name: str) -> int:
        """Return one token id of the model's vocabulary."""
        assert self.config.vocab_size is not None  # of every GPT
        return self.integer(name, self.config.vocab_size - 1)

    def layer_and_head(self) -> Head:
        """Return the head whose layer and number within the layer are given."""
        layer = self.integer("layer", self.config.n_layer - 1)
        return Head(layer, self.integer("head", self.config.n_head - 1))

    def head(self, name: str) -> Head:
        """Return a head, given as a list of its layer and its number within the layer."""
        value = self._list(name)
        if len(value) != 2:
            raise UserError(f"{name} is not a pair [layer, head]")
        return self._check_head(name, *value)

    def heads(self, name: str) -> list[Head]:
        """Return different heads, from their indices layer · n_head + number."""
        count = self.config.n_layer * self.config.n_head
        indices = self._integers(name, count - 1)
        if len(set(indices)) < len(indices):
            raise UserError(f"{name} names a head twice: name each head once")
        return [Head(*divmod(index, self.config.n_head)) for index in indices]

    def names(self, name: str) -> list[str]:
        """Return a list of texts."""
        values = self._list(name)
        for value in values:
            if not isinstance(value, str):
                raise UserError(f"{name} contains {describe(value)}, which is not a string")
        return values

    def text(self, name: str) -> str:
        """Return a text."""
        value = self._value(name)
        if not isinstance(value, str):
            raise UserError(f"{name}={describe(value)} is not a string")
        return value

    def choice(self, name: str, choices: Sequence[str]) -> str:
        """Return one of several names."""
        value = self.text(name)
        if value not in choices:
            raise UserError(not_one_of(name, describe(value), choices))
        return value

    def integer(self, name: str, maximum: float = math.inf) -> int:
        """Return an integer from 0 to `maximum`."""
        return _check_integer(name, self._value(name), maximum)

    def number(self, name: str) -> float:
        """Return a finite number of at least 0."""
        value = self._value(name)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        # An integer may be too large for a float
        if not is_number or not 0 <= value <= 1e300:
            raise UserError(f"{name}={describe(value)} is not a finite number of at least 0")
        return float(value)

    def _ablated_heads(self) -> tuple[Head, ...]:
        heads = set()
        for name in self.names("off"):
            head = parse_head(name)
            if head is None:
                raise UserError(f"off contains {describe(name)}, which is not a head such as L1H3")
            heads.add(self._check_head("off", *head))
        return tuple(sorted(heads))

    def _check_head(self, name: str, layer: Any, number: Any) -> Head:
        _check_integer(f"a layer in {name}", layer, self.config.n_layer - 1)
        _check_integer(f"a head in {name}", number, self.config.n_head - 1)
        return Head(layer, number)

    def _integers(self, name: str, maximum: int) -> list[int]:
        return [_check_integer(f"a number in {name}", value, maximum) for value in self._list(name)]

    def _list(self, name: str) -> list:
        value = self._value(name)
        if not isinstance(value, list):
            raise UserError(f"{name}={describe(value)} is not a list")
        return value

    def _value(self, name: str) -> Any:
        if name not in self.values:
            raise UserError(f"the request has no {name}: add it")
        return self.values[name]


def _check_integer(name: str, value: Any, maximum: float) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= maximum:
        bounds = "of at least 0" if maximum == math.inf else f"from 0 to {maximum}"
        raise UserError(f"{name}={describe(value)} is not an integer {bounds}")
    return value


def describe(value: Any) -> str:
    """Return a JSON value for a message, cut to a short text."""
    if isinstance(value, list):
        return "a list"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, int) and abs(value) >= 10**MAX_SHOWN_CHARACTERS:
        return "a very large number"
    return repr(value)[:MAX_SHOWN_CHARACTERS]
