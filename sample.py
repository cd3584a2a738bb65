"""Text out of a run, streamed as it is made; or how surprised a run is by a text.

python sample.py                                         from the newest run in runs/
python sample.py run_dir=PATH prompt="def main():"       see python sample.py --help
"""

import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import cli
from cli import print_stderr
from common.errors import UserError
from common.paths import expand_home
from common.text import printable
from config import SampleConfig

# So many texts are made at once, or as many as fit their KV caches in 1 GB.
ROWS, CACHE_BYTES = 64, 1 << 30


def main() -> None:
    sample(cli.read_settings(sys.argv[1:], SampleConfig, "python sample.py"))


def sample(config: SampleConfig) -> None:
    """Write config.num_samples texts, or the score of one, to stdout; notes go to stderr."""
    given = read_text(config)
    key = "run_dir" if config.run_dir else "init_from"
    folder = expand_home(key, getattr(config, key) or str(newest_run()))
    if config.run_dir and not folder.exists():
        raise UserError(
            f"run_dir={config.run_dir} does not exist: give the folder of a run, as in runs/"
        )

    if sys.stderr.isatty():
        print_stderr("loading …")
    # Here and below: what imports torch waits until all that is quickly checked is right.
    from interop import load
    from training.device import for_sampling, pick_device

    model, tokenizer = load(folder, config.checkpoint, print_stderr)
    # What is looked at is the model as it is, not rounded.
    precision = config.precision if config.attention is None else "fp32"
    for_sampling(model, pick_device(config.device), precision)
    if config.score is not None:
        show_score(model, tokenizer, given)
    else:
        print_stderr(f"{folder}: {write_texts(config, model, tokenizer, given)}")


def read_text(config: SampleConfig) -> str:
    """The text to continue, or the one to score; "" where none is given."""
    if config.score is None and config.prompt != "-":
        return config.prompt or ""
    path = "-" if config.score is None else config.score
    try:
        written = (
            sys.stdin.buffer.read() if path == "-" else expand_home("score", path).read_bytes()
        )
        text = written.decode("utf-8")
    except UnicodeDecodeError as e:
        raise UserError(
            f"{path} is not UTF-8 text: byte {e.object[e.start]:#04x} at offset {e.start}"
        ) from None
    if config.score is None:
        return text.removesuffix("\n")
    if not text:
        raise UserError(f"score={path} is empty: there is nothing to score")
    return text


def newest_run() -> Path:
    """The run in runs/, or in a sweep there, whose newest checkpoint is the newest."""
    found = [
        path
        for pattern in ("*/checkpoints/last", "*/*/checkpoints/last")
        for path in Path("runs").glob(pattern)
    ]
    if not found:
        raise UserError(
            "there is no run in runs/ yet: train one with python train.py, "
            "or name one with run_dir=PATH"
        )
    return max(found, key=lambda path: path.stat().st_mtime).parent.parent


def write_texts(config: SampleConfig, model, tokenizer, prompt: str) -> str:
    """Write config.num_samples texts to stdout: made together, shown in turn. Returns how fast they
    were made, and with how large a cache, in two lines."""
    from data.tokenizer import encode_prompt
    from decoding import Text, generate_texts

    ids = encode_prompt(tokenizer, prompt)
    if len(ids) > (seen := model.config.block_size):
        print_stderr(
            f"note: the prompt has {len(ids):,} tokens; the model sees the last {seen:,} of them"
        )
    texts = [
        Text(tokenizer, ids, config.seed + n, documents=1 if prompt else 2)
        for n in range(config.num_samples)
    ]
    choice = {name: getattr(config, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    length = len(ids) + config.max_new_tokens
    cache = model.make_cache(1, length)
    rows = min(len(texts), ROWS, max(1, CACHE_BYTES // cache.nbytes))
    began = time.perf_counter()
    for number, text in enumerate(texts):
        if number % rows == 0:
            batch = texts[number : number + rows]
            decoder = model.make_decoder(len(batch), length)
            steps = generate_texts(decoder, batch, config.max_new_tokens, **choice)
        if len(texts) > 1:
            print_stderr(f"--- text {number + 1} of {len(texts)}")
        show(prompt, text, steps)
    seconds, made = time.perf_counter() - began, sum(len(text.tokens) for text in texts)
    if config.attention is not None:
        write_attention(
            model, tokenizer, prompt, texts[0], expand_home("attention", config.attention)
        )
    return (
        f"{made} tokens in {seconds:.2f} s, {made / seconds:,.0f} tokens per second\n"
        f"KV cache {rows * cache.nbytes:,} bytes: {rows} text{'s' * (rows > 1)} of "
        f"{cache.capacity} tokens, {model.config.kv_heads} key/value and "
        f"{model.config.n_head} query heads"
    )


def show(prompt: str, text, steps: Iterator) -> None:
    """Write a text to stdout as it is made, after its prompt where a person reads both streams."""
    if sys.stdout.isatty() and sys.stderr.isatty():
        put(prompt, sys.stderr)
    put(text.text)  # what the steps for the texts before it have made of it
    while text.ended is None:
        shown = len(text.text)
        next(steps)
        put(text.text[shown:])
    put("\n")


def put(new: str, stream=None) -> None:
    """Write to stdout or another stream at once; in a terminal without what would drive it."""
    stream = stream or sys.stdout
    print(printable(new) if stream.isatty() else new, end="", file=stream, flush=True)


def write_attention(model, tokenizer, prompt: str, text, path: Path) -> None:
    """Write the page of every head's attention over a text, and say what was found out."""
    from attention_maps.analysis import analyze
    from attention_maps.capture import float16_weights
    from attention_maps.findings import summarize_run
    from report.pack import pack_weights
    from report.page import Model, attention_page

    config = model.config
    page = Model(
        config,
        tokenizer.to_json(),
        2 * model.num_parameters(),
        {0: lambda: pack_weights({name: t.numpy() for name, t in float16_weights(model).items()})},
    )
    analysis = analyze(model, tokenizer, text.prompt_tokens + text.tokens, print_stderr)
    found, length = summarize_run([analysis.metrics]), len(analysis.arrays["text_ids"])
    title = f"“{prompt}”" if prompt else f"Attention over {length} tokens"
    attention_page(
        analysis.arrays,
        title,
        path,
        page,
        analysis.metrics,
        found,
        max(0, length - len(text.tokens)),
    )
    for finding, figures in found:
        print_stderr(f"{finding[:-1]} ({figures}).")
    print_stderr(f"attention {path}")


def show_score(model, tokenizer, text: str) -> None:
    """Write how unexpected a text is to the model: its loss, measured as validation loss is. The
    text is scored as one that the model begins, so that its first token is predicted too."""
    import numpy as np

    from config import Config
    from data.tokenizer import start_token
    from training.evaluate import Windows

    if not (ids := tokenizer.encode(text)):
        raise UserError("to this model's tokenizer the text is empty: there is nothing to score")
    config = Config(model=model.config, device=str(model.head.weight.device), precision="fp32")
    tokens = np.array([start_token(tokenizer), *ids])
    loss = Windows(tokens, tokenizer, config, most=len(tokens)).loss(model)
    size = len(text.encode())
    print(
        f"{len(ids):,} tokens, {size:,} bytes: loss {loss:.4f} nats per token, "
        f"{loss * len(ids) / math.log(2) / size:.4f} bits per byte",
        flush=True,
    )


if __name__ == "__main__":
    cli.start(main, cli.sample_help)
