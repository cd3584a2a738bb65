"""Several processes that train one run, as torchrun started them.

Every rank runs the same train.py: it takes its slice of each batch, and holds its rows of every
tensor. FSDP2 shards the model over a mesh of (processes / shard, shard) ranks: with shard = 1 each
rank has the whole model (data parallel), with all of them its part alone. Rank 0 writes and prints,
and tells the others what it read or decided.
"""

import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from copy import deepcopy
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from cli.command import explained
from config import Config, UserError
from model import GPT, Block, autocast
from training.runtime import Stopped, StopSignal, compile_to_same_bits

# Rank 0 may draw or save for long. A process that died is noticed at once all the same, by its
# closed connection.
TIMEOUT = timedelta(days=1)
ROLL_CALL = 1.0  # seconds in which the ranks that are left report
CONNECTION_LOST = re.compile(r"gloo|nccl|connection (closed|reset)|broken pipe", re.IGNORECASE)


def join(alone: bool) -> "World":
    """The ranks that torchrun started; this process by itself where it did not, or if `alone`."""
    if alone or "TORCHELASTIC_RUN_ID" not in os.environ or os.environ["WORLD_SIZE"] == "1":
        return World()
    store, rank, size = next(dist.rendezvous("env://", timeout=TIMEOUT))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # It outlives a restart, and with it the addresses of processes that are gone.
        store = dist.PrefixStore(f"attempt_{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    return World(rank, size, store)


def check(config: Config, size: int) -> None:
    """Raise `UserError` where the configuration does not go with so many processes."""
    parts = config.accumulate * size
    if config.batch_size % parts:
        raise UserError(f"batch_size={config.batch_size} cannot be divided among {size} processes "
                        f"with accumulate={config.accumulate}: make it a multiple of {parts}")
    if config.shard != "auto" and size % config.shard:
        raise UserError(f"shard={config.shard} does not divide the {size} processes: "
                        "take a divisor, or shard=auto")
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if size > 1 and restarts != "0" and not (config.run_dir and config.resume == "auto"):
        raise UserError(f"torchrun's --max-restarts={restarts} goes on from a checkpoint "
                        "with run_dir=PATH resume=auto only: add them")


class World:
    """The ranks of a run, of which this is `rank` of `size`; alone, every method is at once done.

    Used as a context manager. A process of several ends with it, whatever comes after it in the
    program: threads of the group that outlive it can crash Python as it ends.
    """

    def __init__(self, rank: int = 0, size: int = 1, store: dist.Store | None = None):
        self.rank, self.size, self.stop, self.save_asked = rank, size, StopSignal(), False
        self._store, self._noted = store, None

    def __enter__(self):
        if self.size > 1:
            self.stop.__enter__()  # torchrun signals the ranks left, which first say who is gone
        return self

    def __exit__(self, kind, error, _):
        if self.size == 1:
            return
        if kind is None or kind is SystemExit:
            dist.barrier()
            leave(error.code or 0 if error else 0)
        if isinstance(error, RuntimeError) and CONNECTION_LOST.search(str(error)):
            self._say_who_is_gone(str(error))
        else:
            why = explained(error)
            reason = why or str(error) or kind.__name__
            self._store.set(f"ended/{self.rank}", reason.split("\n")[0])
            if why is None:
                traceback.print_exception(error)
            elif self.rank == 0:
                print(f"error: {why}", file=sys.stderr)
        leave(1)

    def _say_who_is_gone(self, error: str) -> None:
        """Print which ranks have ended, and why if they wrote that: those left report here."""
        left, reasons = {self.rank}, {}
        try:
            self._store.set(f"left/{self.rank}", "")
            time.sleep(ROLL_CALL)
            ranks = range(self.size)
            left = {rank for rank in ranks if self._store.check([f"left/{rank}"])}
            reasons = {rank: self._store.get(f"ended/{rank}").decode() for rank in ranks
                       if self._store.check([f"ended/{rank}"])}
            gone = reasons.keys() or set(ranks) - left
        except RuntimeError:  # what kept the store has ended
            gone = {0}
        if 0 in reasons or self.rank != min(left):  # it has said so, or another one says it
            return
        who = " or ".join(map(str, sorted(gone)))
        who = f"process {who} of {self.size}" if who else f"the connection to another ({error})"
        why = f" ({'; '.join(reasons.values())})" if reasons else ""
        print(f"error: {who} has ended{why}, and the run with it; the checkpoints are as they were:"
              " go on from the last one with resume=true; torchrun's report says more",
              file=sys.stderr)

    # What rank 0 knows, and what all agree on.

    def tell(self, value=None):
        """Rank 0's value, which JSON can hold, on every rank."""
        if self.size == 1:
            return value
        data = json.dumps(value if self.rank == 0 else None).encode()
        length = torch.tensor([len(data)])
        dist.broadcast(length, 0)
        if self.rank:
            data = bytes(int(length))
        buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        dist.broadcast(buffer, 0)
        return json.loads(buffer.numpy().tobytes())

    def first(self, work: Callable, *args):
        """What work(*args) returns, on rank 0; the others wait for it, and get None.

        Raises:
            Stopped: on every rank, where it did on rank 0.
        """
        result, status = None, 0
        if self.rank == 0:
            try:
                result = work(*args)
            except Stopped as stopped:
                status = stopped.exit_status
        if status := self.tell(status):
            raise Stopped(status)
        return result

    def sum(self, values: Tensor) -> Tensor:
        """The values summed over the ranks."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def check(self) -> None:
        """Raise `Stopped` where a signal asked any rank to end; note where one asked to save.

        Of several ranks all do so in the same call: the one after that in which they tell each
        other, so that nobody waits for the answer.
        """
        status, save = self.stop.exit_status or 0, self.stop.save_asked
        self.stop.save_asked = False
        if self.size > 1:
            now = torch.tensor([status, save])
            work = dist.all_reduce(now, dist.ReduceOp.MAX, async_op=True)
            before, self._noted = self._noted, (work, now)
            status = save = 0
            if before:
                before[0].wait()
                status, save = before[1].tolist()
        self.save_asked |= bool(save)
        if status:
            raise Stopped(status)


def leave(status: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


# The model and its tensors.

def compile_parts(model: GPT, config: Config, rows: int, world: World,
                  say: Callable[[str], None]) -> bool:
    """Compile attention and MLP of each block, which are to be sharded; whether that worked.

    Tried on all ranks with a copy of the first block and `rows` sequences: one that fails amid a
    sharded pass would leave the others waiting.
    """
    compile_to_same_bits(config.device)
    block, worked = deepcopy(model.blocks[0]).to(config.device), True
    try:
        compile_block(block)
        x = torch.zeros(rows, config.model.block_size, config.model.n_embd, device=config.device)
        rotary = None if model.rotary is None else model.rotary.to(config.device)
        with autocast(config.device, config.precision):
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


def shard_model(model: GPT, config: Config, size: int) -> None:
    """Move the model to the device, sharded: blocks one by one, then what is left.

    In bf16 the matrices travel in bf16, and their gradients are summed in float32.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    shape, names = (config.shard,), ("shard",)
    if config.shard < size:
        shape, names = (size // config.shard, config.shard), ("replicate", "shard")
    mesh = init_device_mesh(config.device, shape, mesh_dim_names=names)
    bf16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    policy = bf16 if config.precision == "bf16" else MixedPrecisionPolicy()
    for block in model.blocks:
        # The norms stay in float32, with the rest of the model.
        fully_shard([block.attention, block.mlp], mesh=mesh, mp_policy=policy,
                    reshard_after_forward=config.shard > 1)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)


def local(tensor: Tensor) -> Tensor:
    """The rows of a sharded tensor that are here; any other tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def rows_here(tensor: Tensor) -> slice:
    """Which rows of a tensor are here, all of one that is not sharded."""
    if not hasattr(tensor, "to_local"):
        return slice(0, len(tensor))
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements)
    return slice(offset[0], offset[0] + shape[0])


def copy_rows(file, name: str, tensor: Tensor) -> None:
    """Copy from an open safetensors file into a tensor, of a sharded one the rows that are here."""
    here = local(tensor)
    if here.numel():
        here.copy_(file.get_slice(name)[rows_here(tensor)])


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor put together, by all ranks at once; any other tensor itself."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


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
