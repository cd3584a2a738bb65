"""Every setting: its bounds, its help, and the files that change it."""

import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from cli.config_file import absolute_paths, config_from_dict, config_yaml, read_config
from common.errors import UserError
from common.settings import iterate_settings
from config import Config, GPTConfig, SampleConfig

ROOT = Path(__file__).parents[1]
PRESETS = sorted((ROOT / "configs").glob("*/*.yaml"))
GLOBAL = ("experiment", "sweep")  # groups whose presets set anything, not one section
named = pytest.mark.parametrize("path", PRESETS, ids=lambda p: f"{p.parent.name}/{p.stem}")


def changed(config, values):
    """The configuration with values set by their dotted names."""
    for name, value in values.items():
        *sections, last = name.split(".")
        node = config
        for section in sections:
            node = getattr(node, section)
        assert hasattr(node, last)
        setattr(node, last, value)
    return config


# --- bounds and relations -------------------------------------------------------------------------


WRONG = [
    ({"max_steps": 0}, "max_steps=0 must be at least 1"),
    ({"accumulate": 5}, "accumulate=5 does not divide batch_size=32"),
    ({"seed": 2**63}, f"seed={2**63} must be at most {2**63 - 1}"),
    ({"device": "cuda0"}, "device=cuda0 is not one of auto, cpu, cuda, cuda:N, mps"),
    ({"precision": "fp16"}, "precision=fp16 is not one of auto, fp32, bf16; did you mean bf16"),
    ({"resume": "True"}, "resume=True is not one of true, false, auto"),
    ({"resume": True}, "resume=true needs run_dir=PATH"),
    ({"shard": "few"}, "shard=few is neither auto nor a number"),
    ({"run_dir": "odd\udcff"}, r"'odd\udcff' is not a name in UTF-8"),
    ({"model.n_head": 3}, "model.n_embd=128 is not a multiple of model.n_head=3"),
    ({"model.n_kv_head": 3}, "does not divide model.n_head=4: choose one of 1, 2, 4"),
    ({"model.position": "rope", "model.head_dim": 5}, "needs an even head size, not 5"),
    ({"model.mlp": "relu"}, "model.mlp=relu is not one of gelu, swiglu, relu2; did you mean relu2"),
    ({"model.dropout": 1.0}, "model.dropout=1.0 must be below 1"),
    ({"model.dropout": float("nan")}, "model.dropout=nan is not a finite number"),
    ({"optim.lr": 0.0}, "optim.lr=0.0 must be above 0"),
    ({"optim.muon_lr": 1e300}, "optim.muon_lr=1e+300 must be at most 1e+30"),
    ({"batch_size": 10**22}, "batch_size=10000000000000000000000 must be at most 1000000"),
    ({"log.every": 10**401}, f"must be at most {2**63 - 1}"),
    ({"optim.warmup_steps": 1000}, "is not shorter than the run's 1000 steps"),
    ({"data.source": "text"}, "data=text needs data.path=FILE_OR_FOLDER_OR_GLOB"),
    ({"data.path": "notes/"}, "data.path=notes/ needs a source that takes a path: add data=text"),
    ({"data.source": "hf"}, "data=hf needs data.name=DATASET"),
    ({"data.name": "a/b"}, "data.name=a/b is for data=hf"),
    ({"tokenizer.name": "gtp2"}, "did you mean gpt2"),
    ({"tokenizer.name": "hf"}, "tokenizer=hf comes with a model: add init_from=FOLDER"),
    ({"tokenizer.name": "char", "tokenizer.vocab_size": 300}, "is for tokenizer=bpe"),
    ({"attention.picture_every": 150}, "is not a multiple of attention.every=100"),
]
SAMPLE_WRONG = [
    ({"top_p": 1.1}, "top_p=1.1 must be at most 1"),
    ({"max_new_tokens": 10**23}, "must be at most 1000000000"),
    ({"checkpoint": "²"}, "checkpoint=² is not best, last or a step's number"),
    ({"run_dir": "a", "init_from": "b"}, "run_dir= and init_from= are both given"),
    ({"attention": "map.png"}, "attention=map.png does not end in .html"),
]
RIGHT = [
    {},
    {"optim.warmup_steps": 0},
    {"optim.warmup_steps": 999},
    {"max_steps": 1},
    {"batch_size": 32, "accumulate": 32},
    {"seed": 2**63 - 1},
    {"device": "cuda:1"},
    {"resume": "auto"},
    {"resume": True, "run_dir": "x"},
    {"model.n_head": 3, "model.head_dim": 7},
    {"model.position": "rope", "model.head_dim": 2},
    {"data.source": "text", "data.path": "x"},
    {"data.source": "shakespeare", "data.path": "x"},
    {"tokenizer.name": "o200k_base"},
    {"data.source": "hf", "data.name": "a/b", "data.subset": "c"},
    {"log.every": 0, "eval.every": 0, "checkpoint.every": 0, "attention.every": 0},
    {"optim.grad_clip": 0.0},
    {"optim.decay_share": 1.0},
    {"compile": True},
]


@pytest.mark.parametrize("kind, cases", [(Config, WRONG), (SampleConfig, SAMPLE_WRONG)])
def test_a_wrong_setting_is_named_with_its_value_and_what_to_do(kind, cases):
    for values, sentence in cases:
        with pytest.raises(UserError) as error:
            changed(kind(), values).check()
        assert sentence in str(error.value) and "\n" not in str(error.value)


def test_a_value_at_its_bound_is_taken():
    for values in RIGHT:
        changed(Config(), values).check()
    for values in (
        {"temperature": 0.0},
        {"top_p": 1.0},
        {"min_p": 0.0},
        {"checkpoint": "0"},
        {"prompt": ""},
        {"attention": "a.html"},
    ):
        changed(SampleConfig(), values).check()


BOUNDED = [
    (name, f)
    for name, f, _ in iterate_settings(Config())
    if any(f.metadata.get(key) is not None for key in ("choices", "ge", "gt", "le", "lt"))
]


@given(
    pick=st.sampled_from(BOUNDED),
    value=st.integers(-(10**6), 10**6) | st.floats(-10, 10) | st.text(max_size=5),
)
def test_a_value_out_of_its_bounds_is_never_taken(pick, value):
    name, f = pick
    number, choices = "int" in str(f.type) or "float" in str(f.type), f.metadata.get("choices")
    if number == isinstance(value, str):
        return
    inside = (
        value in choices
        if choices
        else all(
            f.metadata.get(key) is None or good(value, f.metadata[key])
            for key, good in (
                ("ge", lambda v, b: v >= b),
                ("gt", lambda v, b: v > b),
                ("le", lambda v, b: v <= b),
                ("lt", lambda v, b: v < b),
            )
        )
    )
    if not inside:
        with pytest.raises(UserError, match=rf"^{re.escape(name)}="):
            changed(Config(), {name: value}).check()


# --- what follows from a shape --------------------------------------------------------------------


@given(
    heads=st.integers(1, 16),
    size=st.integers(1, 64),
    kv=st.none() | st.integers(1, 16),
    mlp=st.sampled_from(["gelu", "swiglu", "relu2"]),
)
def test_what_is_left_out_follows_from_the_rest(heads, size, kv, mlp):
    shape = GPTConfig(vocab_size=9, n_head=heads, n_embd=heads * size, n_kv_head=kv, mlp=mlp)
    assert (shape.key_dim, shape.value_dim, shape.kv_heads) == (size, size, kv or heads)
    if mlp == "swiglu":
        assert shape.hidden_dim % 8 == 0 and 0 <= shape.hidden_dim - 8 / 3 * shape.n_embd < 8
    else:
        assert shape.hidden_dim == 4 * shape.n_embd


# --- the page itself ------------------------------------------------------------------------------


def test_every_setting_has_a_line_of_help_and_every_number_a_bound_below():
    for name, f, default in [*iterate_settings(Config()), *iterate_settings(SampleConfig())]:
        help, choices = f.metadata["help"], f.metadata.get("choices")
        assert len(help) > 10 and "\n" not in help, name
        assert not choices or default in choices, name
        if "int" in str(f.type) or "float" in str(f.type):
            assert f.metadata.get("ge") is not None or f.metadata.get("gt") is not None, name


# --- kept and read back ---------------------------------------------------------------------------


def read_back(config, folder):
    (folder / "config.yaml").write_text(config_yaml(config), encoding="utf-8")
    return read_config(folder / "config.yaml")


@pytest.mark.slow
def test_a_kept_configuration_is_read_back_the_same(tmp_path):
    for values in RIGHT:
        config = changed(Config(), values)
        assert read_back(config, tmp_path) == absolute_paths(config)
        assert config_from_dict(asdict(config)) == config


@pytest.mark.slow
@given(
    text=st.text(st.characters(exclude_categories=["Cs"])),
    lr=st.floats(1e-12, 1e3),
    seed=st.integers(0, 2**63 - 1),
)
@example(text="null", lr=1e-5, seed=0)
@example(text="1e3", lr=3e-4, seed=1)
@example(text="~/notes (1).txt", lr=1.0, seed=2)
@example(text="a: b # c", lr=1.0, seed=2)
@example(text=r"\\${seed} ${", lr=1.0, seed=2)
def test_any_text_and_number_is_read_back_the_same(text, lr, seed, tmp_path_factory):
    assume(text != "???")  # which the command line refuses
    config = changed(
        Config(),
        {"data.path": text, "data.name": text, "run_dir": text, "optim.lr": lr, "seed": seed},
    )
    assert read_back(config, tmp_path_factory.mktemp("run")) == absolute_paths(config)


def test_a_configuration_that_does_not_fit_is_one_sentence(tmp_path):
    path = tmp_path / "config.yaml"
    with pytest.raises(UserError, match=r"config\.yaml cannot be read: No such file"):
        read_config(path)
    for text in (
        "max_step: 3",
        "max_steps: many",
        "model: [",
        "- 1",
        "model: 3",
        "\0",
        "seed: ${nothing}",
        "eager_steps: 3",
        "wandb:\n  project: caf\xe9\n",
    ):
        path.write_bytes(text.encode("latin-1"))
        with pytest.raises(
            UserError,
            match=r"config\.yaml does not fit this version of GlassGPT: "
            r"\S",
        ) as error:
            read_config(path)
        assert "\n" not in str(error.value)


def test_paths_are_kept_as_they_hold_from_elsewhere(tmp_path, monkeypatch):
    (tmp_path / "a [1]").mkdir()
    monkeypatch.chdir(tmp_path / "a [1]")
    config = changed(Config(), {"data.path": "*.txt", "init_from": "base", "run_dir": "run"})
    kept = absolute_paths(config)
    assert kept.data.path == f"{tmp_path}/a [[]1]/*.txt"
    assert (kept.init_from, kept.run_dir) == (f"{tmp_path}/a [1]/base", "run")
    fetched = replace(config, init_from=f"someone/model@{'0' * 40}")
    assert absolute_paths(fetched).init_from == fetched.init_from


# --- the presets ----------------------------------------------------------------------------------


def settings_of(node, prefix=""):
    for key, value in node.items():
        if isinstance(value, dict):
            yield from settings_of(value, f"{prefix}{key}.")
        else:
            yield prefix + key


@named
def test_a_preset_names_only_known_settings_and_is_headed_by_the_command_that_uses_it(path):
    group, known = path.parent.name, {name for name, _, _ in iterate_settings(Config())}
    values = OmegaConf.to_container(OmegaConf.load(path))
    values.pop("defaults", None)
    lines = path.read_text(encoding="utf-8").splitlines()
    if group in GLOBAL:
        values.pop("hydra", None)
        assert lines.pop(0) == "# @package _global_"
    prefix = "" if group in GLOBAL else f"{group}."
    assert {prefix + name for name in settings_of(values)} <= known
    default = (group, path.stem) == ("experiment", "default")
    used = "" if default else rf" (.* )?{group}={path.stem}\b"
    assert re.match(rf"# python train\.py{used}", lines[0])
    assert lines[1].startswith("# ")
