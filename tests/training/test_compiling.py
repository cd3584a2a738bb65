"""A model that another process compiles beside the first steps."""

import subprocess

import pytest
from processes import assert_same_run, finished, tiny

from config import Config, GPTConfig, UserError, config_from
from training import runtime
from training.runtime import model_size, resolve_size

LONG = {"device": "cpu", "precision": "fp32", "shard": 1, "batch_size": 8, "max_steps": 10 ** 7,
        "model": GPTConfig(65, n_layer=2, n_embd=64, block_size=32)}


@pytest.mark.parametrize("changes, compiled, eager", [
    ({}, True, None), ({"compile": True}, True, 0), ({"compile": False}, False, 0),
    ({"eager_steps": 7}, True, 7), ({"compile": True, "eager_steps": 7}, True, 7),
    ({"compile": False, "eager_steps": 7}, False, 0), ({"max_steps": 10}, False, 0),
    ({"eval_only": True}, False, 0)], ids=str)
def test_a_long_run_takes_its_first_steps_eagerly(changes, compiled, eager, monkeypatch):
    monkeypatch.setattr(runtime, "has_compiler", lambda: True)
    config, _, _ = resolve_size(Config(**LONG | changes), 1, 0)
    if eager is None:
        step = model_size(config)[1] * 8 * 32
        eager = round(runtime.MEANWHILE / step)
        assert 0 < eager < 0.2 * runtime.COMPILE_PAYS["cpu"][0] / step
    assert (config.compile, config.eager_steps) == (compiled, eager)
    # A run that goes on keeps both.
    assert resolve_size(config, 1, 100)[0] == config


def test_ranks_of_several_compile_before_they_shard(monkeypatch):
    monkeypatch.setattr(runtime, "has_compiler", lambda: True)
    config, _, _ = resolve_size(Config(**LONG), 2, 0)
    assert config.compile and config.eager_steps == 0


def test_a_number_is_asked_for():
    with pytest.raises(UserError, match="eager_steps=few is neither auto nor a number of steps"):
        config_from({"eager_steps": "few"}).check()


def test_eager_steps_are_those_of_an_eager_run_and_nobody_is_left_compiling(
        tmp_path, text_file, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    said = finished(tmp_path, *tiny(text_file, "compile=true", "eager_steps=100"))
    assert "compiling beside the first 100 steps" in said and "compiled;" not in said
    finished(tmp_path, *tiny(text_file, "run_dir=eager"))
    assert_same_run(tmp_path / "run", tmp_path / "eager")
    left = subprocess.run(["pgrep", "-f", f"training.compiling {tmp_path}"], capture_output=True)
    assert not left.stdout


