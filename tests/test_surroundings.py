"""Commands work wherever they are started: without a home, a safe path or open streams."""

import os
import pwd
from pathlib import Path

import pytest

from common.paths import writable_folder
from common.terminal import run_main
from config import WandbConfig
from training.wandb_record import check_wandb, provide_folders


@pytest.mark.parametrize("script", ["train.py", "sample.py", "explore.py"])
def test_a_command_finds_its_modules_in_safe_path_mode(new_command, script):
    done = new_command(script, "--help", env={"PYTHONSAFEPATH": "1"})
    assert done.returncode == 0 and not done.stderr


@pytest.mark.parametrize("home", ["", None])
def test_wandb_works_for_a_user_without_a_home(offline_wandb, monkeypatch, home):
    def has_no_entry(user: int):
        raise KeyError(user)

    monkeypatch.setattr(pwd, "getpwuid", has_no_entry)
    for variable in ("WANDB_CACHE_DIR", "WANDB_DATA_DIR"):  # restored at the end
        monkeypatch.setenv(variable, "/dev/null/wandb")
    monkeypatch.setenv("HOME", home or "")
    if home is None:
        monkeypatch.delenv("HOME")
    provide_folders()
    assert check_wandb(WandbConfig()) == "offline"
    assert all(Path(os.environ[name]).is_dir() for name in ("WANDB_CACHE_DIR", "WANDB_DATA_DIR"))


def test_a_temporary_folder_replaces_only_one_that_cannot_be_written(tmp_path):
    assert writable_folder(tmp_path / "new") == tmp_path / "new"
    replacement = writable_folder(Path("/dev/null/cache"))
    (replacement / "file").touch()
    assert writable_folder(Path("/dev/null/cache")) == replacement


def test_a_file_never_gets_the_number_of_a_closed_stream():
    def open_file() -> int:
        return os.open(os.devnull, os.O_RDONLY)

    if (child := os.fork()) == 0:
        os.closerange(0, 3)
        os._exit(run_main(open_file, lambda: ""))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) > 2
