"""Compile a model with torch.compile, which takes a minute or two."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException

from common.errors import UserError
from common.terminal import error_sentence
from config import ResolvedConfig
from kernels import autocast
from model import GPT
from training.world import World

MAX_ERROR_CHARS = 200


def has_compiler() -> bool:
    """Return whether torch.compile finds a C++ compiler, which it needs for GPUs too."""
    candidates = (os.environ.get("CXX"), "g++", "clang++", "cl")
    return any(shutil.which(name) for name in candidates if name)


def compile_model(model: GPT, config: ResolvedConfig) -> nn.Module:
    """Return the model, which torch.compile compiles as a whole when it is first called.

    Without `compile` it is the model itself. So it is if the model is sharded, because its parts
    are compiled where it is placed.
    """
    if not config.compile or config.shard > 1:
        return model
    # On a CPU, cpp_wrapper generates two files instead of fifty; compiling their headers dominates
    # the time. torch 2.13 cannot generate them for attention in float32 that is computed again.
    has_cpp_wrapper = model.head.weight.device.type == "cpu" and not model.checkpoint_activations
    return torch.compile(model, options={"cpp_wrapper": True} if has_cpp_wrapper else None)


def compile_ahead(
    model: nn.Module, micro_batch: tuple[Tensor, Tensor], config: ResolvedConfig, world: World
) -> None:
    """Have torch.compile compile both passes on the inputs and targets (rows, T) of a micro-step.

    In a step, which must not end halfway, a signal would have to wait for it; here it ends it. With
    several processes nothing is compiled ahead, because the others could not be stopped.
    """
    if world.size > 1:
        return
    with world.interruptible():
        with autocast(config.device, config.precision):
            loss = model(*micro_batch)[1]
        loss.backward()
    world.check_stop()
    model.zero_grad()


@contextmanager
def explained_compiler_errors() -> Iterator[None]:
    """Turn an error of torch.compile into one of the user's, who can do without it."""
    try:
        yield
    except TorchDynamoException as e:
        reason = error_sentence(e)[:MAX_ERROR_CHARS]
        raise UserError(f"torch.compile failed here ({reason}): use compile=false") from None
