"""Every setting: its bounds, its help, and the presets that change it."""

import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from cli.config_file import absolute_paths, config_from_dict, config_yaml, read_config
from cli.sample_config import SampleConfig
from common.errors import UserError
from common.settings import iterate_settings
from config import Config, GPTConfig

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


# Settings that cannot work → what the error names: the setting, its value, what is possible.
INVALID = [
    ({"max_steps": 0}, ["max_steps=0", "1"]),
    ({"accumulate": 5}, ["accumulate=5", "batch_size=32"]),
    ({"seed": 2**63}, [f"seed={2**63}", f"{2**63 - 1}"]),
    ({"device": "cuda0"}, ["device=cuda0", "cuda:N"]),
    ({"precision": "bf61"}, ["precision=bf61", "auto, fp32, bf16, fp16", "bf16?"]),
    ({"resume": "True"}, ["resume=True", "true, false, auto"]),
    ({"resume": True}, ["resume=true", "run_dir=PATH"]),
    ({"eval_only": True}, ["eval_only=true", "run_dir=PATH", "init_from=MODEL"]),
    ({"eval_only": True, "prepare_only": True, "run_dir": "x"}, ["eval_only", "prepare_only"]),
    ({"shard": "few"}, ["shard=few", "auto"]),
    ({"run_dir": "odd\udcff"}, [r"'odd\udcff'", "UTF-8"]),
    ({"model.n_head": 3}, ["model.n_embd=128", "model.n_head=3", "model.head_dim"]),
    ({"model.n_kv_head": 3}, ["model.n_kv_head=3", "model.n_head=4", "1, 2, 4"]),
    ({"model.position": "rope", "model.head_dim": 5}, ["model.position=rope", "5"]),
    ({"model.mlp": "relu"}, ["model.mlp=relu", "gelu, swiglu, relu2", "relu2?"]),
    ({"model.dropout": 1.0}, ["model.dropout=1.0", "1"]),
    ({"model.dropout": float("nan")}, ["model.dropout=nan"]),
    ({"model.ngrams": 2, "model.ngram_size": 129}, ["model.ngram_size=129", "model.n_embd=128"]),
    ({"optim.lr": 0.0}, ["optim.lr=0.0", "0"]),
    ({"optim.muon_lr": 1e300}, ["optim.muon_lr=1e+300", "1e+30"]),
    ({"batch_size": 10**22}, ["batch_size=10000000000000000000000", "1000000"]),
    ({"log.every": 10**401}, ["log.every=", f"{2**63 - 1}"]),
    ({"optim.warmup_steps": 1000}, ["optim.warmup_steps=1000", "max_steps=1000"]),
    ({"data.source": "text"}, ["data=text", "data.path="]),
    ({"data.source": "hf"}, ["data=hf", "data.name="]),
    ({"tokenizer.name": "gtp2"}, ["tokenizer.name=gtp2", "gpt2?"]),
    ({"tokenizer.name": "hf"}, ["tokenizer.name=hf", "init_from="]),
    (
        {"attention.picture_every": 150},
        ["attention.picture_every=150", "attention.every=100"],
    ),
]
INVALID_FOR_SAMPLE = [
    ({"top_p": 1.1}, ["top_p=1.1", "1"]),
    ({"max_new_tokens": 10**23}, ["max_new_tokens=", "1000000000"]),
    ({"checkpoint": "²"}, ["checkpoint=²", "best", "last"]),
    ({"run_dir": "a", "init_from": "b"}, ["run_dir=", "init_from="]),
    ({"attention": "map.png"}, ["attention=map.png", ".html"]),
]
VALID = [
    {},
    {"optim.warmup_steps": 0},
    {"optim.warmup_steps": 999},
    {"max_steps": 1},
    {"batch_size": 32, "accumulate": 32},
    {"seed": 2**63 - 1},
    {"device": "cuda:1"},
    {"resume": "auto", "run_dir": "a"},
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


@pytest.mark.parametrize(
    "settings_class, cases", [(Config, INVALID), (SampleConfig, INVALID_FOR_SAMPLE)]
)
def test_an_invalid_setting_is_refused_by_name_and_value(settings_class, cases):
    for values, names in cases:
        with pytest.raises(UserError) as error:
            changed(settings_class(), values).check()
        sentence = str(error.value)
        assert "\n" not in sentence and all(name in sentence for name in names), sentence


def test_values_at_their_bounds_are_accepted():
    for values in VALID:
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
@pytest.mark.slow
def test_a_value_out_of_bounds_is_always_refused(pick, value):
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
        with pytest.raises(UserError) as error:
            changed(Config(), {name: value}).check()
        assert str(error.value).startswith(f"{name}=")


# --- derived sizes --------------------------------------------------------------------------------


@given(
    heads=st.integers(1, 16),
    size=st.integers(1, 64),
    kv=st.none() | st.integers(1, 16),
    mlp=st.sampled_from(["gelu", "swiglu", "relu2"]),
)
def test_sizes_that_are_left_out_follow_from_the_others(heads, size, kv, mlp):
    shape = GPTConfig(vocab_size=9, n_head=heads, n_embd=heads * size, n_kv_head=kv, mlp=mlp)
    assert (shape.key_dim, shape.value_dim, shape.kv_heads) == (size, size, kv or heads)
    if mlp == "swiglu":
        assert shape.hidden_dim % 8 == 0 and 0 <= shape.hidden_dim - 8 / 3 * shape.n_embd < 8
    else:
        assert shape.hidden_dim == 4 * shape.n_embd


# --- help and bounds ------------------------------------------------------------------------------


def test_every_setting_has_help_and_every_number_a_lower_bound():
    for name, f, default in [*iterate_settings(Config()), *iterate_settings(SampleConfig())]:
        help, choices = f.metadata["help"], f.metadata.get("choices")
        assert len(help) > 10 and "\n" not in help, name
        assert not choices or default in choices, name
        if "int" in str(f.type) or "float" in str(f.type):
            assert f.metadata.get("ge") is not None or f.metadata.get("gt") is not None, name


# --- config.yaml ----------------------------------------------------------------------------------


def read_back(config, folder):
    (folder / "config.yaml").write_text(config_yaml(config), encoding="utf-8")
    return read_config(folder / "config.yaml")


@pytest.mark.slow
def test_a_saved_configuration_is_read_back_equal(tmp_path):
    for values in VALID:
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
def test_any_text_and_number_is_read_back_equal(text, lr, seed, tmp_path_factory):
    assume(text != "???")  # the command line refuses it
    config = changed(
        Config(),
        {"data.path": text, "data.name": text, "run_dir": text, "optim.lr": lr, "seed": seed},
    )
    assert read_back(config, tmp_path_factory.mktemp("run")) == absolute_paths(config)


def test_settings_that_older_versions_had_are_ignored(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("data:\n  lines: kept\n  encoding: utf-8\n  field: body\n")
    assert read_config(path).data.field == "body"


def test_an_invalid_configuration_file_is_refused_in_one_sentence(tmp_path):
    path = tmp_path / "config.yaml"
    with pytest.raises(UserError) as error:
        read_config(path)
    assert str(path) in str(error.value)
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
        with pytest.raises(UserError) as error:
            read_config(path)
        sentence = str(error.value)
        assert sentence.startswith(f"{path} ") and "\n" not in sentence


def test_saved_paths_are_valid_from_any_folder(tmp_path, monkeypatch):
    (tmp_path / "a [1]").mkdir()
    monkeypatch.chdir(tmp_path / "a [1]")
    config = changed(Config(), {"data.path": "*.txt", "init_from": "base", "run_dir": "run"})
    saved = absolute_paths(config)
    assert saved.data.path == f"{tmp_path}/a [[]1]/*.txt"
    assert (saved.init_from, saved.run_dir) == (f"{tmp_path}/a [1]/base", "run")
    from_hub = replace(config, init_from=f"someone/model@{'0' * 40}")
    assert absolute_paths(from_hub).init_from == from_hub.init_from


# --- the presets ----------------------------------------------------------------------------------


def settings_of(node, prefix=""):
    for key, value in node.items():
        if isinstance(value, dict):
            yield from settings_of(value, f"{prefix}{key}.")
        else:
            yield prefix + key


@named
def test_a_preset_has_only_known_settings_and_its_header_shows_a_command(path):
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
