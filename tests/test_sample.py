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
import torch
from conftest import TINY, wait_until
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from models import lively, small
from pages import read_back
from processes import Process, exec_script, run_to_end

import sample
from cli.sample_config import SampleConfig
from common.errors import UserError
from data.tokenizer import CharTokenizer, start_token, train_bpe
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
    assert str(run / "char") in done.stderr and "page.html" in done.stderr
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert '"T":32' in page  # block_size; prompt and text have 49 tokens


def test_the_prompt_is_read_from_the_command_line_or_from_stdin(command, run):
    argv = [f"run_dir={run / 'char'}", "temperature=0"]
    from_argument = command("sample.py", *argv, "prompt=the glass é").stdout
    from_stdin = command("sample.py", *argv, "prompt=-", input="the glass é\n").stdout
    assert from_argument == from_stdin
    assert from_argument != ""


def test_a_prompt_is_read_from_a_file(tmp_path, monkeypatch):
    (tmp_path / "p.txt").write_text("the glass\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert sample.read_text(SampleConfig(prompt_file="~/p.txt")) == "the glass"


def test_a_note_says_how_many_tokens_of_a_long_prompt_the_model_reads(command, run):
    def notes(length):
        done = command(
            "sample.py", f"run_dir={run / 'char'}", f"prompt={'t' * length}", "max_new_tokens=5"
        )
        assert done.returncode == 0, done.stderr
        return [line for line in done.stderr.splitlines() if line.startswith("note:")]

    assert notes(32) == []
    (note,) = notes(33)
    assert "33" in note and "32" in note


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
        (["checkpoint=7"], "7"),
        (["prompt_file=none.txt"], "none.txt"),
        (["prompt_file=/dev/null"], "/dev/null"),
        (["score=rows.jsonl"], "rows.jsonl"),
        (["score=/dev/null"], "score=/dev/null"),
    ],
)
def test_a_mistake_gives_one_line_that_names_it_and_status_1(command, run, args, named):
    if not args[0].startswith("run_dir="):
        args = [f"run_dir={run / 'char'}", *args]
    done = command("sample.py", *args, input=b"\xff\xfe", text=False)
    assert done.returncode == 1
    assert not done.stdout
    assert named in done.stderr.decode()
    assert done.stderr.count(b"\n") == 1


def test_a_full_disk_under_stdout_gives_one_line_and_status_1(run, tmp_path):
    process = Process(
        tmp_path,
        f"run_dir={run / 'char'}",
        "max_new_tokens=5",
        script="sample.py",
        stdout=os.open("/dev/full", os.O_WRONLY),
    )
    assert process.wait() == 1
    assert process.output().count("\n") == 1


# --- Several texts --------------------------------------------------------------------------------


def generated(capsys, run, **settings):
    """What sample.py writes to stdout, in this process."""
    capsys.readouterr()
    config = SampleConfig(run_dir=str(run / "bpe"), max_new_tokens=40, precision="fp32", **settings)
    sample.sample(config)
    return capsys.readouterr().out


@pytest.mark.parametrize("prompt", ["", "every token before it and " * 4])
def test_texts_do_not_depend_on_how_many_are_generated_at_once(capsys, run, prompt, monkeypatch):
    singles = [generated(capsys, run, prompt=prompt, seed=1337 + n) for n in range(4)]
    expected = "".join(singles)
    assert generated(capsys, run, prompt=prompt, num_samples=4) == expected
    for name, limit in (("MAX_BATCH_SIZE", 3), ("MAX_CACHE_BYTES", 1)):
        monkeypatch.setattr(sample, name, limit)
        assert generated(capsys, run, prompt=prompt, num_samples=4) == expected


@pytest.mark.parametrize(("prompt", "n_tokens"), [("", 2), ("x", 1)])
def test_a_text_ends_at_the_end_of_text_but_without_a_prompt_may_begin_with_it(
    capsys, prompt, n_tokens
):
    tokenizer = train_bpe(["some text"], 257)
    model = GPT(small(vocab_size=257, tie_embeddings=False, norm="layernorm", bias=True))
    with torch.no_grad():  # a model that always predicts the end of the text
        model.norm.weight.zero_()
        model.norm.bias.fill_(1)
        model.head.weight.zero_()[tokenizer.end_of_text] = 1
    config = SampleConfig(temperature=0.0, max_new_tokens=9)
    sample.write_texts(config, model, tokenizer, prompt)
    assert capsys.readouterr().out == "\n" * n_tokens


def test_each_line_of_stdin_is_a_prompt_of_interactive_mode(capsys, run, monkeypatch):
    expected = [generated(capsys, run, prompt="the", seed=1337 + number) for number in (0, 1)]
    monkeypatch.setattr(sys, "stdin", io.StringIO("the\n\nthe\n"))
    assert generated(capsys, run, interactive=True) == "".join(expected)


def test_stdin_can_be_scored(command, run):
    text = "the glass model é—λ\n" * 5
    scored = command("sample.py", f"run_dir={run / 'bpe'}", "score=-", input=text).stdout
    assert scored.count("\n") == 1 and str(len(text.encode())) in scored


def test_a_score_is_of_all_tokens_though_its_page_shows_the_first(tmp_path, capsys):
    tokenizer = CharTokenizer("ab\n")
    model = lively(GPT(small(vocab_size=3)))
    text = "ab\n" * (sample.MAX_SHOWN_TOKENS // 3 + 8)
    path = tmp_path / "page.html"
    sample.write_score(SampleConfig(score="-", attention=str(path)), model, tokenizer, text)
    losses = score_tokens(model, tokenizer.encode("\n" + text))
    content = read_back(path)[0]["losses"]
    assert content["losses"] == pytest.approx(losses[: sample.MAX_SHOWN_TOKENS], abs=1e-4)
    assert "".join(content["tokens"]) == text[: sample.MAX_SHOWN_TOKENS]
    assert content["tokenCount"] == len(text)
    loss = losses.mean()
    assert capsys.readouterr().out == f"{content['summary']}\n"
    for figure in (f"{loss:.4f} nats", f"{loss / math.log(2):.4f} bits per byte"):
        assert figure in content["summary"]


def test_a_page_of_a_score_shows_and_names_the_loss_of_every_token(tmp_path, open_page, capsys):
    text = "the glass model reads\nthe <b>glass</b> é"
    tokenizer = train_bpe([text] * 20, 280)
    model = lively(GPT(small(vocab_size=tokenizer.vocab_size)))
    path = tmp_path / "page.html"
    config = SampleConfig(score=f"{tmp_path}/poem.txt", attention=str(path))
    sample.write_score(config, model, tokenizer, text)
    losses = score_tokens(model, [start_token(tokenizer), *tokenizer.encode(text)])

    tab = open_page(path)
    tokens = tab.locator("#losses-text .token")
    assert tokens.count() == len(losses)
    assert tab.input_value("#typed") == text
    assert "poem.txt" in tab.inner_text("#title")
    assert capsys.readouterr().out.strip() in tab.inner_text("#losses-summary")
    tokens.nth(int(losses.argmax())).hover()
    assert f"{losses.max():.3f} nats" in tab.inner_text("#tip")
    tokens.nth(0).focus()
    tab.keyboard.press("ArrowRight")
    wait_until(tab, f"document.querySelector('#tip').innerText.includes('{losses[1]:.3f}')")
    # The attention is that of the beginning, in which the losses were measured.
    stored = read_back(path)[0]
    assert stored["probes"][0]["tokens"][1:] == stored["losses"]["tokens"]


# --- Any settings --------------------------------------------------------------------------------

temperatures = st.floats(0, 1e308) | st.sampled_from([5e-324, 1e-30, 1.0])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(options={"temperature": 1e30, "top_k": 3, "top_p": 0.5, "min_p": 0.5})
@example(options={"top_p": 1e-300, "seed": 2**63})
@example(options={"prompt": "the glass " * 500})
@given(
    options=st.fixed_dictionaries(
        {},
        optional={
            "temperature": temperatures,
            "top_k": st.integers(1, 10**18),
            "top_p": st.floats(0, 1),
            "min_p": st.floats(0, 1),
            "seed": st.integers(0, 2**63),
            "prompt": st.text(max_size=80).filter(lambda text: text != "-"),  # which is stdin
        },
    )
)
def test_any_sampling_options_give_a_text_or_a_one_line_error(finished_run, capsys, options):
    config = SampleConfig(run_dir=str(finished_run), max_new_tokens=4, checkpoint="last", **options)
    try:
        config.check()
        sample.sample(config)
    except UserError as e:
        assert "\n" not in str(e)
    else:
        assert len(capsys.readouterr().out) == 5


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

    def read_until(self, pattern: str, timeout: float = 60) -> str:
        """Return the output up to a pattern."""
        return self._read(lambda shown: re.search(pattern, shown) is not None, timeout)

    def read_to_end(self, timeout: float = 60) -> str:
        """Return the output up to the end of the program."""
        return self._read(lambda shown: False, timeout)

    def _read(self, is_complete, timeout):
        output, deadline = b"", time.monotonic() + timeout
        while not is_complete(output.decode(errors="replace")):
            assert time.monotonic() < deadline, output
            if not select.select([self.fd], [], [], 0.1)[0]:
                continue
            try:
                new = os.read(self.fd, 65536)
            except OSError:  # Linux reports the closed other end as an error
                new = b""
            if not new:
                break
            output += new
        return output.decode(errors="replace").replace("\r\n", "\n")

    def exit_status(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_ctrl_c_ends_the_program_with_status_130(run):
    terminal = Terminal(f"run_dir={run / 'char'}", "prompt=the glass", "max_new_tokens=1000000000")
    assert terminal.read_until("the glass.")  # the prompt, which a terminal shows, and a text
    terminal.type("\x03")
    assert "Traceback" not in terminal.read_to_end()
    assert terminal.exit_status() == 130


def test_interactive_mode_survives_ctrl_c_and_mistakes_recalls_prompts_and_ends_by_ctrl_d(run):
    terminal = Terminal(f"run_dir={run / 'char'}", "interactive=true", "max_new_tokens=1000000000")
    terminal.read_until("> $")
    terminal.type("the glass\n")
    terminal.read_until("(?s)the glass.*the glass.")
    terminal.type("\x03")
    terminal.read_until("> $")
    terminal.type("\x1b[A!\n")  # the up arrow recalls the prompt
    assert "'!'" in terminal.read_until("(?s)error: .*> $")
    terminal.type("half")
    terminal.read_until("half")
    time.sleep(0.5)  # Python notices a Ctrl-C during the drawing of a key only at the next key
    terminal.type("\x03")
    terminal.read_until("> $")
    terminal.type("\x04")
    assert "Traceback" not in terminal.read_to_end()
    assert terminal.exit_status() == 0
