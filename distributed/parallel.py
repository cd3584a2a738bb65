"""The model on the device of each rank: compiled, replicated or sharded, averaged and gathered.

With shard=1 each rank has the complete model. On GPUs with AdamW, torch's FSDP2 averages gradients
while the backward pass computes others. On CPUs, and with Muon, they are averaged after it: Muon's
are reduce-scattered to the owners of their matrices, all others summed in one message. With a
larger `shard`, FSDP2 shards the model on a mesh (processes / shard, shard): each group of `shard`
ranks holds one copy.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed import DeviceMesh, init_device_mesh, is_initialized
from torch.optim import Optimizer

from config import ResolvedConfig
from distributed.processes import World
from kernels import DTYPES
from model import GPT
from training.optimizers import Muon
from training.tensors import full_tensor, is_distributed
from variants import build_model

# Devices on which FSDP2 averages the gradients of a replicated model. On a CPU, one message after
# the backward pass is faster than FSDP2's hooks (LOG.md).
FSDP_DEVICES = ("cuda",)


def is_replicated_by_fsdp(config: ResolvedConfig, size: int) -> bool:
    """Return whether FSDP2 averages the gradients of a replicated model.

    With Muon it does not, because it would average the matrices on all ranks, not on their owners.
    """
    is_replicated = size > 1 and config.shard == 1 and config.optim.name != "muon"
    return is_replicated and config.device.partition(":")[0] in FSDP_DEVICES


def count_owners(config: ResolvedConfig, size: int) -> int:
    """Return the number of ranks among which Muon's matrices are divided.

    They are the ranks of one copy of the model, or of several copies as long as there are no more
    owners than layers. Other copies repeat their work, because each message is padded to a
    multiple of the owners.
    """
    copies = size // config.shard
    divisors = [n for n in range(1, copies + 1) if copies % n == 0]
    owner_copies = max(n for n in divisors if n == 1 or n * config.shard <= config.model.n_layer)
    return owner_copies * config.shard


def owners_mesh(config: ResolvedConfig, size: int) -> DeviceMesh | None:
    """Return the mesh (groups of owners, copies of the model in a group, shards) of the ranks.

    It has no third dimension if the model is not sharded. Without a process group there is no mesh.
    """
    if not is_initialized():
        return None
    owners = count_owners(config, size)
    shape: tuple[int, ...] = (size // owners, owners // config.shard, config.shard)
    names: tuple[str, ...] = ("group", "copy", "shard")
    dimensions = 2 if config.shard == 1 else 3
    return init_device_mesh(config.device, shape[:dimensions], mesh_dim_names=names[:dimensions])


def place_model(model: GPT, config: ResolvedConfig, size: int) -> Callable:
    """Move a model to the device, compile it if configured, and let FSDP2 manage it if it should.

    Returns:
        The function that computes a forward pass in training.
    """
    if config.shard > 1 or is_replicated_by_fsdp(config, size):
        apply_fsdp(model, config, size)
        return model
    model.to(config.device)
    if size == 1 and model.ngrams is not None:
        model.ngrams.sparse = True  # several ranks average dense gradients instead
    return compile_model(model) if config.compile else model


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


def compile_model(model: GPT) -> Callable:
    """Return a model that torch.compile compiles as a whole when it is first called."""
    # On a CPU two generated files instead of fifty, because their headers dominate the time. torch
    # 2.13 cannot generate them for attention in float32 that is computed again.
    has_cpp_wrapper = model.head.weight.device.type == "cpu" and not model.checkpoint_activations
    return torch.compile(model, options={"cpp_wrapper": True} if has_cpp_wrapper else None)


def compile_parts(model: GPT) -> None:
    """Have torch.compile compile each block, and the prediction after the blocks, in place.

    FSDP2 calls its hooks between these parts; in a model compiled as a whole they would divide the
    blocks.
    """
    for block in model.blocks:
        block.forward = torch.compile(block.forward)
    model.predict = torch.compile(model.predict)  # type: ignore[method-assign]


def synchronize_gradients(model: nn.Module, config: ResolvedConfig, is_last: bool) -> None:
    """Have FSDP2 average gradients in the last micro-step only; call it before each forward pass.

    A sharded model sums them over its shards in every micro-step, so that no rank stores all of
    them, and over the copies of the model in the last.
    """
    if not hasattr(model, "set_requires_gradient_sync"):
        return
    if config.shard == 1:
        model.set_requires_gradient_sync(is_last)
    else:
        model.set_requires_all_reduce(is_last)


@torch.no_grad()
def average_gradients(optimizers: list[Optimizer], world: World) -> None:
    """Average over the ranks the gradients that FSDP2 does not manage.

    Muon's gradients move to their owners. The others travel in one message, so that they are
    summed in the same order at every step. DistributedDataParallel changes the order after its
    first step.
    """
    grads = []
    for optimizer in optimizers:
        if isinstance(optimizer, Muon):
            optimizer.collect_gradients()
        else:
            params = [p for group in optimizer.param_groups for p in group["params"]]
            grads += [p.grad for p in params if not is_distributed(p)]
    if world.size == 1 or not grads:
        return
    sums = world.sum(torch.cat([grad.flatten() for grad in grads]))
    means = sums.div_(world.size).split([grad.numel() for grad in grads])
    for grad, mean in zip(grads, means):
        grad.copy_(mean.view_as(grad))


@torch.no_grad()
def plain_copy(model: GPT, world: World) -> GPT | None:
    """Gather an unsharded, uncompiled copy of the model on rank 0; return None on other ranks.

    A single process gets the model itself. All ranks call this together.
    """
    if world.size == 1:
        return model
    tensors = {name: full_tensor(tensor) for name, tensor in model.tensors().items()}
    if world.rank > 0:
        return None
    with torch.device("meta"):
        plain = build_model(model.config)
    plain.assign(tensors)
    return plain.train(model.training)


def reshard(model: GPT) -> None:
    """Free the other ranks' rows, which a forward pass without a backward pass leaves gathered."""
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
