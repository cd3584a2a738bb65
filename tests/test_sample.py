"""sample.py as a user runs it."""

import io
import math
import os
import pty
import re
import select
import sys
import time
from pathlib import Path

import pytest
from conftest import TINY, wait_until
from models import lively, small
from processes import Process, exec_script, run_to_end
from vocabularies import TEXT, TOKENIZERS

import sample
from cli.sample_config import SampleConfig
from data.tokenizer import CharTokenizer
from generation.scoring import score_tokens
from model import GPT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(text_file, shared):
    """A folder with two short runs: `char` with a token per character, `bpe` with byte pairs."""

    def make(folder: Path) -> None:
        for name, tokenizer in (("char", []), ("bpe", ["tokenizer.vocab_size=300"])):
            run_to_end(
                folder,
                *TINY,
                f"tokenizer={name}",
                *tokenizer,
                "data=text",
                f"data.path={text_file}",
                "max_steps=3",
                "eval.every=0",
                "attention.every=0",
                f"run_dir={name}",
            )

    return shared("sampled", make)


def test_only_the_generated_text_is_on_stdout_and_its_end_on_a_page(command, run, tmp_path):
    argv = [f"run_dir={run / 'char'}", "prompt=the glass", "max_new_tokens=40"]
    done = command("sample.py", *argv, "attention=page.html")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) == 41  # with the line end
    assert "the glass" not in done.stdout
    assert f"{run / 'char'}, step 3\n" in done.stderr and "page.html" in done.stderr
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert '"T":32' in page and '"tokenCount":49' in page  # block_size; prompt and text


def test_a_model_with_byte_pairs_takes_any_prompt_and_writes_valid_utf8(command, run):
    prompt = "prompt=it's [a] ${HOME} <|endoftext|>日本"
    argv = [f"run_dir={run / 'bpe'}", prompt, "max_new_tokens=200", "temperature=5"]
    done = command("sample.py", *argv, text=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode("utf-8")


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["prompt=the Glass"], "'G'"),
        (["prompt=-"], "UTF-8"),  # stdin is not
        (["score=rows.jsonl"], "rows.jsonl"),
        (["prompt_file=rows.parquet"], "rows.parquet is not plain text"),
    ],
)
def test_a_mistake_gives_one_line_that_names_it_and_status_1(command, run, args, named):
    done = command("sample.py", f"run_dir={run / 'char'}", *args, input=b"\xff\xfe", text=False)
    assert (done.returncode, done.stdout) == (1, b"")
    *_, last = done.stderr.decode().splitlines()
    assert last.startswith("error: ") and named in last and done.stderr.count(b"error") == 1


def test_a_full_disk_under_stdout_gives_one_line_and_status_1(run, tmp_path):
    process = Process(
        tmp_path,
        f"run_dir={run / 'char'}",
        "max_new_tokens=5",
        script="sample.py",
        stdout=os.open("/dev/full", os.O_WRONLY),
    )
    assert process.wait() == 1
    assert process.output().count("error: ") == 1


# --- Several texts --------------------------------------------------------------------------------


def generated(capsys, run, **settings):
    """What sample.py writes to stdout, in this process."""
    capsys.readouterr()
    config = SampleConfig(run_dir=str(run / "bpe"), max_new_tokens=40, precision="fp32", **settings)
    sample.sample(config)
    return capsys.readouterr().out


def test_texts_do_not_depend_on_how_many_are_generated_at_once(capsys, run, monkeypatch):
    prompt = "every token before it and " * 4
    singles = [generated(capsys, run, prompt=prompt, seed=1337 + n) for n in range(4)]
    expected = "".join(singles)
    assert generated(capsys, run, prompt=prompt, num_samples=4) == expected
    for name, limit in (("MAX_BATCH_SIZE", 3), ("MAX_CACHE_BYTES", 1)):
        monkeypatch.setattr(sample, name, limit)
        assert generated(capsys, run, prompt=prompt, num_samples=4) == expected


def test_each_line_of_stdin_is_a_prompt_of_interactive_mode(capsys, run, monkeypatch):
    expected = [generated(capsys, run, prompt="the", seed=1337 + number) for number in (0, 1)]
    monkeypatch.setattr(sys, "stdin", io.StringIO("the\n\nthe\n"))
    assert generated(capsys, run, interactive=True) == "".join(expected)


@pytest.mark.parametrize(
    ("name", "is_lossless"),
    [("byte pairs", True), ("byte level", True), ("byte fallback", True), ("words", False)],
)
def test_a_score_says_that_a_tokenizer_loses_part_of_the_text(name, is_lossless, capsys):
    tokenizer = TOKENIZERS[name]
    model = lively(GPT(small(vocab_size=tokenizer.vocab_size)))
    sample.write_score(SampleConfig(score="-"), model, tokenizer, TEXT)
    out, err = capsys.readouterr()
    assert f"{len(TEXT.encode())} bytes" in out
    assert ("decode" in err) != is_lossless


def test_a_score_is_of_all_tokens_though_its_page_shows_the_first(tmp_path, open_page, capsys):
    tokenizer = CharTokenizer("ab\n")
    model = lively(GPT(small(vocab_size=3)))
    text = "ab\n" * (sample.MAX_SHOWN_TOKENS // 3 + 8)
    path = tmp_path / "page.html"
    config = SampleConfig(score=f"{tmp_path}/poem.txt", attention=str(path))
    sample.write_score(config, model, tokenizer, text)
    losses = score_tokens(model, tokenizer.encode("\n" + text))
    summary = capsys.readouterr().out.strip()
    loss = losses.mean()
    assert f"{loss:.4f} nats" in summary and f"{loss / math.log(2):.4f} bits per byte" in summary

    tab = open_page(path)
    tokens = tab.locator("#losses-text .token")
    assert tokens.count() == sample.MAX_SHOWN_TOKENS
    assert "poem.txt" in tab.inner_text("#title")
    assert summary in tab.inner_text("#losses-summary")
    tokens.nth(0).hover()
    assert f"{losses[0]:.3f} nats" in tab.inner_text("#tip")
    tokens.nth(0).focus()
    tab.keyboard.press("ArrowRight")
    wait_until(tab, f"document.querySelector('#tip').innerText.includes('{losses[1]:.3f}')")


# --- In a terminal --------------------------------------------------------------------------------


class Terminal:
    """sample.py in a real terminal of 80 columns."""

    def __init__(self, *argv: str):
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.environ.update(TERM="xterm-256color", COLUMNS="80")
            exec_script("sample.py", argv)

    def type(self, keys: str) -> None:
        os.write(self.fd, keys.encode())

    def read_until(self, pattern: str) -> str:
        """Return the output up to a pattern, or to the end of the program."""
        output, deadline = "", time.monotonic() + 60
        while not re.search(pattern, output):
            assert time.monotonic() < deadline, output
            if select.select([self.fd], [], [], 0.1)[0]:
                try:
                    output += os.read(self.fd, 65536).decode(errors="replace")
                except OSError:  # Linux reports the closed other end as an error
                    break
        return output

    def exit_status(self) -> int:
        assert "Traceback" not in self.read_until("(?!)")
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_ctrl_c_ends_the_program_with_status_130(run):
    terminal = Terminal(f"run_dir={run / 'char'}", "prompt=the glass", "max_new_tokens=1000000000")
    assert terminal.read_until("the glass.")  # the prompt, which a terminal shows, and a text
    terminal.type("\x03")
    assert terminal.exit_status() == 130


def test_interactive_mode_survives_ctrl_c_and_mistakes_and_ends_by_ctrl_d(run):
    terminal = Terminal(f"run_dir={run / 'char'}", "interactive=true", "max_new_tokens=1000000000")
    terminal.read_until("> $")
    terminal.type("the glass\n")
    terminal.read_until("(?s)the glass.*the glass.")
    terminal.type("\x03")
    terminal.read_until("> $")
    terminal.type("\x1b[A!\n")  # the up arrow recalls the prompt
    assert "'!'" in terminal.read_until("(?s)error: .*> $")
    terminal.type("\x04")
    assert terminal.exit_status() == 0
