"""Decompose the residual stream into what the components of a model write to it."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from glass.heads.measure.capture import ForwardPass, residual_writes
from kernels import in_float32_or_finer
from model import GPT
from run.row import Head


class Component(NamedTuple):
    """A component that writes to the residual stream. A bias is that of W_O."""

    kind: Literal["embedding", "head", "bias", "MLP"]
    layer: int = -1  # -1 for the embedding
    number: int = 0  # of a head in its layer

    def __str__(self) -> str:
        if self.kind == "embedding":
            return self.kind
        if self.kind == "head":
            return str(Head(self.layer, self.number))
        return f"L{self.layer}{self.kind}"


@torch.no_grad()
def iterate_components(
    model: GPT,
    forward: ForwardPass,
    below: int | None = None,
    tokens: slice = slice(None),
    matrix: Tensor | None = None,
) -> Iterator[tuple[Component, Tensor]]:
    """Yield each component and what it wrote for each of the `tokens`, (B, T, C).

    The embedding is first, then come the heads, the bias of W_O if there is one, and the MLP of
    each layer. Their sum is the input of the layer `below`, or without it the final residual
    stream. An MLP that the model does not have writes 0. With a `matrix` (C, D), everything written
    is multiplied by it.
    """
    residuals = in_float32_or_finer(forward.residuals[:, :, tokens])  # (L + 1, B, T, C)
    heads = in_float32_or_finer(forward.heads[:, :, tokens])  # (L, B, T, H, d_v)

    def project(x: Tensor) -> Tensor:
        return x if matrix is None else x @ matrix

    yield Component("embedding"), project(residuals[0])
    for layer in range(model.config.n_layer if below is None else below):
        attention = model.blocks[layer].attention
        by_head = residual_writes(attention, heads[layer], matrix)  # (B, T, H, C)
        for number, written in enumerate(by_head.unbind(dim=2)):
            yield Component("head", layer, number), written
        rest = project(residuals[layer + 1] - residuals[layer]) - by_head.sum(dim=2)
        # A layer that is ablated writes nothing, its bias included.
        is_off = torch.equal(residuals[layer + 1], residuals[layer])
        if attention.W_O.bias is not None and not is_off:
            bias = project(attention.W_O.bias.to(rest.dtype))  # (C,)
            yield Component("bias", layer), bias.expand_as(rest)
            rest = rest - bias
        yield Component("MLP", layer), rest
