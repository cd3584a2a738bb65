"""Text out of a run, streamed as it is made.

    python sample.py                                         from the newest run in runs/
    python sample.py run_dir=PATH prompt="def main():"       see python sample.py --help
"""

import codecs
import sys
import time
from pathlib import Path

import cli
from config import SampleConfig, UserError


def main() -> None:
    sample(cli.sample_config(sys.argv[1:]))


def sample(config: SampleConfig) -> None:
    """Write config.num_samples texts to stdout, and what is worth knowing about them to stderr.

    Raises:
        UserError: there is no such run, or the prompt cannot be read or encoded.
    """
    prompt = read_prompt(config)
    run_dir = Path(config.run_dir or config.init_from or newest_run())

    import torch  # now that all that is quickly checked is right

    from data.tokenizer import prompt_ids
    from decoding import stream
    from training.checkpoint import load_model
    from training.runtime import for_sampling, pick_device, synchronize

    model, tokenizer = load_model(run_dir, config.checkpoint, say=note)
    device = pick_device(config.device)
    for_sampling(model, device, config.precision)
    ids = prompt_ids(tokenizer, prompt)
    tokens = torch.tensor([ids], device=device)  # (1, T)
    cache = model.make_cache(1, min(model.config.block_size, len(ids) + config.max_new_tokens))
    made, seconds = 0, 0.0  # of all texts
    for number in range(config.num_samples):
        if config.num_samples > 1:
            note(f"--- sample {number + 1} of {config.num_samples}")
        if prompt and sys.stderr.isatty():
            sys.stderr.write(prompt)
            sys.stderr.flush()
        began = time.perf_counter()
        texts = stream(model, tokens, config.max_new_tokens, config.temperature, config.top_k, config.top_p, config.min_p,
                       seed=config.seed + number, stop_token=tokenizer.end_of_text, cache=cache)
        # A token may end within a character: its bytes wait for the rest.
        text = codecs.getincrementaldecoder("utf-8")(errors="replace")
        new = []
        for token in texts:
            new.append(int(token))
            sys.stdout.write(text.decode(tokenizer.token_bytes(new[-1])))
            sys.stdout.flush()
        sys.stdout.write(text.decode(b"", final=True) + "\n")
        sys.stdout.flush()
        synchronize(device)
        seconds, made = seconds + time.perf_counter() - began, made + len(new)
        if config.attention is not None and number == 0:
            write_attention(model, tokenizer, (ids + new)[-model.config.block_size:], Path(config.attention).expanduser())
    note(f"{made} tokens in {seconds:.2f} s: {made / seconds:,.0f} tokens per second; KV cache {cache.nbytes:,} bytes "
         f"({model.config.kv_heads} key/value heads for {model.config.n_head} query heads, {cache.capacity} tokens); {run_dir}")


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


def read_prompt(config: SampleConfig) -> str:
    """The text to continue: typed, from a file, or from stdin where it is asked for; without its last line end."""
    try:
        if config.prompt_file is not None:
            return Path(config.prompt_file).expanduser().read_text(encoding="utf-8").removesuffix("\n")
        if config.prompt == "-":
            return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as e:
        raise UserError(f"the prompt is not UTF-8 text: byte {e.object[e.start]:#04x} at offset {e.start}") from None
    except OSError as e:
        raise UserError(f"prompt_file={config.prompt_file} cannot be read: {e.strerror}") from None
    return config.prompt or ""


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
