"""How near the training step of a preset comes to the machine's rate of matrix products.

    python -m benchmarks.train_step [experiments=speedrun,induction,default] [seconds=10]
                                    [rounds=3] [SETTING=VALUE ...]

Each preset trains on its text in a new process, in which steps and matrix products in the same
precision are timed in turns, so that both see the same load. The share is the rate of the model's
operations, attention included but not the optimizer's, over that of the fastest product. Settings
are those of train.py, such as data.path=PATH, threads=1 or optim=adamw.
"""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.harness import (
    WARM_UP_STEPS,
    PassThroughOptions,
    measure_matmul_rate,
    read_options,
    run_command,
    run_in_process,
)
from config import ResolvedConfig

if TYPE_CHECKING:
    from model import GPT
    from training.world import World


@dataclass
class StepOptions(PassThroughOptions):
    """Options of this benchmark."""

    experiments: str = "speedrun,induction,default"
    seconds: float = 10.0
    rounds: int = 3


class StepShare(NamedTuple):
    """The steps of one preset, and the machine's rate while they were timed."""

    seconds: list[float]  # of each step
    flops: int  # operations of the model in a step
    matmul_rate: float  # operations per second

    @property
    def share(self) -> float:
        """Share of the rate that the median step reaches."""
        return self.flops / median(self.seconds) / self.matmul_rate


def measure_share(experiment: str, settings: list[str], seconds: float, rounds: int) -> StepShare:
    """Time the steps of a preset and matrix products in turns."""
    import cli
    from data.batches import Batches
    from interop import read_starting_model
    from run.checkpoints import Start
    from training.device import configure_process, synchronize
    from training.flops import model_size, tokens_per_step
    from training.plan import resolve
    from training.text import prepare_text
    from training.world import World

    arguments = [f"experiment={experiment}", *settings]
    requested = cli.read_job(arguments, read_starting_model).config
    text = prepare_text(requested, World(), None, Start())
    config = resolve(requested, 1, text, 0)
    configure_process(config)
    batches = text.task or Batches(
        text.train, config.model.block_size, config.batch_size, config.seed
    )
    _, take_step = make_train_step(config)
    steps = itertools.count()

    def time_step() -> float:
        step = next(steps)
        batch = batches.batch(step)
        start = time.perf_counter()
        take_step(step, batch)
        synchronize(config.device)
        return time.perf_counter() - start

    for _ in range(WARM_UP_STEPS):
        time_step()
    rates, step_seconds = [], []
    for _ in range(rounds):
        rates.append(measure_matmul_rate(config.device, config.precision))
        end = time.perf_counter() + seconds / rounds
        while time.perf_counter() < end:
            step_seconds.append(time_step())
    _, flops_per_token = model_size(config.model)
    return StepShare(step_seconds, flops_per_token * tokens_per_step(config), max(rates))


def main(argv: list[str]) -> dict[str, StepShare]:
    """Measure all presets, print a table and return the figures."""
    options = read_options(argv, StepOptions)
    shares: dict[str, StepShare] = {}
    table = Table()
    for column in ("preset", "GFLOP", "ms, least", "ms, median", "GFLOP/s", "of matmul", "share"):
        table.add_column(column, justify="right")
    for experiment in options.experiments.split(","):
        arguments = (experiment, options.settings, options.seconds, options.rounds)
        share = run_in_process(measure_share, *arguments).value
        shares[experiment] = share
        middle = median(share.seconds)
        table.add_row(
            experiment,
            f"{share.flops / 1e9:.1f}",
            f"{1000 * min(share.seconds):.1f}",
            f"{1000 * middle:.1f}",
            f"{share.flops / middle / 1e9:.0f}",
            f"{share.matmul_rate / 1e9:.0f}",
            f"{share.share:.2f}",
        )
    Console().print(table)
    return shares


def make_train_step(
    config: ResolvedConfig, world: "World | None" = None
) -> "tuple[GPT, Callable[[int, tuple], Any]]":
    """Build and place a model; return it, and a function of a step's number and batch."""
    from train import train_step
    from training.compiler import compile_model
    from training.loss_scale import LossScaler
    from training.losses import Losses
    from training.optimizers import build_optimizers
    from training.world import World
    from variants import build_model

    world = world or World()
    model = build_model(config.model)
    model.checkpoint_activations = config.checkpoint_activations
    world.place(model, config)
    compiled_model = compile_model(model, config)
    optimizers = build_optimizers(model, config.optim, config.precision)
    scaler, losses = LossScaler(config.precision), Losses(model, config.device)

    def take_step(step: int, batch: tuple) -> Any:
        return train_step(step, batch, compiled_model, optimizers, scaler, losses, config, world)

    return model, take_step


if __name__ == "__main__":
    run_command(main, __doc__)
