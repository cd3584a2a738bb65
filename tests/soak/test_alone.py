"""Training and sampling work without network, key, compiler, GPU, HOME or terminal."""

import os

import pytest
from conftest import TINY
from processes import Process, drop_privileges, rows, tiny_arguments

from run.config_file import read_config

BARE_ENVIRONMENT = {
    "PATH": "",
    "HTTPS_PROXY": "http://127.0.0.1:9",
    "HTTP_PROXY": "http://127.0.0.1:9",
    "CUDA_VISIBLE_DEVICES": "",
    "WANDB_MODE": None,
    "CXX": None,
    "TERM": None,
    "XDG_CACHE_HOME": None,
    "XDG_CONFIG_HOME": None,
    "MPLCONFIGDIR": None,
    "TMPDIR": None,
    "PYTHONSAFEPATH": "1",
}
QUICK = [
    *TINY,
    "data=text",
    "run_dir=run",
    "max_steps=1",
    "eval.every=0",
    "attention.every=0",
    "attention.tokens=16",
]


@pytest.mark.parametrize("home", ["read-only", None, "/nowhere"])
def test_training_and_sampling_work_in_a_bare_environment(new_command, tmp_path, text_file, home):
    (tmp_path / "home").mkdir(mode=0o555)
    env = BARE_ENVIRONMENT | {"HOME": str(tmp_path / "home") if home == "read-only" else home}
    more = {"env": env, "preexec_fn": drop_privileges}
    argv = [word for word in QUICK if word != "compile=false"]
    done = new_command("train.py", *argv, f"data.path={text_file}", **more)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert "warning" not in done.stdout
    assert not read_config(tmp_path / "run" / "config.yaml").compile
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*"))
    assert rows(tmp_path / "run")[-1]["step"] == 1
    sampled = new_command("sample.py", "run_dir=run", "max_new_tokens=5", **more)
    assert sampled.returncode == 0 and sampled.stdout, sampled.stderr


def test_a_closed_or_full_stdout_does_not_end_the_run(tmp_path, text_file):
    argv = tiny_arguments(text_file, "attention.every=0", "max_steps=4")
    reading, writing = os.pipe()
    gone = Process(tmp_path, *argv, stdout=writing)
    os.close(writing)
    assert os.read(reading, 10)
    os.close(reading)
    assert gone.wait() == 0, gone.output()
    full = Process(tmp_path, *argv, "run_dir=full", stdout=os.open("/dev/full", os.O_WRONLY))
    assert full.wait() == 0, full.output()
    assert rows(tmp_path / "full")[-1]["step"] == rows(tmp_path / "run")[-1]["step"] == 4
