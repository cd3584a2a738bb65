"""Paths as people type them: relative, with the signs of a glob, and not valid UTF-8."""

import os
import shutil
import sys

import pytest
from processes import rows, run_to_end, tiny_arguments

import interop.__main__
import sample
from cli.command_line import translate_settings
from cli.job import compose_settings
from cli.sample_config import SampleConfig
from common.errors import UserError
from common.paths import expand_home, expand_model_name
from config import Config
from run.config_file import read_config
from run.locking import locked_run_dir
from sweeps.sweep import Sweep


@pytest.fixture
def text(tmp_path, text_file):
    """A text in a folder whose name contains the signs of a glob."""
    folder = tmp_path / "here [1]"
    (folder / "notes").mkdir(parents=True)
    shutil.copy(text_file, folder / "notes" / "a.txt")
    return folder


def short(*more: str) -> list[str]:
    return [*tiny_arguments("notes/a.txt", "max_steps=4", "attention.every=0"), *more]


@pytest.mark.slow
def test_a_fine_tuned_run_resumes_from_another_working_directory(tmp_path, text, finished_run):
    shutil.copytree(finished_run, text / "first")
    tuned = ["run_dir=tuned", "init_from=first", "data=text", "data.path=notes/a.txt"]
    run_to_end(text, *tuned, "max_steps=2", "batch_size=4")
    trained, untrained = rows(text / "tuned")[0], rows(text / "first")[0]
    assert trained["val/loss"] < untrained["val/loss"]
    assert read_config(text / "tuned" / "config.yaml").tokenizer.name == "char"
    shutil.rmtree(text / "first")  # a resumed run does not need it
    resume = ["run_dir=here [1]/tuned", "resume=true"]
    run_to_end(tmp_path, *resume, "max_steps=4", "init_from=here [1]/first")
    output = run_to_end(tmp_path, *resume, "max_steps=6", "init_from=here [1]/tuned", status=1)
    assert "init_from" in output and "error: " in output


@pytest.mark.slow
def test_a_run_that_fails_before_training_removes_only_what_it_created(tmp_path, text):
    (text / "mine").mkdir()
    for folder, setting in (
        ("mine", "data.path=missing.txt"),
        ("new", "init_from=missing"),
        ("new", "run_dir=odd\udcff/run"),
    ):
        run_to_end(text, *short(f"run_dir={folder}", setting), status=1)
        (line,) = [line for line in (text / "err.txt").read_text().splitlines() if line]
        assert line.startswith("error: ")
    remaining = {path.name for path in text.iterdir()} - {"out.txt", "err.txt"}
    assert remaining == {"mine", "notes"} and not list((text / "mine").iterdir())


# --- output paths ---------------------------------------------------------------------------------

UNUSABLE = ["file.txt/out", "loop/out", "n" * 300, "~nobody_here/out"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory and home with a file, a full folder and a link to itself."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["script"])
    (tmp_path / "file.txt").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    (tmp_path / "loop").symlink_to("loop")
    return tmp_path


def export(to: str) -> None:
    sys.argv[1:] = ["run_dir=.", f"to={to}"]
    interop.__main__.main()


def open_run(path: str) -> None:
    with locked_run_dir(Config(run_dir=str(expand_home("run_dir", path)))):
        pass


def start_sweep(path: str) -> None:
    Sweep(compose_settings(translate_settings([f"hydra.sweep.dir={path}"], is_sweep=True)))


@pytest.mark.parametrize("use", [export, open_run, start_sweep])
def test_a_folder_that_cannot_be_written_is_refused_as_typed(use, here):
    before = sorted(os.walk(here))
    for path in ("file.txt", "full", *UNUSABLE):
        with pytest.raises(UserError) as error:
            use(path)
        assert path in str(error.value)
        assert sorted(os.walk(here)) == before


@pytest.mark.parametrize("path", [f"{path}.html" for path in UNUSABLE])
def test_a_page_that_cannot_be_written_is_refused_before_the_model_is_read(path, here):
    with pytest.raises(UserError) as error:
        sample.sample(SampleConfig(attention=path, run_dir="missing"))
    assert f"attention={path}" in str(error.value)


@pytest.mark.parametrize("path", ["s3://bucket/x", "file:///tmp/x"])
def test_an_address_is_no_path(path):
    with pytest.raises(UserError, match=f"to={path} "):
        expand_home("to", path)


def test_gpt2_is_openais_model_unless_a_path_has_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("gpt2", "gpt2-xl"):
        assert expand_model_name("init_from", name) == f"openai-community/{name}"
    assert expand_model_name("init_from", "gpt3") == "gpt3"
    (tmp_path / "gpt2").mkdir()
    assert expand_model_name("init_from", "gpt2") == "gpt2"
