"""Every preset runs. The experiments train for a few steps; the groups' presets compose and train
where they fit."""

import pytest
from conftest import ROOT, TINY
from hydra import compose, initialize_config_dir

import cli

pytestmark = pytest.mark.slow

SMALL_DATA = ["eval.every=0", "attention.every=0", "data.val_max_tokens=300", "log.every=1",
              "compile=false"]


def presets(group: str) -> list[str]:
    return sorted(p.stem for p in (ROOT / "configs" / group).glob("*.yaml"))


@pytest.fixture
def trains(monkeypatch, tmp_path):
    """trains(*argv): train as it is typed, in this process, in a new folder."""
    from train import train

    def run(*argv: str) -> None:
        checked = cli.check_arguments([*argv, "run_dir=run"])
        with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
            config, resume = cli.to_config(compose("config", overrides=checked), checked)
        assert train(config, resume, "test") > 0

    monkeypatch.chdir(tmp_path)
    return run


@pytest.fixture
def tiktoken(test_data, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(test_data / "tiktoken_cache"))


@pytest.mark.parametrize("name", presets("experiment"))
def test_every_experiment_trains(trains, test_data, tiktoken, name):
    local = [] if name in (
        "default", "induction") else [f"data.path={test_data / 'data' / 'tinyshakespeare.txt'}"]
    if name.startswith("gpt2_"):
        local += ["data=text", "accumulate=1", "model.n_layer=1", "model.n_embd=32",
                  "model.n_head=2", "model.block_size=64"]
    trains(f"experiment={name}", "max_steps=2", "batch_size=4", *local, *SMALL_DATA,
           "optim.warmup_steps=0")


@pytest.mark.parametrize("name", presets("model"))
def test_every_model_trains_at_a_size_that_fits(trains, text_file, name):
    cut = ["model.n_layer=2", "model.block_size=32", "batch_size=2", "tokenizer=char"]
    if name == "llama3_8b" or name.startswith("gpt2_"):
        cut += ["model.n_embd=80", "model.mlp_hidden=96", "model.n_head=4",
                *(["model.n_kv_head=2"] if name == "llama3_8b" else [])]
    trains(f"model={name}", "data=text", f"data.path={text_file}", "max_steps=2", *cut, *SMALL_DATA)


@pytest.mark.parametrize("name", presets("optim"))
def test_every_optimizer_trains(trains, text_file, name):
    trains(f"optim={name}", "data=text", f"data.path={text_file}", "max_steps=3", *TINY)


@pytest.mark.parametrize("name", presets("tokenizer"))
def test_every_tokenizer_trains(trains, text_file, tiktoken, name):
    tiny = [setting for setting in TINY if not setting.startswith("tokenizer=")]
    trains(f"tokenizer={name}", "data=text", f"data.path={text_file}", "max_steps=3", *tiny)
