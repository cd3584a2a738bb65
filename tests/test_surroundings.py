"""Commands work without a home, folders that can be written, or open streams."""

import os
import pwd
from pathlib import Path
from weakref import WeakSet

import pytest
from torch import nn

from common.errors import UserError
from common.launcher import count_processes, process_rank
from common.paths import writable_folder
from common.terminal import exit_on_error
from config import WandbConfig
from training.wandb_record import check_wandb, provide_folders


def test_wandb_works_for_a_user_without_a_home(offline_wandb, monkeypatch):
    def has_no_entry(user: int):
        raise KeyError(user)

    monkeypatch.setattr(pwd, "getpwuid", has_no_entry)
    for variable in ("WANDB_CACHE_DIR", "WANDB_DATA_DIR"):  # restored at the end
        monkeypatch.setenv(variable, "/dev/null/wandb")
    monkeypatch.delenv("HOME")
    provide_folders()
    assert check_wandb(WandbConfig()) == "offline"
    assert all(Path(os.environ[name]).is_dir() for name in ("WANDB_CACHE_DIR", "WANDB_DATA_DIR"))


def test_a_temporary_folder_replaces_only_one_that_cannot_be_written(tmp_path):
    assert writable_folder(tmp_path / "new") == tmp_path / "new"
    replacement = writable_folder(Path("/dev/null/cache"))
    (replacement / "file").touch()
    assert writable_folder(Path("/dev/null/cache")) == replacement


def test_after_a_mistake_a_notebook_keeps_no_model():
    models = WeakSet()

    def fail() -> None:
        model = nn.Linear(1, 1)
        models.add(model)
        raise UserError("wrong")

    with pytest.raises(SystemExit) as kept, exit_on_error():
        fail()
    assert kept.value.code == 1 and not models


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", None])
def test_a_process_is_one_of_several_only_if_both_variables_say_so(monkeypatch, missing):
    variables = {"RANK": "1", "WORLD_SIZE": "2"}
    variables.pop(missing, None)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = count_processes(alone=False), process_rank(), count_processes(alone=True)
    assert found == ((1, 0, 1) if missing else (2, 1, 1))
