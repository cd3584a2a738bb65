"""sample.py as a user runs it."""

import os
import pty
import re
import select
import time
from pathlib import Path

import pytest
from conftest import TINY
from processes import Process, exec_script, run_to_end

from config import SampleConfig
from sample import sample

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(text_file, shared):
    """A folder with a short run by characters, `char`, and one by byte pairs, `bpe`."""

    def make(folder: Path) -> None:
        for name, more in (("char", []), ("bpe", ["tokenizer.vocab_size=300"])):
            run_to_end(
                folder,
                *TINY,
                f"tokenizer={name}",
                *more,
                "data=text",
                f"data.path={text_file}",
                "max_steps=3",
                "eval.every=0",
                "attention.every=0",
                f"run_dir={name}",
            )

    return shared("sampled", make)


def test_only_the_generated_text_is_on_stdout(command, run):
    done = command("sample.py", f"run_dir={run / 'char'}", "prompt=the glass", "max_new_tokens=40")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) == 41 and "the glass" not in done.stdout
    assert "tokens per second" in done.stderr and "KV cache" in done.stderr


def test_the_prompt_is_read_from_the_command_line_or_stdin(command, run):
    argv = [f"run_dir={run / 'char'}", "temperature=0"]
    typed = command("sample.py", *argv, "prompt=the glass é").stdout
    assert typed == command("sample.py", *argv, "prompt=-", input="the glass é\n").stdout != ""


def test_a_prompt_longer_than_the_context_is_cut_and_that_is_said(command, run):
    for n, told in ((32, False), (33, True)):
        done = command(
            "sample.py",
            f"run_dir={run / 'char'}",
            f"prompt={'t' * n}",
            "num_samples=2",
            "max_new_tokens=5",
        )
        note = f"note: the prompt has {n} tokens; the model sees the last 32 of them\n"
        assert done.returncode == 0 and (note in done.stderr) == told
        assert "text 2 of 2" in done.stderr


@pytest.mark.parametrize("prompt", ["", "it's [a] {b} (1) ~/x = é, ${HOME}", "<|endoftext|>日本"])
def test_a_bpe_model_takes_any_prompt_and_writes_whole_characters(command, run, prompt):
    done = command(
        "sample.py",
        f"run_dir={run / 'bpe'}",
        f"prompt={prompt}",
        "max_new_tokens=200",
        "temperature=5",
        text=False,
    )
    assert done.returncode == 0 and done.stdout.decode("utf-8"), done.stderr


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["prompt=the Glass"], "the character 'G'"),
        (["prompt=-"], "not UTF-8"),
        (["temperature=-1"], "temperature=-1.0 must be at least 0"),
        (["top_p=0"], "must be above 0"),
        (["checkpoint=7"], "no checkpoint of step 7: there are 3"),
        (["promt=x"], "did you mean prompt"),
        (["run_dir=nowhere"], "run_dir=nowhere does not exist: give the folder of a run"),
        (["score=none.txt"], "none.txt cannot be read"),
        (["score=/dev/null"], "score=/dev/null is empty"),
        (["attention=page.png"], "end in .html"),
    ],
)
def test_a_mistake_gets_one_sentence_and_status_1(command, run, args, sentence):
    done = command(
        "sample.py",
        *([f"run_dir={run / 'char'}"] if "run_dir=nowhere" not in args else []),
        *args,
        input=b"\xff\xfe",
        text=False,
    )
    assert done.returncode == 1 and not done.stdout
    assert sentence in done.stderr.decode() and done.stderr.count(b"\n") == 1


def test_the_attention_over_prompt_and_text_is_a_page_that_holds_its_tokens(command, run, tmp_path):
    done = command(
        "sample.py",
        f"run_dir={run / 'char'}",
        "prompt=the glass",
        "max_new_tokens=40",
        "attention=page.html",
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) == 41 and "page.html" in done.stderr
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    # the block's 32 tokens of the 49
    assert page.startswith("<!doctype html>") and '"T":32' in page


def test_a_full_disk_under_stdout_is_a_sentence(run, tmp_path):
    process = Process(
        tmp_path,
        f"run_dir={run / 'char'}",
        "max_new_tokens=5",
        script="sample.py",
        stdout=os.open("/dev/full", os.O_WRONLY),
    )
    assert process.wait() == 1
    assert process.output() == (
        "error: the output cannot be read or written: No space left on device\n"
    )


# --- several texts --------------------------------------------------------------------------------


def said(capsys, run, *, kind="bpe", **settings):
    """What sample() writes to stdout, in this process."""
    capsys.readouterr()
    sample(SampleConfig(run_dir=str(run / kind), max_new_tokens=40, precision="fp32", **settings))
    return capsys.readouterr().out


@pytest.mark.parametrize("prompt", ["", "every token before it and " * 4])
def test_texts_made_together_are_those_made_alone(capsys, run, monkeypatch, prompt):
    alone = "".join(said(capsys, run, prompt=prompt, seed=1337 + n) for n in range(4))
    assert said(capsys, run, prompt=prompt, num_samples=4) == alone
    for name, value in (("ROWS", 3), ("CACHE_BYTES", 1)):
        monkeypatch.setattr(f"sample.{name}", value)
        assert said(capsys, run, prompt=prompt, num_samples=4) == alone


def test_a_score_of_a_file_or_of_stdin_is_a_line_in_a_pipe(command, run, tmp_path):
    text = "the glass model é—λ\n" * 5
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    from_file = command("sample.py", f"run_dir={run / 'bpe'}", "score=text.txt").stdout
    from_stdin = command("sample.py", f"run_dir={run / 'bpe'}", "score=-", input=text).stdout
    assert from_file == from_stdin and re.fullmatch(
        r"\d+ tokens, 120 bytes: loss [\d.]+ nats per token, [\d.]+ bits per byte\n", from_file
    )


# --- in a terminal -------------------------------------------------------------------------------


class Terminal:
    """sample.py with a real terminal of 80 columns around it."""

    def __init__(self, *argv: str):
        self.out, (self.pid, self.fd) = "", pty.fork()
        if self.pid == 0:
            os.environ.update(TERM="xterm-256color", COLUMNS="80")
            exec_script("sample.py", argv)

    def type(self, keys: str) -> None:
        os.write(self.fd, keys.encode())

    def until(self, pattern: str = "", timeout: float = 60, keys: str = "") -> str:
        """What it has shown since the last call, once the pattern is found there, or the program
        has ended.

        `keys` are typed at once, and again every five seconds: a signal that comes just before
        readline waits for a key is seen at the next key only.
        """
        shown, start, typed = b"", time.monotonic(), 0.0
        while not (pattern and re.search(pattern, shown.decode(errors="replace"), re.DOTALL)):
            now = time.monotonic()
            assert now < start + timeout, shown
            if keys and now > typed + 5:
                self.type(keys)
                typed = now
            if select.select([self.fd], [], [], 0.1)[0]:
                try:
                    read = os.read(self.fd, 65536)
                except OSError:  # so says Linux where the other end is closed
                    read = b""
                if not read:
                    break
                shown += read
        return shown.decode().replace("\r\n", "\n")

    def status(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_ctrl_c_ends_the_program(run):
    terminal = Terminal(f"run_dir={run / 'char'}", "prompt=the glass", "max_new_tokens=1000000000")
    assert terminal.until("the glass")
    terminal.type("\x03")
    assert "Traceback" not in terminal.until()
    assert terminal.status() == 130


def test_in_a_terminal_prompt_and_text_read_as_one(run):
    terminal = Terminal(
        f"run_dir={run / 'char'}", "prompt=the glass", "temperature=0", "max_new_tokens=20"
    )
    shown = terminal.until()
    assert terminal.status() == 0 and "KV cache" in shown
    assert shown.startswith("loading …\nthe glass")
