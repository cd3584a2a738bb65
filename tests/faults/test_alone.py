"""No network, key, compiler, GPU, HOME or terminal, a read-only HOME, no stdout: training and
sampling finish. And bad prompts."""

import os
import subprocess
import sys

import pytest
from conftest import ROOT, TINY
from hypothesis import given
from hypothesis import strategies as st
from processes import finished, rows, tiny, without_rights

from config import SampleConfig, UserError
from sample import read, sample

NOTHING = {"PATH": "", "HTTPS_PROXY": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9",
           "CUDA_VISIBLE_DEVICES": "", "WANDB_MODE": None,
           "CXX": None, "TERM": None, "XDG_CACHE_HOME": None, "XDG_CONFIG_HOME": None,
           "MPLCONFIGDIR": None, "TMPDIR": None}


@pytest.mark.slow
@pytest.mark.parametrize("home", ["read-only", pytest.param(None, marks=pytest.mark.soak),
                                  pytest.param("/nowhere", marks=pytest.mark.soak)])
def test_with_nothing_around_it_a_run_finishes_and_is_sampled_from(
        new_command, tmp_path, text_file, home):
    (tmp_path / "home").mkdir(mode=0o555)
    env = NOTHING | {"HOME": str(tmp_path / "home") if home == "read-only" else home}
    more = {"env": env, "preexec_fn": without_rights}
    done = new_command("train.py", *TINY, "data=text", f"data.path={text_file}", "max_steps=2",
                       "run_dir=run", "attention.tokens=16", "compile=true", **more)
    assert done.returncode == 0, done.stderr
    assert "torch.compile failed here" in done.stdout and "eager" in done.stdout
    assert "recorded offline" in done.stdout and rows(tmp_path / "run")[-1]["step"] == 2
    said = new_command("sample.py", "run_dir=run", "max_new_tokens=5", **more)
    assert said.returncode == 0 and said.stdout, said.stderr


@pytest.mark.slow
def test_with_no_stdout_and_no_stderr_a_run_finishes(tmp_path, text_file):
    argv = " ".join(f"'{word}'" for word in tiny(text_file, "max_steps=2"))
    done = subprocess.run(f"exec '{sys.executable}' '{ROOT}/train.py' {argv} <&- >&- 2>&-",
                          shell=True, cwd=tmp_path, env=os.environ)
    assert done.returncode == 0 and rows(tmp_path / "run")[-1]["step"] == 2


# --- prompts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [
    {"temperature": 0.0}, {"temperature": 1e-30}, {"temperature": 1e30}, {"temperature": 5e-324},
    {"temperature": 1.7e308}, {"top_k": 10 ** 18},
    {"top_k": 1}, {"top_p": 1e-300}, {"top_p": 1.0}, {"min_p": 0.0}, {"min_p": 1.0},
    {"seed": 2 ** 63}, {"prompt": ""},
    {"prompt": "the glass " * 500}, {"repetition_penalty": 0.01}, {"repetition_penalty": 100.0},
    {"temperature": 1e30, "top_k": 3, "top_p": 0.5, "min_p": 0.5}], ids=str)
def test_whatever_is_allowed_gives_a_text(whole, capsys, more):
    sample(SampleConfig(**{"run_dir": str(whole), "max_new_tokens": 4, "checkpoint": "last",
                           **more}))
    assert len(capsys.readouterr().out) == 5


@pytest.mark.parametrize("argv", [["temperature=-1"], ["temperature=nan"], ["temperature=inf"],
                                  ["top_k=0"], ["top_k=-5"], ["top_p=0"],
                                  ["top_p=1.01"], ["min_p=-0.1"], ["max_new_tokens=0"],
                                  ["max_new_tokens=-3"], ["max_new_tokens=1e9"],
                                  ["num_samples=0"], ["seed=-1"], ["prompt=a", "prompts=b"],
                                  ["checkpoint=-1"], ["top_k=many"],
                                  ["repetition_penalty=0"], ["repetition_penalty=inf"], ["stop="],
                                  ["stop=\\x"],
                                  ["score=a", "prompts=b"]], ids=" ".join)
def test_values_out_of_bounds_are_a_sentence_that_names_them(argv):
    import cli

    with pytest.raises((UserError, Exception)) as error:
        cli.sample_config(argv)
    assert argv[0].partition("=")[0] in cli.sentence(error.value) and "\n" not in cli.sentence(
        error.value)


@pytest.mark.slow
@given(prompt=st.text(max_size=80).filter(lambda text: text != "-"))  # which is stdin
def test_any_prompt_gives_a_text_or_names_the_character(whole, prompt):
    try:
        sample(SampleConfig(run_dir=str(whole), max_new_tokens=1, prompt=prompt))
    except UserError as e:
        assert "at position" in str(e) and "\n" not in str(e)


@given(content=st.binary(max_size=60))
def test_any_bytes_as_a_prompt_are_a_text_or_a_sentence(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("prompt") / "prompt.txt"
    path.write_bytes(content)
    try:
        assert isinstance(read(str(path), "prompt="), str)
    except UserError as e:
        assert "is not UTF-8 text: byte 0x" in str(e)


@pytest.mark.slow
def test_no_prompt_never_waits_for_stdin(tmp_path, whole):
    finished(tmp_path, f"run_dir={whole}", "max_new_tokens=3", script="sample.py")
