"""One process, or several that torchrun started, which train one run.

Every rank runs the same train.py, with its slice of each batch. Rank 0 writes and prints. With
shard = 1 each rank has the whole model, and the gradients are averaged once a step; else FSDP2
divides it on a mesh (processes / shard, shard): each group of `shard` holds a copy."""

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DeviceMesh, init_device_mesh

from common.errors import UserError
from config import Config
from model import GPT
from training.tensors import full_tensor

# Rank 0 may draw or save for long. A process that died is noticed at once all the same, by its
# closed connection.
TIMEOUT = timedelta(days=1)
CONNECTION_LOST = re.compile(r"gloo|nccl|connection (closed|reset)|broken pipe", re.IGNORECASE)


class Stopped(Exception):
    """A signal asked the run to end, with `exit_status` 130 or 143."""

    def __init__(self, exit_status: int):
        super().__init__(exit_status)
        self.exit_status = exit_status


class World:
    """The ranks of a run, of which this is `rank` of `size`, and the signals that they got. Within
    it Ctrl-C and SIGTERM are noted for `check_stop`; Ctrl-C once more ends the process. One that
    came after the last check ends it when all is done."""

    def __init__(self, rank: int = 0, size: int = 1):
        self.rank, self.size, self.exit_status = rank, size, 0
        self.at_once = False  # whether a signal raises `Stopped` at once, where all can be redone

    def __enter__(self):
        self._before = {
            number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def __exit__(self, kind, *_):
        for number, handler in self._before.items():
            # torchrun signals who is still ending.
            signal.signal(number, signal.SIG_IGN if self.exit_status and self.size > 1 else handler)
        if self.exit_status and kind is None and self.size == 1:
            raise SystemExit(self.exit_status)  # a sweep takes no more jobs

    def _note(self, number, frame):
        self.exit_status = 128 + number
        signal.signal(signal.SIGINT, self._before[signal.SIGINT])
        if self.at_once:
            raise Stopped(self.exit_status)

    def broadcast(self, value=None):
        """Rank 0's value, on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, 0, device=torch.device("cpu"))
        return box[0]

    def sum(self, values: Tensor) -> Tensor:
        """The values summed over the ranks."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def check_stop(self) -> None:
        """Raise `Stopped` where a signal came, of several ranks to any; all call this at once."""
        if self.size > 1:
            noted = torch.tensor(self.exit_status)
            dist.all_reduce(noted, dist.ReduceOp.MAX)
            self.exit_status = int(noted)
        if self.exit_status:
            raise Stopped(self.exit_status)


@contextmanager
def join(alone: bool) -> Iterator[World]:
    """The ranks that torchrun started; this process by itself where it did not, or if `alone`."""
    if alone or "TORCHELASTIC_RUN_ID" not in os.environ or os.environ["WORLD_SIZE"] == "1":
        yield World()
        return
    store, rank, size = next(dist.rendezvous("env://", timeout=TIMEOUT))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # It outlives a restart, and with it the addresses of processes that are gone.
        store = dist.PrefixStore(f"attempt_{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    try:
        yield World(rank, size)
        dist.barrier()
    except RuntimeError as e:
        if not CONNECTION_LOST.search(str(e)):
            raise
        raise UserError(
            "another process of the run has ended, as torchrun's report says, and the "
            "run with it: go on from the last checkpoint with resume=true"
        ) from None
    finally:
        dist.destroy_process_group()


def compile_model(model: GPT, processes: int) -> Callable:
    """The model, to be compiled at its first step; of several processes its blocks' parts."""
    # On a CPU, kernels in two files, not in fifty, whose headers take the time.
    options = {"cpp_wrapper": True} if model.head.weight.device.type == "cpu" else None
    if processes == 1:
        return torch.compile(model, options=options)
    for block in model.blocks:
        for part in (block.attention, block.mlp):
            part.forward = torch.compile(part.forward)
    return model


def shard_model(model: GPT, config: Config, size: int) -> tuple[Callable, DeviceMesh | None]:
    """Move the model to the device, compiled if it is to be: whole with shard = 1, else sharded,
    in bf16 with matrices that travel in bf16 and gradients in float32. Returns what takes the
    forward passes of training, and the mesh of several ranks."""
    if size == 1:
        model.to(config.device)
        if model.ngrams is not None:
            model.ngrams.sparse = True  # not of several: their dense gradients are averaged
        return compile_model(model, size) if config.compile else model, None
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if config.compile:
        compile_model(model, size)
    if config.shard == 1:
        mesh = init_device_mesh(config.device, (size,), mesh_dim_names=("replicate",))
        return model.to(config.device), mesh
    shape, names = (config.shard,), ("shard",)
    if config.shard < size:
        shape, names = (size // config.shard, config.shard), ("replicate", "shard")
    mesh = init_device_mesh(config.device, shape, mesh_dim_names=names)
    bf16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    policy = bf16 if config.precision == "bf16" else MixedPrecisionPolicy()
    for block in model.blocks:  # its norms stay in float32, with the rest of the model
        fully_shard([block.attention, block.mlp], mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    return model, mesh


@torch.no_grad()
def average_gradients(model: GPT, world: World) -> None:
    """Replace each gradient by its mean over the ranks, all in one message, so that their sums have
    one order in every step: DistributedDataParallel cuts other messages after the first one."""
    if world.size > 1:
        grads = [p.grad for p in model.parameters()]
        means = world.sum(torch.cat([grad.flatten() for grad in grads])).div_(world.size)
        for grad, mean in zip(grads, means.split([grad.numel() for grad in grads])):
            grad.copy_(mean.view_as(grad))


@torch.no_grad()
def plain_copy(model: GPT, world: World) -> GPT | None:
    """The model as one process has it, on rank 0, made of all ranks' parts; None elsewhere."""
    if world.size == 1:
        return model
    tensors = {name: full_tensor(tensor) for name, tensor in model.state_dict().items()}
    if world.rank > 0:
        return None
    with torch.device("meta"):
        plain = GPT(model.config)
    plain.load_state_dict(tensors, assign=True)
    plain.rotary = model.rotary
    return plain.train(model.training)


def reshard(model: GPT) -> None:
    """After a forward pass without a backward pass: let go of the rows of other ranks."""
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
