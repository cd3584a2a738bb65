"""Initial weights of a model."""

import math

from torch import nn

INIT_STD = 0.02  # of GPT-2 (Radford et al. 2019)


def init_weights(model: nn.Module) -> None:
    """Initialize all weights, so that the loss starts near ln V.

    Matrices are drawn from N(0, 0.02²). Those that write to the residual stream, W_O and W_out, are
    drawn from N(0, 0.02² / (2 n_layer)), or N(0, 0.02² / n_layer) without MLPs. Biases are 0 and
    gains 1.

    Reference: Radford et al. 2019.
    """
    writers = model.config.n_layer * (1 if model.config.mlp == "none" else 2)
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            depth = writers if name.endswith(("W_O", "W_out")) else 1
            nn.init.normal_(module.weight, std=INIT_STD / math.sqrt(depth))
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)
