"""Every preset runs. The experiments train for a few steps; the groups' presets compose and train
where they fit."""

import pytest
from conftest import ROOT, TINY

pytestmark = pytest.mark.slow

SMALL_DATA = ["eval.every=0", "attention.every=0", "data.val_max_tokens=300", "log.every=1",
              "compile=false"]


def presets(group: str) -> list[str]:
    return sorted(p.stem for p in (ROOT / "configs" / group).glob("*.yaml"))


@pytest.mark.parametrize("name", presets("experiment"))
def test_every_experiment_trains(command, test_data, name):
    local = [] if name in (
        "default", "induction") else [f"data.path={test_data / 'data' / 'tinyshakespeare.txt'}"]
    if name.startswith("gpt2_"):
        local += ["data=text", "accumulate=1", "model.n_layer=1", "model.n_embd=32",
                  "model.n_head=2", "model.block_size=64"]
    done = command("train.py", f"experiment={name}", "max_steps=3", "batch_size=4", "run_dir=run",
                   *local, *SMALL_DATA, "optim.warmup_steps=0",
                   env={"TIKTOKEN_CACHE_DIR": str(test_data / "tiktoken_cache")})
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", presets("model"))
def test_every_model_trains_at_a_size_that_fits(command, text_file, name):
    cut = ["model.n_layer=2", "model.block_size=32", "batch_size=2", "tokenizer=char"]
    if name == "llama3_8b" or name.startswith("gpt2_"):
        cut += ["model.n_embd=80", "model.mlp_hidden=96", "model.n_head=4",
                *(["model.n_kv_head=2"] if name == "llama3_8b" else [])]
    done = command("train.py", f"model={name}", "data=text", f"data.path={text_file}",
                   "max_steps=2", "run_dir=run", *cut, *SMALL_DATA)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", presets("optim"))
def test_every_optimizer_trains(command, text_file, name):
    done = command("train.py", f"optim={name}", "data=text", f"data.path={text_file}",
                   "max_steps=3", "run_dir=run", *TINY)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", presets("tokenizer"))
def test_every_tokenizer_trains(command, text_file, test_data, name):
    tiny = [setting for setting in TINY if not setting.startswith("tokenizer=")]
    done = command("train.py", f"tokenizer={name}", "data=text", f"data.path={text_file}",
                   "max_steps=3", "run_dir=run", *tiny,
                   env={"TIKTOKEN_CACHE_DIR": str(test_data / "tiktoken_cache")})
    assert done.returncode == 0, done.stderr
