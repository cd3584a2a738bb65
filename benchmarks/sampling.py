"""Decoding speed of `generate` and of transformers with its KV cache, at equal shapes.

    python -m benchmarks.sampling [sizes=0.8M,10.65M,124M] [batches=1,16] [tokens=256] [rounds=2]
                                  [device=auto] [context=4096] [seconds=2]

Both sample at temperature 1 after a prompt of 8 tokens with random weights, in turns, each time in
a new process: transformers in float32, GlassGPT in the precision that sample.py chooses, which the
last column shows. The fastest of `rounds` calls counts. The memory bound is the rate at which this
machine reads a matrix of 8192² elements in a matrix–vector product, divided by the bytes of the
weights as decoding keeps them, times the sequences in the batch.

The second table decodes at a long context with fewer and fewer key/value heads, which is what
grouped-query attention is for (Ainslie et al. 2023). `seconds` is the time for each row.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.harness import (
    BYTES_PER_MB,
    median_step_seconds,
    read_options,
    run_command,
    run_in_process,
    select,
)


class DecodingShape(NamedTuple):
    """DecodingShape of a model that decodes."""

    n_layer: int
    n_head: int
    n_embd: int
    block_size: int
    vocab_size: int


DECODING_SHAPES = {
    "0.8M": DecodingShape(4, 4, 128, 512, 65),
    "10.65M": DecodingShape(6, 6, 384, 512, 65),
    "124M": DecodingShape(12, 12, 768, 1024, 50257),
}
PROMPT_TOKENS = 8
WARM_UP_TOKENS = 8
READ_MATRIX_SIZE = 8192  # in float32 256 MB, larger than any cache
READ_SECONDS = 1.0
# The model of the second table; its context length is an option.
GROUPED_LAYERS = 4
GROUPED_HEADS = 16
GROUPED_WIDTH = 512
GROUPED_VOCAB_SIZE = 65


@dataclass
class SamplingOptions:
    """Options of this benchmark."""

    sizes: str = ",".join(DECODING_SHAPES)
    batches: str = "1,16"
    tokens: int = 256
    rounds: int = 2
    context: int = 4096
    seconds: float = 2.0
    device: str = "auto"


class DecodingTime(NamedTuple):
    """Duration of decoding, and size and type of the weights that were read."""

    seconds: float
    weight_bytes: int = 0
    dtype: str = ""


@dataclass
class DecodingRow:
    """Decoding speeds at one size and batch, in tokens per second."""

    size: str
    batch: int
    dtype: str
    transformers: float
    glassgpt: float
    ratio: float
    bound: float  # what reading the weights allows


@dataclass
class GroupedRow:
    """Decoding with some number of key/value heads."""

    n_kv_head: int
    tokens_per_second: float
    cache_bytes: int


@dataclass
class SamplingResult:
    """Everything that this benchmark measures."""

    machine: str
    bytes_per_second: float = 0.0
    decoding: list[DecodingRow] = field(default_factory=list)
    grouped: list[GroupedRow] = field(default_factory=list)


def fastest_seconds(generate: Callable[[int], None], tokens: int, rounds: int) -> float:
    """Return the seconds of the fastest of `rounds` calls, after a short one to warm up."""
    generate(min(tokens, WARM_UP_TOKENS))
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        generate(tokens)
        times.append(time.perf_counter() - start)
    return min(times)


def time_glassgpt(size: str, batch: int, tokens: int, rounds: int, device: str) -> DecodingTime:
    """Time GlassGPT's decoder."""
    import torch

    from model import GPT, GPTConfig
    from training.device import move_for_sampling, synchronize

    torch.manual_seed(0)
    config = GPTConfig(**DECODING_SHAPES[size]._asdict(), bias=True)
    model = move_for_sampling(GPT(config), device)
    prompt = torch.zeros(batch, PROMPT_TOKENS, dtype=torch.long, device=device)

    def generate(tokens: int) -> None:
        model.generate(prompt, tokens, seed=0)
        synchronize(device)

    seconds = fastest_seconds(generate, tokens, rounds)
    weights = [p for name, p in model.named_parameters() if "position" not in name]
    dtype = str(weights[0].dtype).removeprefix("torch.")
    return DecodingTime(seconds, sum(p.nbytes for p in weights), dtype)


def time_transformers(size: str, batch: int, tokens: int, rounds: int, device: str) -> DecodingTime:
    """Time transformers' GPT-2 with its KV cache."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, logging

    from training.device import synchronize

    logging.set_verbosity_error()
    shape = DECODING_SHAPES[size]
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=shape.vocab_size,
        n_positions=shape.block_size,
        n_embd=shape.n_embd,
        n_layer=shape.n_layer,
        n_head=shape.n_head,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = GPT2LMHeadModel(config).to(device).eval()
    prompt = torch.zeros(batch, PROMPT_TOKENS, dtype=torch.long, device=device)

    def generate(tokens: int) -> None:
        torch.manual_seed(0)
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=tokens,
            do_sample=True,
            top_k=0,
            use_cache=True,
        )
        synchronize(device)

    return DecodingTime(fastest_seconds(generate, tokens, rounds))


def time_grouped(n_kv_head: int, context: int, device: str, seconds: float) -> GroupedRow:
    """Time the token after `context` - 1 others, with a cache of `n_kv_head` key/value heads."""
    import torch

    from generation.decoder import Decoder
    from model import GPT, GPTConfig
    from training.device import move_for_sampling, synchronize

    torch.manual_seed(0)
    config = GPTConfig(
        GROUPED_VOCAB_SIZE,
        block_size=context,
        n_layer=GROUPED_LAYERS,
        n_head=GROUPED_HEADS,
        n_kv_head=n_kv_head,
        n_embd=GROUPED_WIDTH,
        position="rope",
    )
    model = move_for_sampling(GPT(config), device)
    decoder = Decoder(model, batch_size=1)
    cache = decoder.cache
    cache.keys.normal_()
    cache.values.normal_()
    token = torch.zeros(1, 1, dtype=torch.long, device=device)

    @torch.inference_mode()
    def step() -> None:
        cache.length = context - 1
        decoder.read(token)

    step_seconds = median_step_seconds(step, seconds, lambda: synchronize(device))
    return GroupedRow(n_kv_head, 1 / step_seconds, cache.nbytes)


def measure_read_rate(device: str) -> float:
    """Return the bytes per second at which a matrix–vector product reads its matrix.

    The faster of two precisions counts.
    """
    import torch

    from training.device import synchronize

    rates = []
    for dtype in (torch.float32, torch.bfloat16):
        matrix = torch.randn(READ_MATRIX_SIZE, READ_MATRIX_SIZE, device=device).to(dtype)
        vector = torch.randn(READ_MATRIX_SIZE, device=device).to(dtype)

        def multiply(matrix: torch.Tensor = matrix, vector: torch.Tensor = vector) -> None:
            torch.mv(matrix, vector)

        seconds = median_step_seconds(multiply, READ_SECONDS, lambda: synchronize(device))
        rates.append(matrix.nbytes / seconds)
    return max(rates)


def main(argv: list[str]) -> dict[str, Any]:
    """Measure everything, print two tables and return their figures."""
    options = read_options(argv, SamplingOptions)
    sizes = select("sizes", options.sizes, DECODING_SHAPES)
    batches = [int(batch) for batch in options.batches.split(",")]
    from training.device import describe, pick_device

    device = pick_device(options.device)
    kv_heads = [n for n in range(GROUPED_HEADS, 0, -1) if GROUPED_HEADS % n == 0]
    console, result = Console(), SamplingResult(describe(device))
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("memory", total=1 + 2 * len(sizes) * len(batches) + len(kv_heads))

        def measure(description: str, function: Callable[..., Any], *args: Any) -> Any:
            progress.update(task, description=description)
            value, _ = run_in_process(function, *args)
            progress.advance(task)
            return value

        result.bytes_per_second = measure("memory", measure_read_rate, device)
        for size in sizes:
            for batch in batches:
                args = (size, batch, options.tokens, options.rounds, device)
                peer = measure(f"{size}, batch {batch}: transformers", time_transformers, *args)
                ours = measure(f"{size}, batch {batch}: GlassGPT", time_glassgpt, *args)
                new_tokens = batch * options.tokens
                row = DecodingRow(
                    size,
                    batch,
                    ours.dtype,
                    transformers=new_tokens / peer.seconds,
                    glassgpt=new_tokens / ours.seconds,
                    ratio=peer.seconds / ours.seconds,
                    bound=batch * result.bytes_per_second / ours.weight_bytes,
                )
                result.decoding.append(row)
        for n in kv_heads:
            settings = (n, options.context, device, options.seconds)
            result.grouped.append(measure(f"{n} key/value heads", time_grouped, *settings))
    console.print(make_decoding_table(result))
    console.print(make_grouped_table(result, options.context))
    return asdict(result)


def make_decoding_table(result: SamplingResult) -> Table:
    """Show decoding beside transformers."""
    table = Table(
        title=f"Decoding, tokens per second; {result.machine}, which reads "
        f"{result.bytes_per_second / 1e9:.1f} GB/s"
    )
    columns = ["model", "batch", "transformers, float32", "GlassGPT", "ratio", "of memory bound"]
    for column in [*columns, "GlassGPT's weights"]:
        table.add_column(column, justify="right")
    for row in result.decoding:
        table.add_row(
            row.size,
            str(row.batch),
            f"{row.transformers:,.0f}",
            f"{row.glassgpt:,.0f}",
            f"{row.ratio:.1f}x",
            f"{row.glassgpt / row.bound:.0%}",
            row.dtype,
        )
    return table


def make_grouped_table(result: SamplingResult, context: int) -> Table:
    """Show decoding with fewer and fewer key/value heads."""
    table = Table(
        title=f"{GROUPED_LAYERS} layers of width {GROUPED_WIDTH}, {GROUPED_HEADS} query heads, "
        f"{context:,} tokens in the cache"
    )
    for column in ("key/value heads", "KV cache", "tokens per second", "ratio"):
        table.add_column(column, justify="right")
    multi_head = result.grouped[0].tokens_per_second  # one key/value head for each query head
    for row in result.grouped:
        table.add_row(
            str(row.n_kv_head),
            f"{row.cache_bytes / BYTES_PER_MB:.1f} MB",
            f"{row.tokens_per_second:,.0f}",
            f"{row.tokens_per_second / multi_head:.1f}x",
        )
    return table


if __name__ == "__main__":
    run_command(main, __doc__)
