"""Every preset trains for a few steps, large models at a reduced size."""

import pytest
from conftest import ROOT, TINY

SHORT = ["max_steps=2", "eval.every=0", "attention.every=0", "data.val_max_tokens=300"]
SHORT += ["log.every=1", "compile=false", "run_dir=run"]
SMALL = ["model.n_embd=80", "model.n_head=4"]  # whose sizes fit every family of models


def presets(*groups: str) -> list[str]:
    return [
        f"{group}={path.stem}"
        for group in groups
        for path in sorted((ROOT / "configs" / group).glob("*.yaml"))
    ]


@pytest.mark.parametrize("preset", presets("experiment", "model", "optim", "tokenizer"))
def test_every_preset_trains(command, test_data, text_file, monkeypatch, preset):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(test_data / "tiktoken_cache"))
    group, name = preset.split("=")
    if group == "experiment":
        settings = ["batch_size=4", "accumulate=1"]
        if name.endswith("_gpu") or name.startswith("gpt2"):
            settings += ["model.n_layer=1", "model.block_size=64"]
        if name.startswith("gpt2"):
            settings += SMALL
        if not name.startswith(("default", "induction", "paper")):
            settings += ["data=text", f"data.path={test_data / 'data' / 'tinyshakespeare.txt'}"]
    elif group == "model":
        settings = ["model.n_layer=2", "model.block_size=32", "batch_size=2", "tokenizer=char"]
        settings += ["data=text", f"data.path={text_file}"]
        if name.startswith("gpt2"):
            settings += SMALL
    else:
        settings = [*TINY, "data=text", f"data.path={text_file}"]
    done = command("train.py", *settings, preset, *SHORT)
    assert done.returncode == 0, done.stderr
