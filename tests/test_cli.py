"""What is typed: checked before anything is made, and carried unchanged."""

import os
import re
import shlex
import sys
from pathlib import Path

import processes
import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.singleton import Singleton
from hypothesis import example, given
from hypothesis import strategies as st
from models import few
from omegaconf import OmegaConf

import cli
from cli.arguments import CONFIGS, check_arguments
from cli.config_file import config_yaml
from common.errors import UserError
from common.settings import iterate_settings
from config import Config, GPTConfig, SampleConfig, TokenizerConfig
from interop import starting_config

ROOT = Path(__file__).parents[1]
# An argument is any text without NUL.
arguments = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
# Signs that mean something to a shell, to Hydra or to OmegaConf, thickly sown.
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
typed = arguments | st.lists(st.sampled_from([*SIGNS, "a"]), max_size=8).map("".join)
KNOWN_HARD = [
    "",
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
    "None",
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


def composed(*argv) -> Config:
    """The configuration of a command line, by way of Hydra's own composition."""
    return OmegaConf.to_object(compose("config", overrides=check_arguments(list(argv))))


def configured(*argv, **more) -> Config:
    """What `to_config` makes of a command line."""
    checked = check_arguments(list(argv))
    return cli.to_config(compose("config", overrides=checked), checked, starting_config, **more)


def refused(*argv) -> str:
    """The sentence with which a command line is refused."""
    with pytest.raises(UserError) as error:
        check_arguments(list(argv))
    assert "\n" not in str(error.value)
    return str(error.value)


# --- mistakes -------------------------------------------------------------------------------------


MISTAKES = [
    ("max_step=3", "max_step is not a setting; did you mean max_steps? python train.py --help"),
    ("n_layer=4", "did you mean model.n_layer?"),
    ("zzz=1", "zzz is not a setting; python train.py --help lists all"),
    ("+model.typo=4", "model.typo is not a setting"),
    ("~max_steps", "did you mean max_steps?"),
    ("max_steps", "max_steps is not of the form key=value"),
    ("data.path=it's", "data.path=it's needs a source that takes a path: add data=text"),
    ("max_steps=abc", "max_steps: Value 'abc' of type 'str' could not be converted to Integer"),
    ("max_steps=0", "max_steps=0 must be at least 1"),
    ("max_steps='3", "max_steps='3"),
    ("seed=???", "missing mandatory value: seed"),
    ("seed=1,2", "To sweep over it, add --multirun"),
    ("model=gpt3", "model=gpt3 is not one of gpt2,"),
    ("model=gpt3", "did you mean gpt2?"),
    ("sweep=heads", "sweep=heads is a sweep: add -m"),
    ("model.n_head=5", "model.n_head=5"),
    ("device=tpu", "device=tpu is not one of"),
    ("data=text", "data=text needs data.path"),
    ("data=text data.path=nowhere", "data.path=nowhere does not exist"),
    ("resume=true", "resume=true needs run_dir=PATH"),
    ("resume=true run_dir=nowhere", "run_dir=nowhere holds no run"),
    ("optim.lr=${nothing}", "nothing"),
    ("hydra/launcher=foo", "hydra/launcher=foo is not one of basic"),
    ("--batch_size=32", "did you mean batch_size?"),
    ("--config-name=nope", "--config-name=nope"),
    ("--config-dir=none", "none is not a folder"),
    ("--cfg nope", "nope"),
    ("-m seed=1,2 run_dir=x", "hydra.sweep.dir=PATH"),
    ("-m seed=1,2 resume=true", "resume=auto"),
    ("init_from=resume", "here it is run_dir=PATH resume=true"),
    ("init_from=gpt2-xl", "here it is init_from=openai-community/gpt2-xl"),
    ("init_from=somewhere max_steps=0", "max_steps=0 must be"),
    ("optim.learning_rate=1", "here it is optim.lr=RATE"),
    ("--max_iters=5", "here it is max_steps=N"),
    ("config/train_shakespeare_char.py", "experiment=nanogpt_gpu"),
]


@pytest.fixture
def answered(monkeypatch, tmp_path, capsys):
    """answered(command line) → (exit status, stdout, stderr) of what is answered before torch."""

    def answer(line: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["train.py", *line.split()])
        try:
            cli.answer_early()
            status = 0
        except SystemExit as e:
            status = e.code or 0
        return (status, *capsys.readouterr())

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("signal.signal", lambda *_: None)  # what is signalled is pytest
    monkeypatch.delitem(Singleton._instances, GlobalHydra, raising=False)  # as in a new process
    return answer


def test_a_mistake_is_one_sentence_with_its_value_and_makes_nothing(answered, tmp_path):
    for line, sentence in MISTAKES:
        status, out, err = answered(line)
        assert (status, out) == (1, ""), line
        assert err.startswith("error: ") and err.count("\n") == 1, (line, err)
        assert sentence in err, (line, err)
    assert list(tmp_path.iterdir()) == []


def test_what_is_right_goes_to_hydra_with_a_word_on_what_it_waits_for(answered):
    assert answered("max_steps=3 data.name=null") == (0, "loading PyTorch …\n", "")
    assert answered("-m seed=1,2") == (0, "loading PyTorch …\n", "")
    assert answered("--cfg job") == (0, "", "")


def test_of_several_processes_the_first_alone_speaks_and_looks_at_folders(answered, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("RANK", "1")
    assert answered("resume=true run_dir=nowhere") == (0, "", "")
    assert answered("max_step=3") == (1, "", "")
    monkeypatch.setenv("RANK", "0")
    assert answered("resume=true run_dir=nowhere")[0] == 1
    assert "start it by python train.py -m" in answered("-m seed=1,2")[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "script, line", [("train.py", "data=text data.path=nowhere"), ("sample.py", "temprature=1")]
)
def test_a_mistake_is_answered_before_torch_is_imported(script, line, new_command, tmp_path):
    folder = tmp_path / "path"
    folder.mkdir()
    (folder / "torch.py").write_text("raise SystemExit('torch was imported')")
    done = new_command(script, *line.split(), env={"PYTHONPATH": str(folder)})
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr


# --- what is taken --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv",
    [
        ["max_steps=3"],
        ["model=small", "optim=muon"],
        ["--cfg", "job"],
        ["hydra/launcher=basic"],
        ["seed=1", "-c", "job"],
        ["seed=1,2", "-m"],
        ["model=glob(*)", "-m"],
        ["optim.lr=choice(1,2)", "-m"],
        ["data.name=a b,c", "-m"],
        ["--config-dir", str(ROOT / "docs")],
        ["data.name=null"],
    ],
)
def test_what_needs_no_quotes_is_passed_on_as_it_is(argv):
    assert check_arguments(argv) == argv


def alternatives(value: str) -> list:
    """What Hydra makes of data.name=VALUE in a sweep."""
    parse = OverridesParser.create().parse_override
    override = parse(check_arguments(["-m", f"data.name={value}"])[0])
    if not override.is_sweep_override():
        return [override.value()]
    return [parse(f"data.name={text}").value() for text in override.sweep_string_iterator()]


@pytest.mark.parametrize(
    "value, meant",
    [
        ("a", ["a"]),
        ("/notes,a b.txt", ["/notes", "a b.txt"]),
        ("'a,b',c", ["a,b", "c"]),
        ("choice(a,b)", ["a", "b"]),
        ("null,a", [None, "a"]),
        ("it's (1)", ["it's (1)"]),
    ],
)
def test_a_sweep_separates_what_hydra_can_read_and_takes_the_rest_as_one_text(value, meant):
    assert alternatives(value) == meant


@pytest.mark.slow
@few
@given(text=typed)
@example(text="\\\n")
@example(text="a'\\\n")
def test_a_text_arrives_as_it_was_typed(text, hydra):
    if text not in ("null", "???"):
        config = composed(f"data.path={text}", f"data.name={text}")
        assert (config.data.path, config.data.name) == (text, text)


@pytest.mark.slow
def test_a_text_that_others_take_for_syntax_arrives_as_it_was_typed(hydra):
    for n in range(0, len(KNOWN_HARD), 3):
        texts = KNOWN_HARD[n : n + 3]
        config = composed(
            *(f"{name}={text}" for name, text in zip(("data.path", "data.name", "run_dir"), texts))
        )
        assert [config.data.path, config.data.name, config.run_dir][: len(texts)] == texts


@pytest.mark.slow
def test_what_wins_over_what(hydra):
    assert composed("experiment=nanogpt_cpu").data.source == "shakespeare"
    assert composed("experiment=nanogpt_cpu", "data=stdlib").data.source == "stdlib"
    assert composed("data=stdlib", "experiment=nanogpt_cpu").data.source == "stdlib"
    nanogpt = composed("experiment=nanogpt_cpu", "optim=muon").optim
    assert (nanogpt.name, nanogpt.beta2) == ("muon", 0.99)
    assert composed("experiment=nanogpt_cpu", "optim.beta2=0.9").optim.beta2 == 0.9
    assert composed("data.name=null").data.name is None


@pytest.mark.soak
def test_the_command_above_a_preset_composes_a_configuration_that_is_right(hydra):
    for group, presets in cli.groups().items():
        for path in presets.values() if group != "sweep" else ():
            lines = path.read_text(encoding="utf-8").splitlines()
            command = next(line for line in lines if line.startswith("# python train.py"))
            composed(*shlex.split(re.sub(r"# python train\.py|[\[\]]", "", command))).check()


# --- the settings of sample.py --------------------------------------------------------------------


@given(text=typed)
@example(text="???")
def test_a_prompt_arrives_as_it_was_typed(text):
    if text != "null":
        assert sample_config([f"prompt={text}"]).prompt == text


def test_settings_of_sample_have_their_types():
    config = sample_config(["top_k=5", "temperature=0", "prompt=5"])
    assert config == SampleConfig(top_k=5, temperature=0.0, prompt="5")


@pytest.mark.parametrize(
    "argv, sentence",
    [
        (
            ["temprature=1"],
            "temprature is not a setting; did you mean temperature? python sample.py",
        ),
        (
            ["prompt=def", "main"],
            "main is not of the form key=value, in quotes where the value has",
        ),
        (["--prompt"], "--prompt is not of the form key=value"),
        (["prompt=a", "score=b"], "both given"),
        (["json=true"], "json is not a setting"),
        (["--start=To be"], "here it is prompt=TEXT"),
        (["top_k=1.5"], "top_k: Value '1.5' of type 'str' could not be converted to Integer"),
    ],
)
def test_a_mistake_in_the_settings_of_sample_is_one_sentence(argv, sentence):
    with pytest.raises(Exception) as error:
        sample_config(argv)
    assert sentence in cli.sentence(error.value)


# --- the help, the configuration, what is printed -------------------------------------------------


def test_the_help_of_train_lists_every_setting_and_every_preset_and_fits_the_window(
    answered, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "80")
    status, out, err = answered("max_steps=3 --help")
    assert (status, err) == (0, "") and all(len(line) <= 80 for line in out.splitlines())
    text = " ".join(out.split())
    for name, f, _ in iterate_settings(Config()):
        assert re.search(rf" {re.escape(name)}=\S+ {re.escape(f.metadata['help'])}", text), name
    for group, presets in cli.groups().items():
        assert all(re.search(rf" {group}={name}\*? \S", text) for name in presets)
    # As in the plain command, experiment=default, and not before any preset.
    assert " max_steps=2400 " in text and " optim.name=muon " in text
    assert "(true | false | auto)" in text


@pytest.mark.slow
@pytest.mark.parametrize("argv", [["train.py", "--help"], ["sample.py", "-h"]])
def test_help_is_printed_in_every_encoding(argv, tmp_path):
    done = processes.run(tmp_path, *argv, env={"PYTHONIOENCODING": "ascii"}, text=False)
    assert (done.returncode, done.stderr) == (0, b"") and len(done.stdout.decode("ascii")) > 100


def test_every_setting_of_nanogpt_in_the_docs_is_taken_or_answered():
    table = (
        (ROOT / "docs" / "settings.md")
        .read_text(encoding="utf-8")
        .partition("| nanoGPT | here |")[2]
    )
    rows = [line.split("|") for line in table.partition("\n\n")[0].splitlines()[2:]]
    cells = [name for row in rows for name in re.findall(r"`([\w=]+)`", row[1] + row[3])]
    assert len(cells) > 15
    taken = {name for name, _, _ in iterate_settings(Config())}
    for name in cells:
        if name not in taken:
            assert re.search(
                r"here it is|did you mean", refused(name if "=" in name else f"{name}=1")
            )


# --- presets of one's own -------------------------------------------------------------------------

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
def test_presets_of_ones_own_are_for_runs_that_go_on_and_for_sweeps(own, tmp_path, command):
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


@pytest.mark.parametrize(
    "name, text, sentence",
    [
        ("experiment/bad", GLOBAL + "max_steps: [3\n", "bad.yaml, line 3: expected"),
        ("experiment/bad", GLOBAL + "max_step: 3\n", "In 'experiment/bad': ConfigKeyError"),
        ("model/bad", "n_layer: many\n", "In 'model/bad': ValidationError"),
        ("experiment/bad", GLOBAL + "defaults:\n  - override /model: smal\n", "did you mean small"),
    ],
)
def test_a_mistake_in_a_preset_of_ones_own_is_one_sentence(name, text, sentence, own, answered):
    status, out, err = answered(f"{own({name: text})} {name.replace('/', '=')}")
    assert (status, out) == (1, "") and sentence in err and err.count("\n") == 1, err


# --- from arguments to a configuration ------------------------------------------------------------


@pytest.mark.slow
def test_a_presets_sizes_follow_those_that_are_typed(hydra, capsys):
    assert configured("model.n_embd=64").model.mlp_hidden is None
    assert "mlp_hidden=176 follows your model.n_embd" in capsys.readouterr().out
    assert configured("model.n_embd=64", "model.mlp_hidden=99").model.mlp_hidden == 99


@pytest.mark.slow
def test_a_run_goes_on_with_its_own_configuration_and_what_is_typed(hydra, tmp_path, capsys):
    kept = Config(model=GPTConfig(vocab_size=77, n_layer=3), tokenizer=TokenizerConfig("char"))
    (tmp_path / "config.yaml").write_text(config_yaml(kept))
    config = configured(f"run_dir={tmp_path}", "resume=true", "max_steps=5000", "optim.lr=0.5")
    assert (config.model, config.max_steps) == (kept.model, 5000)
    assert "note: optim.lr is 0.5 from here on; it was 0.001" in capsys.readouterr().out
    for typed, wrong in (
        ("model.n_layer=8", "n_layer: 3 in the run, 8 asked for"),
        ("seed=2", "seed: 1337 in the run"),
    ):
        with pytest.raises(UserError, match=wrong):
            configured(f"run_dir={tmp_path}", "resume=true", typed)
    assert configured(f"run_dir={tmp_path / 'new'}", "resume=auto").model.n_layer == 4


def test_home_is_found_behind_an_equals_sign(hydra, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.yaml").write_text(config_yaml(Config()))
    config = configured("run_dir=~/run", "init_from=~/base")
    assert (config.run_dir, config.init_from) == (str(tmp_path / "run"), str(tmp_path / "base"))
    with pytest.raises(UserError, match=r"model.n_layer=2 does not go with init_from="):
        configured("init_from=~/base", "model.n_layer=2")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2-xl").mkdir()
    assert check_arguments(["init_from=gpt2-xl"]) == ["init_from='gpt2-xl'"]


def test_what_is_printed_shows_control_characters_and_goes_nowhere_else(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["sample.py"])
    for name in ("PYTHONIOENCODING", "HYDRA_FULL_ERROR"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    cli.tell("a \x1b[31m\x9b name\n\tof two lines")
    cli.printer(cli.Terminal())("a \x1b[31m")
    said = capsys.readouterr()
    assert (said.out, said.err) == ("a ␛[31m\n", "a ␛[31m\ufffd name\n\tof two lines\n")
    monkeypatch.setattr(sys, "stderr", None)  # as with 2>&-
    cli.start(lambda: cli.tell("a note"), str)
    assert capsys.readouterr().out == ""
