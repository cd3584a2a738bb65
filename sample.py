"""Generate text from a model and stream it to stdout, or score a text.

python sample.py                                         from the newest run in runs/
python sample.py run_dir=PATH prompt="def main():"       see python sample.py --help
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))  # python -P and -I leave it out
    import common.wait_policy  # noqa: F401  measures from here on what other programs compute
    from common.signals import end_on_interrupt

    end_on_interrupt()  # without a traceback from an import below

import math
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TextIO

import cli
from cli.sample_config import SampleConfig
from common.errors import UserError
from common.paths import expand_home, require_output_file
from common.terminal import command, error_sentence, is_terminal, print_stderr
from common.text import format_loss, format_speed, pluralize, printable
from common.wait_policy import choose_wait_policy
from data.text_files import MAX_CHARS, has_records, normalize_text, open_text, read_at_once
from run.run_dir import find_newest_run

if TYPE_CHECKING:  # importing torch takes a second, so that the command line is checked first
    from data.tokenizer import Tokenizer
    from model import GPT
    from training.stored_model import StoredModel

MAX_BATCH_SIZE = 64  # texts that are generated at once
MAX_CACHE_BYTES = 1 << 30  # of the KV caches of these texts
MAX_SHOWN_TOKENS = 10_000  # of a scored text, whose losses a page shows
MAX_ATTENTION_TOKENS = 128  # of a scored text, whose attention a page shows
PROMPT_MARK = "> "
END_KEYS = "Ctrl-Z and Enter" if os.name == "nt" else "Ctrl-D"
INSTRUCTIONS = f"type a prompt and press Enter; Ctrl-C stops a text, {END_KEYS} quits"


def main() -> None:
    """Run the command line."""
    sample(cli.read_settings(sys.argv[1:], SampleConfig, "python sample.py"))


def sample(config: SampleConfig) -> None:
    """Write generated texts, or the score of a text, to stdout, and notes to stderr."""
    if config.attention is not None:
        page = expand_home("attention", config.attention)
        require_output_file(f"attention={config.attention}", page)
    text = read_text(config)
    path = config.run_dir if config.init_from is None else config.init_from
    if path is None:
        path = str(find_newest_run().path)
    if is_terminal(sys.stderr):
        print_stderr("loading …")
    choose_wait_policy(print_stderr)
    from data.tokenizer import encode_prompt
    from interop import find_model
    from interop.stored import StoredRun
    from training.device import move_for_sampling, pick_device, restored_process

    source = find_model(path, config.checkpoint)
    model, tokenizer = source.load()
    print_stderr(f"{path}, step {source.step:,}" if isinstance(source, StoredRun) else path)
    # A page of attention shows the model itself, not one with rounded weights.
    precision = config.precision if config.attention is None else "fp32"
    with restored_process():  # for a notebook
        move_for_sampling(model, pick_device(config.device), precision)
        if config.score is not None:
            write_score(config, model, tokenizer, text)
            return
        if config.interactive:
            if is_terminal(sys.stdin):
                print_stderr(INSTRUCTIONS)
            _continue_typed_prompts(config, model, tokenizer)
            return
        if not text and (text := _task_prompt(source, tokenizer)):
            rest = model.config.block_size + 1 - len(encode_prompt(tokenizer, text))
            config = replace(config, max_new_tokens=min(rest, config.max_new_tokens))
        print_stderr(write_texts(config, model, tokenizer, text))


def _task_prompt(source: StoredModel, tokenizer: Tokenizer) -> str:
    """Return the prompt of a run of generated data, such as 3+4=; "" for another model."""
    from data.synthetic import make_task
    from interop.stored import StoredRun

    if isinstance(source, StoredRun) and source.settings.data.source == "synthetic":
        return tokenizer.decode(make_task(source.settings, tokenizer).prompt)
    return ""


def read_text(config: SampleConfig) -> str:
    """Return the text to score, or the prompt; "" without a prompt."""
    if config.score is not None:
        return read_file("score", config.score)
    if config.prompt_file is not None:
        return read_file("prompt_file", config.prompt_file).removesuffix("\n")
    if config.prompt == "-":
        return read_file("prompt", "-").removesuffix("\n")
    return normalize_text(config.prompt or "")


def read_file(key: str, path: str) -> str:
    """Return the text of the file that a setting names; "-" is stdin."""
    if has_records(Path(path)):
        raise UserError(f"{key}={path} is not plain text: extract a field of its records first")
    source: Path | bytes = expand_home(key, path)
    if path == "-":
        source = sys.stdin.buffer.read(4 * MAX_CHARS + 1)  # a character has up to 4 bytes
    with open_text(source, f"{key}={path}") as file:
        text = read_at_once(file.read, f"{key}={path}")
    if not text and key != "prompt":
        raise UserError(f"{key}={path} is empty: name a file with text")
    return text


def _continue_typed_prompts(config: SampleConfig, model: GPT, tokenizer: Tokenizer) -> None:
    """Continue one line of stdin after the other until its end; text n has the seed `seed` + n.

    In a terminal, Ctrl-C stops only the current text, and a mistake is reported before the next
    prompt is read. Otherwise either one ends the program.
    """
    is_typed, seed = is_terminal(sys.stdin), config.seed
    if is_typed:
        with suppress(ImportError):  # Windows edits lines without it
            import readline  # gives input() line editing and a history

            readline.parse_and_bind("set enable-bracketed-paste on")  # several lines are one prompt
    while True:
        prompt = ""
        try:
            prompt = _read_prompt_line(PROMPT_MARK if is_typed else "")
            if prompt:
                settings = replace(config, seed=seed)
                seed += config.num_samples
                write_texts(settings, model, tokenizer, prompt)
        except EOFError:
            if is_typed:
                print_stderr("")
            return
        except KeyboardInterrupt:
            if not is_typed:
                raise
            if prompt:  # its text was stopped
                _write_now("\n", sys.stdout)
            else:
                print_stderr(f"\n({END_KEYS} quits)")
        except UserError as e:
            if not is_typed:
                raise
            print_stderr(f"error: {error_sentence(e)}")


def _read_prompt_line(mark: str) -> str:
    """Ask for a prompt and return it; raise `EOFError` at the end of stdin."""
    if not is_terminal(sys.stdout):  # which gets the generated texts alone
        _write_now(mark, sys.stderr)
        mark = ""
    try:
        return normalize_text(input(mark))
    except UnicodeDecodeError as e:
        raise UserError(f"the prompt is not UTF-8 text ({e.reason}): type or convert it") from None


def write_texts(config: SampleConfig, model: GPT, tokenizer: Tokenizer, prompt: str) -> str:
    """Write `num_samples` texts to stdout, and return how many tokens they have, and the speed."""
    from data.tokenizer import encode_prompt, normal_form_note
    from generation.decoder import Decoder, allocate_cache, window_start
    from generation.sampling import Sampling, draw_batch, stream_text

    prompt_ids = encode_prompt(tokenizer, prompt)
    if note := normal_form_note(tokenizer, prompt):
        print_stderr(note)
    block_size = model.config.block_size
    if left_out := window_start(len(prompt_ids), block_size):
        print_stderr(
            f"note: the prompt has {pluralize(len(prompt_ids), 'token')}; the model reads the last "
            f"{len(prompt_ids) - left_out:,} of them"
        )
    length = len(prompt_ids) + config.max_new_tokens
    cache = allocate_cache(model, 1, length)
    fitting_texts = max(1, MAX_CACHE_BYTES // cache.nbytes)
    batch_size = min(config.num_samples, MAX_BATCH_SIZE, fitting_texts)

    # Generate a batch while its first text is shown
    sampling = Sampling(
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
        vocab_size=tokenizer.vocab_size,
    )
    stops = [stop.replace(r"\n", "\n") for stop in config.stop]
    seeds = range(config.seed, config.seed + config.num_samples)
    texts: list[list[int]] = []  # the ids of each
    start = time.perf_counter()
    for first in range(0, config.num_samples, batch_size):
        batch = seeds[first : first + batch_size]
        decoder = Decoder(model, len(batch), length)
        for ids in draw_batch(decoder, prompt_ids, config.max_new_tokens, sampling, batch):
            texts.append([])
            if config.num_samples > 1:
                print_stderr(f"--- text {len(texts)} of {config.num_samples}")
            if is_terminal(sys.stdout) and is_terminal(sys.stderr):
                _write_now(prompt, sys.stderr)
            recorded = _recorded(ids, texts[-1])
            for piece in stream_text(tokenizer, recorded, stops, has_prompt=bool(prompt)):
                _write_now(piece, sys.stdout)
            _write_now("\n", sys.stdout)
    seconds = time.perf_counter() - start

    if config.attention is not None:
        all_ids = [*prompt_ids, *texts[0]]  # the page shows the last block_size of them
        title = f"“{prompt}”" if prompt else f"Attention over {pluralize(len(all_ids), 'token')}"
        begin = int(all_ids[0] == tokenizer.begin_of_text)  # and begin-of-text
        shown = max(begin, len(prompt_ids) - max(0, len(all_ids) - block_size))
        facts = {"title": title, "promptTokens": shown, "tokenCount": len(all_ids)}
        _write_attention(config.attention, model, tokenizer, all_ids, facts)
    n_tokens = sum(len(ids) for ids in texts)
    speed = f", {format_speed(n_tokens / seconds)} tok/s" if n_tokens else ""
    return f"{pluralize(n_tokens, 'token')} in {seconds:.2f} s{speed}"


def _recorded(ids: Iterable[int], record: list[int]) -> Iterator[int]:
    for id in ids:
        record.append(id)
        yield id


def _write_now(text: str, stream: TextIO) -> None:
    """Write to a stream and flush it; control characters do not reach a terminal."""
    shown = printable(text) if is_terminal(stream) else text
    print(shown, end="", file=stream, flush=True)


def write_score(config: SampleConfig, model: GPT, tokenizer: Tokenizer, text: str) -> None:
    """Print the loss of a text after its start token; `attention` may name a page to write."""
    from data.tokenizer import normal_form_note, start_token
    from generation.scoring import score_tokens
    from glass.heads.measure.probes import spell_tokens

    text_ids = tokenizer.encode(text)
    if not text_ids:
        raise UserError(
            "the tokenizer of this model finds no token in the text: name a file with other text"
        )
    if note := normal_form_note(tokenizer, text):
        print_stderr(note)
    ids = [start_token(tokenizer), *text_ids]
    losses = score_tokens(model, ids)
    mean, num_bytes = losses.mean(), len(text.encode())
    loss = format_loss(mean, mean * len(losses) / math.log(2) / num_bytes)
    summary = f"{pluralize(len(losses), 'token')}, {pluralize(num_bytes, 'byte')}: loss {loss}"
    print(summary, flush=True)
    if tokenizer.decode(text_ids).strip() != text.strip():
        print_stderr(
            "note: the tokens do not decode to the same text; what this model's tokenizer "
            "normalizes or drops costs no bits"
        )
    if config.attention is not None:
        shown = losses[:MAX_SHOWN_TOKENS].tolist()
        block_size = model.config.block_size
        facts = {
            "title": "standard input" if config.score == "-" else Path(config.score or "").name,
            "losses": {
                "summary": summary,
                "tokens": spell_tokens(tokenizer, text_ids[: len(shown)]),
                "losses": [round(loss, 4) for loss in shown],
                "tokenCount": len(losses),
                "window": block_size,
                "vocabSize": tokenizer.vocab_size,
            },
        }
        attended = ids[: min(block_size, MAX_ATTENTION_TOKENS)]
        _write_attention(config.attention, model, tokenizer, attended, facts)


def _write_attention(
    file: str, model: GPT, tokenizer: Tokenizer, tokens: list[int], facts: dict[str, Any]
) -> None:
    """Write a page of every head's attention; `facts` are those of `format_analysis`."""
    from glass.heads.measure.analysis import analyze
    from glass.heads.say.findings import summarize
    from glass.page.html import write_html
    from glass.page.prompt import format_analysis

    path = expand_home("attention", file)
    path.parent.mkdir(parents=True, exist_ok=True)
    analysis = analyze(model, tokenizer, tokens, print_stderr)
    write_html(path, format_analysis(facts, model, tokenizer, analysis))
    for finding in summarize(analysis.row):
        print_stderr(f"finding  {finding.headline}")
    print_stderr(f"page     {path.absolute().as_uri()}")


if __name__ == "__main__":
    with command(lambda: cli.settings_help("sample", SampleConfig())):
        main()
