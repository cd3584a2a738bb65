"""Match our parameters with the tensors of another library's checkpoint."""

from collections.abc import Iterator
from typing import NamedTuple

from interop.names import MODULE_NAMES


class TensorMapping(NamedTuple):
    """A tensor of another library's checkpoint, and the parameters that it holds.

    Attributes:
        name: Its name there.
        parameters: Names of our parameters, whose rows are stacked in it.
        is_transposed: Whether it is the transpose of the stacked rows.
        shape: Its shape there.
    """

    name: str
    parameters: tuple[str, ...]
    is_transposed: bool
    shape: list[int]


def map_tensors(parameter_shapes: dict[str, list[int]], naming: str) -> Iterator[TensorMapping]:
    """Match parameters with the tensors of a checkpoint.

    Args:
        parameter_shapes: Shapes of our parameters by name. A tensor whose parameters are not among
            them is not in the checkpoint.
        naming: Key of `MODULE_NAMES`.

    Yields:
        Every tensor of the checkpoint.
    """
    for module, our_modules in _list_modules(parameter_shapes, naming):
        for kind in ("weight", "bias"):
            parameters = tuple(f"{name}.{kind}" for name in our_modules)
            if parameters[0] not in parameter_shapes:
                continue
            rows = sum(parameter_shapes[name][0] for name in parameters)
            shape = [rows, *parameter_shapes[parameters[0]][1:]]
            # GPT-2's linear layers, whose names begin with c_, compute x W instead of x Wᵀ
            is_transposed = kind == "weight" and ".c_" in module
            if is_transposed:
                shape.reverse()
            yield TensorMapping(f"{module}.{kind}", parameters, is_transposed, shape)


def _list_modules(
    parameter_shapes: dict[str, list[int]], naming: str
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Every module's name in another library, with ours."""
    names = MODULE_NAMES[naming]
    yield from names.top.items()
    layers = [int(name.split(".")[1]) for name in parameter_shapes if name.startswith("blocks.")]
    for layer in range(max(layers) + 1):
        for module, our_modules in names.block.items():
            our_names = tuple(f"blocks.{layer}.{name}" for name in our_modules)
            yield f"{names.layers}.{layer}.{module}", our_names
