"""FSDP2: shard the parameters, gradients and optimizer state of a model by rows."""

import torch
from torch.distributed import init_device_mesh

from config import ResolvedConfig
from kernels import DTYPES
from model import GPT


def apply_fsdp(model: GPT, config: ResolvedConfig, size: int) -> None:
    """Shard a model over groups of `config.shard` ranks, each of which holds one copy.

    FSDP2 gathers the parameters block by block and averages the gradients during the backward pass.
    In bf16 or fp16 the blocks' matrices are communicated in that format, and everything else,
    gradients included, in float32. Vectors of the blocks, such as the gains of norms, stay whole on
    every rank.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    shape = (size // config.shard, config.shard)
    mesh = init_device_mesh(config.device, shape, mesh_dim_names=("copy", "shard"))
    # FSDP2 calls hooks between these parts; in a model compiled as a whole they would divide blocks
    if config.compile:
        for block in model.blocks:
            block.forward = torch.compile(block.forward)
        model.predict = torch.compile(model.predict)  # type: ignore[method-assign]
    policy = MixedPrecisionPolicy()
    if config.precision != "fp32":
        dtype = DTYPES[config.precision]
        policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    vectors = {p for p in model.blocks.parameters() if p.dim() == 1}
    for vector in vectors:  # FSDP2 does not move what it ignores
        vector.data = vector.data.to(config.device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, ignored_params=vectors)
    fully_shard(model, mesh=mesh, reshard_after_forward=False, ignored_params=vectors)
