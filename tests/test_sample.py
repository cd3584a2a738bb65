"""sample.py as a user runs it."""

import json
import os
import pty
import re
import resource
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, TINY
from processes import Process, become, finished, without_rights

import cli
from config import SampleConfig, UserError
from files import sha256_of
from sample import sample
from training.checkpoint import _sealed, find_checkpoint

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(text_file, shared):
    """A folder with a short run by characters, `char`, and one by byte pairs, `bpe`."""
    def make(folder: Path) -> None:
        for name, more in (("char", []), ("bpe", ["tokenizer.vocab_size=300"])):
            finished(folder, *TINY, f"tokenizer={name}", *more, "data=text",
                     f"data.path={text_file}", "max_steps=3", "eval.every=0", "attention.every=0",
                     f"run_dir={name}")

    return shared("sampled", make)


def test_only_the_generated_text_is_on_stdout(command, run):
    done = command("sample.py", f"run_dir={run / 'char'}", "prompt=the glass", "max_new_tokens=40")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) == 41 and "the glass" not in done.stdout
    assert "tokens per second" in done.stderr and "KV cache" in done.stderr


def test_the_same_seed_gives_the_same_text_and_another_seed_another(command, run):
    texts = [command("sample.py", f"run_dir={run / 'char'}", f"seed={seed}", "max_new_tokens=60",
                     "temperature=1").stdout for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_the_prompt_is_read_from_the_command_line_or_stdin(command, run):
    argv = [f"run_dir={run / 'char'}", "temperature=0"]
    typed = command("sample.py", *argv, "prompt=the glass é").stdout
    read = command("sample.py", *argv, "prompt=-", input="the glass é\n").stdout
    assert typed == read != ""


def test_several_samples_and_prompts_longer_than_the_context_work(command, run):
    done = command("sample.py", f"run_dir={run / 'bpe'}", "prompt=" + "the glass model " * 30,
                   "num_samples=3", "max_new_tokens=50")
    assert done.returncode == 0, done.stderr
    assert "text 3 of 3" in done.stderr


def test_a_prompt_longer_than_the_context_is_said_to_be_cut(command, run):
    for n, told in ((32, False), (33, True)):
        done = command("sample.py", f"run_dir={run / 'char'}", f"prompt={'t' * n}",
                       "max_new_tokens=5")
        note = f"note: the prompt has {n} tokens; the model sees the last 32 of them\n"
        assert done.returncode == 0 and (note in done.stderr) == told


@pytest.mark.parametrize("prompt", ["", "Hello, world", "it's [a] {b} (1) ~/x = é", "${HOME}",
                                    "<|endoftext|>", "日本"])
def test_a_bpe_model_takes_any_prompt(command, run, prompt):
    done = command("sample.py", f"run_dir={run / 'bpe'}", f"prompt={prompt}", "max_new_tokens=5")
    assert done.returncode == 0, done.stderr


def test_half_a_character_is_never_written(command, run):
    done = command("sample.py", f"run_dir={run / 'bpe'}", "max_new_tokens=200", "temperature=5",
                   text=False)
    done.stdout.decode("utf-8")


@pytest.mark.parametrize(("args", "sentence"), [
    (["prompt=the Glass"], "'G' at position 4"),
    (["prompt=-"], "not UTF-8"),
    (["temperature=-1"], "temperature=-1.0 must be at least 0"),
    (["top_p=0"], "must be above 0"),
    (["checkpoint=7"], "no checkpoint of step 7: there are 3"),
    (["promt=x"], "did you mean prompt"),
    (["prompts=none.txt"], "cannot be read"),
    (["max_new_tokens=many"], "max_new_tokens"),
    (["device=tpu"], "device=tpu"),
    (["run_dir=nowhere"], "run_dir=nowhere does not exist: python -m report lists your runs"),
    (["prompts=-"], "prompts=- is not UTF-8 text: byte 0xff at offset 0"),
    (["prompt=a", "interactive=true"], "prompt= and interactive= are both given"),
    (["score=none.txt"], "score=none.txt cannot be read"),
    (["score=/dev/null"], "score=/dev/null is empty"),
    (["stop="], "stop= is empty"),
    (["stop=a\\q"], "a backslash that means nothing"),
    (["repetition_penalty=0"], "repetition_penalty=0.0 must be at least 0.01"),
])
def test_a_mistake_gets_one_sentence_and_status_1(command, run, args, sentence):
    done = command("sample.py", *([f"run_dir={run / 'char'}"] if "run_dir=nowhere" not in args
                                  else []), *args, input=b"\xff\xfe",
                   text=False)
    assert done.returncode == 1 and not done.stdout
    assert sentence in done.stderr.decode() and done.stderr.count(b"\n") == 1


def test_without_any_run_there_is_a_sentence(monkeypatch, tmp_path):
    from sample import newest_run

    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no run in runs/ yet"):
        newest_run()


def test_the_attention_over_prompt_and_text_is_a_page_that_holds_its_tokens(command, run, tmp_path):
    done = command("sample.py", f"run_dir={run / 'char'}", "prompt=the glass", "max_new_tokens=40",
                   "attention=page.html")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) == 41 and "page.html" in done.stderr
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    # the block's 32 tokens of the 49
    assert page.startswith("<!doctype html>") and '"T":32' in page


@pytest.mark.parametrize(("path", "why"),
                         [("page.png", "ends in .html"), ("nowhere/page.html", "does not exist")])
def test_a_page_that_cannot_be_written_is_refused_before_the_model_is_loaded(
        command, run, path, why):
    done = command("sample.py", f"run_dir={run / 'char'}", f"attention={path}")
    assert done.returncode == 1 and why in done.stderr
    assert "Traceback" not in done.stderr and not done.stdout


def test_a_page_that_finds_its_disk_full_or_its_folder_locked_is_a_sentence(run, disk, tmp_path):
    args = [f"run_dir={run / 'char'}", "max_new_tokens=5", f"attention={disk / 'page.html'}"]
    said = finished(tmp_path, *args, script="sample.py", status=1)
    assert "page.html cannot be written: No space left on device\n" in said
    assert not list(disk.iterdir())
    disk.chmod(0o500)
    said = finished(tmp_path, *args, script="sample.py", status=1, fault=without_rights)
    assert "is in a folder that you may not write" in said and said.count("\n") == 1


@pytest.mark.parametrize("args", [["--help"], [], ["json=true"], ["score=text.txt", "json=true"]])
def test_a_full_disk_under_stdout_is_a_sentence(run, tmp_path, args):
    (tmp_path / "text.txt").write_text("the glass")
    args = [f"run_dir={run / 'char'}", "max_new_tokens=5", *args]
    process = Process(tmp_path, *args, script="sample.py",
                      stdout=os.open("/dev/full", os.O_WRONLY))
    assert process.wait() == 1
    assert process.said() == ("error: the output cannot be read or written: "
                              "No space left on device\n")


def test_a_full_disk_under_stderr_costs_no_text(run, tmp_path):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, str(ROOT / "sample.py"), f"run_dir={run / 'char'}",
             "max_new_tokens=5"],
            stdout=subprocess.PIPE, stderr=full, text=True)
    assert done.returncode == 0 and len(done.stdout) == 6


@pytest.mark.parametrize("setting", ["prompts", "score"])
def test_a_pipe_that_nobody_writes_to_is_refused_and_one_of_the_shells_is_read(
        command, run, tmp_path, setting):
    os.mkfifo(tmp_path / "pipe")
    done = command("sample.py", f"run_dir={run / 'char'}", f"{setting}=pipe")
    assert done.returncode == 1 and f"{setting}=pipe is a named pipe" in done.stderr
    done = command("sample.py", f"run_dir={run / 'char'}", f"{setting}=/dev/stdin",
                   "max_new_tokens=5",
                   input='{"prompt": "the"}\n' if setting == "prompts" else "the")
    assert done.returncode == 0, done.stderr


def test_too_little_memory_is_a_sentence(run, tmp_path):
    def fault():
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), used + (1 << 30)))

    said = finished(tmp_path, f"run_dir={run / 'char'}", "score=/dev/zero", script="sample.py",
                    status=1, fault=fault)
    assert said.startswith("error: there is too little memory") and said.count("\n") == 1


def with_tokenizer(run_dir: Path, to: Path, **changes) -> Path:
    """A copy of a run whose last checkpoint has another tokenizer, and hashes that fit it."""
    shutil.copytree(run_dir, to)
    folder, manifest = find_checkpoint(to)
    kept = json.loads((folder / "tokenizer.json").read_text())
    text = json.dumps({**kept, **{key: change(kept) for key, change in changes.items()}})
    (folder / "tokenizer.json").write_text(text)
    manifest["files"]["tokenizer.json"] = {"bytes": len(text),
                                           "sha256": sha256_of(folder / "tokenizer.json")}
    del manifest["sha256"]
    (folder / "manifest.json").write_text(_sealed(json.dumps(manifest, indent=1)))
    return to


LONGER = {"char": {"alphabet": lambda kept: kept["alphabet"] + "ÿ日"},
          "bpe": {"tokens": lambda kept: [*kept["tokens"], "enp6", "enp6eno="],
                  "end_of_text": lambda kept: kept["end_of_text"] + 2}}
SHORTER = {"char": {"alphabet": lambda kept: kept["alphabet"][:5]},
           "bpe": {"tokens": lambda kept: kept["tokens"][:-20],
                   "end_of_text": lambda kept: len(kept["tokens"]) - 20}}


@pytest.mark.parametrize("kind", ["char", "bpe"])
def test_a_tokenizer_larger_or_smaller_than_the_model_is_refused(run, tmp_path, kind):
    for name, changed in (("longer", LONGER), ("shorter", SHORTER)):
        other = with_tokenizer(run / kind, tmp_path / name, **changed[kind])
        said = finished(tmp_path, f"run_dir={other}", script="sample.py", status=1)
        assert "they do not belong together" in said and said.count("\n") == 1


# --- several texts, several prompts ---------------------------------------------------------------


def said(capsys, run, *, kind="bpe", **settings):
    """What sample() writes to stdout, in this process."""
    capsys.readouterr()
    sample(SampleConfig(run_dir=str(run / kind), max_new_tokens=40, precision="fp32", **settings))
    return capsys.readouterr().out


def objects(out):
    return [json.loads(line) for line in out.splitlines()]


def write_prompts(path, prompts):
    path.write_text("".join(json.dumps({"prompt": prompt, "from": "a test"}) + "\n\n"
                            for prompt in prompts), encoding="utf-8")
    return str(path)


PROMPTS = ["the glass", "", "every token before it and " * 4, "é", "a\nb"]


def test_texts_made_together_are_those_made_alone(capsys, run, tmp_path):
    together = objects(said(capsys, run, prompts=write_prompts(tmp_path / "p.jsonl", PROMPTS),
                            num_samples=2, json=True))
    assert [(t["prompt"], t["seed"])
            for t in together] == [(prompt, 1337 + n) for prompt in PROMPTS for n in range(2)]
    for text in together:
        (alone,) = objects(said(capsys, run, prompt=text["prompt"], seed=text["seed"], json=True))
        assert alone == text
        assert said(capsys, run, prompt=text["prompt"], seed=text["seed"]) == text["text"] + "\n"


def test_more_texts_than_fit_at_once_are_the_same_texts(capsys, run, tmp_path, monkeypatch):
    settings = {"prompts": write_prompts(tmp_path / "p.jsonl", PROMPTS), "num_samples": 2,
                "json": True}
    together = said(capsys, run, **settings)
    for name in ("ROWS", "CACHE_BYTES"):
        with monkeypatch.context() as patched:
            patched.setattr(f"sample.{name}", {"ROWS": 3, "CACHE_BYTES": 1}[name])
            assert said(capsys, run, **settings) == together


def test_the_texts_of_a_script_are_json_lines_with_why_each_ended(capsys, run):
    free = objects(said(capsys, run, num_samples=3, json=True, temperature=1.0))
    assert all(text["ended"] in ("length", "end_of_text") and text["tokens"] <= 40 for text in free)
    stop = free[1]["text"][5:8]
    texts = objects(said(capsys, run, num_samples=3, json=True, temperature=1.0,
                         stop=["never seen", stop]))
    assert texts[1]["text"] == free[1]["text"][:free[1]["text"].index(stop)]
    assert texts[1]["ended"] == "stop"
    for text, before in zip(texts, free):
        assert stop not in text["text"] and before["text"].startswith(text["text"])


def test_prompts_and_texts_go_through_pipes_as_json_lines(command, run):
    lines = "".join(json.dumps({"prompt": prompt}) + "\r\n" for prompt in PROMPTS)
    first = command("sample.py", f"run_dir={run / 'bpe'}", "prompts=-", "json=true",
                    "max_new_tokens=5", input=lines)
    again = command("sample.py", f"run_dir={run / 'bpe'}", "prompts=-", "json=true",
                    "max_new_tokens=5", input=first.stdout)
    assert first.returncode == 0 and first.stdout == again.stdout
    assert len(objects(first.stdout)) == 5
    plain = command("sample.py", f"run_dir={run / 'bpe'}", "prompts=-", "max_new_tokens=5",
                    input=lines)
    assert plain.stdout == "".join(text["text"] + "\n" for text in objects(first.stdout))
    assert "text 5 of 5" in plain.stderr


@pytest.mark.parametrize("line", ["the glass", "[]", "{}", '"a"', '{"prompt": 3}',
                                  '{"prompt": null}', "null", "[" * 100_000, '{"prompt": "a"'])
def test_a_line_without_a_prompt_is_named(tmp_path, run, line):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n' + line)
    with pytest.raises(UserError, match=r"p\.jsonl has no prompt in line 2: each is a JSON object"):
        sample(SampleConfig(run_dir=str(run / "bpe"), prompts=str(tmp_path / "p.jsonl")))


def test_a_prompt_of_many_that_cannot_be_encoded_is_named(tmp_path, run):
    with pytest.raises(UserError, match=r"^prompt 2 of 3: the character 'G' at position 4"):
        sample(SampleConfig(run_dir=str(run / "char"),
                            prompts=write_prompts(tmp_path / "p.jsonl", ["a", "the G", "b"])))


def test_a_file_without_prompts_is_refused(tmp_path, run):
    (tmp_path / "p.jsonl").write_text("\n")
    with pytest.raises(UserError, match="has no line"):
        sample(SampleConfig(run_dir=str(run / "bpe"), prompts=str(tmp_path / "p.jsonl")))


def test_a_repetition_penalty_makes_text_repeat_less(capsys, run):
    free, fined = (said(capsys, run, kind="char", temperature=0.0, repetition_penalty=penalty)
                   for penalty in (1.0, 5.0))
    assert len(set(fined)) > len(set(free))


def test_an_output_that_is_not_utf8_gets_what_it_can_show(command, run):
    done = command("sample.py", f"run_dir={run / 'bpe'}", "prompt=é", "temperature=5",
                       "max_new_tokens=100", env={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0 and "?" in done.stdout and done.stdout.isascii()


def test_a_score_is_a_line_in_a_pipe_and_json_lines_on_request(command, run, tmp_path):
    (tmp_path / "text.txt").write_text("the glass model é—λ\n" * 5, encoding="utf-8")
    line = command("sample.py", f"run_dir={run / 'bpe'}", "score=text.txt")
    *tokens, total = objects(command("sample.py", f"run_dir={run / 'bpe'}", "score=-", "json=true",
                                     input="the glass model é—λ\n" * 5).stdout)
    assert total["tokens"] == len(tokens) and total["bytes"] == 24 * 5
    assert sum(token["nats"]
               for token in tokens) / len(tokens) == pytest.approx(total["loss"], abs=1e-5)
    assert line.stdout == (f"{len(tokens)} tokens, 120 bytes: loss {total['loss']:.4f} nats per "
                           f"token, {total['bits_per_byte']:.4f} bits per byte\n")


def test_with_a_byte_a_weight_texts_together_are_those_alone_and_a_score_changes_little(
        command, run, tmp_path):
    """The command line, with a trained model: greedy text, prompts together as alone, a score."""
    which = (f"run_dir={run / 'char'}", "device=cpu")
    prompts = write_prompts(tmp_path / "p.jsonl", ["the glass", "m", "every token before it"])
    for precision in ("precision=bf16", "quantize=int8"):
        greedy = (*which, precision, "temperature=0", "max_new_tokens=30", "json=true")
        together = objects(command("sample.py", *greedy, f"prompts={prompts}").stdout)
        assert together == [objects(command("sample.py", *greedy, f"prompt={t['prompt']}").stdout)[
            0] for t in together]
    (tmp_path / "text.txt").write_text("the glass model\n" * 9)
    plain, bytes_ = (objects(command("sample.py", *which, precision, "score=text.txt",
                                     "json=true").stdout)[-1]["bits_per_byte"]
                     for precision in ("precision=fp32", "quantize=int8"))
    assert 0 < abs(bytes_ - plain) < 0.01 * plain


# --- a conversation, in a terminal ----------------------------------------------------------------


class Terminal:
    """sample.py with a real terminal of 80 columns around it."""

    def __init__(self, *argv: str):
        self.out, (self.pid, self.fd) = "", pty.fork()
        if self.pid == 0:
            os.environ.update(TERM="xterm-256color", COLUMNS="80")
            become("sample.py", argv)

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


def test_a_conversation_asks_for_prompts_until_ctrl_d(run):
    terminal = Terminal(f"run_dir={run / 'char'}", "interactive=true", "max_new_tokens=20")
    assert "Ctrl-D" in terminal.until(r"> \Z")
    terminal.type("the glass\n")
    first = terminal.until(r"\n> \Z").removeprefix("the glass\n")  # as it was typed
    assert first.startswith("the glass") and len(first) >= len("the glass") + 20
    terminal.type("the G\n")
    assert "error: the character 'G' at position 4" in terminal.until(r"\n> \Z")
    terminal.type("\x1b[A\x1b[A\n")  # up, up: the history
    second = terminal.until(r"\n> \Z")
    # the seed after the last
    assert second.rpartition("the glass")[2] != first.rpartition("the glass")[2]
    terminal.until(r"\n> \Z", keys="\x03")
    terminal.type("\x04")
    terminal.until()
    assert terminal.status() == 0


def test_ctrl_c_ends_a_text_which_stays_and_not_the_conversation(run):
    terminal = Terminal(f"run_dir={run / 'char'}", "interactive=true", "max_new_tokens=1000000000")
    terminal.until(r"> \Z")
    terminal.type("the glass\n")
    terminal.until("the glass.{50}")
    terminal.type("\x03")
    terminal.until(r"\n> \Z")
    terminal.type("\x04")
    terminal.until()
    assert terminal.status() == 0


def test_ctrl_c_ends_the_program_where_there_is_no_conversation(run):
    terminal = Terminal(f"run_dir={run / 'char'}", "prompt=the glass", "max_new_tokens=1000000000")
    assert terminal.until("the glass")
    terminal.type("\x03")
    assert "Traceback" not in terminal.until()
    assert terminal.status() == 130


@pytest.mark.parametrize("setting", ["prompt=-", "prompts=-", "score=-", "interactive=true"])
def test_a_closed_stdin_is_said_where_it_would_be_read(run, monkeypatch, setting):
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UserError, match="stdin is closed"):
        sample(cli.sample_config([f"run_dir={run / 'char'}", setting]))


def test_without_a_terminal_each_line_is_a_prompt(command, run):
    done = command("sample.py", f"run_dir={run / 'char'}", "interactive=true", "max_new_tokens=5",
                   "json=true", input="the\nglass\n")
    assert done.returncode == 0
    assert [(text["prompt"], text["seed"])
            for text in objects(done.stdout)] == [("the", 1337), ("glass", 1338)]


def test_in_a_terminal_prompt_and_text_read_as_one_and_a_score_is_coloured(run, tmp_path):
    terminal = Terminal(f"run_dir={run / 'char'}", "prompt=the glass", "temperature=0",
                        "max_new_tokens=20")
    shown = terminal.until()
    assert terminal.status() == 0 and shown.startswith("the glass") and "KV cache" in shown
    (tmp_path / "text.txt").write_text("the glass\nlass the")
    terminal = Terminal(f"run_dir={run / 'char'}", f"score={tmp_path / 'text.txt'}")
    shown = terminal.until()
    assert terminal.status() == 0 and "\x1b[" in shown and "bits per token" in shown
    assert "bits per byte" in shown
