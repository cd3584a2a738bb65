"""sample.py as a user runs it."""

import subprocess
import sys

import pytest
from conftest import ROOT, TINY

from config import UserError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(text_file, tmp_path_factory):
    """A folder with a short run by characters, `char`, and one by byte pairs, `bpe`."""
    folder = tmp_path_factory.mktemp("runs")
    for name, more in (("char", []), ("bpe", ["tokenizer.vocab_size=300"])):
        settings = [*TINY, f"tokenizer={name}", *more, "data=text", f"data.path={text_file}", "max_steps=3", "eval.every=0", "attention.every=0"]
        done = subprocess.run([sys.executable, str(ROOT / "train.py"), *settings, f"run_dir={folder / name}"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    return folder


def test_only_the_generated_text_is_on_stdout(command, run):
    done = command("sample.py", f"run_dir={run / 'char'}", "prompt=the glass", "max_new_tokens=40")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) == 41 and "the glass" not in done.stdout
    assert "tokens per second" in done.stderr and "KV cache" in done.stderr


def test_the_same_seed_gives_the_same_text_and_another_seed_another(command, run):
    texts = [command("sample.py", f"run_dir={run / 'char'}", f"seed={seed}", "max_new_tokens=60", "temperature=1").stdout for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_the_prompt_is_read_from_the_command_line_a_file_or_stdin(command, run, tmp_path):
    (tmp_path / "prompt.txt").write_text("the glass é", encoding="utf-8")
    ways = [("prompt=the glass é",), ("prompt_file=prompt.txt",)]
    texts = [command("sample.py", f"run_dir={run / 'char'}", *way, "temperature=0").stdout for way in ways]
    texts.append(command("sample.py", f"run_dir={run / 'char'}", "prompt=-", "temperature=0", input="the glass é\n").stdout)
    assert texts[0] == texts[1] == texts[2] != ""


def test_several_samples_and_prompts_longer_than_the_context_work(command, run):
    done = command("sample.py", f"run_dir={run / 'bpe'}", "prompt=" + "the glass model " * 30, "num_samples=3", "max_new_tokens=50")
    assert done.returncode == 0, done.stderr
    assert "sample 3 of 3" in done.stderr


@pytest.mark.parametrize("prompt", ["", "Hello, world", "it's [a] {b} (1) ~/x = é", "${HOME}", "<|endoftext|>", "日本"])
def test_a_bpe_model_takes_any_prompt(command, run, prompt):
    done = command("sample.py", f"run_dir={run / 'bpe'}", f"prompt={prompt}", "max_new_tokens=5")
    assert done.returncode == 0, done.stderr


def test_half_a_character_is_never_written(command, run):
    done = command("sample.py", f"run_dir={run / 'bpe'}", "max_new_tokens=200", "temperature=5", text=False, encoding=None)
    done.stdout.decode("utf-8")


@pytest.mark.parametrize(("args", "sentence"), [
    (["prompt=the Glass"], "'G' at position 4"),
    (["prompt=-"], "not UTF-8"),
    (["temperature=-1"], "temperature=-1.0 must be at least 0"),
    (["top_p=0"], "must be above 0"),
    (["checkpoint=7"], "no checkpoint of step 7: there are 3"),
    (["promt=x"], "did you mean prompt"),
    (["prompt_file=none.txt"], "cannot be read"),
    (["max_new_tokens=many"], "max_new_tokens"),
    (["device=tpu"], "device=tpu"),
    (["run_dir=nowhere"], "does not exist"),
])
def test_a_mistake_gets_one_sentence_and_status_1(command, run, args, sentence):
    done = command("sample.py", *([f"run_dir={run / 'char'}"] if "run_dir=nowhere" not in args else []), *args, input=b"\xff\xfe",
                   text=False, encoding=None)
    assert done.returncode == 1 and not done.stdout
    assert sentence in done.stderr.decode() and done.stderr.count(b"\n") == 1


def test_without_any_run_there_is_a_sentence(monkeypatch, tmp_path):
    from sample import newest_run

    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no run in runs/ yet"):
        newest_run()


def test_the_attention_over_prompt_and_text_is_a_page_that_holds_its_tokens(command, run, tmp_path):
    done = command("sample.py", f"run_dir={run / 'char'}", "prompt=the glass", "max_new_tokens=40", "attention=page.html")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) == 41 and "page.html" in done.stderr
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>") and '"T":32' in page  # the block's 32 tokens of the 49


@pytest.mark.parametrize(("path", "why"), [("page.png", "ends in .html"), ("nowhere/page.html", "does not exist")])
def test_a_page_that_cannot_be_written_is_refused_before_the_model_is_loaded(command, run, path, why):
    done = command("sample.py", f"run_dir={run / 'char'}", f"attention={path}")
    assert done.returncode == 1 and why in done.stderr and "Traceback" not in done.stderr and not done.stdout

