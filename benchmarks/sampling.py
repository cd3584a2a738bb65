"""Decoding speed: GlassGPT's `generate` against transformers' with its cache, on the same random
weights' shapes.

    python -m benchmarks.sampling [sizes=0.8M,10.65M,124M] [batches=1,16] [tokens=256] [rounds=2]
                                  [device=auto] [context=4096] [json=FILE]

Both sample at temperature 1 after a prompt of 8 tokens, in turns, each time in a process of its
own; what counts is the fastest of `rounds` whole calls. The bound is what memory allows: the bytes
of the weights, as they are kept here for sampling, over the rate at which a matrix–vector product
reads 8192² of them here, times the sequences in the batch. The second table decodes at a long
context with fewer and fewer key/value heads, the reason for grouping them.
"""

import sys
import time

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import cli
from benchmarks import apart, chosen, options, seconds_per, write_json

# Layers, heads, width, context, vocabulary.
SIZES = {
    "0.8M": (4, 4, 128, 512, 65),
    "10.65M": (6, 6, 384, 512, 65),
    "124M": (12, 12, 768, 1024, 50257),
}
PROMPT = 8
LONG = {"n_layer": 4, "n_head": 16, "n_embd": 512}  # the model of the second table


def fastest(generate, tokens: int, rounds: int) -> float:
    """Seconds of the fastest of `rounds` calls for so many tokens, after a short one."""
    generate(min(tokens, 8))
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        generate(tokens)
        times.append(time.perf_counter() - began)
    return min(times)


def ours(size: str, batch: int, tokens: int, rounds: int, device: str) -> dict:
    import torch

    from model import GPT, GPTConfig
    from training.device import move_for_sampling, synchronize

    n_layer, n_head, n_embd, block_size, vocab_size = SIZES[size]
    torch.manual_seed(0)
    model = move_for_sampling(
        GPT(
            GPTConfig(
                vocab_size,
                block_size=block_size,
                n_layer=n_layer,
                n_head=n_head,
                n_embd=n_embd,
                bias=True,
            )
        ),
        device,
    )
    prompt = torch.zeros(batch, PROMPT, dtype=torch.long, device=device)

    def generate(tokens: int) -> None:
        model.generate(prompt, tokens, seed=0)
        synchronize(device)

    read = [p for name, p in model.named_parameters() if "position" not in name]
    return {
        "seconds": fastest(generate, tokens, rounds),
        "parameters": model.num_parameters(),
        "bytes": sum(p.nbytes for p in read),
        "dtype": str(read[0].dtype).removeprefix("torch."),
    }


def theirs(size: str, batch: int, tokens: int, rounds: int, device: str) -> dict:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, logging

    from training.device import synchronize

    logging.set_verbosity_error()
    n_layer, n_head, n_embd, block_size, vocab_size = SIZES[size]
    torch.manual_seed(0)
    model = (
        GPT2LMHeadModel(
            GPT2Config(
                vocab_size=vocab_size,
                n_positions=block_size,
                n_embd=n_embd,
                n_layer=n_layer,
                n_head=n_head,
                bos_token_id=0,
                eos_token_id=None,
                pad_token_id=0,
            )
        )
        .to(device)
        .eval()
    )
    prompt = torch.zeros(batch, PROMPT, dtype=torch.long, device=device)

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

    return {"seconds": fastest(generate, tokens, rounds)}


def grouped(n_kv_head: int, context: int, device: str, seconds: float) -> dict:
    """A sequence's next token after `context` others, with a cache of n_kv_head key/value heads."""
    import torch

    from decoder import Decoder
    from model import GPT, GPTConfig
    from training.device import move_for_sampling, synchronize

    torch.manual_seed(0)
    config = GPTConfig(65, block_size=context, n_kv_head=n_kv_head, position="rope", **LONG)
    model = move_for_sampling(GPT(config), device)
    cache = model.make_cache(1)
    cache.keys.normal_()
    cache.values.normal_()
    decoder, token = Decoder(model, cache), torch.zeros(1, dtype=torch.long, device=device)

    @torch.inference_mode()
    def step() -> None:
        cache.length = context - 1
        decoder.read(token[:, None])

    return {
        "tokens_per_second": 1 / seconds_per(step, seconds, lambda: synchronize(device)),
        "cache_bytes": cache.nbytes,
    }


def read_rate(device: str) -> dict:
    """Bytes per second at which a matrix–vector product reads its matrix, larger than any cache:
    the better of two precisions."""
    import torch

    from training.device import synchronize

    rates = []
    for dtype in (torch.float32, torch.bfloat16):
        weights = torch.randn(8192, 8192, device=device).to(dtype)
        x = torch.randn(8192, device=device).to(dtype)
        rates.append(
            weights.nbytes
            / seconds_per(lambda x=x, w=weights: torch.mv(w, x), 1.0, lambda: synchronize(device))
        )
    return {"bytes_per_second": max(rates)}


def main(argv: list[str]) -> dict:
    given = options(
        argv,
        __doc__,
        sizes=",".join(SIZES),
        batches="1,16",
        tokens=256,
        rounds=2,
        context=4096,
        seconds=2.0,
        device="auto",
    )
    sizes, batches = chosen(given["sizes"], SIZES), [int(b) for b in given["batches"].split(",")]
    from training.device import describe, pick_device

    device = pick_device(given["device"])
    heads = [2**n for n in range(LONG["n_head"].bit_length() - 1, -1, -1)]
    console, result = Console(), {"machine": describe(device), "decoding": [], "grouped": []}
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("memory", total=1 + 2 * len(sizes) * len(batches) + len(heads))

        def measure(what: str, function, *args) -> dict:
            progress.update(task, description=what)
            measured = apart(function, *args)
            progress.advance(task)
            return measured

        rate = result["bytes_per_second"] = measure("memory", read_rate, device)["bytes_per_second"]
        for size in sizes:
            for batch in batches:
                args = (size, batch, given["tokens"], given["rounds"], device)
                peer = measure(f"{size}, batch {batch}: transformers", theirs, *args)
                mine = measure(f"{size}, batch {batch}", ours, *args)
                made = batch * given["tokens"]
                result["decoding"].append(
                    {
                        "size": size,
                        "batch": batch,
                        "dtype": mine["dtype"],
                        "transformers": made / peer["seconds"],
                        "glassgpt": made / mine["seconds"],
                        "ratio": peer["seconds"] / mine["seconds"],
                        "bound": batch * rate / mine["bytes"],
                    }
                )
        for n in heads:
            result["grouped"].append(
                {
                    "n_kv_head": n,
                    **measure(
                        f"{n} key/value heads",
                        grouped,
                        n,
                        given["context"],
                        device,
                        given["seconds"],
                    ),
                }
            )
    show(console, result, given["context"])
    write_json(given["json"], result)
    return result


def show(console: Console, result: dict, context: int) -> None:
    table = Table(
        title=f"Decoding, tokens per second; {result['machine']}, reading "
        f"{result['bytes_per_second'] / 1e9:.1f} GB/s"
    )
    for column in (
        "model",
        "batch",
        "transformers",
        "GlassGPT",
        "ratio",
        "of memory's bound",
        "weights",
    ):
        table.add_column(column, justify="right")
    for row in result["decoding"]:
        table.add_row(
            row["size"],
            str(row["batch"]),
            f"{row['transformers']:,.0f}",
            f"{row['glassgpt']:,.0f}",
            f"{row['ratio']:.1f}x",
            f"{row['glassgpt'] / row['bound']:.0%}",
            row["dtype"],
        )
    console.print(table)
    table = Table(
        title=f"{LONG['n_layer']} layers of {LONG['n_embd']}, {LONG['n_head']} query "
        f"heads, {context:,} tokens in the cache"
    )
    for column in ("key/value heads", "KV cache", "tokens per second", "ratio"):
        table.add_column(column, justify="right")
    slowest = result["grouped"][0]["tokens_per_second"]  # with a key/value head for each query head
    for row in result["grouped"]:
        table.add_row(
            str(row["n_kv_head"]),
            f"{row['cache_bytes'] / 2**20:.1f} MB",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['tokens_per_second'] / slowest:.1f}x",
        )
    console.print(table)


if __name__ == "__main__":
    cli.start(lambda: main(sys.argv[1:]), lambda: __doc__)
