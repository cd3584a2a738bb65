"""Every knob: its bounds, its help, and the files that change it."""

import re
import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from config import (
    Config,
    GPTConfig,
    OptimConfig,
    SampleConfig,
    UserError,
    absolute_paths,
    config_yaml,
    did_you_mean,
    knobs,
    read_config,
)

ROOT = Path(__file__).parents[1]
YAMLS = sorted((ROOT / "configs").rglob("*.yaml"))
PRESETS = [p for p in YAMLS if p.parent.name != "configs"]
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


def test_the_defaults_are_right():
    Config().check()
    GPTConfig(vocab_size=1).check()
    SampleConfig().check()


WRONG = [
    ({"max_steps": 0}, "max_steps=0 must be at least 1"),
    ({"max_steps": -5}, "max_steps=-5 must be at least 1"),
    ({"batch_size": 0}, "batch_size=0 must be at least 1"),
    ({"accumulate": 0}, "accumulate=0 must be at least 1"),
    ({"accumulate": 5}, "accumulate=5 does not divide batch_size=32"),
    ({"batch_size": 2, "accumulate": 4}, "accumulate=4 does not divide batch_size=2"),
    ({"seed": -1}, "seed=-1 must be at least 0"),
    ({"seed": 2**63}, f"seed={2**63} must be at most {2**63 - 1}"),
    ({"device": "tpu"}, "device=tpu is not one of auto, cpu, cuda, cuda:N, mps"),
    ({"device": ""}, "device= is not one of"),
    ({"device": "cuda0"}, "device=cuda0 is not one of"),
    ({"precision": "fp16"}, "precision=fp16 is not one of auto, fp32, bf16; did you mean bf16"),
    ({"compile": "yes"}, "compile=yes is not one of true, false, auto"),
    ({"resume": "maybe"}, "resume=maybe is not one of true, false, auto"),
    ({"resume": "True"}, "resume=True is not one of true, false, auto"),
    ({"resume": True}, "resume=true needs run_dir=PATH"),
    ({"eval_only": True}, "eval_only=true needs run_dir=PATH"),
    ({"model.vocab_size": 0}, "model.vocab_size=0 must be at least 1"),
    ({"model.block_size": 1}, "model.block_size=1 must be at least 2"),
    ({"model.n_layer": 0}, "model.n_layer=0 must be at least 1"),
    ({"model.n_head": 0}, "model.n_head=0 must be at least 1"),
    ({"model.n_embd": 0}, "model.n_embd=0 must be at least 1"),
    ({"model.head_dim": 0}, "model.head_dim=0 must be at least 1"),
    ({"model.value_head_dim": 0}, "model.value_head_dim=0 must be at least 1"),
    ({"model.mlp_hidden": 0}, "model.mlp_hidden=0 must be at least 1"),
    ({"model.n_kv_head": 0}, "model.n_kv_head=0 must be at least 1"),
    ({"model.n_head": 3}, "model.n_embd=128 is not a multiple of model.n_head=3"),
    ({"model.n_head": 256}, "model.n_embd=128 is not a multiple of model.n_head=256"),
    ({"model.n_kv_head": 3},
     "model.n_kv_head=3 does not divide model.n_head=4: choose one of 1, 2, 4"),
    ({"model.n_kv_head": 8}, "model.n_kv_head=8 does not divide model.n_head=4"),
    ({"model.position": "rope", "model.head_dim": 5},
     "model.position=rope turns pairs of numbers and needs an even head size, not 5"),
    ({"model.position": "rope", "model.n_head": 128}, "even head size, not 1"),
    ({"model.position": "rotary"}, "model.position=rotary is not one of learned, rope"),
    ({"model.norm": "layer"},
     "model.norm=layer is not one of layernorm, rmsnorm; did you mean layernorm"),
    ({"model.mlp": "relu"}, "model.mlp=relu is not one of gelu, swiglu, relu2; did you mean relu2"),
    ({"model.norm_eps": 0.0}, "model.norm_eps=0.0 must be above 0"),
    ({"model.rope_theta": -1.0}, "model.rope_theta=-1.0 must be above 0"),
    ({"model.dropout": 1.0}, "model.dropout=1.0 must be below 1"),
    ({"model.dropout": -0.1}, "model.dropout=-0.1 must be at least 0"),
    ({"model.dropout": float("nan")}, "model.dropout=nan is not a finite number"),
    ({"optim.lr": 0.0}, "optim.lr=0.0 must be above 0"),
    ({"optim.lr": float("inf")}, "optim.lr=inf is not a finite number"),
    ({"optim.muon_lr": -0.1}, "optim.muon_lr=-0.1 must be above 0"),
    ({"optim.name": "adam"}, "optim.name=adam is not one of adamw, muon; did you mean adamw"),
    ({"optim.schedule": "linear"}, "optim.schedule=linear is not one of cosine, wsd, constant"),
    ({"optim.warmup_steps": -1}, "optim.warmup_steps=-1 must be at least 0"),
    ({"optim.warmup_steps": 1000},
     "optim.warmup_steps=1000 is not shorter than the run's 1000 steps"),
    ({"optim.warmup_steps": 10, "max_steps": 10},
     "optim.warmup_steps=10 is not shorter than the run's 10 steps"),
    ({"optim.decay_share": 0.0}, "optim.decay_share=0.0 must be above 0"),
    ({"optim.decay_share": 1.5}, "optim.decay_share=1.5 must be at most 1"),
    ({"optim.min_lr_ratio": 1.1}, "optim.min_lr_ratio=1.1 must be at most 1"),
    ({"optim.weight_decay": -1.0}, "optim.weight_decay=-1.0 must be at least 0"),
    ({"optim.beta1": 1.0}, "optim.beta1=1.0 must be below 1"),
    ({"optim.beta2": 1.0}, "optim.beta2=1.0 must be below 1"),
    ({"optim.momentum": 1.0}, "optim.momentum=1.0 must be below 1"),
    ({"optim.grad_clip": -1.0}, "optim.grad_clip=-1.0 must be at least 0"),
    ({"data.source": "web"}, "data.source=web is not one of stdlib, shakespeare, text"),
    ({"data.source": "text"}, "data=text needs data.path=FILE_OR_FOLDER_OR_GLOB"),
    ({"data.source": "text", "data.path": ""}, "data=text needs data.path=FILE_OR_FOLDER_OR_GLOB"),
    ({"data.path": "notes/"}, "data.path=notes/ needs a source that takes a path: add data=text"),
    ({"data.val_max_tokens": 0}, "data.val_max_tokens=0 must be at least 2"),
    ({"tokenizer.name": "words"}, "tokenizer.name=words is not one of char, bpe, gpt2"),
    ({"tokenizer.name": "gtp2"}, "did you mean gpt2"),
    ({"tokenizer.name": "char", "tokenizer.pattern": "gpt2"},
     "tokenizer.pattern=gpt2 is for tokenizer=bpe"),
    ({"tokenizer.pattern": "words"}, "tokenizer.pattern=words is not one of code, gpt2"),
    ({"data.source": "hf"}, "data=hf needs data.name=DATASET"),
    ({"data.source": "hf", "data.name": "a/b", "data.path": "c"},
     "data.path=c needs a source that takes a path"),
    ({"data.name": "a/b"}, "data.name=a/b is for data=hf"),
    ({"data.source": "text", "data.path": "a", "data.subset": "b"}, "data.subset=b is for data=hf"),
    ({"tokenizer.vocab_size": 256}, "tokenizer.vocab_size=256 must be at least 257"),
    ({"tokenizer.vocab_size": 3_000_000_000}, "=3000000000 must be at most 1000000"),
    ({"tokenizer.name": "char", "tokenizer.vocab_size": 300},
     "tokenizer.vocab_size=300 is for tokenizer=bpe"),
    ({"tokenizer.name": "gpt2", "tokenizer.vocab_size": 50257},
     "tokenizer=gpt2 has its own vocabulary"),
    ({"log.every": -1}, "log.every=-1 must be at least 0"),
    ({"eval.every": -1}, "eval.every=-1 must be at least 0"),
    ({"checkpoint.every": -1}, "checkpoint.every=-1 must be at least 0"),
    ({"checkpoint.keep": 0}, "checkpoint.keep=0 must be at least 1"),
    ({"attention.every": -1}, "attention.every=-1 must be at least 0"),
    ({"attention.tokens": 7}, "attention.tokens=7 must be at least 8"),
    ({"wandb.mode": "on"}, "wandb.mode=on is not one of auto, online, offline, disabled"),
]


@pytest.mark.parametrize("values, sentence", WRONG,
                         ids=lambda v: "" if isinstance(v, dict) else v.partition(" ")[0])
def test_a_wrong_setting_is_named_with_its_value_and_what_to_do(values, sentence):
    with pytest.raises(UserError) as error:
        changed(Config(), values).check()
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


RIGHT = [
    {"optim.warmup_steps": 0}, {"optim.warmup_steps": 999}, {"max_steps": 1},
    {"batch_size": 32, "accumulate": 32}, {"seed": 0}, {"seed": 2**63 - 1},
    {"model.block_size": 2}, {"tokenizer.vocab_size": 1_000_000},
    {"device": "cuda:1"}, {"device": "mps"}, {"resume": "auto"}, {"resume": True, "run_dir": "x"},
    {"eval_only": True, "run_dir": "x"},
    {"model.n_kv_head": 1}, {"model.n_kv_head": 4}, {"model.n_head": 3, "model.head_dim": 7},
    {"model.dropout": 0.99},
    {"model.position": "rope", "model.head_dim": 2},
    {"model.head_dim": 5, "model.value_head_dim": 3}, {"compile": True}, {"compile": False},
    {"data.source": "text", "data.path": "x"}, {"data.source": "shakespeare"},
    {"data.source": "shakespeare", "data.path": "x"},
    {"tokenizer.name": "o200k_base"}, {"data.source": "hf", "data.name": "a/b", "data.subset": "c"},
    {"tokenizer.vocab_size": 257}, {"tokenizer.name": "char"},
    {"log.every": 0, "eval.every": 0, "checkpoint.every": 0, "attention.every": 0},
    {"optim.grad_clip": 0.0}, {"optim.min_lr_ratio": 1.0}, {"optim.decay_share": 1.0},
    {"attention.tokens": 8},
]


@pytest.mark.parametrize("values", RIGHT, ids=lambda v: ",".join(v))
def test_a_value_at_its_bound_is_taken(values):
    changed(Config(), values).check()


SAMPLE_WRONG = [
    ({"max_new_tokens": 0}, "max_new_tokens=0 must be at least 1"),
    ({"temperature": -0.1}, "temperature=-0.1 must be at least 0"),
    ({"temperature": float("nan")}, "temperature=nan is not a finite number"),
    ({"top_k": 0}, "top_k=0 must be at least 1"),
    ({"top_p": 0.0}, "top_p=0.0 must be above 0"),
    ({"top_p": 1.1}, "top_p=1.1 must be at most 1"),
    ({"min_p": 1.1}, "min_p=1.1 must be at most 1"),
    ({"num_samples": 0}, "num_samples=0 must be at least 1"),
    ({"seed": -1}, "seed=-1 must be at least 0"),
    ({"seed": 2**63}, f"must be at most {2**63 - 1}"),
    ({"checkpoint": "newest"}, "checkpoint=newest is not best, last or a step's number"),
    ({"checkpoint": "-1"}, "checkpoint=-1 is not best, last or a step's number"),
    ({"checkpoint": "²"}, "checkpoint=² is not best, last or a step's number"),
    ({"prompt": "a", "score": "b"}, "prompt= and score= are both given"),
    ({"prompt": "", "prompts": "b"}, "prompt= and prompts= are both given"),
    ({"interactive": True, "score": "b"}, "interactive= and score= are both given"),
    ({"repetition_penalty": 0.001}, "repetition_penalty=0.001 must be at least 0.01"),
    ({"stop": ["a", ""]}, "stop= is empty"),
]


@pytest.mark.parametrize("values, sentence", SAMPLE_WRONG,
                         ids=lambda v: "" if isinstance(v, dict) else v.partition(" ")[0])
def test_a_wrong_setting_of_sample_is_named_with_its_value(values, sentence):
    with pytest.raises(UserError) as error:
        changed(SampleConfig(), values).check()
    assert sentence in str(error.value)


@pytest.mark.parametrize("values", [{"temperature": 0.0}, {"top_p": 1.0}, {"min_p": 0.0},
                                    {"min_p": 1.0}, {"checkpoint": "0"},
                                    {"checkpoint": "last"}, {"prompt": ""}, {"prompts": "x"}],
                         ids=lambda v: ",".join(v))
def test_a_value_of_sample_at_its_bound_is_taken(values):
    changed(SampleConfig(), values).check()


def bounded():
    """(name, field) of every knob with a bound or choices."""
    return [(name, f) for name, f, _ in knobs(Config())
            if any(f.metadata.get(key) is not None for key in ("choices", "ge", "gt", "le", "lt"))]


@given(pick=st.sampled_from(bounded()),
       value=st.integers(-10**6, 10**6) | st.floats(-10, 10) | st.text(max_size=5))
def test_a_value_out_of_its_bounds_is_never_taken(pick, value):
    name, f = pick
    number, choices = "int" in str(f.type) or "float" in str(f.type), f.metadata.get("choices")
    if number == isinstance(value, str):
        return
    inside = value in choices if choices else all(
        f.metadata.get(key) is None or good(value, f.metadata[key]) for key, good in (
            ("ge", lambda v, b: v >= b), ("gt", lambda v, b: v > b), ("le", lambda v, b: v <= b),
            ("lt", lambda v, b: v < b)))
    config = changed(Config(), {name: value})
    if not inside:
        with pytest.raises(UserError, match=rf"^{re.escape(name)}="):
            config.check()


# --- what follows from a shape --------------------------------------------------------------------


@given(heads=st.integers(1, 16), size=st.integers(1, 64), kv=st.none() | st.integers(1, 16),
       mlp=st.sampled_from(["gelu", "swiglu", "relu2"]))
def test_what_is_left_out_follows_from_the_rest(heads, size, kv, mlp):
    shape = GPTConfig(vocab_size=9, n_head=heads, n_embd=heads * size, n_kv_head=kv, mlp=mlp)
    assert (shape.key_dim, shape.value_dim, shape.kv_heads) == (size, size, kv or heads)
    if mlp == "swiglu":
        assert shape.hidden_dim % 8 == 0 and 0 <= shape.hidden_dim - 8 / 3 * shape.n_embd < 8
    else:
        assert shape.hidden_dim == 4 * shape.n_embd


def test_what_is_given_is_kept():
    shape = GPTConfig(vocab_size=9, head_dim=7, value_head_dim=3, mlp_hidden=11)
    assert (shape.key_dim, shape.value_dim, shape.hidden_dim) == (7, 3, 11)
    assert GPTConfig(vocab_size=9, head_dim=7).value_dim == 7


def test_the_warm_up_is_a_twentieth_of_the_run():
    assert OptimConfig().warmup(1000) == 50
    assert OptimConfig().warmup(200) == 10
    assert OptimConfig(warmup_steps=0).warmup(200) == 0


# --- the page itself ------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [Config(), SampleConfig()], ids=["train", "sample"])
def test_every_knob_has_a_line_of_help(config):
    for name, f, _ in knobs(config):
        help = f.metadata.get("help", "")
        assert len(help) > 10 and "\n" not in help, name


def test_every_default_is_within_its_own_bounds_and_choices():
    for name, f, default in knobs(Config()):
        choices = f.metadata.get("choices")
        assert not choices or default in choices, name


def test_every_number_has_a_bound_below():
    for name, f, _ in [*knobs(Config()), *knobs(SampleConfig())]:
        if "int" in str(f.type) or "float" in str(f.type):
            assert f.metadata.get("ge") is not None or f.metadata.get("gt") is not None, name


def test_no_two_sections_share_a_default():
    one, other = Config(), Config()
    for f in fields(Config):
        if is_dataclass(getattr(one, f.name)):
            assert getattr(one, f.name) is not getattr(other, f.name)


def test_config_and_cli_do_not_import_torch():
    code = ("import sys, config, cli; cli.train_help(); cli.check_arguments(['max_steps=3']); "
            "assert 'torch' not in sys.modules")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_near_miss_is_proposed_and_a_far_one_is_not():
    assert did_you_mean("max_step", ["max_steps", "seed"]) == "; did you mean max_steps?"
    assert did_you_mean("zzz", ["max_steps", "seed"]) == ""


# --- kept and read back ---------------------------------------------------------------------------


def read_back(config, folder):
    (folder / "config.yaml").write_text(config_yaml(config), encoding="utf-8")
    return read_config(folder / "config.yaml")


@pytest.mark.parametrize("values", [{}, *RIGHT], ids=lambda v: ",".join(v))
def test_a_kept_configuration_is_read_back_the_same(values, tmp_path):
    config = changed(Config(), values)
    assert read_back(config, tmp_path) == absolute_paths(config)


@pytest.mark.slow
@given(text=st.text(st.characters(exclude_categories=["Cs"])), lr=st.floats(1e-12, 1e3),
       seed=st.integers(0, 2**63 - 1))
@example(text="null", lr=1e-5, seed=0)
@example(text="1e3", lr=3e-4, seed=1)
@example(text="~/notes (1).txt", lr=1.0, seed=2)
@example(text="a: b # c", lr=1.0, seed=2)
def test_any_text_and_number_is_read_back_the_same(text, lr, seed, tmp_path_factory):
    assume(text != "???")  # which the command line refuses
    config = changed(Config(), {"data.path": text, "data.name": text, "run_dir": text,
                                "optim.lr": lr, "seed": seed})
    assert read_back(config, tmp_path_factory.mktemp("run")) == absolute_paths(config)


@pytest.mark.parametrize("text",
                         ["${seed}", "${nothing}", "${", r"\${seed}", r"\\${seed}", "a ${b} \\"])
def test_a_text_that_looks_like_an_interpolation_is_read_back_the_same(text, tmp_path):
    config = changed(Config(), {"data.path": text})
    assert read_back(config, tmp_path) == absolute_paths(config)


def test_a_missing_configuration_is_named(tmp_path):
    with pytest.raises(UserError, match=r"config\.yaml cannot be read: No such file"):
        read_config(tmp_path / "config.yaml")


@pytest.mark.parametrize("text", ["max_step: 3", "max_steps: many", "model: [", "- 1", "model: 3",
                                  "\0", "seed: ${nothing}"])
def test_a_configuration_that_does_not_fit_is_one_sentence(text, tmp_path):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError,
                       match=r"config\.yaml does not fit this version of GlassGPT: \S") as error:
        read_config(tmp_path / "config.yaml")
    assert "\n" not in str(error.value)


def test_a_configuration_that_is_not_utf8_is_one_sentence(tmp_path):
    (tmp_path / "config.yaml").write_bytes(b"wandb:\n  name: caf\xe9\n")
    with pytest.raises(UserError, match=r"config\.yaml"):
        read_config(tmp_path / "config.yaml")


OLD = ("model:\n  rope_low: {low}\n  n_layer: 3\nattention:\n  svg: true\n  every: 7\n"
       "wandb:\n  name: {name}\n")


def test_settings_of_an_older_version_are_ignored_with_one_line(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text(OLD.format(low=1.0, name="mine"))
    config = [read_config(tmp_path / "config.yaml") for _ in range(2)][1]
    assert (config.model.n_layer, config.attention.every) == (3, 7)
    assert capsys.readouterr().err == ("note: a setting of an older version is ignored: "
                                       "attention.svg=True, wandb.name=mine\n")


def test_a_setting_of_an_older_version_that_makes_another_model_is_refused(tmp_path):
    (tmp_path / "config.yaml").write_text(OLD.format(low=2.0, name="null"))
    with pytest.raises(UserError, match=r"no model\.rope_low=2\.0"):
        read_config(tmp_path / "config.yaml")


# --- the presets ----------------------------------------------------------------------------------


def settings_of(node, prefix=""):
    for key, value in node.items():
        if isinstance(value, dict):
            yield from settings_of(value, f"{prefix}{key}.")
        else:
            yield prefix + key


@named
def test_a_preset_names_only_known_settings(path):
    group, known = path.parent.name, {name for name, _, _ in knobs(Config())}
    values = OmegaConf.to_container(OmegaConf.load(path))
    values.pop("defaults", None)
    if group in GLOBAL:
        values.pop("hydra", None)
    prefix = "" if group in GLOBAL else f"{group}."
    assert {prefix + name for name in settings_of(values)} <= known


@named
def test_a_preset_is_headed_by_the_command_that_uses_it(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    if path.parent.name in GLOBAL:
        assert lines.pop(0) == "# @package _global_"
    used = "" if (path.parent.name, path.stem) == (
        "experiment", "default") else rf" (.* )?{path.parent.name}={path.stem}\b"
    assert re.match(rf"# python train\.py{used}", lines[0])
    assert lines[1].startswith("# ")


def test_every_group_has_a_preset():
    assert {p.parent.name for p in PRESETS} >= {"model", "data", "tokenizer", "optim", "experiment"}
    assert all(list(folder.glob("*.yaml")) for folder in (ROOT / "configs").iterdir()
               if folder.is_dir())
