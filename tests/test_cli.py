"""The command line: mistakes are refused early, and values arrive as typed."""

import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir, version
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hypothesis import example, given
from hypothesis import strategies as st
from models import few
from omegaconf.errors import OmegaConfBaseException
from run_folders import write_configuration, write_run

import cli
from cli.command_line import CONFIGS, NANOGPT, PRESETS, SETTINGS, split_options
from cli.continuation import apply_starting_model
from cli.job import complete_settings, translate
from cli.sample_config import SampleConfig
from common.errors import UserError
from common.settings import iterate_settings
from common.terminal import explain_error
from config import Config, GPTConfig, ModelConfig, TokenizerConfig
from data.tokenizer import CharTokenizer
from interop import read_starting_model, save_hf
from run.config_file import absolute_paths
from variants import build_model

ROOT = Path(__file__).parents[1]
# An argument is any text without NUL.
arguments = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
# Signs with a meaning for a shell, for Hydra or for OmegaConf.
TEXTS = "${ } ${x} ${oc.env:HOME} \\' \\\\ ??? null true 1e3 日本 😀 choice( --"
SIGNS = [*"'\"\\,=()[]{}<>~+$:;|&*?#@!%^ \t\né", *TEXTS.split()]
hostile_texts = arguments | st.lists(st.sampled_from([*SIGNS, "a"]), max_size=8).map("".join)
UNSET = ("", "null", "???")  # texts that a path cannot be; the last one is OmegaConf's


def sample_config(argv: list[str]) -> SampleConfig:
    return cli.read_settings(argv, SampleConfig, "python sample.py")


def job_of(*argv: str) -> cli.Job:
    return cli.compose_job(complete_settings(*split_options(argv)))


def composed(*argv: str) -> Config:
    return job_of(*argv).config


def configured(*argv: str) -> Config:
    return cli.configure(job_of(*argv), read_starting_model).config


# --- mistakes -------------------------------------------------------------------------------------

# A command line → what its error names: the setting, its value, what to type instead.
MISTAKES = [
    ("max_step=3", ["max_step=3", "max_steps?", "python train.py --help"]),
    ("n_layer=4", ["n_layer=4", "model.n_layer?"]),
    ("max_steps", ["max_steps=VALUE"]),
    ("max_steps=abc", ["max_steps: ", "'abc'"]),
    ("optim.lr=1e-3,3e-3", ["optim.lr=1e-3,3e-3", "--multirun"]),
    ("model.n_layer=2,", ["model.n_layer=2,"]),
    ("max_steps=0", ["max_steps=0", "1"]),
    ("model=gpt3", ["model=gpt3", "gpt2?"]),
    ("model.n_head=5", ["model.n_head=5", "model.n_embd=128"]),
    ("data=text", ["data.path"]),
    ("data=synthetic data.task=modular model.block_size=8", ["model.block_size=8", "=4"]),
    ("data=synthetic tokenizer=gpt2", ["tokenizer", "data=synthetic"]),
    ("tokenizer=gtp2", ["gtp2", "gpt2?", "o200k_base", "tokenizer.json"]),
    ("tokenizer=no/tokenizer.json", ["tokenizer=no/tokenizer.json"]),
    ("data.path=nowhere", ["data.path=nowhere does not exist"]),
    (f"data=stdlib data.path={ROOT}", ["data.path=", "data=stdlib", "data=text"]),
    (f"data=hf data.name=x data.path={ROOT}", ["data.path=", "data=hf"]),
    ("resume=true", ["resume=true", "run_dir=PATH"]),
    ("resume=true run_dir=nowhere", ["nowhere does not exist"]),
    ("hydra.job.nam=x", ["hydra.job.nam"]),
    ("hydra.launcher.n_jobs=2", ["hydra.launcher.n_jobs", "BasicLauncher"]),
    ("~optim.lr", ["~optim.lr", "optim.lr=VALUE"]),
    ("+optim.rate=1", ["+optim.rate=1", "not a setting"]),
    ("-cn mine", ["mine"]),
    ("--cfg everything", ["--cfg", "job"]),
    ("--batch_size=32", ["--batch_size=32", "write batch_size=VALUE"]),
    ("--help optm", ["--help optm", "optim?"]),
    ("--help=optim", ["--help=optim"]),
    (f"--config-dir={CONFIGS / 'model'} seed=1", ["--config-dir", "experiment"]),
    ("experiment=mine", ["experiment=mine", "--config-dir"]),
    ("-m seed=1,2 hydra.run.dir=x", ["run_dir=x", "hydra.sweep.dir=PATH"]),
    ("sweep=heads run_dir=x", ["run_dir=x", "hydra.sweep.dir=PATH"]),
    ("-m seed=1,2 run_dir=x", ["run_dir=x", "hydra.sweep.dir=PATH"]),
    ("-m seed=1,2 resume=true", ["resume=true", "resume=auto"]),
    (f"seed=1 {ROOT}", [str(ROOT), "data.path=PATH", "run_dir=PATH"]),
    (f"{ROOT} {ROOT}/docs", [f"{ROOT}/docs", "data.path=PATH"]),
    (str(CONFIGS / "model" / "small.yaml"), ["small.yaml", "data.path=PATH"]),
    ("nowhere.txt", ["nowhere.txt", "setting", "path"]),
    ("speedrun", ["experiment=speedrun"]),
    ("optim=adamw optim.momentum=0.9", ["optim.momentum=0.9", "optim=muon"]),
    ("model.position=learned model.rope_theta=8", ["model.rope_theta=8", "learned"]),
    ("data=synthetic data.task=markov data.train_share=0.5", ["data.train_share=0.5", "markov"]),
    *(
        (f"prepare_only=true {typed}", [typed, "prepare_only"])
        for typed in ("max_steps=3", "optim=adamw")
    ),
    ("data.path=small.txt data.path=nowhere data=text", ["data.path=nowhere does not exist"]),
]


@pytest.fixture
def launch(monkeypatch, tmp_path, run_hydra, capsys):
    """launch(command line) → (exit status, stdout, stderr) of train.py before it imports torch."""

    def prepare(line: str) -> tuple[int, str, str]:
        status = run_hydra(*re.findall("[^ ]+", line), task=lambda composed: None)
        return (status, *capsys.readouterr())

    monkeypatch.chdir(tmp_path)
    return prepare


def assert_one_sentence(error: str, names: Sequence[str]) -> None:
    assert error.startswith("error: ") and error.count("\n") == 1, error
    for name in names:
        assert name in error, (name, error)


@pytest.mark.slow
def test_a_mistake_gives_one_sentence_that_names_it_and_creates_no_file(launch, tmp_path):
    for line, names in MISTAKES:
        status, _, err = launch(line)
        assert status == 1, line
        assert_one_sentence(err, names)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", NANOGPT)
def test_a_name_of_another_program_is_answered_with_the_one_here(name):
    typed = name if "=" in name or name.endswith(".py") else f"--{name}=1"
    for read in (
        lambda: translate([typed]),
        lambda: sample_config([typed]),
    ):
        with pytest.raises(UserError, match=re.escape(NANOGPT[name])):
            read()
    known = {*SETTINGS, *PRESETS, *SampleConfig.__dataclass_fields__}
    assert known.issuperset(re.findall(r"([\w.]+)=", NANOGPT[name]))


def test_the_configuration_is_printed_without_torch(launch):
    status, out, err = launch("--cfg job")
    assert (status, err) == (0, "")
    assert yaml.safe_load(out)["max_steps"] == 2100  # of experiment=default


def test_the_options_of_hydra_work(command, tmp_path):
    primary = "defaults:\n  - config\n  - _self_\nseed: 7\n"
    argument = write_presets(tmp_path / "own", OWN | {"primary": primary})
    for line, shown in (
        ("--cfg hydra --resolve", "dir: runs/sweep"),
        ("-c job --package optim", "# @package optim"),
        ("--info defaults", "experiment/default"),
        ("-i", "hydra.conf"),
        (f"{argument} -cn primary --cfg job", "seed: 7"),
        ("--hydra-help", "--config-dir"),
    ):
        done = command("train.py", *line.split())
        assert done.returncode == 0 and shown in done.stdout, (line, done)
    assert [*tmp_path.iterdir()] == [tmp_path / "own"]


def test_each_run_has_a_folder_with_what_was_typed(launch):
    for line in ("seed=5", "seed=6", "run_dir=named", "hydra.run.dir=typed", "dry_run=true"):
        assert launch(line)[0] == 0  # within a second
    runs = [*sorted(Path("runs").iterdir()), Path("named"), Path("typed")]
    typed = [yaml.safe_load((run / ".hydra" / "overrides.yaml").read_text()) for run in runs]
    assert typed == [["seed=5"], ["seed=6"], ["run_dir='named'"], ["run_dir='typed'"]]
    assert {path.name for path in Path().iterdir()} == {"runs", "named", "typed"}


def test_another_hydra_application_goes_on_after_a_run_is_composed(tmp_path):
    (tmp_path / "other.yaml").write_text("answer: 42\n")
    with initialize_config_dir(str(tmp_path), job_name="other", version_base="1.2"):
        running = GlobalHydra.instance().hydra
        assert composed("seed=3").seed == 3
        assert GlobalHydra.instance().hydra is running and str(version.getbase()) == "1.2"
        config = compose("other", return_hydra_config=True)
        assert (config.answer, config.hydra.job.name) == (42, "other")
    assert composed("seed=4").seed == 4


def test_only_rank_0_prints_errors_and_reads_folders(launch, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert launch("resume=true run_dir=nowhere") == (0, "", "")
    assert launch("max_step=3") == (1, "", "")
    monkeypatch.setenv("RANK", "0")
    assert launch("resume=true run_dir=nowhere")[0] == 1


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


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.slow
@few
@given(text=hostile_texts)
@example(text="\\\n")
@example(text="a'\\\n")
@example(text=r"\${seed}")
@example(text="choice(1,2)")
@example(text="it's {a: 1} [1,2]")
def test_any_text_arrives_as_typed(text):
    if text not in UNSET:
        config = composed(f"data.path={text}", f"data.name={text}")
        assert (config.data.path, config.data.name) == (text, text)


@pytest.mark.slow
@few
@given(name=st.sampled_from(sorted(SETTINGS)), text=hostile_texts)
def test_any_value_of_any_setting_is_composed_or_refused_in_one_sentence(name, text):
    try:
        composed(f"{name}={text}")
    except (UserError, HydraException, OmegaConfBaseException) as e:
        sentence = explain_error(e)
        assert sentence and "\n" not in sentence


@pytest.mark.slow
def test_typed_settings_win_over_experiments_and_experiments_over_presets():
    assert composed("experiment=nanogpt_cpu").data.source == "shakespeare"
    assert composed("experiment=nanogpt_cpu", "data=stdlib").data.source == "stdlib"
    assert composed("data=stdlib", "experiment=nanogpt_cpu").data.source == "stdlib"
    nanogpt = composed("experiment=nanogpt_cpu", "optim=muon").optim
    assert (nanogpt.name, nanogpt.beta2) == ("muon", 0.99)


# --- the settings of sample.py --------------------------------------------------------------------


@given(text=hostile_texts)
@example(text="???")
@example(text="5")
def test_a_prompt_arrives_as_typed_and_numbers_as_numbers(text):
    if text != "null":
        config = sample_config([f"prompt={text}", "top_k=5", "temperature=2"])
        assert config == SampleConfig(prompt=text, top_k=5, temperature=2.0)


@pytest.mark.parametrize(
    "argv, names",
    [
        (["temprature=1"], ["temprature", "temperature?"]),
        (["--prompt"], ["--prompt", "prompt=VALUE"]),
        (["top_k=1.5"], ["top_k=1.5"]),
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


def test_the_help_of_train_is_one_screen_and_explains_a_section_or_all(launch, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    pages = {}
    for topic in ("", "all", "optim"):
        status, pages[topic], err = launch(f"max_steps=3 --help {topic}")
        assert (status, err) == (0, "")
        assert all(len(line) <= 80 for line in pages[topic].splitlines())
    assert pages[""].count("\n") <= 42
    assert " max_steps=2100 " in pages[""]  # of experiment=default
    text = " ".join(pages["all"].split())
    assert all(f" {name}=" in f" {text}" for name, _, _ in iterate_settings(Config()))
    assert "[" not in text  # conditions are words
    assert pages["all"].count(" experiment=default ") == 1  # a group and a setting
    for group, presets in PRESETS.items():
        assert all(f" {group}={name} " in f" {text}" for name in presets)
        assert all(name in pages[""] for name in presets)
    assert " optim=muon " in pages["optim"] and " eval." not in pages["optim"]


# --- the user's own presets -----------------------------------------------------------------------

OWN = {
    "model/tiny": "n_layer: 1\nn_head: 2\nn_embd: 16\nblock_size: 16\n",
    "data/mine": f"source: text\npath: {ROOT / 'LICENSE'}\n",
    "tokenizer/letters": "name: char\n",
    "experiment/mine": "# @package _global_\ndefaults:\n  - default\n  - override /model: tiny\n"
    "  - override /data: mine\n  - override /tokenizer: letters\n"
    "max_steps: 2\nbatch_size: 2\nattention:\n  every: 0\n",
}


def write_presets(folder: Path, presets: dict[str, str]) -> str:
    """Write presets to a folder, and return the argument that adds it."""
    for name, text in presets.items():
        path = folder / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return f"--config-dir={folder}"


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ("o200k_base", "tokenizer.name"),
        ("a b/tokenizer.json", "tokenizer.name"),
        ("char, p50k_base", "tokenizer.name"),
        ("char", "tokenizer"),
        ("letters", "tokenizer"),
        ("letters,gpt2", "tokenizer"),
        ("choice(bpe,letters)", "tokenizer"),
    ],
)
def test_what_tokenizer_names_is_a_preset_or_a_name(value, key, tmp_path):
    folder = write_presets(tmp_path / "own", OWN)
    is_sweep = re.search("[,(]", value) is not None
    (typed, *_) = translate([f"tokenizer={value}", folder, *["-m"] * is_sweep])
    assert typed.partition("=")[0] == key
    if key == "tokenizer.name" and not is_sweep:
        assert composed(f"tokenizer={value}").tokenizer.name == value


@pytest.mark.slow
def test_a_run_of_own_presets_resumes(tmp_path, command):
    folder = write_presets(tmp_path / "own", OWN)
    for steps, more in ((2, []), (3, ["resume=true", "max_steps=3"])):
        done = command(
            "train.py", folder, "experiment=mine", "tokenizer=letters", "run_dir=run", *more
        )
        assert (done.returncode, done.stderr) == (0, "")
        kept = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
        assert (kept["model"]["n_embd"], kept["max_steps"]) == (16, steps)
    calls = [tmp_path / "run" / name / "overrides.yaml" for name in (".hydra", ".hydra_2")]
    assert ["resume=true" in path.read_text() for path in calls] == [False, True]


GLOBAL = "# @package _global_\n"
# The file of a preset of the user's own and its content → what the error names besides the file.
BAD_PRESETS = [
    ("experiment/bad.yaml", GLOBAL + "max_steps: [3\n", ["line 3"]),
    ("experiment/bad.yaml", GLOBAL + "seed: 1\nseed: 2\n", ["seed"]),
    ("experiment/bad.yaml", GLOBAL + "max_step: 3\n", ["bad.yaml: max_step=3", "max_steps?"]),
    ("experiment/bad.yaml", GLOBAL + "modle:\n  n_layer: 3\n", ["model.n_layer?"]),
    ("experiment/bad.yaml", GLOBAL + "learning_rate: 1\n", ["optim.lr"]),
    ("experiment/bad.yaml", GLOBAL + "optim.lr: 1\n", ["optim:", "lr: VALUE"]),
    ("experiment/bad.yaml", GLOBAL + "max_steps: abc\n", ["bad.yaml: max_steps=abc"]),
    ("experiment/bad.yaml", GLOBAL + "max_steps: 0\n", ["bad.yaml: max_steps=0", "1"]),
    ("experiment/bad.yaml", GLOBAL + "model: small\n", ["model: small", "defaults"]),
    ("experiment/bad.yaml", GLOBAL + "optim:\n  - lr: 3\n", ["optim"]),
    *(
        ("experiment/bad.yaml", f"{GLOBAL}defaults:\n  {entry}\n", names)
        for entry, names in (
            ("- override /modle: small", ["did you mean model?"]),
            ("- override model: small", ["override model", "- override /GROUP"]),
            ("- override /model: smal", ["bad.yaml: model=smal", "small?"]),
            ("- speedrn", ["bad.yaml: experiment=speedrn", "speedrun?"]),
            ("- _self_", ["bad.yaml", "[default, _self_]"]),
            ("override /model: small", ["defaults is not a list"]),
        )
    ),
    ("experiment/bad.yaml", GLOBAL + "seed: !!python/name:os.system\n", ["line 2"]),
    ("experiment/bad.yaml", GLOBAL + "defaults:\n  - bad\n", ["includes itself"]),
    ("experiment/bad.yaml", GLOBAL + "max_steps: 3\n", ["bad.yaml", "[default, _self_]"]),
    ("sweep/bad.yaml", GLOBAL + "seed: 1\n", ["sweep=bad", "-m"]),
    ("experiment/bad.yaml", GLOBAL.encode() + "# café\n".encode("latin-1"), ["UTF-8"]),
    ("experiment/bad.yaml", "seed: 1\n", [GLOBAL.strip()]),
    ("experiment/bad.yml", GLOBAL + "seed: 1\n", ["bad.yaml"]),
    ("model/bad.yaml", "n_layers: 2\n", ["n_layers", "model.n_layer?"]),
    ("model/bad.yaml", "norm: layer\n", ["model.norm=layer", "layernorm?"]),
    # A text that YAML reads as another value
    ("experiment/bad.yaml", GLOBAL + "run_dir: 20261128_0310\n", ["run_dir", "quotes"]),
    ("data/bad.yaml", "source: hf\nname: no\n", ["data.name", "quotes"]),
]


@pytest.mark.parametrize(("file", "content", "names"), BAD_PRESETS)
def test_a_mistake_in_an_own_preset_gives_one_sentence_that_names_it(
    file, content, names, tmp_path, launch
):
    path = tmp_path / "own" / file
    path.parent.mkdir(parents=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    group = file.partition("/")[0]
    status, out, err = launch(f"--config-dir=own {group}=bad")
    assert (status, out) == (1, "")
    assert_one_sentence(err, ["bad", *names])


def test_an_own_preset_with_the_name_of_another_is_refused(tmp_path, launch):
    argument = write_presets(tmp_path / "own", {"optim/muon": "name: muon\n"})
    status, _, err = launch(f"{argument} max_steps=3")
    assert status == 1
    assert_one_sentence(err, ["own/optim/muon.yaml"])


CHANGES = "max_steps: 7\ndata:\n  path: my.txt\n"


def test_an_own_experiment_changes_the_one_it_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my.txt").touch()
    base = "defaults:\n  - default\n"
    defaults = f"{base}  - override /optim: adamw\n"
    own = {
        "experiment/plain": GLOBAL + base + CHANGES,
        "experiment/mine": GLOBAL + defaults + CHANGES,
        "experiment/short": f"{GLOBAL}defaults:\n  - mine\nmax_steps: 3\n",
        "experiment/fast": f"{GLOBAL}defaults:\n  - speedrun\n{CHANGES}",
    }
    argument = write_presets(tmp_path, own)

    def config(*typed: str) -> Config:
        return replace(cli.read_job([argument, *typed], pytest.fail).config, experiment=None)

    typed = ("max_steps=7", "data.path=my.txt")
    assert config("experiment=plain") == config(*typed)
    assert config("experiment=mine") == config("optim=adamw", *typed)
    assert config("experiment=mine", "optim=muon") == config(*typed)
    assert config("experiment=short") == config("optim=adamw", *typed, "max_steps=3")
    assert config("experiment=fast") == config("experiment=speedrun", *typed)
    assert config("experiment=default") == config()


def test_the_help_lists_own_presets(tmp_path, launch):
    mine = "# @package _global_\n# My poems.\nmax_steps: 3\n"
    argument = write_presets(tmp_path / "own", {"experiment/mine": mine})
    assert " speedrun_ngrams mine model= " in " ".join(launch(f"{argument} --help")[1].split())
    assert " experiment=mine " in launch(f"--help experiment {argument}")[1]


# --- from arguments to a configuration ------------------------------------------------------------

SHAKESPEARE = "data=shakespeare data.path=a"


@pytest.mark.parametrize(
    ("typed", "same"),
    [
        ("data.path=a", "data=text data.path=a"),
        ("experiment=induction data.path=a", "experiment=induction data=text data.path=a"),
        ("experiment=speedrun data.path=a", f"experiment=speedrun {SHAKESPEARE}"),
        (SHAKESPEARE, f"experiment=default {SHAKESPEARE}"),
        ("data.path=null", ""),
    ],
)
def test_a_path_alone_is_of_a_text_unless_the_experiment_reads_one(typed, same):
    def config(line: str) -> Config:
        return composed(*line.split())

    assert config(typed) == config(same)


def test_a_path_in_the_first_place_is_that_of_a_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("notes.txt", "a=b, c.txt"):
        Path(name).touch()
        typed = translate([name, "-m", "seed=1,2", "experiment=speedrun"])
        assert typed[:2] == ["data=text", f"data.path='{name}'"]
        assert typed[2:] == ["seed=1,2", "experiment=speedrun", "--multirun"]
    write_run(tmp_path / "mine")
    for name in ("data", "seed", "wandb", "speedrun", "text"):
        Path(name).mkdir()
    names = ("data", "seed", "wandb", "speedrun", "text", "mine")
    for name in names:  # settings, presets and a run
        with pytest.raises(UserError, match=name):
            translate([name])
        assert name == "mine" or translate([f"./{name}"])[0] == "data=text"


def test_a_run_is_evaluated_on_the_text_at_a_path(tmp_path):
    write_run(tmp_path)
    typed = (f"run_dir={tmp_path}", "eval_only=true", f"data.path={ROOT / 'LICENSE'}")
    assert cli.read_job(typed, read_starting_model).config.data.source == "text"


def test_a_setting_of_a_preset_may_have_no_effect():
    assert configured("optim=adamw", "experiment=speedrun").optim.name == "adamw"


@pytest.mark.slow
def test_the_shares_of_a_preset_follow_what_is_typed():
    short = configured("experiment=speedrun", "max_steps=1", "optim.lr=0.3", "model.n_embd=48")
    assert short.model.hidden_dim == 96
    assert round(short.optim.warmup_share * 1) == 0
    assert short.optim.muon_lr_multiple * short.optim.lr == pytest.approx(1)
    exact = configured("model.n_embd=64", "model.mlp_hidden=99").model
    assert exact.hidden_dim == 99
    with pytest.raises(UserError, match=r"model.mlp_ratio=2.*model.mlp_hidden=99"):
        configured("model.mlp_ratio=2", "model.mlp_hidden=99")


def test_changes_are_noted_of_a_run_that_goes_on_and_not_of_a_finished_one(tmp_path, capsys):
    write_run(tmp_path)  # whose newest checkpoint is that of step 6
    for max_steps, goes_on in ((6, False), (7, True)):
        configured(f"run_dir={tmp_path}", "resume=true", f"max_steps={max_steps}", "log.every=3")
        assert ("log.every changes" in capsys.readouterr().out) == goes_on


@pytest.mark.slow
def test_a_resumed_run_keeps_its_configuration_except_for_typed_settings(tmp_path, capsys):
    shape = ModelConfig(vocab_size=77, n_layer=3)
    kept = Config(experiment="default", model=shape, tokenizer=TokenizerConfig("char"))
    write_configuration(tmp_path, kept)
    config = configured(f"run_dir={tmp_path}", "resume=true", "max_steps=5000", "optim.lr=0.5")
    assert (config.model, config.max_steps) == (kept.model, 5000)
    note = capsys.readouterr().out
    assert all(text in note for text in ("optim.lr", "0.5", "0.001"))
    for setting, names in (
        ("model.n_layer=8", ["n_layer", "3", "8"]),
        ("seed=2", ["seed", "1337"]),
        ("optim=muon", ["optim.name", "adamw", "muon"]),
        ("data=synthetic", ["data.val_max_tokens", "200000", "16384"]),
        ("experiment=speedrun", ["experiment", "speedrun"]),
    ):
        with pytest.raises(UserError) as error:
            configured(f"run_dir={tmp_path}", "resume=true", setting)
        assert all(name in str(error.value) for name in names)
    assert configured(f"run_dir={tmp_path / 'new'}", "resume=auto").model.n_layer == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "typed",
    [
        ["experiment=speedrun", "optim=muon", "optim.lr=0.02", "data.path={text}"],
        ["optim=adamw", "model=small", "data=text", "data.path={text}", "compile=auto"],
        ["data=synthetic", "data.task=modular", "tokenizer=char", "model.vocab_multiple=null"],
        ["init_from={base}", "data.path={text}", "model.block_size=16"],
    ],
)
def test_the_command_that_started_a_run_continues_it_unchanged(typed, tmp_path, capsys):
    write_run(tmp_path / "base")
    paths = {"text": ROOT / "LICENSE", "base": tmp_path / "base"}
    command = [argument.format(**paths) for argument in typed] + [f"run_dir={tmp_path / 'run'}"]
    run = configured(*command)
    model = replace(run.model, vocab_size=50, vocab_multiple=64)
    run = replace(run, model=model, compile=True, threads=2, precision="fp32")
    write_configuration(tmp_path / "run", run)
    capsys.readouterr()
    continued = configured(*command, "resume=auto")
    assert replace(continued, resume=False) == absolute_paths(run)
    assert not capsys.readouterr().out


@pytest.mark.slow
def test_a_typed_preset_counts_as_its_settings_in_the_runs_experiment(tmp_path):
    run = configured("experiment=induction", "optim.lr=0.5", "optim.momentum=0.5")
    write_configuration(tmp_path, run)
    optim = configured(f"run_dir={tmp_path}", "resume=true", "optim=muon").optim
    assert optim == replace(run.optim, lr=6e-3)
    assert optim.decay_share == 0.5  # not that of experiment=default


def test_a_tilde_after_an_equals_sign_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_run(tmp_path / "base")
    config = configured("run_dir=~/run", "init_from=~/base")
    assert (config.run_dir, config.init_from) == (str(tmp_path / "run"), str(tmp_path / "base"))
    with pytest.raises(UserError) as error:
        configured("init_from=~/base", "model.n_layer=2")
    assert "model.n_layer" in str(error.value) and "init_from=" in str(error.value)


@pytest.mark.parametrize("typed", [None, 16, 64])
@pytest.mark.parametrize("eval_only", [False, True])
@pytest.mark.parametrize("is_pretrained", [False, True])
@pytest.mark.parametrize("length", [8, 64])
def test_a_model_to_train_has_its_own_context_or_a_shorter_one(
    length, is_pretrained, eval_only, typed, monkeypatch
):
    monkeypatch.setattr(cli.continuation, "is_pretrained", lambda _: is_pretrained)
    start = Config(init_from="base", model=GPTConfig(3, block_size=length))
    requested = Config(eval_only=eval_only, model=GPTConfig(3, block_size=typed or 32))
    keys = [] if typed is None else ["model.block_size"]
    with pytest.raises(UserError, match="8") if (typed or 0) > length else nullcontext():
        config = apply_starting_model(requested, start, keys, lambda _: None)
        lowered = 32 if is_pretrained and not eval_only else length  # without a typed one
        assert config.model.block_size == min(typed or lowered, length)


@pytest.mark.slow
def test_a_pretrained_model_implies_the_experiment_for_fine_tuning(tmp_path, capsys):
    for name, length in (("base", 300), ("short", 32)):
        model = build_model(GPTConfig(3, block_size=length, n_layer=1, n_head=1, n_embd=8))
        save_hf(model, tmp_path / name, CharTokenizer("abc"))
    write_run(tmp_path / "own")
    own = configured(f"init_from={tmp_path / 'own'}")
    assert (own.experiment, own.optim.lr, own.model.block_size) == ("default", 6e-3, 32)
    assert not capsys.readouterr().out
    start = f"init_from={tmp_path / 'base'}"
    config = configured(start, f"run_dir={tmp_path / 'run'}")
    assert (config.experiment, config.optim.name, config.optim.lr) == ("finetune", "adamw", 1e-4)
    assert (config.model.block_size, config.attention.every) == (256, 0)
    assert "experiment=finetune" in capsys.readouterr().out
    assert configured(f"init_from={tmp_path / 'short'}").model.block_size == 32
    typed = configured(start, "model.block_size=290", "attention.every=5", "optim.lr=0.01")
    assert (typed.model.block_size, typed.attention.every, typed.optim.lr) == (290, 5, 0.01)
    assert configured(start, "eval_only=true").model.block_size == 300
    capsys.readouterr()
    assert configured(start, "experiment=speedrun", "optim.lr=0.01").optim.lr == 0.01
    assert not capsys.readouterr().out
    assert configured(start, "experiment=speedrun").optim.lr == 0.03
    assert "optim.lr=0.03 of experiment=speedrun" in capsys.readouterr().out

    # A run that fine-tunes a model is pretrained too
    write_configuration(tmp_path / "run", config)
    assert composed(f"init_from={tmp_path / 'run'}").experiment == "finetune"
