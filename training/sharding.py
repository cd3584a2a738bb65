"""A model given to several ranks, and put together.

With shard = 1 each rank has the whole model, and DistributedDataParallel averages the gradients.
Else FSDP2 divides it on a mesh (processes / shard, shard): each group of `shard` holds a copy.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy

import torch
from torch.distributed import DeviceMesh, init_device_mesh

from config import Config
from model import GPT, Block, autocast
from training.compiling import compile_to_same_bits
from training.distributed import World
from training.runtime import same_bits
from training.tensors import whole

GROUP = 4 << 20  # bytes of parameters that travel together at least: less costs more calls


def compile_parts(model: GPT, config: Config, world: World, say: Callable[[str], None]) -> bool:
    """Compile attention and MLP of each block, which are to be sharded; whether that worked.

    Tried on all ranks with a copy of the first block and a micro-batch: one that fails amid a
    sharded pass would leave the others waiting.
    """
    compile_to_same_bits(config.device)
    block, worked = deepcopy(model.blocks[0]).to(config.device), True
    try:
        compile_block(block)
        shape = config.micro_batch(world.size), config.model.block_size, config.model.n_embd
        x = torch.zeros(shape, device=config.device)
        rotary = None if model.rotary is None else model.rotary.to(config.device)
        with same_bits(config.device), autocast(config.device, config.precision):
            block(x, rotary).sum().backward()
    except Exception:  # the compilers' errors have no common base; the run can go on without
        worked = False
    worked = int(world.sum(torch.tensor(int(worked)))) == world.size
    if not worked:
        say("torch.compile failed on some process, so the run is eager")
        return False
    for block in model.blocks:
        compile_block(block)
    return True


def compile_block(block: Block) -> None:
    for part in (block.attention, block.mlp):
        part.forward = torch.compile(part.forward)


def shard_model(model: GPT, config: Config, size: int) -> tuple[Callable, DeviceMesh | None]:
    """Move the model to the device: whole with shard = 1, else sharded, blocks one by one, then
    what is left. In bf16, matrices that are sharded travel in bf16; gradients in float32.

    Returns what takes the forward passes of training, and the mesh of several ranks.
    """
    if size == 1:
        return model.to(config.device), None
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    if config.shard == 1:
        with warnings.catch_warnings():  # torch 2.11 has no other name for the first argument
            warnings.filterwarnings("ignore", ".*broadcast_buffers", FutureWarning)
            forward = DistributedDataParallel(model.to(config.device), broadcast_buffers=False,
                                              gradient_as_bucket_view=True)
        return forward, init_device_mesh(config.device, (size,), mesh_dim_names=("replicate",))
    shape, names = (config.shard,), ("shard",)
    if config.shard < size:
        shape, names = (size // config.shard, config.shard), ("replicate", "shard")
    mesh = init_device_mesh(config.device, shape, mesh_dim_names=names)
    bf16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    policy = bf16 if config.precision == "bf16" else MixedPrecisionPolicy()
    for blocks in groups(model.blocks):
        # The norms stay in float32, with the rest of the model.
        fully_shard([part for block in blocks for part in (block.attention, block.mlp)], mesh=mesh,
                    mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    return model, mesh


def groups(blocks: Iterable[Block]) -> Iterator[list[Block]]:
    """Blocks in a row whose parameters travel together: each by itself where it is large, else as
    many as make GROUP bytes."""
    group, size = [], 0
    for block in blocks:
        group.append(block)
        size += sum(p.nbytes for p in block.parameters())
        if size >= GROUP:
            yield group
            group, size = [], 0
    if group:
        yield group


@torch.no_grad()
def plain_copy(model: GPT, world: World) -> GPT | None:
    """The model as one process has it, on rank 0, made of all ranks' parts; None elsewhere.

    Where the device has no room for it, it is in the host's memory.
    """
    if world.size == 1:
        return model
    plain = None
    if world.rank == 0:
        device = model.head.weight.device
        if device.type == "cuda" and torch.cuda.mem_get_info()[0] < 8 * model.num_parameters():
            device = torch.device("cpu")
        with torch.device("meta"):
            plain = GPT(model.config)
        plain = plain.to_empty(device=device).train(model.training)
        if model.config.tie_embeddings:  # which that took apart
            plain.head.weight = plain.token_embedding.weight
    mine = dict([*plain.named_parameters(), *plain.named_buffers()]) if plain else {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        tensor = whole(tensor)
        if plain:
            mine[name].copy_(tensor)
    return plain


def reshard(model: GPT) -> None:
    """After a forward pass without a backward pass: let go of the rows of other ranks."""
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
