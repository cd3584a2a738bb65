"""The processes of a run: one, or several that torchrun started.

Every rank runs the same train.py on its slice of each batch. Rank 0 writes and prints. With shard=1
each rank has the complete model, and the gradients are averaged once per step. Otherwise FSDP2
shards the model on a mesh (processes / shard, shard): each group of `shard` ranks holds one copy.
"""

import os
import platform
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh, init_device_mesh

from cli import explain_error, print_stderr
from common.errors import SharedError
from common.signals import STOP_SIGNALS, set_handlers
from config import ResolvedConfig
from model import GPT, Block
from training.tensors import full_tensor

# Other ranks wait this long for rank 0, which may draw or save for hours. A process that dies is
# noticed at once nevertheless, because its connection closes.
RANK_TIMEOUT = timedelta(days=1)
CONNECTION_LOST = re.compile(r"gloo|nccl|connection (closed|reset)|broken pipe", re.IGNORECASE)


class Stopped(BaseException):
    """A signal asked the run to stop. Like `KeyboardInterrupt`, it is not an `Exception`.

    Attributes:
        exit_status: 130 after SIGINT, 143 after SIGTERM.
    """

    def __init__(self, exit_status: int) -> None:
        self.exit_status = exit_status


class World:
    """The ranks of a run and the stop signals that they received.

    As a context manager it notes SIGINT and SIGTERM for `check_stop`. A second Ctrl-C ends the
    process at once. A signal after the last check ends it when the block is left.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size
        self._exit_status = 0
        self._is_interruptible = False
        self._handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "World":
        self._handlers = set_handlers(dict.fromkeys(STOP_SIGNALS, self._note_signal))
        return self

    def __exit__(self, exception_type: type[BaseException] | None, *_: object) -> None:
        # torchrun sends signals to processes that are still ending.
        is_ignored = self._exit_status and self.size > 1
        set_handlers(dict.fromkeys(STOP_SIGNALS, signal.SIG_IGN) if is_ignored else self._handlers)
        if self._exit_status and exception_type is None and self.size == 1:
            raise SystemExit(self._exit_status)  # so that a sweep starts no more jobs

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        self._exit_status = 128 + number
        set_handlers({signal.SIGINT: self._handlers[signal.SIGINT]})
        if self._is_interruptible:
            raise Stopped(self._exit_status)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let a signal end the block early; call `check_stop` after it.

        The block must contain nothing that other ranks wait for, and only work that can be redone.
        """
        self._is_interruptible = True
        try:
            yield
        except Stopped:
            pass  # `check_stop` raises it on all ranks together
        finally:
            self._is_interruptible = False

    def check_stop(self) -> None:
        """Raise `Stopped` on all ranks if any of them got a signal; all ranks call this."""
        if self.size > 1:
            status = torch.tensor(self._exit_status)
            dist.all_reduce(status, dist.ReduceOp.MAX)
            self._exit_status = int(status)
        if self._exit_status:
            raise Stopped(self._exit_status)

    def broadcast(self, value: Any = None) -> Any:
        """Return rank 0's value on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, 0, device=torch.device("cpu"))
        return box[0]

    @contextmanager
    def share_errors(self) -> Iterator[None]:
        """Raise an error of any rank on all ranks, with the name of its machine.

        All ranks enter the block together and wait for each other at its end. It must contain
        nothing else that other ranks wait for.

        Raises:
            SharedError: If a rank met an error that the user can fix.
        """
        if self.size == 1:
            yield
            return
        sentence = None
        try:
            yield
        except Exception as e:
            sentence = explain_error(e)
            if sentence is None:  # a bug, whose traceback this rank prints
                raise
            if self.rank > 0:
                sentence = f"{_rank_name(self.rank)}: {sentence}"
        sentences: list[str | None] = [None] * self.size
        dist.all_gather_object(sentences, sentence)
        for first_sentence in filter(None, sentences):
            raise SharedError(first_sentence)

    def sum(self, values: Tensor) -> Tensor:
        """Sum a tensor over the ranks, in place, and return it."""
        if self.size > 1:
            dist.all_reduce(values)
        return values


def count_processes(alone: bool) -> int:
    """Return the number of processes that torchrun started for a run, unless it is to have one."""
    is_alone = alone or "TORCHELASTIC_RUN_ID" not in os.environ
    return 1 if is_alone else int(os.environ["WORLD_SIZE"])


@contextmanager
def join(alone: bool) -> Iterator[World]:
    """Join the ranks that torchrun started, unless the run is to have one process.

    An error that only this rank has met is printed, because only rank 0 prints at the end.

    Raises:
        SharedError: If the connection to another rank is lost.
    """
    if count_processes(alone) == 1:
        yield World()
        return
    store, rank, size = next(dist.rendezvous("env://", timeout=RANK_TIMEOUT))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # The store outlives a restart, and would return addresses of processes that are gone.
        store = dist.PrefixStore(f"attempt_{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=RANK_TIMEOUT)
    try:
        yield World(rank, size)
        dist.barrier()
    except Exception as e:
        if not (isinstance(e, RuntimeError) and CONNECTION_LOST.search(str(e))):
            _print_own_error(e, rank)
            raise
        raise SharedError(
            "another process of the run has ended, and this one with it; see torchrun's report for "
            "the reason, then continue from the last checkpoint with resume=true."
        ) from None
    finally:
        dist.destroy_process_group()


def _print_own_error(error: Exception, rank: int) -> None:
    """Print an error that rank 0, which prints its own at the end, does not have."""
    sentence = explain_error(error)
    if rank > 0 and sentence and not isinstance(error, SharedError):
        print_stderr(f"error: {_rank_name(rank)}: {sentence}")


def _rank_name(rank: int) -> str:
    return f"process {rank} on {platform.node()}"


def compile_model(model: GPT, processes: int) -> Callable:
    """Have torch.compile compile the model at its first step, and return what to call.

    With several processes, the attention and the MLP of each block are compiled in place.
    """
    # On a CPU two generated files instead of fifty, because their headers dominate the time. torch
    # 2.13 cannot generate them for attention in float32 that is computed again.
    has_cpp_wrapper = model.head.weight.device.type == "cpu" and not model.checkpoint_activations
    options = {"cpp_wrapper": True} if has_cpp_wrapper else None
    if processes == 1:
        return torch.compile(model, options=options)
    for block in model.blocks:
        for part in parts_of(block):
            part.forward = torch.compile(part.forward)
    return model


def parts_of(block: Block) -> list[nn.Module]:
    """Return the attention of a block, and its MLP if it has one."""
    return [part for part in (block.attention, block.mlp) if part is not None]


def shard_model(
    model: GPT, config: ResolvedConfig, size: int
) -> tuple[Callable, DeviceMesh | None]:
    """Move a model to the device, compile it if configured, and shard it over `config.shard` ranks.

    A sharded model in bf16 communicates matrices in bf16 and gradients in float32.

    Returns:
        What to call for a forward pass in training, and the mesh of the ranks (None for one rank).
    """
    model.rotary_at(0, config.model.block_size)  # a compiled forward pass cannot grow the table
    if size == 1:
        model.to(config.device)
        if model.ngrams is not None:
            model.ngrams.sparse = True  # several ranks average dense gradients instead
        return compile_model(model, size) if config.compile else model, None
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if config.compile:
        compile_model(model, size)
    if config.shard == 1:
        mesh = init_device_mesh(config.device, (size,), mesh_dim_names=("replicate",))
        return model.to(config.device), mesh
    if config.shard < size:
        shape = (size // config.shard, config.shard)
        mesh = init_device_mesh(config.device, shape, mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh(config.device, (config.shard,), mesh_dim_names=("shard",))
    policy = MixedPrecisionPolicy()
    if config.precision == "bf16":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for block in model.blocks:  # without its norms, which stay in float32 with the other weights
        fully_shard(parts_of(block), mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    return model, mesh


@torch.no_grad()
def average_gradients(model: GPT, world: World) -> None:
    """Replace each gradient by its mean over the ranks.

    All gradients travel in one message, so that they are summed in the same order at every step.
    DistributedDataParallel changes the order after its first step.
    """
    if world.size == 1:
        return
    grads = [p.grad for p in model.parameters()]
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
    tensors = {name: full_tensor(tensor) for name, tensor in model.state_dict().items()}
    if world.rank > 0:
        return None
    with torch.device("meta"):
        plain = GPT(model.config)
    plain.load_state_dict(tensors, assign=True)
    plain.rotary = model.rotary
    return plain.train(model.training)


def reshard(model: GPT) -> None:
    """Free the other ranks' rows, which a forward pass without a backward pass leaves gathered."""
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
