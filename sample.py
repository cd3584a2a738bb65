"""Text out of a run, streamed as it is made; or how surprised a run is by a text.

    python sample.py                                         from the newest run in runs/
    python sample.py run_dir=PATH prompt="def main():"       see python sample.py --help
"""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import cli
from config import SampleConfig, UserError

ROWS, CACHE_BYTES = 64, 1 << 30  # texts are made so many at once, or as many as fit their KV caches in 1 GB


def main() -> None:
    sample(cli.sample_config(sys.argv[1:]))


def sample(config: SampleConfig) -> None:
    """Write config.num_samples texts for each prompt to stdout, and what is worth knowing about them to stderr.

    Raises:
        UserError: there is no such run, or what it shall continue or score cannot be read or encoded.
    """
    prompts = read_prompts(config)
    folder = Path(config.run_dir or config.init_from or newest_run())

    from training.checkpoint import load_model  # torch, now that all that is quickly checked is right
    from training.runtime import for_sampling, pick_device

    model, tokenizer = load_model(folder, config.checkpoint, say=note)
    for_sampling(model, pick_device(config.device), config.precision)
    if config.score is not None:
        from scoring import show_score

        show_score(model, tokenizer, prompts[0], config.json)
    elif config.interactive:
        converse(config, model, tokenizer, folder)
    else:
        note(f"{folder}: {write_texts(config, model, tokenizer, prompts, config.seed)}")


def write_texts(config: SampleConfig, model, tokenizer, prompts: list[str], seed: int) -> str:
    """Write config.num_samples texts for each prompt to stdout: made together, shown one after the other.

    Returns:
        How fast they were made, and with how large a cache, in two lines.

    Raises:
        UserError: a prompt cannot be encoded.
    """
    from decoding import Text, write

    texts = []
    for number, prompt in enumerate(prompts, 1):
        try:
            texts += [Text(tokenizer, prompt, seed + n, config.stop) for n in range(config.num_samples)]
        except UserError as e:
            raise UserError(f"prompt {number} of {len(prompts)}: {e}" if len(prompts) > 1 else str(e)) from None
    room = min(model.config.block_size, max(len(text.prompt_tokens) for text in texts) + config.max_new_tokens)
    rows = min(len(texts), ROWS, max(1, CACHE_BYTES // model.make_cache(1, room).nbytes))
    cache = model.make_cache(rows, room)
    began = time.perf_counter()
    for number, text in enumerate(texts):
        if number % rows == 0:
            batch = texts[number:number + rows]
            steps = write(model, batch, config.max_new_tokens, cache if len(batch) == rows else None, temperature=config.temperature,
                          top_k=config.top_k, top_p=config.top_p, min_p=config.min_p, repetition_penalty=config.repetition_penalty)
        if len(texts) > 1 and not config.json:
            note(f"--- text {number + 1} of {len(texts)}")
        show(text, steps, config.json)
    seconds, made = time.perf_counter() - began, sum(len(text.tokens) for text in texts)
    if config.attention is not None:
        tokens = (texts[0].prompt_tokens + texts[0].tokens)[-model.config.block_size:]
        write_attention(model, tokenizer, tokens, Path(config.attention).expanduser())
    return (f"{made} tokens in {seconds:.2f} s, {made / seconds:,.0f} tokens per second\n"
            f"KV cache {cache.nbytes:,} bytes: {rows} at once, {cache.capacity} tokens, "
            f"{model.config.kv_heads} key/value heads for {model.config.n_head} query heads")


def show(text, steps: Iterator, as_json: bool) -> None:
    """Write a text to stdout as the steps make it, or as a JSON object when it has ended; its prompt too where a person reads both streams."""
    from decoding import printable

    def put(new: str, stream=sys.stdout) -> None:
        stream.write(printable(new) if stream.isatty() else new)
        stream.flush()

    if as_json:
        while text.ended is None:
            next(steps)
        put(json.dumps({"prompt": text.prompt, "text": text.text, "tokens": len(text.tokens), "ended": text.ended, "seed": text.seed},
                       ensure_ascii=False) + "\n")
        return
    if sys.stdout.isatty() and sys.stderr.isatty():
        put(text.prompt, sys.stderr)
    put(text.text)  # what the steps for the texts before it have made of it
    while text.ended is None:
        shown = len(text.text)
        next(steps)
        put(text.text[shown:])
    put("\n")


def converse(config: SampleConfig, model, tokenizer, folder: Path) -> None:
    """Ask for a prompt, continue it, ask again: Ctrl-C ends a text, Ctrl-D the program. Each text has the seed after the last one's."""
    with suppress(ImportError):
        import readline  # noqa: F401  the arrow keys and a history, where the platform has them
    note(f"{folder}: type the beginning of a text; Ctrl-C ends a text, Ctrl-D the program")
    person, seed = sys.stdin.isatty(), config.seed
    while True:
        try:
            if person and not sys.stdout.isatty():
                print("> ", end="", file=sys.stderr, flush=True)
            prompt = input("> " if person and sys.stdout.isatty() else "")
            seed, current = seed + config.num_samples, seed
            write_texts(config, model, tokenizer, [prompt], current)
            if person:
                note("")
        except KeyboardInterrupt:
            print(flush=True)
        except EOFError:
            if person:
                note("")
            return
        except (UserError, UnicodeDecodeError) as e:
            note(f"error: {e}")


def write_attention(model, tokenizer, ids: list[int], path: Path) -> None:
    """Write the page that shows every head's attention over the tokens."""
    import numpy as np

    from attention_maps.capture import maps
    from attention_maps.probe import words
    from report.page import attention_page

    tokens = np.array([ids])
    weights, norms = maps(model, tokens)
    attention_page({"text": weights[:, 0].astype(np.float16), "text_tokens": np.array(words(tokenizer, tokens[0])),
                    "text_value_norms": norms[:, 0]}, f"Attention over {len(ids)} tokens", path, model.config.kv_heads)
    note(f"attention {path}")


def read_prompts(config: SampleConfig) -> list[str]:
    """The texts to continue, or the one to score; [""] where none is given.

    Raises:
        UserError: one cannot be read.
    """
    if sys.stdin is None and (config.interactive or "-" in (config.prompt, config.prompts, config.score)):
        raise UserError("stdin is closed, so that nothing can be read from it: give the text in a file")
    if config.score is not None:
        text = read(config.score, "score=")
        if not text:
            raise UserError(f"score={config.score} is empty: there is nothing to score")
        return [text]
    if config.prompts is not None:
        return list(prompt_lines(read(config.prompts, "prompts="), config.prompts))
    return [read("-", "prompt=").removesuffix("\n") if config.prompt == "-" else config.prompt or ""]


def prompt_lines(text: str, source: str) -> list[str]:
    """The prompts of JSON lines, {"prompt": "…"} each, whatever else is in them."""
    prompts = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                prompt = json.loads(line)["prompt"]
                prompts.append(prompt + "")
            except (ValueError, TypeError, KeyError, RecursionError):
                raise UserError(f'prompts={source} has no prompt in line {number}: each is a JSON object, {{"prompt": "…"}}') from None
    if not prompts:
        raise UserError(f'prompts={source} has no line: each is a JSON object, {{"prompt": "…"}}')
    return prompts


def read(path: str, setting: str) -> str:
    """The text of a file, or of stdin where the path is -."""
    try:
        return (sys.stdin.buffer.read() if path == "-" else Path(path).expanduser().read_bytes()).decode("utf-8")
    except UnicodeDecodeError as e:
        raise UserError(f"{setting}{path} is not UTF-8 text: byte {e.object[e.start]:#04x} at offset {e.start}") from None
    except OSError as e:
        raise UserError(f"{setting}{path} cannot be read: {e.strerror or e}") from None


def newest_run() -> Path:
    """The run in runs/, or in a sweep there, whose newest checkpoint is the newest.

    Raises:
        UserError: there is none.
    """
    found = [path for pattern in ("*/checkpoints/last", "*/*/checkpoints/last") for path in Path("runs").glob(pattern)]
    if not found:
        raise UserError("there is no run in runs/ yet: train one with python train.py, or name one with run_dir=PATH")
    return max(found, key=lambda path: path.stat().st_mtime).parent.parent


def note(line: str) -> None:
    print(line, file=sys.stderr)


if __name__ == "__main__":
    cli.start(main, cli.sample_help)
