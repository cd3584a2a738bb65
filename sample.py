"""Text out of a run, streamed as it is made; or how surprised a run is by a text.

    python sample.py                                         from the newest run in runs/
    python sample.py run_dir=PATH prompt="def main():"       see python sample.py --help
"""

import codecs
import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import cli
from config import SampleConfig, UserError
from files import printable

# So many texts are made at once, or as many as fit their KV caches in 1 GB.
ROWS, CACHE_BYTES = 64, 1 << 30
# From so many bits on, a token that is scored has this colour; below the first it has none.
LEVELS = ((1, "black on #ffffaf"), (3, "black on #ffd75f"), (6, "black on #ff875f"),
          (10, "#ffffff on #d70000"))


def main() -> None:
    sample(cli.sample_config(sys.argv[1:]))


def sample(config: SampleConfig) -> None:
    """Write config.num_samples texts for each prompt to stdout, and notes on them to stderr.

    Raises:
        UserError: there is no such run, or a text cannot be read, encoded or written.
    """
    prompts = read_prompts(config)
    folder = Path(config.run_dir or config.init_from or newest_run()).expanduser()

    if config.run_dir and not folder.exists():
        raise UserError(f"run_dir={config.run_dir} does not exist: python -m report lists your "
                        "runs")

    # Here and below: what imports torch waits until all that is quickly checked is right.
    from interop import fetched, load_model
    from training.runtime import for_sampling, pick_device

    if config.init_from:
        folder = Path(fetched(str(folder)))
    model, tokenizer = load_model(folder, config.checkpoint, say=note)
    for_sampling(model, pick_device(config.device), config.precision, config.quantize)
    if config.score is not None:
        show_score(model, tokenizer, prompts[0], config.json)
    elif config.interactive:
        converse(config, model, tokenizer, folder)
    else:
        note(f"{folder}: {write_texts(config, model, tokenizer, prompts, config.seed)}")


def write_texts(config: SampleConfig, model, tokenizer, prompts: list[str], seed: int) -> str:
    """Write config.num_samples texts for each prompt to stdout: made together, shown in turn.

    Returns:
        How fast they were made, and with how large a cache, in two lines.

    Raises:
        UserError: a prompt cannot be encoded.
    """
    from data.tokenizer import prompt_ids
    from decoding import Text, write
    from model import Decoder

    texts = []
    for number, prompt in enumerate(prompts, 1):
        try:
            ids = prompt_ids(tokenizer, prompt)
        except UserError as e:
            which = f"prompt {number} of {len(prompts)}: " if len(prompts) > 1 else ""
            raise UserError(f"{which}{e}") from None
        if len(ids) > (seen := model.config.block_size):
            note(f"note: the prompt has {len(ids):,} tokens; the model sees the last {seen:,} of "
                 "them")
        texts += [Text(tokenizer, ids, seed + n, config.stop) for n in range(config.num_samples)]
    choice = {name: getattr(config, name) for name in
              ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}
    room = max(len(text.prompt_tokens) for text in texts) + config.max_new_tokens
    rows = min(len(texts), ROWS, max(1, CACHE_BYTES // model.make_cache(1, room).nbytes))
    cache = model.make_cache(rows, room)
    began = time.perf_counter()
    for number, text in enumerate(texts):
        if number % rows == 0:
            batch = texts[number:number + rows]
            own = cache if len(batch) == rows else model.make_cache(len(batch), room)
            steps = write(Decoder(model, own), batch, config.max_new_tokens, **choice)
        if len(texts) > 1 and not config.json:
            note(f"--- text {number + 1} of {len(texts)}")
        show(prompts[number // config.num_samples], text, steps, config.json)
    seconds, made = time.perf_counter() - began, sum(len(text.tokens) for text in texts)
    if config.attention is not None:
        tokens = (texts[0].prompt_tokens + texts[0].tokens)[-model.config.block_size:]
        write_attention(model, tokenizer, tokens, prompts[0], len(texts[0].tokens),
                        Path(config.attention).expanduser())
    return (f"{made} tokens in {seconds:.2f} s, {made / seconds:,.0f} tokens per second\n"
            f"KV cache {cache.nbytes:,} bytes: {rows} text{'s' * (rows > 1)} of "
            f"{cache.capacity} tokens, {model.config.kv_heads} key/value and "
            f"{model.config.n_head} query heads")


def show(prompt: str, text, steps: Iterator, as_json: bool) -> None:
    """Write a text to stdout as the steps make it, or as a JSON object when it has ended; its
    prompt too where a person reads both streams."""
    if as_json:
        while text.ended is None:
            next(steps)
        made = {"prompt": prompt, "text": text.text, "tokens": len(text.tokens),
                "ended": text.ended, "seed": text.seed}
        put(json.dumps(made, ensure_ascii=False) + "\n")
        return
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


def converse(config: SampleConfig, model, tokenizer, folder: Path) -> None:
    """Ask for a prompt, continue it, ask again: Ctrl-C stops a text, Ctrl-D leaves. Each text has
    the seed after the last one's."""
    with suppress(ImportError):
        import readline  # noqa: F401  the arrow keys and a history, where the platform has them
    note(f"{folder}: type the beginning of a text. Each prompt is new. Ctrl-C stops a text, "
         "Ctrl-D leaves.")
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


def write_attention(model, tokenizer, ids: list[int], prompt: str, generated: int,
                    path: Path) -> None:
    """Write the page, or the numbers, of every head's attention over the tokens, the last
    `generated` of which the model made, or raise `UserError`."""
    from attention_maps.prompt import look
    from report.page import attention_page, save_look

    alone = path.suffix == ".npz"  # the prompt's
    found, scores = look(model, tokenizer, ids[:len(ids) - generated] if alone else ids, note)
    title = f"“{prompt}”" if prompt else f"Attention over {len(ids)} tokens"
    try:
        if alone:
            save_look(found, scores, model.config.kv_heads, path)
        else:
            attention_page(found, title, path, model.config.kv_heads, model.config.tie_embeddings,
                           scores, len(ids) - generated)
    except OSError as e:
        raise UserError(f"attention={path} cannot be written: {e.strerror or e}") from None
    note(f"attention {path}")


def show_score(model, tokenizer, text: str, as_json: bool = False) -> None:
    """Write the score of a text to stdout: in a terminal under the text, coloured by surprise; as
    JSON under a line for each token. A text that cannot be encoded raises `UserError`.

    The text is scored as one that the model begins, so that its first token is predicted too.
    """
    import torch
    from rich.console import Console
    from rich.text import Text

    from data.tokenizer import first_token
    from training.evaluate import surprise

    ids = tokenizer.encode(text)
    tokens = torch.tensor([first_token(tokenizer), *ids], device=model.head.weight.device)
    console = Console(highlight=False, soft_wrap=True)
    coloured = not as_json and console.color_system is not None and not console.no_color
    characters = codecs.getincrementaldecoder("utf-8")(errors="replace")
    scored, total, waiting = iter(ids), 0.0, 0.0
    for piece in surprise(model, tokens):
        view = Text()
        # In this order, so that the end of a piece takes no token.
        for nats, id in zip(piece.tolist(), scored):
            total += nats
            spelling = tokenizer.token_bytes(id)
            if as_json:
                token = spelling.decode(errors="replace")
                print(json.dumps({"token": token, "id": id, "nats": round(nats, 6)},
                                 ensure_ascii=False))
            elif coloured:
                # Tokens that end within a character are shown with those that end it.
                waiting += nats
                whole = characters.decode(spelling)
                if whole and not characters.getstate()[0]:
                    add_coloured(view, printable(whole), waiting / math.log(2))
                    waiting = 0.0
        if coloured:
            console.print(view, end="")
    if coloured:
        legend = Text("\nbits per token  ")
        for (low, style), (high, _) in zip(LEVELS, [*LEVELS[1:], (None, "")]):
            legend.append(f" {low} to {high} " if high else f" {low} and more ", style).append("  ")
        console.print(legend)
    size = len(text.encode())
    loss, bits = total / len(ids), total / math.log(2) / size
    if as_json:
        figures = {"tokens": len(ids), "bytes": size, "loss": loss, "bits_per_byte": bits}
        print(json.dumps(figures), flush=True)
    else:
        print(f"{len(ids):,} tokens, {size:,} bytes: loss {loss:.4f} nats per token, "
              f"{bits:.4f} bits per byte", flush=True)


def add_coloured(view, text: str, bits: float) -> None:
    """Append a token's text in the colour of its bits; an unexpected line end shows as ↵."""
    style = next((style for low, style in reversed(LEVELS) if bits >= low), "")
    for n, line in enumerate(text.split("\n")):
        if n:
            view.append("↵" if style else "", style).append("\n")
        view.append(line, style)


def read_prompts(config: SampleConfig) -> list[str]:
    """The texts to continue, or the one to score; [""] where none is given.

    Raises:
        UserError: one cannot be read.
    """
    from_stdin = config.interactive or "-" in (config.prompt, config.prompts, config.score)
    if sys.stdin is None and from_stdin:
        raise UserError("stdin is closed, so nothing can be read from it: give the text in a file")
    if config.score is not None:
        text = read(config.score, "score=")
        if not text:
            raise UserError(f"score={config.score} is empty: there is nothing to score")
        return [text]
    if config.prompts is not None:
        return list(prompt_lines(read(config.prompts, "prompts="), config.prompts))
    if config.prompt == "-":
        return [read("-", "prompt=").removesuffix("\n")]
    return [config.prompt or ""]


def prompt_lines(text: str, source: str) -> list[str]:
    """The prompts of JSON lines, {"prompt": "…"} each, whatever else is in them."""
    prompts, form = [], 'each is a JSON object, {"prompt": "…"}'
    for number, line in enumerate(text.split("\n"), 1):
        try:
            prompts += [json.loads(line)["prompt"] + ""] if line.strip() else []
        except (ValueError, TypeError, KeyError, RecursionError):
            raise UserError(f"prompts={source} has no prompt in line {number}: {form}") from None
    if not prompts:
        raise UserError(f"prompts={source} has no line: {form}")
    return prompts


def read(path: str, setting: str) -> str:
    """The text of a file, or of stdin where the path is -."""
    file = Path(path).expanduser()
    if file.is_fifo() and file.parts[1:2] not in (("dev",), ("proc",)):  # <(…) gives /dev/fd/63
        raise UserError(f"{setting}{path} is a named pipe, which nobody may ever write to: "
                        "give a file, or - to read stdin")
    try:
        return (sys.stdin.buffer.read() if path == "-" else file.read_bytes()).decode("utf-8")
    except UnicodeDecodeError as e:
        raise UserError(f"{setting}{path} is not UTF-8 text: byte {e.object[e.start]:#04x} "
                        f"at offset {e.start}") from None
    except OSError as e:
        raise UserError(f"{setting}{path} cannot be read: {e.strerror or e}") from None


def newest_run() -> Path:
    """The run in runs/, or in a sweep there, whose newest checkpoint is the newest.

    Raises:
        UserError: there is none.
    """
    found = [path for pattern in ("*/checkpoints/last", "*/*/checkpoints/last")
             for path in Path("runs").glob(pattern)]
    if not found:
        raise UserError("there is no run in runs/ yet: train one with python train.py, "
                        "or name one with run_dir=PATH")
    return max(found, key=lambda path: path.stat().st_mtime).parent.parent


def note(line: str) -> None:
    with suppress(OSError):  # a full disk under stderr costs no text
        print(line, file=sys.stderr)


if __name__ == "__main__":
    cli.start(main, cli.sample_help)
