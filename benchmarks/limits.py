"""What limits a training step on 1, 8 and 1,024 GPUs, and its memory and traffic, on paper.

    python -m benchmarks.limits [utilization=0.5]

Nothing is measured. The first table is computed for H100s in machines of eight, each GPU with a
port of 400 Gb/s InfiniBand, from `model_size`, which runs use, and assumptions:

- Memory is that of weights, gradients and AdamW's state; activations come on top.
- Matrix products reach `utilization` of the data sheet's rate, all other operations 0.8 of the
  memory's, and messages 0.8 of the links'. NCCL builds a ring for each port of a machine.
- The gradients of a complete model are averaged after the backward pass, and nothing hides that.
  The messages of a sharded model are hidden by compute, unless they take longer.

The second table compares published speeds with predicted ones, after one speed of each program has
fixed its utilization. They are those of bf16 in github.com/pytorch/torchtitan,
benchmarks/llama3_h100_202412_torchtitan.md, and github.com/mosaicml/llm-foundry,
scripts/train/benchmarking/README.md, both for H100s and read on 26 November 2026.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from benchmarks.harness import read_options, run_command
from config import GPTConfig, ResolvedConfig
from training.flops import PUBLISHED_16_BIT_FLOPS, model_size, tokens_per_step

GPUS_PER_MACHINE = 8
TOKENS_PER_GPU = 8192  # in a step of the first table
MIN_COMPUTE_SHARE = 0.9  # from here on, compute limits a step
KEPT_BYTES = 16  # of a parameter: weight, gradient and AdamW's two moments
# An H100's data sheet, in operations or bytes per second (each way) and bytes
RATE_SHARE = 0.8  # that is reached, of memory and links
FLOPS = PUBLISHED_16_BIT_FLOPS["NVIDIA H100 80GB HBM3"]
MEMORY = 80e9
MEMORY_RATE = RATE_SHARE * 3.35e12
NVLINK_RATE = RATE_SHARE * 450e9
PORT_RATE = RATE_SHARE * 50e9
# Seconds of a step of a ring within and between machines (NCCL's src/graph/tuning.cc, Simple).
STEP_WITHIN, STEP_BETWEEN = 3.4e-6, 14e-6
# Bytes that other operations than matrix products move: for each token, layer and channel; for each
# logit; and for each parameter, in the update. Counted on a CPU, of compiled steps.
MOVED_BYTES = 169
MOVED_LOGIT_BYTES = 12
MOVED_PARAMETER_BYTES = 40

LLAMA = GPTConfig(
    128256,
    block_size=8192,
    n_layer=32,
    n_head=32,
    n_kv_head=8,
    n_embd=4096,
    mlp_hidden=14336,
    norm="rmsnorm",
    position="rope",
    mlp="swiglu",
    tie_embeddings=False,
)
MPT_7B = GPTConfig(50368, block_size=2048, n_layer=32, n_head=32, n_embd=4096)
MPT_3B = replace(MPT_7B, n_head=20, n_embd=2560)
MPT_1B = replace(MPT_7B, n_layer=24, n_head=16, n_embd=2048)
# Models of the first table, and whether they checkpoint activations
MODELS = {
    "124 M": (GPTConfig(50257, block_size=1024, n_layer=12, n_head=12, n_embd=768), False),
    "1.2 B": (replace(MPT_1B, n_layer=22), False),
    "8 B, `checkpoint_activations`": (LLAMA, True),
}


class Published(NamedTuple):
    """A published speed of a model that is sharded over all GPUs."""

    program: str
    name: str
    model: GPTConfig
    gpus: int
    sequences: int  # per GPU and step
    speed: float  # tokens per second and GPU


PUBLISHED = [  # the first of each program fixes its utilization
    Published("torchtitan", "Llama 3 8B", LLAMA, 8, 2, 6667),
    Published("torchtitan", "Llama 3 8B", LLAMA, 128, 2, 6514),
    Published("llm-foundry", "MPT 7B", MPT_7B, 8, 6, 10643),
    Published("llm-foundry", "MPT 7B", MPT_7B, 512, 6, 9670),
    Published("llm-foundry", "MPT 3B", MPT_3B, 512, 8, 21664),
    Published("llm-foundry", "MPT 1B", MPT_1B, 8, 14, 45455),
    Published("llm-foundry", "MPT 1B", MPT_1B, 64, 20, 44402),
]


@dataclass
class LimitsOptions:
    """Options of this page."""

    utilization: float = 0.5


class Step(NamedTuple):
    """Seconds of a training step, and the bytes that a GPU receives in it."""

    products: float  # matrix products
    moving: float  # all other operations
    messages: float
    received: float
    is_hidden: bool  # the messages, by compute

    @property
    def compute(self) -> float:
        """Seconds without messages."""
        return self.products + self.moving

    @property
    def seconds(self) -> float:
        """Duration of the step."""
        if self.is_hidden:
            return max(self.compute, self.messages)
        return self.compute + self.messages


def make_config(model: GPTConfig, gpus: int, shard: int, sequences: int) -> ResolvedConfig:
    """Return a run in bf16 with `sequences` per GPU and step."""
    return ResolvedConfig(
        device="cuda", precision="bf16", shard=shard, batch_size=sequences * gpus, model=model
    )


def predict_step(config: ResolvedConfig, gpus: int, utilization: float) -> Step:
    """Predict a training step, of one micro-step, from its operations, bytes and their rates."""
    model, shard = config.model, config.shard
    parameters, flops_per_token = model_size(model)
    tokens = tokens_per_step(config) / gpus
    recomputed = 4 / 3 if config.checkpoint_activations else 1
    moved = MOVED_BYTES * model.n_layer * model.n_embd + MOVED_LOGIT_BYTES * model.vocab_size

    # A complete model averages gradients in float32. A sharded one gathers weights in bf16 in both
    # passes, sums gradients, and averages the sums over its copies.
    gathered = 8 * parameters * (shard - 1) / shard
    averaged = 8 * parameters / shard * (1 - shard / gpus)
    machines = -(-shard // GPUS_PER_MACHINE)
    latency = STEP_WITHIN * (shard - machines) + STEP_BETWEEN * (machines - 1)
    gathering = gathered / ring_rate(machines) + 3 * model.n_layer * latency
    ports = GPUS_PER_MACHINE if shard == 1 else 1  # the GPUs of a machine are in the same ring
    averaging = averaged / ring_rate(gpus // GPUS_PER_MACHINE, ports)
    return Step(
        products=tokens * flops_per_token * recomputed / (utilization * FLOPS),
        moving=(tokens * moved + MOVED_PARAMETER_BYTES * parameters / shard) / MEMORY_RATE,
        messages=max(gathering, averaging),
        received=gathered + averaged,
        is_hidden=shard > 1,
    )


def ring_rate(machines: int, ports: int = GPUS_PER_MACHINE) -> float:
    """Return the bytes per second that each GPU of a ring receives."""
    return min(NVLINK_RATE, ports * PORT_RATE) if machines > 1 else NVLINK_RATE


def list_limits(utilization: float) -> str:
    """Return a Markdown table: memory, traffic and limit of models on 1, 8 and 1,024 GPUs."""
    lines = [
        "| parameters | GPUs | `shard` | memory kept | received | compute | messages | limit |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, (model, is_recomputed) in MODELS.items():
        for gpus in (1, GPUS_PER_MACHINE, 1024):
            for shard in sorted({1, min(gpus, GPUS_PER_MACHINE), gpus}):
                config = make_config(model, gpus, shard, TOKENS_PER_GPU // model.block_size)
                config = replace(config, checkpoint_activations=is_recomputed)
                step = predict_step(config, gpus, utilization)
                memory = KEPT_BYTES * model_size(model)[0] / shard
                limit = "compute"
                if memory > MEMORY:
                    limit = "memory"
                elif step.compute / step.seconds < MIN_COMPUTE_SHARE:
                    limit = "messages"
                lines.append(
                    f"| {name} | {gpus:,} | {shard:,} | {memory / 1e9:,.1f} GB "
                    f"| {step.received / 1e9:,.1f} GB | {1000 * step.compute:,.0f} ms "
                    f"| {1000 * step.messages:,.0f} ms | {limit} |"
                )
    return "\n".join(lines)


def predict_published() -> list[tuple[Published, float]]:
    """Return each published speed and the predicted one."""
    predictions = []
    utilization: dict[str, float] = {}
    for published in PUBLISHED:
        program, _, model, gpus, sequences, speed = published
        config = make_config(model, gpus, gpus, sequences)
        tokens = sequences * model.block_size
        if program not in utilization:
            step = predict_step(config, gpus, utilization=1.0)
            utilization[program] = step.products / (tokens / speed - step.moving)
        step = predict_step(config, gpus, utilization[program])
        predictions.append((published, tokens / step.seconds))
    return predictions


def list_published() -> str:
    """Return a Markdown table of published and predicted speeds."""
    lines = [
        "| program | model | GPUs | published, tokens/s per GPU | predicted | error |",
        "|---|---|---|---|---|---|",
    ]
    for (program, name, _, gpus, _, speed), predicted in predict_published():
        error = predicted / speed - 1
        lines.append(
            f"| {program} | {name} | {gpus} | {speed:,} | {predicted:,.0f} | {error:+.0%} |"
        )
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    """Print both tables as Markdown."""
    options = read_options(argv, LimitsOptions)
    print(f"{list_limits(options.utilization)}\n\n{list_published()}")


if __name__ == "__main__":
    run_command(main, __doc__)
