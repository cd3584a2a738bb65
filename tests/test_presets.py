"""Every preset trains for a few steps, large models at a reduced size."""

import pytest
from conftest import ROOT, TINY

pytestmark = pytest.mark.slow

SMALL_DATA = [
    "eval.every=0",
    "attention.every=0",
    "data.val_max_tokens=300",
    "log.every=1",
    "compile=false",
]
QUICK = ("nanogpt_cpu", "speedrun")


def presets(group: str) -> list[str]:
    return sorted(p.stem for p in (ROOT / "configs" / group).glob("*.yaml"))


@pytest.fixture
def trains(command):
    """trains(*argv): run train.py in a new folder, and check that it succeeds."""

    def run(*argv: str) -> None:
        done = command("train.py", *argv, "run_dir=run")
        assert done.returncode == 0, done.stderr

    return run


@pytest.fixture
def tiktoken(test_data, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(test_data / "tiktoken_cache"))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.soak] * (name not in QUICK))
        for name in presets("experiment")
    ],
)
def test_every_experiment_trains(trains, test_data, tiktoken, name):
    local = (
        []
        if name in ("default", "induction") or name.startswith("paper_")
        else [f"data.path={test_data / 'data' / 'tinyshakespeare.txt'}"]
    )
    if name.startswith("gpt2_"):
        local += [
            "data=text",
            "accumulate=1",
            "model.n_layer=1",
            "model.n_embd=32",
            "model.n_head=2",
            "model.block_size=64",
        ]
    elif name.endswith("_gpu"):
        local += ["model.n_layer=1", "model.block_size=64"]
    trains(
        f"experiment={name}",
        "max_steps=2",
        "batch_size=4",
        *local,
        *SMALL_DATA,
        "optim.warmup_steps=0",
    )


@pytest.mark.soak
@pytest.mark.parametrize("name", presets("model"))
def test_every_model_trains_at_a_reduced_size(trains, text_file, name):
    cut = ["model.n_layer=2", "model.block_size=32", "batch_size=2", "tokenizer=char"]
    if name == "llama3_8b" or name.startswith("gpt2"):
        cut += [
            "model.n_embd=80",
            "model.mlp_hidden=96",
            "model.n_head=4",
            *(["model.n_kv_head=2"] if name == "llama3_8b" else []),
        ]
    trains(f"model={name}", "data=text", f"data.path={text_file}", "max_steps=2", *cut, *SMALL_DATA)


@pytest.mark.soak
@pytest.mark.parametrize(
    "setting", [f"{group}={name}" for group in ("optim", "tokenizer") for name in presets(group)]
)
def test_every_optimizer_and_tokenizer_trains(trains, text_file, tiktoken, setting):
    trains(*TINY, "data=text", f"data.path={text_file}", "max_steps=3", setting)
