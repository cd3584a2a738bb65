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
from dataclasses import dataclass
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.harness import (
    BYTES_PER_MB,
    median_step_seconds,
    read_options,
    run_command,
    run_in_process,
    select,
)
from config import GPTConfig

DECODING_MODELS = {
    "0.8M": GPTConfig(65, block_size=512, n_layer=4, n_head=4, n_embd=128, bias=True),
    "10.65M": GPTConfig(65, block_size=512, n_layer=6, n_head=6, n_embd=384, bias=True),
    "124M": GPTConfig(50257, block_size=1024, n_layer=12, n_head=12, n_embd=768, bias=True),
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

    sizes: str = ",".join(DECODING_MODELS)
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


class TokenTime(NamedTuple):
    """Duration of decoding one token, and size of the cache that was read."""

    seconds: float
    cache_bytes: int


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

    from model import GPT
    from training.device import move_for_sampling, synchronize

    torch.manual_seed(0)
    model = move_for_sampling(GPT(DECODING_MODELS[size]), device)
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

    from benchmarks.peers import build_transformers
    from training.device import synchronize

    torch.manual_seed(0)
    model = build_transformers(DECODING_MODELS[size]).to(device).eval()
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


def time_grouped(n_kv_head: int, context: int, device: str, seconds: float) -> TokenTime:
    """Time the token after `context` - 1 others, with a cache of `n_kv_head` key/value heads."""
    import torch

    from generation.decoder import Decoder
    from model import GPT
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
    return TokenTime(step_seconds, cache.nbytes)


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


def main(argv: list[str]) -> None:
    """Measure everything and print two tables."""
    options = read_options(argv, SamplingOptions)
    select("sizes", options.sizes, DECODING_MODELS)
    from training.device import describe, pick_device

    device = pick_device(options.device)
    print(describe(device))
    Console().print(compare_decoding(options, device))
    Console().print(compare_key_value_heads(options, device))


def compare_decoding(options: SamplingOptions, device: str) -> Table:
    """Decode beside transformers, and return the table."""
    bytes_per_second, _ = run_in_process(measure_read_rate, device)
    title = f"Decoding, tokens per second; memory is read at {bytes_per_second / 1e9:.1f} GB/s"
    table = Table(title=title)
    columns = ["model", "batch", "transformers, float32", "GlassGPT", "ratio", "of memory bound"]
    for column in [*columns, "GlassGPT's weights"]:
        table.add_column(column, justify="right")
    for size in options.sizes.split(","):
        for batch in map(int, options.batches.split(",")):
            args = (size, batch, options.tokens, options.rounds, device)
            peer, _ = run_in_process(time_transformers, *args)
            ours, _ = run_in_process(time_glassgpt, *args)
            new_tokens = batch * options.tokens
            bound = batch * bytes_per_second / ours.weight_bytes
            table.add_row(
                size,
                str(batch),
                f"{new_tokens / peer.seconds:,.0f}",
                f"{new_tokens / ours.seconds:,.0f}",
                f"{peer.seconds / ours.seconds:.1f}x",
                f"{new_tokens / ours.seconds / bound:.0%}",
                ours.dtype,
            )
    return table


def compare_key_value_heads(options: SamplingOptions, device: str) -> Table:
    """Decode with fewer and fewer key/value heads, and return the table."""
    table = Table(
        title=f"{GROUPED_LAYERS} layers of width {GROUPED_WIDTH}, {GROUPED_HEADS} query heads, "
        f"{options.context:,} tokens in the cache"
    )
    for column in ("key/value heads", "KV cache", "tokens per second", "ratio"):
        table.add_column(column, justify="right")
    multi_head_seconds = None
    for n in (n for n in range(GROUPED_HEADS, 0, -1) if GROUPED_HEADS % n == 0):
        row, _ = run_in_process(time_grouped, n, options.context, device, options.seconds)
        multi_head_seconds = multi_head_seconds or row.seconds
        table.add_row(
            str(n),
            f"{row.cache_bytes / BYTES_PER_MB:.1f} MB",
            f"{1 / row.seconds:,.0f}",
            f"{multi_head_seconds / row.seconds:.1f}x",
        )
    return table


if __name__ == "__main__":
    run_command(main, __doc__)
