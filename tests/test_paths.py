"""Paths as people type them: ~, relative ones from wherever a run is resumed, names that are no
UTF-8, folders of their own."""

import shutil

import pytest
from processes import rows, run_to_end, tiny_arguments

from cli.config_file import read_config

pytestmark = pytest.mark.slow


@pytest.fixture
def text(tmp_path, text_file):
    """A text in a folder whose name has signs of a glob."""
    folder = tmp_path / "here [1]"
    (folder / "notes").mkdir(parents=True)
    shutil.copy(text_file, folder / "notes" / "a.txt")
    return folder


def short(*more: str) -> list[str]:
    return [*tiny_arguments("notes/a.txt", "max_steps=4", "attention.every=0"), *more]


NEW = ["data=text", "max_steps=2", "batch_size=4"]  # a run that starts from another


def test_a_run_that_started_from_another_goes_on_from_another_folder(tmp_path, text):
    run_to_end(text, *short("run_dir=first"))
    run_to_end(text, "run_dir=tuned", "init_from=first", "data.path=notes/a.txt", *NEW)
    trained, untrained = rows(text / "tuned")[0], rows(text / "first")[0]
    assert trained["val/loss"] < untrained["val/loss"]
    assert read_config(text / "tuned" / "config.yaml").tokenizer.name == "char"
    go_on = ["run_dir=here [1]/tuned", "resume=true"]
    run_to_end(tmp_path, *go_on, "max_steps=4", "init_from=here [1]/first")
    shutil.rmtree(text / "first")  # which is needed no more
    again = ["run_dir=here [1]/tuned", "resume=auto", "init_from=here [1]/first"]
    run_to_end(tmp_path, *again, "max_steps=5")
    said = run_to_end(tmp_path, *go_on, "max_steps=6", "init_from=here [1]/tuned", status=1)
    assert "cannot continue with other settings (init_from" in said


def test_a_run_that_fails_before_it_begins_removes_what_it_made_and_nothing_else(tmp_path, text):
    (text / "mine").mkdir()
    for folder, setting in (
        ("mine", "data.path=missing.txt"),
        ("new", "init_from=missing"),
        ("new", "run_dir=odd\udcff/run"),
    ):
        run_to_end(text, *short(f"run_dir={folder}", setting), status=1)
        (line,) = [line for line in (text / "err.txt").read_text().splitlines() if line]
        assert line.startswith("error: ")
    made = {path.name for path in text.iterdir()} - {"out.txt", "err.txt"}
    assert made == {"mine", "notes"} and not list((text / "mine").iterdir())
