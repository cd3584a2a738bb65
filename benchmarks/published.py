"""Published training speeds, and how far the simulation is from them.

A row of published.csv states the program and its settings, the sequences per GPU and micro-step,
and the speed in tokens per second and GPU. The first row of a program on a kind of GPU fixes the
utilization of the GPU, the only fitted number; the other rows are predicted.

Sources, read on 26 November 2026:

- github.com/pytorch/torchtitan: benchmarks/llama3_h100_202412_torchtitan.md, without float8; and
  docs/performance.md of August 2024, where the network of the A100s is not stated.
- github.com/mosaicml/llm-foundry, scripts/train/benchmarking/README.md: all rows with 2,048 tokens
  in bf16 that do not checkpoint activations, except one: 15,555 tokens per second of MPT 1B on 32
  A100s, 18% below its neighbors on 16 and on 64.
"""

import csv
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from benchmarks.hardware import GPUS, NETWORKS, Cluster
from benchmarks.step_time import Engine, make_config, simulate_step
from common.text import pluralize
from config import GPTConfig
from training.flops import tokens_per_step

MAX_ERROR = 0.15
# Smaller micro-steps are predicted, but not checked: matrix products are slower then, which the
# simulation ignores.
MIN_CHECKED_TOKENS = 8192
BISECTIONS = 20
LLAMA = GPTConfig(
    128_256,
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
MPT = GPTConfig(50368, block_size=2048, n_layer=32, n_head=32, n_embd=4096)
MODELS = {
    "Llama 3 8B": LLAMA,
    "Llama 3 70B": replace(LLAMA, n_layer=80, n_head=64, n_embd=8192, mlp_hidden=28672),
    "MPT 13B": replace(MPT, n_layer=40, n_head=40, n_embd=5120),
    "MPT 7B": MPT,
    "MPT 3B": replace(MPT, n_head=20, n_embd=2560),
    "MPT 1B": replace(MPT, n_layer=24, n_head=16, n_embd=2048),
    "MPT 760M": replace(MPT, n_layer=24, n_head=12, n_embd=1536),
    "MPT 350M": replace(MPT, n_layer=24, n_head=16, n_embd=1024),
    "MPT 125M": replace(MPT, n_layer=12, n_head=12, n_embd=768),
}
# Operations of a Llama block's forward pass per token, halved: weights of its matrices in the order
# wq, wk, wv, wo, w1, w3, w2, and the products of its attention.
LLAMA_PRODUCTS = [16_777_216, 4_194_304, 4_194_304, 16_777_216, 58_720_256, 58_720_256, 58_720_256]
LLAMA_ATTENTION = 32 * (128 + 128) * 8192
REPEATED_BY_OP = sum(LLAMA_PRODUCTS[1::2]) / (sum(LLAMA_PRODUCTS) + LLAMA_ATTENTION)
ENGINES = {
    # Torchtitan's activation checkpointing: "selective op" repeats every second matrix product,
    # "selective layer" every second block
    "selective op": Engine(outside_weight_bytes=2, recomputed=REPEATED_BY_OP),
    "selective layer": Engine(outside_weight_bytes=2, recomputed=0.5),
    "full": Engine(outside_weight_bytes=2, recomputed=1.0),
    # llm-foundry's sharding: SHARD_GRAD_OP keeps what the forward pass gathered; PURE reduces
    # gradients in bf16
    "FULL_SHARD": Engine(outside_weight_bytes=2),
    "SHARD_GRAD_OP": Engine(outside_weight_bytes=2, gathers_again=False),
    "PURE": Engine(outside_weight_bytes=2, gradient_bytes=2),
}


class Row(NamedTuple):
    """A row of published.csv; the model is sharded over all GPUs."""

    program: str
    gpu: str
    network: str
    model: str
    setting: str
    mode: str  # "eager" or "compiled"
    gpus: int
    sequences: int  # per GPU and micro-step
    accumulate: int
    speed: float  # tokens per second and GPU


class Prediction(NamedTuple):
    """A published speed and the predicted one."""

    row: Row
    speed: float  # tokens per second and GPU, predicted
    utilization: float
    is_fitted: bool

    @property
    def error(self) -> float:
        """Relative error of the predicted speed."""
        return self.speed / self.row.speed - 1

    @property
    def is_checked(self) -> bool:
        """Whether the simulation should hold for the row."""
        tokens = self.row.sequences * MODELS[self.row.model].block_size
        return tokens >= MIN_CHECKED_TOKENS


def read_published() -> list[Row]:
    """Read published.csv."""
    with (Path(__file__).parent / "published.csv").open(newline="") as file:
        _, *lines = csv.reader(file)
    return [
        Row(program, gpu, network, model, setting, mode, *map(int, numbers))
        for program, gpu, network, model, setting, mode, *numbers in lines
    ]


def predict_speed(row: Row, utilization: float) -> float:
    """Return the tokens per second and GPU that the simulation predicts for a row."""
    config = make_config(
        MODELS[row.model],
        row.gpus,
        row.gpus,
        row.sequences,
        row.accumulate,
        row.mode == "compiled",
    )
    cluster = Cluster(GPUS[row.gpu], NETWORKS[row.network], row.gpus, utilization)
    step = simulate_step(config, cluster, ENGINES[row.setting])
    return tokens_per_step(config) / row.gpus / step.seconds


def fit_utilization(row: Row) -> float:
    """Return the utilization with which the simulation predicts the speed of a row."""
    low, high = 0.0, 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if predict_speed(row, middle) < row.speed:
            low = middle
        else:
            high = middle
    return high


def predict_published() -> list[Prediction]:
    """Fit the utilization to the first row of each program and GPU, and predict the others."""
    predictions = []
    for _, group in groupby(read_published(), key=lambda row: (row.program, row.gpu)):
        fitted, *others = group
        utilization = fit_utilization(fitted)
        for row in (fitted, *others):
            speed = predict_speed(row, utilization)
            predictions.append(Prediction(row, speed, utilization, row is fitted))
    return predictions


def check_predictions(predictions: list[Prediction]) -> None:
    """Raise `AssertionError` if a checked speed is more than `MAX_ERROR` off."""
    for prediction in predictions:
        assert abs(prediction.error) <= MAX_ERROR or not prediction.is_checked, (
            f"{prediction.row}: the predicted speed is {prediction.error:+.1%} off"
        )


def format_predictions(predictions: list[Prediction]) -> str:
    """Return a Markdown table with the range of the errors for each program and GPU."""
    lines = [
        "| program, GPU | utilization | fitted to | predicted | models | GPUs | error |",
        "|---|---|---|---|---|---|---|",
    ]
    for _, series in groupby(predictions, key=lambda prediction: prediction.row[:2]):
        fitted, *others = series
        row = fitted.row
        for is_checked in (True, False):
            group = [prediction for prediction in others if prediction.is_checked == is_checked]
            if not group:
                continue
            models = list(dict.fromkeys(prediction.row.model for prediction in group))
            cells = [
                f"{row.program}, {row.gpu}",
                f"{fitted.utilization:.2f}",
                f"{row.model} on {row.gpus}",
                pluralize(len(group), "speed"),
                format_range(models),
                format_range(sorted({prediction.row.gpus for prediction in group})),
                format_range([f"{error:+.0%}" for error in sorted(p.error for p in group)]),
            ]
            if not is_checked:
                cells[3] += f", micro-steps of fewer than {MIN_CHECKED_TOKENS:,} tokens"
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def format_range(values: list) -> str:
    """Return the first and the last value."""
    first, last = str(values[0]), str(values[-1])
    return first if first == last else f"{first} to {last}"
