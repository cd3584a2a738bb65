"""Join the processes of a run, one or several that were started together: see `training.world`."""

import os
import platform
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import init_device_mesh

from common.errors import SharedError, UserError
from common.launcher import count_processes
from common.signals import STOP_SIGNALS, set_handlers
from common.terminal import STATUS_USER_ERROR, explain_error, print_stderr
from config import ResolvedConfig
from kernels import DTYPES
from model import GPT
from training.sharding import full_tensor, is_distributed
from training.world import World
from variants import build_model

# All ranks do the same amount of work in a training step, so one that is late by minutes hangs.
STEP_TIMEOUT = timedelta(minutes=10)
# Other ranks wait this long for rank 0, which may draw or save for hours. A process that dies is
# noticed at once nevertheless, because its connection closes.
RANK_0_TIMEOUT = timedelta(days=1)
SECONDS_BETWEEN_CHECKS = 1.0  # of stop signals; torchrun waits 30 s after it has sent one


class DistributedWorld(World):
    """Several ranks; all of them call a method together.

    With shard=1 each rank has the complete model, and gradients are averaged after the backward
    pass. With a larger `shard`, each group of `shard` ranks holds one copy: see `apply_fsdp`. In
    `waiting_group`, on the CPU and with a long timeout, ranks wait while rank 0 works alone.
    """

    def __init__(
        self, rank: int, size: int, waiting_group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(rank, size)
        self._waiting_group = waiting_group
        self._steps_between_checks = 1  # equal on all ranks
        self._steps_since_check = 0
        self._last_check = time.monotonic()

    def __exit__(self, *_: object) -> None:
        # torchrun sends signals to processes that are still ending.
        ignored = dict.fromkeys(STOP_SIGNALS, signal.SIG_IGN)
        set_handlers(ignored if self._exit_status else self._handlers)

    def check_stop(self, at_once: bool = True) -> None:
        """Raise `Stopped` on all ranks if any of them got a signal; see `World.check_stop`."""
        if not at_once:
            self._steps_since_check += 1
            if self._steps_since_check < self._steps_between_checks:
                return
        seconds = time.monotonic() - self._last_check
        steps = max(1, int(SECONDS_BETWEEN_CHECKS * self._steps_since_check / seconds))
        # The largest exit status, and the fewest steps until the next check
        message = torch.tensor([self._exit_status, -steps])
        dist.all_reduce(message, dist.ReduceOp.MAX, group=self._waiting_group)
        self._exit_status, self._steps_between_checks = int(message[0]), -int(message[1])
        self._steps_since_check, self._last_check = 0, time.monotonic()
        super().check_stop()

    # --- Messages ---------------------------------------------------------------------------------

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank."""
        box = [value]
        dist.broadcast_object_list(box, 0, group=self._waiting_group, device=torch.device("cpu"))
        return box[0]

    def wait(self) -> None:
        """Wait until all ranks are here, however long rank 0 has worked alone."""
        dist.barrier(group=self._waiting_group)

    def sum(self, values: Tensor) -> Tensor:
        """Sum a tensor over the ranks, in place, and return it."""
        dist.all_reduce(values)
        return values

    # --- The model and its gradients --------------------------------------------------------------

    def place(self, model: GPT, config: ResolvedConfig) -> None:
        """Move the model to the device of each rank, or shard it; see `World.place`."""
        self.wait()  # for the ranks that still read weights
        if config.shard > 1:
            apply_fsdp(model, config, self.size)
        else:
            super().place(model, config)

    @torch.no_grad()
    def average_gradients(self, model: nn.Module) -> None:
        """Average the gradients that FSDP2 has not averaged.

        They travel in one message, so that they are summed in the same order at every step.
        """
        grads = [p.grad for p in model.parameters() if not is_distributed(p)]
        if not grads:
            return
        sums = self.sum(torch.cat([grad.flatten() for grad in grads]))
        means = sums.div_(self.size).split([grad.numel() for grad in grads])
        for grad, mean in zip(grads, means):
            grad.copy_(mean.view_as(grad))

    def join_norms(self, norms: Tensor, params: list[Tensor]) -> Tensor:
        """Return the norms (parameters,) of whole gradients, given those of each rank's parts.

        A gradient is on all ranks, or sharded by rows over the ranks of each copy of the model.
        """
        parts = [p.grad.device_mesh.shape[-1] if is_distributed(p.grad) else 1 for p in params]
        factors = torch.tensor(parts, dtype=torch.float64, pin_memory=norms.is_cuda)
        factors = factors.to(norms.device, non_blocking=norms.is_cuda)
        squares = self.sum(factors * norms.double().square())
        return (squares / self.size).sqrt().float()

    @contextmanager
    def evaluating(self, model: GPT) -> Iterator[None]:
        """Put a model into evaluation mode, uncompiled; at the end free the gathered rows."""
        try:
            with model.evaluating(), torch.compiler.set_stance("force_eager"):
                yield
        finally:
            for module in model.modules():
                if hasattr(module, "reshard"):
                    module.reshard()

    @torch.no_grad()
    def plain_copy(self, model: GPT) -> GPT | None:
        """Gather an unsharded, uncompiled copy of the model on rank 0; return None elsewhere."""
        tensors = {name: full_tensor(tensor) for name, tensor in model.tensors().items()}
        if self.rank > 0:
            return None
        with torch.device("meta"):
            plain = build_model(model.config)
        plain.assign(tensors)
        return plain.train(model.training)


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


@contextmanager
def join(alone: bool) -> Iterator[World]:
    """Join the ranks that were started together, unless the run is to have one process.

    The first rank that fails reports its error. It ends the others, whose errors follow from that.
    """
    if count_processes(alone) == 1:
        yield World()
        return
    store, rank, size = _connect()
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=STEP_TIMEOUT)
    try:
        world = DistributedWorld(rank, size, dist.new_group(backend="gloo", timeout=RANK_0_TIMEOUT))
        yield world
        world.wait()
    except SharedError:
        raise
    except Exception as e:
        if not _fails_first(store, rank):
            raise SystemExit(STATUS_USER_ERROR) from None
        raise _report_failure(e, rank)  # noqa: B904  # often the same error
    finally:
        dist.destroy_process_group()


def _connect() -> tuple[dist.Store, int, int]:
    """Return the store that all ranks share, this rank and their number, once rank 0 is ready."""
    try:
        store, rank, size = next(dist.rendezvous("env://", timeout=RANK_0_TIMEOUT))
    except ValueError as e:  # RANK and WORLD_SIZE are set, and another variable is not
        raise UserError(f"{e}: set it, or use distributed=none") from None
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # The store outlives a restart, and would return addresses of processes that are gone.
        store = dist.PrefixStore(f"attempt_{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    if rank == 0:  # which has read the configuration, and perhaps downloaded a model
        store.delete_key("failed")  # of the processes before a machine was replaced
        store.set("rank_0_is_ready", "")
    store.wait(["rank_0_is_ready"], RANK_0_TIMEOUT)
    return store, rank, size


def _report_failure(error: Exception, rank: int) -> Exception:
    """Print the error of the first rank that failed unless that is rank 0; return what to raise."""
    sentence = explain_error(error)
    is_of_gloo = type(error) is RuntimeError and "gloo" in str(error)
    if isinstance(error, dist.DistError) or is_of_gloo:  # no rank has reported an error
        sentence = "another process was lost, or hangs: its own messages may say why"
        error = UserError(sentence)
    if rank > 0 and sentence:
        print_stderr(f"error: process {rank} on {platform.node()}: {sentence}")
    return error


def _fails_first(store: dist.Store, rank: int) -> bool:
    """Return whether no other rank has failed, whose end would be the reason for this error."""
    try:
        return store.compare_set("failed", "", str(rank)) == str(rank).encode()
    except RuntimeError:  # the store has ended with the other rank
        return False
