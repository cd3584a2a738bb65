"""Training speed at equal architecture: GlassGPT against transformers' GPT2LMHeadModel and
nanoGPT's model with the same optimizer.

    python -m benchmarks.throughput [sizes=4x128,6x384,12x768] [seconds=20] [rounds=2]
                                    [device=auto] [peers=eager] [json=FILE]
    python -m benchmarks.throughput sizes=10M,124M,350M peers=compiled        # on a GPU

All take the same whole training steps (forward, backward, clipping, fused AdamW) on the same random
tokens, in turns, each time in a process of its own: transformers as it comes (eager, float32) and
under bf16 autocast, nanoGPT's model in plain torch, GlassGPT eager in float32 and as
`precision=auto compile=auto` become for a run of 2,000 steps; or with peers=compiled all in bf16,
compiled. For each the median step of `seconds` is taken, and the median of the rounds. Operations
are counted from the structure, attention included; their share is of what a matrix product reaches
here, in the precision used, and on a GPU also of its maker's figure.
"""

import itertools
import sys
from functools import partial
from statistics import median

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import cli
from benchmarks import apart, chosen, options, seconds_per, write_json

# Layers, heads, width, context, sequences a step, vocabulary.
SIZES = {
    "4x128": (4, 4, 128, 64, 12, 65),
    "6x384": (6, 6, 384, 256, 16, 65),
    "12x768": (12, 12, 768, 1024, 1, 50257),
}
GPU_SIZES = {
    "10M": (6, 6, 384, 256, 64, 65),
    "124M": (12, 12, 768, 1024, 16, 50257),
    "350M": (24, 16, 1024, 1024, 8, 50257),
}
ALL_SIZES = SIZES | GPU_SIZES
# Dense bf16 operations per second with float32 sums (NVIDIA's data sheets).
GPUS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "A10G": 70e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}
STEPS = 2000  # of the run for which compile=auto decides
OPTIM = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}


def matmul_rate(device: str, precision: str, seconds: float = 0.5) -> float:
    """Operations per second of a matrix product here, large enough to fill the device, measured for
    so many seconds."""
    import torch
    from torch.utils.benchmark import Timer

    size = 8192 if device.startswith("cuda") else 2048
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    a, b = torch.ones(2, size, size, device=device).to(dtype)
    timer = Timer("a @ b", globals={"a": a, "b": b}, num_threads=torch.get_num_threads())
    return 2 * size**3 / timer.blocked_autorange(min_run_time=seconds).median


def make_config(size: str, precision: str, compile: bool | str, device: str):
    """The run that is measured, resolved for this machine."""
    from config import Config, GPTConfig, OptimConfig
    from training.device import pick_precision

    n_layer, n_head, n_embd, block_size, batch_size, vocab_size = ALL_SIZES[size]
    return Config(
        device=device,
        precision=pick_precision(precision, device),
        compile=compile,
        batch_size=batch_size,
        max_steps=STEPS,
        shard=1,
        model=GPTConfig(
            vocab_size,
            block_size=block_size,
            n_layer=n_layer,
            n_head=n_head,
            n_embd=n_embd,
            bias=True,
        ),
        optim=OptimConfig(
            lr=OPTIM["lr"],
            beta1=OPTIM["betas"][0],
            beta2=OPTIM["betas"][1],
            weight_decay=OPTIM["weight_decay"],
            schedule="constant",
            warmup_steps=0,
        ),
    )


def ours(size: str, precision: str, compile: bool | str, device: str, seconds: float) -> dict:
    from model import GPT
    from training.device import configure_process
    from training.optimizers import build_optimizers
    from training.plan import model_size, should_compile
    from training.processes import compile_model

    config = make_config(size, precision, compile, device)
    flops = model_size(config.model)[1] * config.batch_size * config.model.block_size
    if config.compile == "auto":
        config.compile = should_compile(device, flops * STEPS)
    configure_process(config)
    return {
        **steps(
            GPT(config.model),
            lambda model, x, y: model(x, y)[1],
            config,
            seconds,
            partial(build_optimizers, optim=config.optim, precision=config.precision),
            partial(compile_model, processes=1),
        ),
        "flops": flops,
    }


def theirs(size: str, precision: str, compile: bool, device: str, seconds: float) -> dict:
    from transformers import GPT2Config, GPT2LMHeadModel, logging

    logging.set_verbosity_error()
    config = make_config(size, precision, compile, device)
    c = config.model
    shape = GPT2Config(
        vocab_size=c.vocab_size,
        n_positions=c.block_size,
        n_embd=c.n_embd,
        n_layer=c.n_layer,
        n_head=c.n_head,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    return steps(
        GPT2LMHeadModel(shape), lambda model, x, y: model(x, labels=x).loss, config, seconds
    )


def nanogpts(size: str, precision: str, compile: bool, device: str, seconds: float) -> dict:
    from benchmarks.plain import PlainGPT

    config = make_config(size, precision, compile, device)
    return steps(PlainGPT(config.model), lambda model, x, y: model(x, y), config, seconds)


def fused_adamw(model) -> list:
    import torch

    return [torch.optim.AdamW(model.parameters(), **OPTIM, fused=True)]


def steps(
    model, loss_of, config, seconds: float, make_optimizers=fused_adamw, compiled=None
) -> dict:
    """What a step of the model takes, on a GPU of ten that follow each other without a wait."""
    import numpy as np
    import torch

    from data.batches import Batches
    from model import autocast
    from training.device import synchronize

    tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, 1 << 20, dtype=np.uint16)
    batches = Batches(tokens, config.model.block_size, config.batch_size, seed=0)
    numbers = itertools.count()
    model.to(config.device)
    forward = (compiled or torch.compile)(model) if config.compile else model
    optimizers = make_optimizers(model)

    def train() -> None:
        x, y = (torch.from_numpy(part) for part in batches.batch(next(numbers)))
        if config.device.startswith("cuda"):
            x, y = x.pin_memory(), y.pin_memory()
        x, y = (part.to(config.device, non_blocking=True) for part in (x, y))
        with autocast(config.device, config.precision):
            loss = loss_of(forward, x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    together = 10 if config.device.startswith("cuda") else 1
    return {
        "seconds": seconds_per(train, seconds, lambda: synchronize(config.device), together),
        "parameters": sum(p.numel() for p in model.parameters()),
        "precision": config.precision,
        "compiled": bool(config.compile),
    }


# Name → what is measured, in which precision, compiled or not. The others are compared with the
# first.
RUNNERS = {
    "transformers": (theirs, "fp32", False),
    "transformers, bf16": (theirs, "bf16", False),
    "nanoGPT's model": (nanogpts, "fp32", False),
    "GlassGPT, eager float32": (ours, "fp32", False),
    "GlassGPT, auto": (ours, "auto", "auto"),
}
COMPILED = {
    "nanoGPT's model": (nanogpts, "bf16", True),
    "transformers": (theirs, "bf16", True),
    "GlassGPT": (ours, "bf16", True),
}
PEERS = {"eager": RUNNERS, "compiled": COMPILED}


def rates(device: str) -> dict:
    """Measured operations per second of a matrix product, by precision."""
    return {
        precision: matmul_rate(device, precision, seconds=1.0) for precision in ("fp32", "bf16")
    }


def main(argv: list[str]) -> dict:
    given = options(
        argv, __doc__, sizes=",".join(SIZES), seconds=20.0, rounds=2, device="auto", peers="eager"
    )
    (runners,) = chosen(given["peers"], PEERS).values()
    sizes = chosen(given["sizes"], ALL_SIZES)
    from training.device import describe, pick_device

    device = pick_device(given["device"])
    console = Console()
    result = {"machine": describe(device), "sizes": {}}
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(
            "matrix products", total=len(sizes) * given["rounds"] * len(runners) + 1
        )
        result["matmul"] = apart(rates, device)
        console.print(
            f"{result['machine']}; matrix products: "
            f"{result['matmul']['fp32'] / 1e9:,.0f} GFLOP/s in float32, "
            f"{result['matmul']['bf16'] / 1e9:,.0f} in bf16"
        )
        progress.advance(task)
        for size in sizes:
            measured = {name: [] for name in runners}
            for _ in range(given["rounds"]):
                for name, (runner, precision, compile) in runners.items():
                    progress.update(task, description=f"{size}: {name}")
                    measured[name].append(
                        apart(runner, size, precision, compile, device, given["seconds"])
                    )
                    progress.advance(task)
            rows = result["sizes"][size] = summed_up(size, measured, result["matmul"])
            console.print(table(size, rows, result["machine"]))
    write_json(given["json"], result)
    return result


def summed_up(size: str, measured: dict[str, list[dict]], matmul: dict) -> dict:
    """The rounds of each runner as one row of figures."""
    *_, block_size, batch_size, _ = ALL_SIZES[size]
    tokens, rows = block_size * batch_size, {}
    flops = next(m["flops"] for rounds in measured.values() for m in rounds if "flops" in m)
    for name, rounds in measured.items():
        seconds = median(m["seconds"] for m in rounds)
        first = next(iter(rows.values()), {"seconds": seconds})
        rows[name] = {
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "ratio": first["seconds"] / seconds,
            "flops_per_second": flops / seconds,
            "share_of_matmul": flops / seconds / matmul[rounds[0]["precision"]],
            "memory": max(m["memory"] for m in rounds),
            "precision": rounds[0]["precision"],
            "compiled": rounds[0]["compiled"],
            "parameters": rounds[0]["parameters"],
        }
    return rows


def table(size: str, rows: dict, machine: str) -> Table:
    n_layer, _, n_embd, block_size, batch_size, _ = ALL_SIZES[size]
    parameters = next(iter(rows.values()))["parameters"]
    table = Table(
        title=f"{n_layer} layers of {n_embd}, {parameters / 1e6:.1f} M parameters, "
        f"{batch_size} × {block_size} tokens a step"
    )
    gpu = next((rate for name, rate in GPUS.items() if name in machine), None)
    for column in ("", "tok/s", "ratio", "GFLOP/s", "of matmul", "memory") + (
        ("of data sheet",) if gpu else ()
    ):
        table.add_column(column, justify="right" if column else "left")
    for name, row in rows.items():
        compiled = "compiled" if row["compiled"] else "eager"
        how = f" ({row['precision']}, {compiled})" if name.endswith("auto") else ""
        table.add_row(
            name + how,
            f"{row['tokens_per_second']:,.0f}",
            f"{row['ratio']:.2f}x",
            f"{row['flops_per_second'] / 1e9:,.0f}",
            f"{row['share_of_matmul']:.0%}",
            f"{row['memory'] / 2**20:,.0f} MB",
            *([f"{row['flops_per_second'] / gpu:.0%}"] if gpu else []),
        )
    return table


if __name__ == "__main__":
    cli.start(lambda: main(sys.argv[1:]), lambda: __doc__)
