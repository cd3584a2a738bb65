"""Paths as people type them: relative, with the signs of a glob, and not valid UTF-8."""

import shutil

import pytest
from processes import rows, run_to_end, tiny_arguments

from cli.config_file import read_config

pytestmark = pytest.mark.slow


@pytest.fixture
def text(tmp_path, text_file):
    """A text in a folder whose name contains the signs of a glob."""
    folder = tmp_path / "here [1]"
    (folder / "notes").mkdir(parents=True)
    shutil.copy(text_file, folder / "notes" / "a.txt")
    return folder


def short(*more: str) -> list[str]:
    return [*tiny_arguments("notes/a.txt", "max_steps=4", "attention.every=0"), *more]


FINE_TUNING = ["data=text", "max_steps=2", "batch_size=4"]


def test_a_fine_tuned_run_resumes_from_another_working_directory(tmp_path, text):
    run_to_end(text, *short("run_dir=first"))
    run_to_end(text, "run_dir=tuned", "init_from=first", "data.path=notes/a.txt", *FINE_TUNING)
    trained, untrained = rows(text / "tuned")[0], rows(text / "first")[0]
    assert trained["val/loss"] < untrained["val/loss"]
    assert read_config(text / "tuned" / "config.yaml").tokenizer.name == "char"
    resume = ["run_dir=here [1]/tuned", "resume=true"]
    run_to_end(tmp_path, *resume, "max_steps=4", "init_from=here [1]/first")
    shutil.rmtree(text / "first")  # a resumed run does not need it
    again = ["run_dir=here [1]/tuned", "resume=auto", "init_from=here [1]/first"]
    run_to_end(tmp_path, *again, "max_steps=5")
    output = run_to_end(tmp_path, *resume, "max_steps=6", "init_from=here [1]/tuned", status=1)
    assert "init_from" in output and "error: " in output


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
