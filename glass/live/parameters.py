"""The parameters of the page's requests, checked by pydantic (which W&B installs)."""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from common.errors import UserError
from common.text import pluralize
from config import GPTConfig
from glass.heads.measure.patching import Patch, parse_patch
from glass.heads.measure.text_pass import max_tokens

# Error messages quote numbers, so their size is limited here; the model and the text bound them.
Number = Annotated[int, Field(ge=0, le=2**63 - 1)]
PatchName = Annotated[Patch, BeforeValidator(lambda name: parse_patch(str(name)))]


class StepChanged(UserError):
    """The request is about another training step than the one whose weights are loaded."""


class Parameters(BaseModel):
    """The name of a request and its parameters; each request reads those that it needs."""

    model_config = ConfigDict(strict=True)  # texts are not converted to numbers
    request: str = Field(max_length=20)
    text: str = ""
    step: Number = 0
    ids: list[Number] = []
    off: list[str] = []  # names of ablated heads
    hidden: list[Number] = []
    heads: list[Number] = []  # layer · n_head + number of each
    of: tuple[Number, Number] = (0, 0)  # layer and number of a head
    layer: Number = 0
    head: Number = 0
    i: Number = 0
    j: Number = 0
    temperature: float = Field(1.0, ge=0, le=1e6)
    max_tokens: int = Field(0, alias="maxTokens", ge=0, le=1000)
    corrupted: list[Number] = []
    answer: Number = 0
    wrong: Number = 0
    patched: list[PatchName] = []
    direction: Literal["denoising", "noising"] = "denoising"
    kind: Literal["residual", "component"] = "residual"


def read_parameters(body: bytes, config: GPTConfig) -> Parameters:
    """Return the parameters of a request, from its JSON; raise `UserError` if one is impossible."""
    try:
        parameters = Parameters.model_validate_json(body)
    except ValidationError as e:
        first = e.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the request"
        raise UserError(f"{place}: {first['msg']}") from None
    _check_bounds(parameters, config)
    return parameters


def _check_bounds(p: Parameters, config: GPTConfig) -> None:
    assert config.vocab_size is not None  # of every GPT
    patched_layers = [patch.layer for patch in p.patched]
    patched_heads = [patch.index for patch in p.patched if patch.kind == "head"]
    _require_below(config.vocab_size, "a token id", *p.ids, *p.corrupted, p.answer, p.wrong)
    _require_below(max(1, len(p.ids)), "the number of a token", p.i, p.j)
    _require_below(config.n_layer, "a layer", p.of[0], p.layer, *patched_layers)
    _require_below(config.n_head, "a head", p.of[1], p.head, *patched_heads)
    _require_below(config.n_layer * config.n_head, "one of heads", *p.heads)


def _require_below(bound: int, name: str, *values: int) -> None:
    largest = max(values, default=0)
    if largest >= bound:
        raise UserError(f"{name} is {largest}, but must be from 0 to {bound - 1}")


def check_text(parameters: Parameters, step: int, config: GPTConfig) -> None:
    """Raise `UserError` unless the model of this step can read the text of a request at once."""
    if parameters.step != step:
        raise StepChanged(f"step={parameters.step} is not loaded any more: reload the page")
    length = len(parameters.ids)
    maximum = max_tokens(config)
    if not 1 <= length <= maximum:
        raise UserError(f"use a text of 1 to {maximum} tokens: it has {pluralize(length, 'token')}")
