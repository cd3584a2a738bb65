"""FSDP2: gather the parameters of a model and average its gradients, block by block."""

import torch
from torch.distributed import init_device_mesh

from config import ResolvedConfig
from kernels import DTYPES
from model import GPT


def apply_fsdp(model: GPT, config: ResolvedConfig, size: int) -> None:
    """Let FSDP2 gather the parameters of a model and average its gradients, block by block.

    A sharded model in bf16 or fp16 communicates the blocks' matrices in that format, and everything
    else, gradients included, in float32. Vectors of the blocks, such as the gains of norms, stay
    whole on every rank.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if config.shard == size:
        mesh = init_device_mesh(config.device, (size,), mesh_dim_names=("shard",))
    else:
        shape = (size // config.shard, config.shard)
        mesh = init_device_mesh(config.device, shape, mesh_dim_names=("replicate", "shard"))
    if config.compile:
        compile_parts(model)
    policy = MixedPrecisionPolicy()
    if config.precision != "fp32" and config.shard > 1:
        dtype = DTYPES[config.precision]
        policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    vectors = {p for p in model.blocks.parameters() if p.dim() == 1}
    for vector in vectors:  # FSDP2 does not move what it ignores
        vector.data = vector.data.to(config.device)
    keeps_weights = config.shard == 1  # there are none of other ranks that could be freed
    for block in model.blocks:
        fully_shard(
            block,
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=not keeps_weights,
            ignored_params=vectors,
        )
    fully_shard(model, mesh=mesh, reshard_after_forward=False, ignored_params=vectors)


def compile_parts(model: GPT) -> None:
    """Have torch.compile compile each block, and the prediction after the blocks, in place.

    FSDP2 calls its hooks between these parts; in a model compiled as a whole they would divide the
    blocks.
    """
    for block in model.blocks:
        block.forward = torch.compile(block.forward)
    model.predict = torch.compile(model.predict)  # type: ignore[method-assign]
