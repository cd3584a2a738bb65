"""The command line: mistakes are refused early, and values arrive as typed."""

import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import processes
import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.singleton import Singleton
from hydra.errors import HydraException
from hypothesis import example, given
from hypothesis import strategies as st
from models import few
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from run_folders import write_configuration, write_run

import cli
from cli.command_line import CONFIGS, SETTINGS, parse_command_line
from cli.config_file import config_yaml
from cli.sample_config import SampleConfig
from common.errors import UserError
from common.settings import Above, explain_unused, iterate_settings
from common.terminal import Terminal, explain_error, print_stderr, printer, run_main
from config import Config, GPTConfig, ModelConfig, TokenizerConfig
from data.tokenizer import CharTokenizer
from interop import read_starting_model, save_hf
from variants import build_model

ROOT = Path(__file__).parents[1]
# An argument is any text without NUL.
arguments = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
# Signs with a meaning for a shell, for Hydra or for OmegaConf.
SIGNS = [
    *"'\"\\,=()[]{}<>~+$:;|&*?#@!%^ \t\n",
    "${",
    "}",
    "${x}",
    "${oc.env:HOME}",
    "\\'",
    "\\\\",
    "???",
    "null",
    "true",
    "1e3",
    "é",
    "日本",
    "😀",
    "choice(",
    "--",
]
hostile_texts = arguments | st.lists(st.sampled_from([*SIGNS, "a"]), max_size=8).map("".join)
UNSET = ("", "null")  # texts that a path cannot be
SYNTAX_LIKE_TEXTS = [
    " ",
    "it's",
    "Hello, world",
    "~/notes (1).txt",
    "café",
    "a=b",
    "[1,2]",
    "{a: 1}",
    "${seed}",
    r"\${seed}",
    "\\",
    "\\'",
    "a\\",
    "'quoted'",
    '"quoted"',
    "NULL",
    "true",
    "1",
    "1e3",
    "007",
    "-",
    "--help",
    "a  b",
    "#",
    "glob(*)",
    "choice(1,2)",
    "x,",
    "+x",
    "~x",
]


def sample_config(argv: list[str]) -> SampleConfig:
    return cli.read_settings(argv, SampleConfig, "python sample.py")


@pytest.fixture(scope="module")
def hydra():
    with initialize_config_dir(str(CONFIGS.resolve()), version_base="1.3"):
        yield


def job_of(*argv: str) -> cli.Job:
    """The job that a command line describes, composed within the fixture `hydra`."""
    settings = parse_command_line(list(argv)).settings
    return cli.Job(OmegaConf.to_object(compose("config", overrides=settings)), settings)


def composed(*argv: str) -> Config:
    return job_of(*argv).config


def configured(*argv: str) -> Config:
    return cli.configure(job_of(*argv), read_starting_model).config


def refused(*argv) -> str:
    """The error message of a command line."""
    with pytest.raises(UserError) as error:
        parse_command_line(list(argv))
    assert "\n" not in str(error.value)
    return str(error.value)


# --- mistakes -------------------------------------------------------------------------------------

# A command line → what its error names: the setting, its value, what to type instead.
MISTAKES = [
    ("max_step=3", ["max_step ", "max_steps?", "python train.py --help"]),
    ("n_layer=4", ["n_layer ", "model.n_layer?"]),
    ("zzz=1", ["zzz ", "--help"]),
    ("+model.typo=4", ["model.typo"]),
    ("max_steps", ["max_steps=VALUE"]),
    ("data.path=it's", ["data.path=it's", "data=text"]),
    ("max_steps=abc", ["max_steps: ", "'abc'"]),
    ("max_steps=", ["max_steps="]),
    ("max_steps=1e3", ["max_steps: ", "1000.0"]),
    ("model.n_layer=2,", ["model.n_layer=2,"]),
    ("model.n_layer=${", ["model.n_layer=${"]),
    ("model.tie_embeddings=maybe", ["model.tie_embeddings: ", "'maybe'"]),
    ("optim.lr=1e-3,3e-3", ["optim.lr=1e-3,3e-3", "-m"]),
    ("optim.lr=interval(0,1)", ["optim.lr=interval(0,1)", "-m"]),
    ("model=small,gpt2", ["model=small,gpt2", "-m"]),
    ("experiment=configs/experiment/induction.yaml", ["experiment=configs/", "induction"]),
    ("data=my.txt", ["data=my.txt", "data.path=my.txt"]),
    ("tokenizer=o200k_base", ["tokenizer.name=o200k_base"]),
    ("data=text data.path=a.txt,b.txt", ["data.path=a.txt,b.txt", "folder", "glob"]),
    ("data=text data.path=a.txt data.path=b.txt", ["data.path=a.txt data.path=b.txt", "glob"]),
    ("max_steps=0", ["max_steps=0", "1"]),
    ("model=gpt3", ["model=gpt3", "gpt2?"]),
    ("sweep=heads", ["sweep=heads", "-m"]),
    ("model.n_head=5", ["model.n_head=5", "model.n_embd=128"]),
    ("device=tpu", ["device=tpu", "cuda"]),
    ("data=text", ["data.path"]),
    ("data=synthetic data.task=modular model.block_size=8", ["model.block_size=8", "=4"]),
    ("data=synthetic data.max_period=300", ["data.max_period=300", "model.block_size=256"]),
    ("data=synthetic data.min_period=30", ["data.min_period=30", "data.max_period=24"]),
    ("data=synthetic data.task=recall data.pairs=17", ["data.pairs=17", "data.symbols=32"]),
    ("data=synthetic data.task=modular data.symbols=2 data.train_share=0.1", ["data.train_share"]),
    ("data=synthetic tokenizer=gpt2", ["tokenizer", "data=synthetic"]),
    ("data=synthetic tokenizer.vocab_size=300", ["tokenizer.vocab_size", "data=synthetic"]),
    ("data=text data.path=nowhere", ["data.path=nowhere"]),
    ("resume=true", ["resume=true", "run_dir=PATH"]),
    ("resume=auto", ["resume=auto", "run_dir=PATH"]),
    ("resume=true run_dir=nowhere", ["run_dir=nowhere", "resume=true"]),
    ("optim.lr=${nothing}", ["nothing"]),
    ("hydra/launcher=foo", ["hydra/launcher=foo", "-m"]),
    ("hydra.run.dir=here", ["hydra.run.dir=here", "-m"]),
    ("--batch_size=32", ["--batch_size=32", "write batch_size=32"]),
    ("--resume", ["--resume", "resume=VALUE"]),
    ("model.context_length=64", ["model.context_length=64", "model.block_size=N"]),
    ("wandb.mode=off", ["wandb.mode=off", "wandb.mode=disabled"]),
    ("--config-dir=none", ["--config-dir=none"]),
    ("--cfg nope", ["nope"]),
    ("-m seed=1,2 run_dir=x", ["run_dir=x", "hydra.sweep.dir=PATH"]),
    ("-m seed=1,2 resume=true", ["resume=true", "resume=auto"]),
    ("init_from=resume", ["init_from=resume", "run_dir=PATH resume=true"]),
    ("init_from=somewhere max_steps=0", ["max_steps=0"]),
    ("optim.learning_rate=1", ["optim.learning_rate=1", "optim.lr=RATE"]),
    ("--max_iters=5", ["--max_iters=5", "max_steps=N"]),
    ("config/train_shakespeare_char.py", ["experiment=nanogpt_gpu"]),
]


@pytest.fixture
def launch(monkeypatch, tmp_path, capsys):
    """launch(command line) → (exit status, stdout, stderr) of train.py before it imports torch."""

    def prepare(line: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["train.py", *re.findall("[^ ]+", line)])
        try:
            cli.read_request(read_starting_model)
            status = 0
        except SystemExit as e:
            status = e.code or 0
        return (status, *capsys.readouterr())

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("signal.signal", lambda *_: None)  # pytest's own handlers stay
    monkeypatch.delitem(Singleton._instances, GlobalHydra, raising=False)  # as in a new process
    return prepare


def assert_one_sentence(error: str, names: Sequence[str]) -> None:
    assert error.startswith("error: ") and error.count("\n") == 1, error
    for name in names:
        assert name in error, (name, error)


def test_a_mistake_gives_one_sentence_that_names_it_and_creates_no_file(launch, tmp_path):
    for line, names in MISTAKES:
        status, _, err = launch(line)
        assert status == 1, line
        assert_one_sentence(err, names)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("line", ["max_steps=3 data.name=null", "-m seed=1,2"])
def test_a_valid_command_line_prints_one_line_and_continues(line, launch):
    status, out, err = launch(line)
    assert (status, out.count("\n"), err) == (0, 1, "")


@pytest.mark.parametrize("line", ["max_steps=3", "model=small", "precision=fp32 ", "-m seed=1,2"])
def test_carriage_returns_of_a_windows_script_are_ignored(line, launch):
    assert launch(f"{line}\r")[::2] == (0, "")


def test_hydra_prints_the_configuration_without_torch(launch):
    status, out, err = launch("--cfg job")
    assert (status, err) == (0, "")
    assert yaml.safe_load(out)["max_steps"] == 2000  # of experiment=default


def test_only_rank_0_prints_errors_and_reads_folders(launch, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("RANK", "1")
    assert launch("resume=true run_dir=nowhere") == (0, "", "")
    assert launch("max_step=3") == (1, "", "")
    monkeypatch.setenv("RANK", "0")
    assert launch("resume=true run_dir=nowhere")[0] == 1
    status, _, err = launch("-m seed=1,2")
    assert status == 1
    assert_one_sentence(err, ["torchrun", "python train.py -m"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "script, line", [("train.py", "data=text data.path=nowhere"), ("sample.py", "temprature=1")]
)
def test_a_mistake_is_refused_before_torch_is_imported(script, line, new_command, tmp_path):
    folder = tmp_path / "path"
    folder.mkdir()
    (folder / "torch.py").write_text("raise SystemExit('torch was imported')")
    done = new_command(script, *line.split(), env={"PYTHONPATH": str(folder)})
    assert (done.returncode, done.stdout) == (1, "")
    assert_one_sentence(done.stderr, [])


# --- paths without a setting ----------------------------------------------------------------------


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Names of texts, in the working directory."""
    names = ["a.txt", "b.txt", "my notes.txt", "a[1].txt", "a=b.txt", "notes/a.txt", "notes/b.txt"]
    (tmp_path / "notes").mkdir()
    for name in names:
        (tmp_path / name).write_text("a text")
    monkeypatch.chdir(tmp_path)
    return names


def test_a_path_without_a_setting_gets_the_settings_to_type(files):
    for path in [*files, "notes", "notes/", "notes/*.txt", "*.txt"]:
        command = refused(path).rpartition(": write ")[2]
        settings = parse_command_line(shlex.split(command)).settings
        assert settings == ["data=text", f"data.path='{path}'"]
    for path in [*files, "notes"]:
        with pytest.raises(UserError) as error:
            sample_config([path])
        for key in ("prompt_file", "score", "init_from"):
            assert f" {key}={shlex.quote(path)} " in str(error.value)
    with pytest.raises(UserError, match=r" score=FILE "):
        sample_config(["notes/*.txt"])


@pytest.mark.parametrize(
    "argv",
    [
        ["a.txt", "b.txt"],
        ["notes/a.txt", "notes/b.txt", "my notes.txt"],
        ["data=text", "data.path=a.txt", "b.txt"],
        ["data=text", "data.path=a.txt", "data.path=b.txt"],
        ["a.txt", "notes"],
    ],
)
def test_several_paths_are_named_with_the_settings_to_type(argv, files):
    sentence = refused(*argv)
    assert sentence.startswith(" ".join(argument for argument in argv if argument != "data=text"))
    assert "data=text data.path=FOLDER" in sentence


def test_a_thousand_paths_are_not_all_listed(files, tmp_path):
    paths = [f"notes/{n}.txt" for n in range(1000)]
    for path in paths:
        (tmp_path / path).write_text("a text")
    sentence = refused(*paths)
    assert "notes/0.txt" in sentence and "data.path=FOLDER" in sentence and len(sentence) < 500


@pytest.mark.parametrize("path", ["a.txt/b", "nowhere/*.txt", "n" * 5000, "a\0", "a\0/*", ""])
def test_what_cannot_be_a_path_is_asked_for_a_setting(path, files):
    assert f"{path!r} " in refused(path) and "KEY=VALUE" in refused(path)
    with pytest.raises(UserError, match="KEY=VALUE"):
        sample_config([path])


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv",
    [
        ["max_steps=3"],
        ["model=small", "optim=muon"],
        ["--cfg", "job"],
        ["hydra/launcher=basic", "-m"],
        ["seed=1", "-c", "job"],
        ["seed=1,2", "-m"],
        ["model=glob(*)", "-m"],
        ["optim.lr=choice(1,2)", "-m"],
        ["data.name=a b,c", "-m"],
        ["--config-dir", str(CONFIGS)],
        ["data.name=null"],
    ],
)
def test_arguments_that_hydra_understands_are_not_quoted(argv):
    assert parse_command_line(argv).arguments == argv


def alternatives(value: str) -> list:
    """The values of data.name=VALUE that Hydra sweeps over."""
    parse = OverridesParser.create().parse_override
    override = parse(parse_command_line(["-m", f"data.name={value}"]).settings[0])
    if not override.is_sweep_override():
        return [override.value()]
    return [parse(f"data.name={text}").value() for text in override.sweep_string_iterator()]


@pytest.mark.parametrize(
    "value, expected",
    [
        ("a", ["a"]),
        ("/notes,a b.txt", ["/notes", "a b.txt"]),
        ("'a,b',c", ["a,b", "c"]),
        ("choice(a,b)", ["a", "b"]),
        ("null,a", [None, "a"]),
        ("it's (1)", ["it's (1)"]),
    ],
)
def test_a_sweep_splits_values_that_hydra_can_parse_and_keeps_others_whole(value, expected):
    assert alternatives(value) == expected


@pytest.mark.slow
@few
@given(text=hostile_texts)
@example(text="\\\n")
@example(text="a'\\\n")
def test_any_text_arrives_as_typed(text, hydra):
    if text not in UNSET:
        config = composed(f"data.path={text}", f"data.name={text}")
        assert (config.data.path, config.data.name) == (text, text)


@pytest.mark.slow
@few
@given(name=st.sampled_from(sorted(SETTINGS)), text=hostile_texts)
def test_any_value_of_any_setting_is_composed_or_refused_in_one_sentence(name, text, hydra):
    try:
        composed(f"{name}={text}")
    except (UserError, HydraException, OmegaConfBaseException) as e:
        sentence = explain_error(e)
        assert sentence and "\n" not in sentence


@pytest.mark.slow
def test_text_that_looks_like_syntax_arrives_as_typed(hydra):
    for n in range(0, len(SYNTAX_LIKE_TEXTS), 3):
        texts = SYNTAX_LIKE_TEXTS[n : n + 3]
        config = composed(
            *(f"{name}={text}" for name, text in zip(("data.path", "data.name", "run_dir"), texts))
        )
        assert [config.data.path, config.data.name, config.run_dir][: len(texts)] == texts


@pytest.mark.slow
def test_typed_settings_win_over_experiments_and_experiments_over_presets(hydra):
    assert composed("experiment=nanogpt_cpu").data.source == "shakespeare"
    assert composed("experiment=nanogpt_cpu", "data=stdlib").data.source == "stdlib"
    assert composed("data=stdlib", "experiment=nanogpt_cpu").data.source == "stdlib"
    nanogpt = composed("experiment=nanogpt_cpu", "optim=muon").optim
    assert (nanogpt.name, nanogpt.beta2) == ("muon", 0.99)
    assert composed("experiment=nanogpt_cpu", "optim.beta2=0.9").optim.beta2 == 0.9
    assert composed("data.name=null").data.name is None


@pytest.mark.soak
def test_the_command_in_a_presets_header_is_valid(hydra):
    for group, presets in cli.find_presets().items():
        for path in presets.values() if group != "sweep" else ():
            lines = path.read_text(encoding="utf-8").splitlines()
            command = next(line for line in lines if line.startswith("# python train.py"))
            composed(*shlex.split(re.sub(r"# python train\.py|[\[\]]", "", command))).check()


# --- the settings of sample.py --------------------------------------------------------------------


@given(text=hostile_texts)
@example(text="???")
def test_a_prompt_arrives_as_typed(text):
    if text != "null":
        assert sample_config([f"prompt={text}"]).prompt == text


def test_the_folder_of_a_run_without_run_dir_gets_the_right_setting(tmp_path):
    write_run(tmp_path)
    with pytest.raises(UserError, match=f" run_dir={re.escape(str(tmp_path))}"):
        sample_config([str(tmp_path)])


def test_settings_of_sample_are_converted_to_their_types():
    config = sample_config(["top_k=5", "temperature=2", "prompt=5"])
    assert config == SampleConfig(top_k=5, temperature=2.0, prompt="5")


@pytest.mark.parametrize(
    "argv, names",
    [
        (["temprature=1"], ["temprature", "temperature?", "python sample.py --help"]),
        (["prompt=def", "main"], ["main", "KEY=VALUE"]),
        (["--prompt"], ["--prompt", "prompt=VALUE"]),
        (["prompt=a", "score=b"], ["prompt=", "score="]),
        (["json=true"], ["json"]),
        (["top_k=1.5"], ["top_k=1.5"]),
        (["top_k=5,"], ["top_k=5,"]),
        (["top_k=None"], ["top_k=None"]),
        (["temperature=null"], ["temperature=null"]),
        (["temperature=${x}"], ["temperature=${x}"]),
        (["run_dir="], ["run_dir="]),
        (["score=a", "top_k=3"], ["top_k=3", "score=a"]),
        (["temperature=0", "top_p=0.5"], ["top_p=0.5", "temperature=0"]),
        (["attention=a.html", "precision=bf16"], ["precision=bf16", "attention=a.html"]),
    ],
)
def test_a_mistake_in_the_settings_of_sample_is_named(argv, names):
    with pytest.raises(UserError) as error:
        sample_config(argv)
    sentence = str(error.value)
    assert "\n" not in sentence and all(name in sentence for name in names), sentence


# --- help and other output ------------------------------------------------------------------------


def test_the_help_of_train_lists_all_settings_and_presets_in_80_columns(launch, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    status, out, err = launch("max_steps=3 --help")
    assert (status, err) == (0, "") and all(len(line) <= 80 for line in out.splitlines())
    text = " ".join(out.split())
    for name, f, _ in iterate_settings(Config()):
        assert re.search(rf" {re.escape(name)}=\S+ {re.escape(f.metadata['help'])}", text), name
    for group, presets in cli.find_presets().items():
        assert all(re.search(rf" {group}={name}\*? \S", text) for name in presets)
    # The values of the plain command, which is experiment=default, not the neutral ones.
    assert " max_steps=2000 " in text and " optim.name=muon " in text
    assert "(true | false | auto)" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    "argv", [["train.py", "-h"], ["sample.py", "-h"], ["explore.py", "--help"]]
)
def test_help_is_printed_in_every_encoding(argv, tmp_path):
    done = processes.run(tmp_path, *argv, env={"PYTHONIOENCODING": "ascii"}, text=False)
    assert (done.returncode, done.stderr) == (0, b"") and len(done.stdout.decode("ascii")) > 100


def test_nanogpt_settings_in_the_docs_are_accepted_or_get_a_hint():
    table = (
        (ROOT / "docs" / "settings.md")
        .read_text(encoding="utf-8")
        .partition("| nanoGPT | here |")[2]
    )
    rows = [line.split("|") for line in table.partition("\n\n")[0].splitlines()[2:]]
    cells = [name for row in rows for name in re.findall(r"`([\w=]+)`", row[1] + row[3])]
    assert len(cells) > 15
    settings, without_hint = {name for name, *_ in iterate_settings(Config())}, refused("zzz=1")
    for name in cells:
        if name not in settings:
            sentence = refused(name if "=" in name else f"{name}=1")
            assert sentence != without_hint.replace("zzz", name)


# --- the user's own presets -----------------------------------------------------------------------

GLOBAL = "# @package _global_\n"
OWN = {
    "model/tiny": "n_layer: 1\nn_head: 2\nn_embd: 16\nblock_size: 16\n",
    "data/mine": f"source: text\npath: {ROOT / 'LICENSE'}\n",
    "tokenizer/letters": "name: char\n",
    "experiment/mine": GLOBAL + "defaults:\n  - override /model: tiny\n"
    "  - override /data: mine\n  - override /tokenizer: letters\n"
    "max_steps: 2\nbatch_size: 2\nattention:\n  every: 0\n",
    "sweep/seeds": GLOBAL + "hydra:\n  sweeper:\n    params:\n"
    "      seed: 1,2\n      experiment: mine\n",
}


@pytest.fixture
def own(tmp_path):
    """Add presets to a folder for --config-dir: own({"model/tiny": "n_layer: 1"})."""

    def write(presets: dict[str, str]) -> str:
        for name, text in presets.items():
            path = tmp_path / "own" / f"{name}.yaml"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return f"--config-dir={tmp_path / 'own'}"

    return write


@pytest.mark.soak
def test_own_presets_work_in_runs_resumed_runs_and_sweeps(own, tmp_path, command):
    folder = own(OWN)
    for steps, more in ((2, []), (3, ["resume=true", "max_steps=3"])):
        done = command("train.py", folder, "experiment=mine", "run_dir=run", *more)
        assert (done.returncode, done.stderr) == (0, "")
        kept = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
        assert (kept["model"]["n_embd"], kept["max_steps"]) == (16, steps)
    done = command(
        "train.py",
        folder,
        "-m",
        "sweep=seeds",
        "hydra.sweep.dir=~/sweep",
        env={"HOME": str(tmp_path)},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(path.name for path in (tmp_path / "sweep").glob("*/")) == ["seed=1", "seed=2"]
    best = re.search(r"^best run +python (train.py .*)", done.stdout, re.MULTILINE)[1]
    done = command(*shlex.split(best), "prepare_only=true")
    assert done.returncode == 0, done.stderr


# What experiment/bad.yaml has below its first line → what is named.
BAD_EXPERIMENTS = [
    ("max_steps: [3\n", ["bad.yaml", "line 3"]),
    ("max_step: 3\n", ["max_step"]),
    ("max_steps: many\n", ["max_steps", "many"]),
    ("max_steps: 0\n", ["max_steps=0", "1"]),
    ("max_steps: ${nothing}\n", ["nothing"]),
    ("defaults:\n  - override /model: smal\n", ["model=smal", "small?"]),
    ("defaults:\n  - override /mode: small\n", ["mode"]),
]


@pytest.mark.parametrize("content, names", BAD_EXPERIMENTS)
def test_a_mistake_in_an_own_preset_gives_one_sentence(content, names, own, launch):
    folder = own({"experiment/bad": GLOBAL + content})
    status, out, err = launch(f"{folder} experiment=bad")
    assert (status, out) == (1, "")
    assert_one_sentence(err, names)


# --- settings without effect ----------------------------------------------------------------------

USED_WITH = [
    (name, other)
    for name, field in SETTINGS.items()
    for other in field.metadata.get("only_with", ())
]
NO_EFFECT = {  # other setting → a value with which the settings above have no effect
    "data.source": "stdlib",
    "data.task": "markov",
    "model.mlp": "none",
    "tokenizer.name": "char",
    "optim.name": "adamw",
    "optim.schedule": "constant",
    "model.position": "learned",
    "model.rope_factor": 1.0,
    "model.ngrams": 1,
    "attention.every": 0,
    "wandb.mode": "disabled",
}
EXAMPLES = {"int": 512, "float": 0.5, "str": "x"}  # values of optional settings, by type


@pytest.mark.parametrize("name, other", USED_WITH)
def test_a_setting_without_effect_is_refused_if_it_was_typed(name, other):
    conditions = SETTINGS[name].metadata["only_with"]
    config = Config()
    for key, allowed in conditions.items():
        works = 2 if isinstance(allowed, Above) else allowed[0]
        config = config.with_value(key, works)
    value = SETTINGS[name].default
    if value is None:
        value = next(v for kind, v in EXAMPLES.items() if kind in str(SETTINGS[name].type))
    config = config.with_value(name, value)
    assert explain_unused(config, name) is None
    without_effect = (
        "recall" if (name, other) == ("data.concentration", "data.task") else NO_EFFECT[other]
    )
    config = config.with_value(other, without_effect)
    reason = explain_unused(config, name)
    assert reason.startswith(f"{name}=") and str(without_effect) in reason
    for swept in (other, other.partition(".")[0], "experiment"):  # other jobs use it
        assert explain_unused(config, name, [swept]) is None


def test_a_setting_without_effect_is_refused_unless_a_preset_has_it(hydra):
    assert configured("optim=adamw", "experiment=speedrun").optim.name == "adamw"
    with pytest.raises(UserError, match=r"optim.momentum=0.9 .* optim=muon"):
        configured("optim=adamw", "optim.momentum=0.9")


# --- from arguments to a configuration ------------------------------------------------------------


@pytest.mark.slow
def test_a_presets_mlp_width_is_reset_by_a_typed_model_width(hydra, capsys):
    assert configured("model.n_embd=64").model.mlp_hidden is None
    assert "model.mlp_hidden=176" in capsys.readouterr().out
    assert configured("model.n_embd=64", "model.mlp_hidden=99").model.mlp_hidden == 99


@pytest.mark.slow
def test_a_resumed_run_keeps_its_configuration_except_for_typed_settings(hydra, tmp_path, capsys):
    kept = Config(model=ModelConfig(vocab_size=77, n_layer=3), tokenizer=TokenizerConfig("char"))
    write_configuration(tmp_path, kept)
    config = configured(f"run_dir={tmp_path}", "resume=true", "max_steps=5000", "optim.lr=0.5")
    assert (config.model, config.max_steps) == (kept.model, 5000)
    note = capsys.readouterr().out
    assert all(text in note for text in ("optim.lr", "0.5", "0.001"))
    for setting, names in (
        ("model.n_layer=8", ["n_layer", "3", "8"]),
        ("seed=2", ["seed", "1337"]),
    ):
        with pytest.raises(UserError) as error:
            configured(f"run_dir={tmp_path}", "resume=true", setting)
        assert all(name in str(error.value) for name in names)
    assert configured(f"run_dir={tmp_path / 'new'}", "resume=auto").model.n_layer == 3
    (tmp_path / "early").mkdir()  # stopped before its first checkpoint
    (tmp_path / "early" / "config.yaml").write_text(config_yaml(kept))
    assert configured(f"run_dir={tmp_path / 'early'}", "resume=auto").model.vocab_size is None


def test_a_tilde_after_an_equals_sign_is_expanded(hydra, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_run(tmp_path / "base")
    config = configured("run_dir=~/run", "init_from=~/base")
    assert (config.run_dir, config.init_from) == (str(tmp_path / "run"), str(tmp_path / "base"))
    with pytest.raises(UserError) as error:
        configured("init_from=~/base", "model.n_layer=2")
    assert "model.n_layer=2" in str(error.value) and "init_from=" in str(error.value)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2-xl").mkdir()
    assert parse_command_line(["init_from=gpt2-xl"]).settings == ["init_from='gpt2-xl'"]


@pytest.mark.slow
def test_a_pretrained_model_starts_at_a_tenth_of_the_presets_rate_unless_one_is_typed(
    hydra, tmp_path, capsys
):
    model = build_model(GPTConfig(3, block_size=8, n_layer=1, n_head=1, n_embd=8))
    save_hf(model, tmp_path / "base", CharTokenizer("abc"))
    write_run(tmp_path / "own")
    own = configured(f"init_from={tmp_path / 'own'}").optim
    assert own.lr == configured().optim.lr == 6e-3 and not capsys.readouterr().out
    start = f"init_from={tmp_path / 'base'}"
    config = configured(start, f"run_dir={tmp_path / 'run'}")
    assert (config.optim.lr, config.optim.muon_lr) == (pytest.approx(6e-4), None)
    assert "optim.lr=0.0006" in capsys.readouterr().out
    assert configured(start, "optim=adamw").optim.lr == pytest.approx(1e-4)
    both = configured(start, "experiment=speedrun").optim  # lr and muon_lr in the preset
    assert (both.lr, both.muon_lr) == (pytest.approx(3e-3), pytest.approx(1e-2))
    typed = configured(start, "experiment=speedrun", "optim.lr=0.01").optim
    assert (typed.lr, typed.muon_lr) == (0.01, None)
    typed = configured(start, "experiment=speedrun", "optim.muon_lr=0.5").optim
    assert (typed.lr, typed.muon_lr) == (pytest.approx(3e-3), 0.5)

    # A resumed run keeps its rate, whether its command is repeated or not
    write_configuration(tmp_path / "run", config)
    for arguments in ([], [start], ["experiment=default"], [start, "experiment=default"]):
        resumed = configured(f"run_dir={tmp_path / 'run'}", "resume=true", *arguments)
        assert resumed.optim.lr == pytest.approx(6e-4)
        assert resumed.init_from == config.init_from
    resumed = configured(f"run_dir={tmp_path / 'run'}", "resume=true", "optim.lr=0.002")
    assert resumed.optim.lr == 0.002
    command = [start, "optim=adamw", f"run_dir={tmp_path / 'run'}"]
    config = configured(*command)
    write_configuration(tmp_path / "run", config)
    assert configured(*command, "resume=true").optim == config.optim


def test_control_characters_are_shown_and_closed_streams_are_ignored(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["sample.py"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", os.environ.get("HYDRA_FULL_ERROR", ""))
    print_stderr("a \x1b[31m\x9b name\n\tof two lines")
    printer(Terminal())("a \x1b[31m")
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("a ␛[31m\n", "a ␛[31m\ufffd name\n\tof two lines\n")
    monkeypatch.setattr(sys, "stderr", None)  # as with 2>&-
    run_main(lambda: print_stderr("a note"), str)
    assert capsys.readouterr().out == ""


def test_a_short_trial_of_a_preset_shortens_its_warm_up():
    preset = "experiment=paper_markov"
    assert configured(preset).optim.warmup_steps == 50
    assert configured(preset, "max_steps=51").optim.warmup_steps == 50
    assert configured(preset, "max_steps=50").optim.warmup_steps is None
    with pytest.raises(UserError, match=r"optim.warmup_steps=50"):
        configured(preset, "max_steps=50", "optim.warmup_steps=50")
