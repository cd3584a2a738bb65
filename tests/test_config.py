"""Every setting: its bounds, its help, and the presets that change it."""

from dataclasses import replace

import pytest
import yaml
from conftest import ROOT
from hypothesis import assume, example, given
from hypothesis import strategies as st
from omegaconf.errors import OmegaConfBaseException

from cli.checks import check_config
from cli.sample_config import SampleConfig
from common.errors import UserError
from common.settings import check_settings, iterate_settings
from config import Config, GPTConfig
from run.config_file import (
    ADDED_SETTINGS,
    absolute_paths,
    config_yaml,
    parse_config,
    read_config,
)


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
    ({"accumulate": 5}, ["accumulate=5", "batch_size=32"]),
    ({"seed": 2**63}, [f"seed={2**63}", f"{2**63 - 1}"]),
    ({"eval_only": True}, ["eval_only=true", "run_dir=PATH", "init_from=MODEL"]),
    ({"run_dir": "odd\udcff"}, [r"'odd\udcff'", "UTF-8"]),
    ({"model.n_head": 3}, ["model.n_embd=128", "model.n_head=3", "model.head_dim"]),
    ({"model.n_kv_head": 3}, ["model.n_kv_head=3", "model.n_head=4", "1, 2, 4"]),
    ({"model.position": "rope", "model.head_dim": 5}, ["model.position=rope", "5"]),
    ({"model.position": "rope", "model.rope_share": 0.1}, ["model.rope_share=0.1", "32", "3"]),
    ({"model.mlp": "relu"}, ["model.mlp=relu", "gelu, gelu_exact, swiglu,", "relu2?"]),
    ({"model.ngrams": 2, "model.ngram_size": 129}, ["model.ngram_size=129", "model.n_embd=128"]),
    ({"optim.lr": 0.0}, ["optim.lr=0.0", "0"]),
    ({"optim.warmup_share": 1.0}, ["optim.warmup_share=1.0", "below 1"]),
    ({"data.source": "hf"}, ["data=hf", "data.name="]),
    ({"tokenizer.name": "gtp2"}, ["tokenizer.name=gtp2", "gpt2?"]),
]
INVALID_FOR_SAMPLE = [
    ({"top_p": 1.1}, ["top_p=1.1", "1"]),
    ({"max_new_tokens": 10**23}, ["max_new_tokens=", "1000000000"]),
    ({"checkpoint": "²"}, ["checkpoint=²", "best", "last"]),
    ({"attention": "map.png"}, ["attention=map.png", ".html"]),
]


def check_run(config):
    check_settings(config)
    check_config(config)


@pytest.mark.parametrize(
    "settings_class, check, cases",
    [(Config, check_run, INVALID), (SampleConfig, SampleConfig.check, INVALID_FOR_SAMPLE)],
)
def test_an_invalid_setting_is_refused_by_name_and_value(settings_class, check, cases):
    for values, names in cases:
        with pytest.raises(UserError) as error:
            check(changed(settings_class(), values))
        sentence = str(error.value)
        assert "\n" not in sentence and all(name in sentence for name in names), sentence


# --- derived sizes --------------------------------------------------------------------------------


@pytest.mark.parametrize("mlp, hidden", [("gelu", 240), ("swiglu", 160), ("none", 0)])
def test_sizes_that_are_left_out_follow_from_the_others(mlp, hidden):
    shape = GPTConfig(vocab_size=9, n_head=3, n_embd=60, mlp=mlp)
    assert (shape.key_dim, shape.value_dim, shape.kv_heads) == (20, 20, 3)
    assert shape.hidden_dim == hidden
    assert replace(shape, mlp_ratio=1.5).hidden_dim == (90 if hidden else 0)
    assert replace(shape, mlp_ratio=1.5, mlp_hidden=7).hidden_dim == (7 if hidden else 0)


# --- config.yaml ----------------------------------------------------------------------------------


def read_back(config, folder):
    (folder / "config.yaml").write_text(config_yaml(config), encoding="utf-8")
    return read_config(folder / "config.yaml")


@pytest.mark.slow
@given(
    text=st.text(st.characters(exclude_categories=["Cs"])),
    lr=st.floats(1e-12, 1e3),
    seed=st.integers(0, 2**63 - 1),
)
@example(text="null", lr=1e-5, seed=0)
@example(text=r"\\${seed} ${", lr=1.0, seed=2)
def test_any_text_and_number_is_read_back_equal(text, lr, seed, tmp_path_factory):
    assume(text != "???")  # the command line refuses it
    config = changed(
        Config(),
        {"data.path": text, "data.name": text, "run_dir": text, "optim.lr": lr, "seed": seed},
    )
    assert read_back(config, tmp_path_factory.mktemp("run")) == absolute_paths(config)


# A file with the settings of November 2026.
FIRST = (ROOT / "tests" / "config_format_1.yaml").read_text(encoding="utf-8")


def changed_file(text: str, **changes) -> str:
    """A configuration file without the settings whose new value is None."""
    content = yaml.safe_load(text)
    for key, value in changes.items():
        *sections, name = key.split(".")
        node = content[sections[0]] if sections else content
        if value is None:
            del node[name]
        else:
            node[name] = value
    return yaml.safe_dump(content)


def test_a_new_setting_is_in_the_table_with_the_value_of_earlier_runs():
    content = yaml.safe_load(FIRST)
    sections = {key: value for key, value in content.items() if isinstance(value, dict)}
    recorded = {f"{section}.{name}" for section in sections for name in sections[section]}
    recorded |= content.keys() - sections.keys()
    settings = {name for name, _, _ in iterate_settings(Config())}
    assert settings - recorded == ADDED_SETTINGS.keys(), "see ADDED_SETTINGS in run/config_file.py"
    assert recorded - settings == {"format"}


def test_a_configuration_that_lacks_a_setting_is_refused_by_name():
    assert parse_config(FIRST).model.norm_eps == 1e-5
    for key, _, _ in iterate_settings(Config()):
        if key not in ADDED_SETTINGS:
            with pytest.raises(UserError) as error:
                parse_config(changed_file(FIRST, **{key: None}))
            assert key in str(error.value)


def test_a_later_setting_has_the_old_value_and_an_unknown_one_is_refused(monkeypatch):
    monkeypatch.setitem(ADDED_SETTINGS, "model.norm", "rmsnorm")
    text = config_yaml(parse_config(FIRST))
    assert parse_config(text).model.norm == "layernorm"
    assert parse_config(changed_file(text, **{"model.norm": None})).model.norm == "rmsnorm"
    with pytest.raises(OmegaConfBaseException, match="typo"):
        parse_config(changed_file(text, typo=1))


@pytest.mark.parametrize("version", [None, 2])
def test_a_file_of_another_format_is_refused_because_of_it(version):
    with pytest.raises(UserError, match="format: 1"):
        parse_config(changed_file(FIRST, format=version))


def test_an_invalid_configuration_file_is_refused_in_one_sentence(tmp_path):
    path = tmp_path / "config.yaml"
    with pytest.raises(UserError) as error:
        read_config(path)
    assert str(path) in str(error.value)
    for text in ("max_step: 3", "max_steps: many", "model: [", "wandb:\n  project: caf\xe9\n"):
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
