"""Find which of our parameters the tensors of another library's checkpoint contain."""

from collections.abc import Iterator
from typing import NamedTuple

from interop.names import MODULE_NAMES


class TensorMapping(NamedTuple):
    """A tensor of another library's checkpoint, and our parameters that it contains."""

    name: str  # of the tensor in the checkpoint
    parameters: list[str]  # names of our parameters, which are stacked by rows
    is_transposed: bool  # whether the checkpoint has the transpose of the stacked parameters
    shape: list[int]  # of the tensor in the checkpoint


def map_tensors(parameter_shapes: dict[str, list[int]], naming: str) -> Iterator[TensorMapping]:
    """Yield the tensors that another library's checkpoint of our model has.

    Parameters that our model lacks, such as biases, are not expected in the checkpoint either.
    """
    blocks = {int(name.split(".")[1]) for name in parameter_shapes if name.startswith("blocks.")}
    for i in range(-1, len(blocks)):  # -1: the modules outside the blocks
        for module, our_modules in MODULE_NAMES[naming].items():
            if ("{i}" in module) != (i >= 0):
                continue
            for kind in ("weight", "bias"):
                parameters = [f"{name}.{kind}".format(i=i) for name in our_modules.split()]
                if parameters[0] not in parameter_shapes:
                    continue
                rows = sum(parameter_shapes[name][0] for name in parameters)
                shape = [rows, *parameter_shapes[parameters[0]][1:]]
                # GPT-2's linear layers, whose names begin with c_, compute x W instead of x Wᵀ
                is_transposed = kind == "weight" and ".c_" in module
                if is_transposed:
                    shape.reverse()
                name = f"{module}.{kind}".format(i=i)
                yield TensorMapping(name, parameters, is_transposed, shape)
