"""What is typed: checked before anything is made, and carried unchanged."""

import io
import re
import shlex
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import processes
import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.singleton import Singleton
from hypothesis import example, given
from hypothesis import strategies as st
from models import few
from omegaconf import OmegaConf

import cli
from config import Config, GPTConfig, SampleConfig, TokenizerConfig, UserError, config_yaml, knobs
from interop import starting_config

ROOT = Path(__file__).parents[1]
# An argument is any text without NUL.
arguments = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
# Signs that mean something to a shell, to Hydra or to OmegaConf, thickly sown.
SIGNS = [*"'\"\\,=()[]{}<>~+$:;|&*?#@!%^ \t\n", "${", "}", "${x}", "${oc.env:HOME}", "\\'", "\\\\",
         "???", "null", "true", "1e3",
         "é", "日本", "😀", "choice(", "--"]
awkward = st.lists(st.sampled_from([*SIGNS, "a"]), max_size=8).map("".join)
typed = arguments | awkward
KNOWN_HARD = ["", " ", "it's", "Hello, world", "~/notes (1).txt", "café", "a=b", "[1,2]", "{a: 1}",
              "${seed}", r"\${seed}", "\\", "\\'", "a\\",
              "'quoted'", '"quoted"', "None", "Null", "NULL", "true", "1", "1e3", "-", "--help",
              "a  b", "#",
              "glob(*)", "choice(1,2)", "x,", "+x", "~x"]


@pytest.fixture(scope="module")
def hydra():
    with initialize_config_dir(str(cli.CONFIGS.resolve()), version_base="1.3"):
        yield


def composed(*argv) -> Config:
    """The configuration of a command line, by way of Hydra's own composition."""
    return OmegaConf.to_object(compose("config", overrides=cli.check_arguments(list(argv))))


def refused(*argv) -> str:
    """The sentence with which a command line is refused."""
    with pytest.raises(UserError) as error:
        cli.check_arguments(list(argv))
    assert "\n" not in str(error.value)
    return str(error.value)


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("typo, meant", [("max_step=3", "max_steps"), (
    "model.n_heads=3", "model.n_head"), ("optim.lrr=1", "optim.lr"),
                                         ("modle=small", "model"), ("optm=muon", "optim"),
                                         ("n_layer=4", "model.n_layer"),
                                         ("experimnt=default", "experiment"),
                                         ("max_step", "max_steps")])
def test_a_misspelt_setting_is_named_with_the_nearest_one(typo, meant):
    assert refused(typo).startswith(typo.partition("=")[0])
    assert re.search(rf"did you mean {re.escape(meant)}\b", refused(typo))


def test_an_unknown_setting_is_told_where_all_are_listed():
    assert refused("zzz=1") == "zzz is not a setting; python train.py --help lists all"


@pytest.mark.parametrize("arg", ["+model.typo=4", "++model.typo=4", "+zzz=1", "~zzz", "++zzz=1",
                                 "~model.typo=4", "+model.n_layers=4"])
def test_what_does_not_exist_cannot_be_added_or_removed(arg):
    assert arg.partition("=")[0] in refused(arg)


@pytest.mark.parametrize("arg", ["+max_steps=3", "++max_steps=3", "~max_steps", "~optim.lr=3",
                                 "+model.n_layer=4"])
def test_a_setting_is_changed_and_not_added_or_removed(arg):
    name = arg.lstrip("+~").partition("=")[0]
    assert f"write {name}=VALUE" in refused(arg)


@pytest.mark.parametrize("arg", ["+experiment=default", "~model", "~model=small", "++optim=muon"])
def test_a_group_is_chosen_from_and_not_added_or_removed(arg):
    assert re.search(r"did you mean (experiment|model|optim)\b", refused(arg))


@pytest.mark.parametrize("arg", ["steps", "max_steps", "hello world", "seed:3"])
def test_an_argument_without_an_equals_sign_is_refused(arg):
    assert refused(arg).startswith(f"{arg} is not of the form key=value")


@pytest.mark.parametrize("arg", ["model=gpt3", "data=web", "tokenizer=words", "optim=sgd",
                                 "experiment=best", "model=", "model=null"])
def test_an_unknown_preset_is_named_with_those_there_are(arg):
    group, _, preset = arg.partition("=")
    assert f"{arg} is not one of {', '.join(cli.groups()[group])}" in refused(arg)
    if preset == "gpt3":
        assert "did you mean gpt2" in refused(arg)


@pytest.mark.parametrize("arg", ["model.n_layer=1,2", "seed=[1,2]", "optim.lr=1e-3,1e-4",
                                 "compile=true,false"])
def test_several_values_without_a_sweep_are_told_of_the_sweep(arg):
    assert refused(arg) == f"{arg} gives several values: add -m to run a sweep over them"


def test_several_presets_without_a_sweep_are_told_of_the_sweep():
    assert "add -m" in refused("model=small,gpt2")


@pytest.mark.parametrize("sweep", ["-m", "--multirun"])
def test_a_sweep_refuses_a_run_dir(sweep):
    assert "hydra.sweep.dir=PATH" in refused(sweep, "run_dir=x", "seed=1,2")
    assert "hydra.sweep.dir=PATH" in refused("run_dir=x", "seed=1,2", sweep)


def test_a_sweep_over_an_unknown_preset_names_that_one():
    assert refused("-m", "model=small,gpt3,gpt2").startswith("model=gpt3 is not one of")


# --- what is taken --------------------------------------------------------------------------------


@pytest.mark.parametrize("argv", [["max_steps=3"], ["model=small", "optim=muon"],
                                  ["hydra/launcher=basic"], ["--cfg", "job"],
                                  ["-c", "job", "seed=1"], ["-m", "seed=1,2"],
                                  ["-m", "model=small,gpt2"], ["-m", "model=glob(*)"],
                                  ["--config-dir", str(ROOT / "docs")], ["-m", "seed=range(1,4)"],
                                  ["-m", "optim.lr=choice(1,2)"],
                                  ["-m", "model=choice(small,gpt2)"]])
def test_what_needs_no_quotes_is_passed_on_as_it_is(argv):
    assert cli.check_arguments(argv) == argv


unquoted = st.characters(categories=["L", "N"], include_characters=" ~=[]{}<>:;|&*?#@!%^-_./+")


def sweep_of(value):
    """The alternatives that Hydra makes of data.name=VALUE in a sweep."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    (override,) = OverridesParser.create().parse_overrides(
        cli.check_arguments(["-m", f"data.name={value}"])[1:])
    if not override.is_sweep_override():
        return [override.value()]
    return [OverridesParser.create().parse_override(f"data.name={text}").value()
            for text in override.sweep_string_iterator()]


@given(names=st.lists(st.text(unquoted, min_size=1), min_size=2, max_size=4))
@example(names=["~/notes", "café", "a=b", "[x", "y]", " a "])
def test_the_alternatives_of_a_sweep_arrive_as_they_are(names):
    if "null" not in names:
        assert sweep_of(",".join(names)) == names


@pytest.mark.parametrize("value, alternatives", [("a", ["a"]), ("it's,two", ["it's", "two"]), (
    "'a,b',c", ["a,b", "c"]), ('"a,b",c', ["a,b", "c"]),
                                                 ("notes (1, 2).txt,b", ["notes (1, 2).txt", "b"]),
                                                 ("choice(a,b)", ["a", "b"])])
def test_a_sweep_separates_alternatives_at_the_commas_between_them(value, alternatives):
    assert sweep_of(value) == alternatives


def test_null_among_the_alternatives_of_a_sweep_is_null():
    assert sweep_of("null,a") == [None, "a"]


def test_the_groups_are_the_folders_of_presets():
    assert list(cli.groups()["optim"]) == ["adamw", "muon"]
    assert {"data", "experiment", "model", "optim", "tokenizer"} <= set(cli.groups())


@pytest.mark.slow
@pytest.mark.parametrize("group, preset", [(group, preset) for group, presets in cli.groups().items(
    ) for preset in presets if group != "sweep"])
def test_the_command_above_a_preset_composes_a_configuration_that_is_right(group, preset, hydra):
    lines = (cli.CONFIGS / group / f"{preset}.yaml").read_text(encoding="utf-8").splitlines()
    command = next(line for line in lines
                   if line.startswith("# python train.py")).removeprefix("# python train.py")
    for words in {re.sub(r"\[.*?\]", "", command), re.sub(r"[\[\]]", "", command)}:
        composed(*shlex.split(words)).check()


def test_a_typed_preset_wins_over_the_one_that_the_experiment_chose(hydra):
    assert composed("experiment=nanogpt_cpu").data.source == "shakespeare"
    assert composed("experiment=nanogpt_cpu", "data=stdlib").data.source == "stdlib"
    assert composed("data=stdlib", "experiment=nanogpt_cpu").data.source == "stdlib"


def test_an_experiments_settings_win_over_a_typed_preset_and_a_typed_setting_over_both(hydra):
    nanogpt = composed("experiment=nanogpt_cpu", "optim=muon").optim
    assert (nanogpt.name, nanogpt.beta2) == ("muon", 0.99)
    assert composed("experiment=nanogpt_cpu", "optim.beta2=0.9").optim.beta2 == 0.9


def test_null_is_nothing(hydra):
    config = composed("data.name=null", "tokenizer.vocab_size=null")
    assert config.data.name is None and config.tokenizer.vocab_size is None


# --- texts arrive unchanged -----------------------------------------------------------------------


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
@pytest.mark.parametrize("texts", [KNOWN_HARD[i:i + 3] for i in range(0, len(KNOWN_HARD), 3)],
                         ids=str)
def test_a_text_that_others_take_for_syntax_arrives_as_it_was_typed(texts, hydra):
    names = ("data.path", "data.name", "run_dir")[:len(texts)]
    config = composed(*(f"{name}={text}" for name, text in zip(names, texts)))
    assert [config.data.path, config.data.name, config.run_dir][:len(texts)] == texts


@given(text=typed)
def test_a_prompt_arrives_as_it_was_typed(text):
    if text != "null":
        assert cli.sample_config([f"prompt={text}"]).prompt == text


@pytest.mark.parametrize("text", [*KNOWN_HARD, "???"])
def test_a_prompt_that_others_take_for_syntax_arrives_as_it_was_typed(text):
    config = cli.sample_config([f"prompt={text}", f"run_dir={text}"])
    assert (config.prompt, config.run_dir) == (text, text)


# --- the settings of sample.py --------------------------------------------------------------------


def test_the_settings_of_sample_have_their_types():
    config = cli.sample_config(["temperature=0", "top_k=5", "top_p=0.9", "max_new_tokens=7",
                                "checkpoint=600", "prompt=5", "seed=3"])
    assert (config.temperature, config.top_k, config.top_p,
            config.max_new_tokens) == (0.0, 5, 0.9, 7)
    assert (config.checkpoint, config.prompt, config.seed) == ("600", "5", 3)
    assert cli.sample_config(["top_k=null"]).top_k is None
    assert cli.sample_config([]) == SampleConfig()


@pytest.mark.parametrize("argv, sentence", [
    (["temprature=1"], "temprature is not a setting of sample.py; did you mean temperature"),
    (["hello"], "hello is not of the form key=value; a prompt is prompt=TEXT"),
    (["prompt=def", "main", "():", "seed=3"],
     'main stands alone: put a value with spaces in quotes: prompt="def main ():"'),
    (["--prompt"], "--prompt is not of the form key=value; did you mean prompt"),
    (["temperature=-1"], "temperature=-1.0 must be at least 0"),
    (["prompt=a", "prompts=b"], "both given"),
    (["quantize=int4"], "quantize=int4 is not one of none, int8"),
    (["quantize=int8", "precision=fp32"], "multiplies in bf16, are both given: leave one out"),
    (["checkpoint=newest"], "checkpoint=newest is not best, last or a step's number")])
def test_a_mistake_in_the_settings_of_sample_is_one_sentence(argv, sentence):
    with pytest.raises(UserError) as error:
        cli.sample_config(argv)
    assert sentence in str(error.value)


@pytest.mark.parametrize("typed, meant", [(r"\n\n", "\n\n"), (r"a\tb", "a\tb"), (r"\\n", r"\n"),
                                          (r"\\\n", "\\\n"), ("\n", "\n"), ("é", "é"),
                                          ("null", "null"), ("[a]", "[a]"), ("=", "=")])
def test_a_stop_string_is_what_is_meant_by_what_is_typed(typed, meant):
    assert cli.sample_config([f"stop={typed}", "stop=second",
                              r"stop=\t"]).stop == [meant, "second", "\t"]
    assert cli.sample_config([]).stop == []


@given(text=typed.filter(bool))
def test_any_stop_string_can_be_typed(text):
    assert cli.sample_config(["stop=" + text.replace("\\", "\\\\")]).stop == [text]


@pytest.mark.parametrize("typed", ["\\", r"a\q", "\\\\\\", r"\x41"])
def test_a_backslash_in_a_stop_string_that_means_nothing_is_refused(typed):
    with pytest.raises(UserError, match="has a backslash that means nothing: write"):
        cli.sample_config([f"stop={typed}"])


# --- the help -------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [80, 200])
def test_the_help_of_train_lists_every_setting_and_every_preset_and_fits_the_window(
        columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.delitem(Singleton._instances, GlobalHydra, raising=False)  # as in a new process
    assert all(len(line) <= min(columns, 120) for line in cli.train_help().splitlines())
    text = " ".join(cli.train_help().split())
    for name, f, _ in knobs(Config()):
        assert re.search(rf" {re.escape(name)}=\S+ {re.escape(f.metadata['help'])}", text)
    for group, presets in cli.groups().items():
        assert f" {group} {', '.join(presets)}" in text
    # As in the plain command, experiment=default, and not before any preset.
    assert " max_steps=2400 " in text and " optim.name=muon " in text
    assert " tokenizer.pattern=gpt2 " in text and "(true | false | auto)" in text


def test_the_help_of_sample_lists_every_setting():
    lines = cli.sample_help().splitlines()
    assert all(len(line) <= 160 for line in lines)
    for name, f, _ in knobs(SampleConfig()):
        assert len([line for line in lines if line.startswith(f"  {name}=")]) == 1
        assert f.metadata["help"] in " ".join(cli.sample_help().split())


def test_sentences_are_wrapped_on_a_terminal_alone_and_commands_never():
    sentence = "L0H0 matters most: without it the loss is 1.42 ± 0.07 nats higher. " * 3
    for terminal, wrap, lines in ((True, True, 3), (True, False, 1), (False, True, 1)):
        console = cli.Terminal(file=io.StringIO(), force_terminal=terminal, width=80)
        cli.printer(console, wrap=wrap)(sentence.strip())
        said = console.file.getvalue().splitlines()
        assert len(said) == lines and " ".join(map(str.strip, said)) == sentence.strip()


# --- as a user runs it ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def no_torch(tmp_path_factory):
    """A folder before all others on Python's path, whose torch cannot be imported."""
    folder = tmp_path_factory.mktemp("path")
    (folder / "torch.py").write_text("raise SystemExit('torch was imported')")
    return str(folder)


def run(folder, script, *argv, **variables):
    return processes.run(folder, script, *argv,
                         env={"GLASSGPT_CACHE": str(folder / "cache"), **variables})


def one_sentence(folder, done):
    """What a mistaken command says: one line on stderr, with status 1, and no file made."""
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("error: "), done.stderr
    assert (done.returncode, done.stdout) == (1, "")
    assert list(folder.iterdir()) == []
    return done.stderr


BAD = [
    (["max_step=3"], "did you mean max_steps"),
    (["max_steps=abc"], "max_steps"),
    (["max_steps="], "max_steps"),
    (["max_steps=0"], "max_steps=0 must be at least 1"),
    (["max_steps=1.5"], "max_steps"),
    (["max_steps='3"], "max_steps='3"),
    (["seed=???"], "seed"),
    (["optim.lr=nan"], "optim.lr=nan"),
    (["optim.lr=${nothing}"], "nothing"),
    (["model.bias=maybe"], "model.bias"),
    (["model.n_head=5"], "model.n_head=5"),
    (["model.n_layer=1,2"], "add -m"),
    (["model=gpt3"], "did you mean gpt2"),
    (["+model.typo=4"], "model.typo"),
    (["data.path=notes"], "add data=text"),
    (["data=text"], "data.path"),
    (["device=tpu"], "device=tpu"),
    (["resume=true"], "run_dir"),
    (["resume=true", "run_dir=nowhere"], "run_dir=nowhere"),
    (["-m", "seed=1,2", "run_dir=x"], "hydra.sweep.dir"),
    (["--config-name=nope"], "nope"),
    (["--batch_size=32"], "batch_size=32"),
    (["--cfg", "nope"], "nope"),
    (["modle=small"], "did you mean model"),
    (["~max_steps"], "max_steps"),
    (["optim.warmup_steps=5000"], "is not shorter than the run's"),
    (["precision=fp16"], "precision=fp16 is not one of"),
    (["accumulate=5"], "does not divide batch_size"),
    (["model.n_kv_head=3"], "does not divide model.n_head"),
    (["data=text", "data.path=x", "data.encoding=utf-9"], "data.encoding=utf-9 is not an encoding"),
    (["on_nonfinite=ignore"], "on_nonfinite=ignore is not one of stop, skip"),
]


@pytest.mark.slow
@pytest.mark.parametrize("argv, fragment", BAD,
                         ids=lambda v: " ".join(v) if isinstance(v, list) else "")
def test_a_mistaken_command_is_one_sentence_and_makes_nothing(argv, fragment, tmp_path):
    assert fragment in one_sentence(tmp_path, run(tmp_path, "train.py", *argv))


@pytest.mark.slow
@pytest.mark.parametrize("script, argv", [
    ("train.py", ["max_step=3"]), ("train.py", ["model.n_head=5"]),
    ("train.py", ["data=text", "data.path=nowhere"]), ("sample.py", ["run_dir=nowhere"]),
    ("train.py", ["resume=true", "run_dir=nowhere"]), ("train.py", ["-m", "seed=1,2", "run_dir=x"]),
    ("sample.py", ["temprature=1"])], ids=" ".join)
def test_a_mistake_is_answered_before_torch_is_imported(script, argv, new_command, tmp_path,
                                                        no_torch):
    one_sentence(tmp_path, new_command(script, *argv, env={"PYTHONPATH": no_torch}))


@pytest.mark.slow
def test_a_gpu_that_is_not_there_is_one_sentence(tmp_path):
    done = run(tmp_path, "train.py", "device=cuda:99", "run_dir=run")
    assert done.returncode == 1
    assert done.stderr.startswith("error: device=cuda:99 is not available here")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_text_that_is_not_there_is_one_sentence_and_leaves_no_run(tmp_path):
    done = run(tmp_path, "train.py", "data=text", "data.path=nowhere, ${x} (1).txt", "run_dir=run")
    assert done.stderr == ("error: data.path=nowhere, ${x} (1).txt does not exist: "
                           "give the path of a text file, of a folder, or a glob\n")
    assert (done.returncode, done.stdout) == (1, "")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("argv, fragment", [(["temprature=1"], "did you mean temperature"),
                                            (["top_p=2"], "top_p=2.0 must be at most 1"),
                                            ([], "runs/"), (["top_k=1.5"], "top_k"),
                                            (["prompts=none.txt"], "none.txt"),
                                            (["seed=???"], "seed")],
                         ids=lambda v: " ".join(v) if isinstance(v, list) else "")
def test_a_mistaken_sample_is_one_sentence_and_makes_nothing(argv, fragment, tmp_path):
    assert fragment in one_sentence(tmp_path, run(tmp_path, "sample.py", *argv))


@pytest.mark.parametrize("script, flag",
                         [("train.py", "--help"), ("train.py", "-h"), ("sample.py", "--help")])
def test_help_is_given_without_making_anything(script, flag, tmp_path):
    done = run(tmp_path, script, "max_steps=3", flag)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Settings (KEY=VALUE)" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("argv", [["--cfg", "job", "max_steps=3", "data.name=it's, ${x}"],
                                  ["max_steps=3", "data.name=it's, ${x}", "--cfg", "job"],
                                  ["max_steps=3", "--cfg", "job", "data.name=it's, ${x}"]],
                         ids=["first", "last", "between"])
def test_the_configuration_is_printed_wherever_the_option_stands(argv, tmp_path):
    done = run(tmp_path, "train.py", *argv)
    assert (done.returncode, done.stderr) == (0, "")
    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config),
                                                 OmegaConf.create(done.stdout)))
    assert (config.max_steps, config.data.name) == (3, "it's, ${x}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["runs/s (1)", "my runs, [x]=1", "it's"])
def test_a_sweeps_folder_is_taken_as_it_is_typed(path):
    checked = cli.check_arguments(["-m", f"hydra.sweep.dir={path}"])
    assert cli.typed_value("hydra.sweep.dir", checked) == path


# --- presets of one's own ------------------------------------------------------------------------

GLOBAL = "# @package _global_\n"
OWN = {"model/tiny": "n_layer: 1\nn_head: 2\nn_embd: 16\nblock_size: 16\n",
       "data/mine": f"source: text\npath: {ROOT / 'LICENSE'}\n",
       "tokenizer/letters": "name: char\n",
       "optim/fast": "name: adamw\nlr: 0.01\n",
       "experiment/mine": GLOBAL + "defaults:\n  - override /model: tiny\n"
                          "  - override /data: mine\n"
                          "  - override /tokenizer: letters\n  - override /optim: fast\n"
                          "max_steps: 2\nbatch_size: 2\nattention:\n  every: 0\n",
       "sweep/seeds": GLOBAL + "hydra:\n  sweeper:\n    params:\n"
                      "      seed: 1,2\n      experiment: mine\n"}


@pytest.fixture
def own(tmp_path):
    """Add presets to a folder for --config-dir: own({"model/tiny": "n_layer: 1"})."""
    def write(presets: dict[str, str | bytes]) -> str:
        for name, text in presets.items():
            path = tmp_path / "own" / f"{name}.yaml"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return "--config-dir=" + str(tmp_path / "own")

    return write


@pytest.mark.slow
def test_a_preset_of_ones_own_is_found_in_every_group_and_for_a_run_that_goes_on(own, tmp_path):
    folder = own(OWN)
    done = run(tmp_path, "train.py", folder, "experiment=mine", "run_dir=run")
    assert (done.returncode, done.stderr) == (0, "")
    kept = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (kept["model"]["n_embd"], kept["optim"]["lr"]) == (16, 0.01)
    assert (kept["data"]["source"], kept["tokenizer"]["name"]) == ("text", "char")
    done = run(tmp_path, "train.py", "experiment=mine", folder, "run_dir=run", "resume=true",
               "max_steps=3")
    assert (done.returncode, done.stderr) == (0, "") and "resuming at step 2" in done.stdout


@pytest.mark.slow
def test_a_sweep_of_ones_own_runs_and_its_best_command_runs_again(own, tmp_path):
    done = run(tmp_path, "train.py", own(OWN), "-m", "sweep=seeds", "hydra.sweep.dir=~/sweep",
               HOME=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    folders = sorted(path.name for path in (tmp_path / "sweep").glob("*/"))
    assert folders == ["seed=1", "seed=2"]
    best = re.search(r"^best run +python (train.py .*)", done.stdout, re.MULTILINE)[1]
    done = run(tmp_path, *shlex.split(best), "dry_run=true")
    assert done.returncode == 0 and "1 layers of 16" in done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name, text, sentence", [
    ("experiment/bad", GLOBAL + "max_steps: [3\n", "bad.yaml, line 3: expected"),
    ("experiment/bad", GLOBAL + "model:\n\tn_layer: 3\n", "bad.yaml, line 3: found character"),
    ("experiment/bad", GLOBAL + "seed: 1\nseed: 2\n", "bad.yaml, line 3: found duplicate"),
    ("experiment/bad", b"# @package _global_\n# r\xe9glages\n", "bad.yaml cannot be read: 'utf-8'"),
    ("experiment/bad", "max_steps: 3\n", "bad.yaml: its first line has to be # @package _global_"),
    ("experiment/bad", GLOBAL + "max_step: 3\n",
     "experiment/bad.yaml: max_step is not a setting; did you mean max_steps"),
    ("model/bad", "n_layers: 3\n", "model/bad.yaml: model.n_layers is not a setting; did you mean"),
    ("model/bad", "n_layer: many\n", "model/bad.yaml: model.n_layer=many is not a whole number"),
    ("experiment/bad", GLOBAL + "defaults:\n  - override /model: smal\n", "did you mean small"),
    ("experiment/bad", "# @package\nmax_steps: 3\n", "Expected header format"),
    ("model/small", "n_layer: 3\n", "model=small is one of GlassGPT's presets: give the file"),
])
def test_a_mistake_in_a_preset_of_ones_own_is_one_sentence(name, text, sentence, own, tmp_path):
    done = run(tmp_path, "train.py", own({name: text}), name.replace("/", "="))
    assert (done.returncode, done.stdout) == (1, "")
    assert sentence in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["own"]


# --- what Hydra cannot read -----------------------------------------------------------------------


@pytest.mark.parametrize("argv", [["-m", "seed=1,,2"], ["model.n_layer=[1"], ["optim.lr={"],
                                  ["max_steps='3"], ["hydra.job.name=[a"],
                                  ["-m", "model.n_layer="]])
def test_what_cannot_be_read_is_named_with_what_to_type(argv):
    key = argv[-1].partition("=")[0]
    assert refused(*argv).startswith(argv[-1]) and f"type {key}=VALUE" in refused(*argv)


@pytest.mark.slow
@pytest.mark.parametrize("argv, sentence", [
    (["-m", "hydra/launcher=foo", "seed=1,2"], "hydra/launcher=foo is not one of basic, "),
    (["-m", "hydra/launcher=submitit_slurm", "seed=1,2"], "are you indeed on a slurm cluster?"),
    (["hydra.foo=3"], "hydra.foo is not a setting"),
    (["--cfg", "job", "--info", "all"], "Only one of"), (["--resolve"], "--resolve"),
    (["--config-path=/tmp"], "--config-path=/tmp"), (["--config-dir=none"], "none is not a folder"),
    (["--experimental-rerun=x"], "x"), (["-sc"], "subcommand")])
def test_what_hydra_refuses_is_one_sentence(argv, sentence, tmp_path):
    done = run(tmp_path, "train.py", *argv)
    assert (done.returncode, done.stdout) == (1, "")
    assert sentence in done.stderr and done.stderr.count("\n") == 1, done.stderr


# --- nanoGPT's habits -----------------------------------------------------------------------------


@pytest.mark.parametrize("arg, here", [
    ("init_from=resume", "run_dir=PATH resume=true"), ("init_from=scratch", "leave it out"),
    ("init_from=gpt2", "openai-community/gpt2"), ("init_from=gpt2-xl", "gpt2-xl"),
    ("learning_rate=6e-4", "optim.lr="), ("optim.learning_rate=1", "optim.lr="),
    ("dtype=bfloat16", "precision=bf16"), ("max_iters=5", "max_steps="),
    ("eval_interval=1", "eval.every="), ("out_dir=out", "run_dir="), ("n_layer=3", "model.n_layer"),
    ("block_size=8", "model.block_size"),
    ("--batch_size=8", "batch_size=8"), ("--batch_size", "batch_size=VALUE"),
    ("--compile=False", "compile=False"), ("--max_iters=5", "max_steps="),
    ("--init_from=gpt2", "openai-community/gpt2"),
    ("config/train_shakespeare_char.py", "experiment=nanogpt_gpu"), ("train_gpt2.py", "gpt2_124m"),
    ("min_lr=1e-4", "optim.min_lr_ratio="), ("decay_lr=False", "optim.schedule=constant")])
def test_nanogpts_habits_are_answered_with_what_to_type_here(arg, here):
    assert here in refused(arg)


def test_every_setting_of_nanogpt_in_the_docs_is_taken_or_answered():
    table = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8").partition(
        "| nanoGPT | here |")[2]
    rows = [line.split("|") for line in table.partition("\n\n")[0].splitlines()[2:]]
    cells = [name for row in rows for name in re.findall(r"`([\w=]+)`", row[1] + row[3])]
    assert len(cells) > 15
    taken = {name for name, _, _ in knobs(Config())}
    for name in cells:
        arg = name if "=" in name else f"{name}=1"
        if name not in taken:
            assert re.search(r"here it is|did you mean", refused(arg))


def test_a_folder_with_the_name_of_a_habit_is_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    assert cli.check_arguments(["init_from=gpt2"]) == ["init_from='gpt2'"]


def test_nanogpts_habits_are_answered_by_sample_too():
    with pytest.raises(UserError, match="here it is prompt=TEXT"):
        cli.sample_config(["--start=To be"])


# --- from arguments to a configuration ------------------------------------------------------------


def configured(*argv) -> tuple[Config, bool]:
    """What `to_config` makes of a command line."""
    checked = cli.check_arguments(list(argv))
    return cli.to_config(compose("config", overrides=checked), checked, starting_config)


@pytest.mark.parametrize("n_head, fitting", [(1, 1), (2, 2), (4, 2), (8, 2), (16, 2)])
def test_a_presets_kv_heads_follow_the_heads_that_are_typed(n_head, fitting, hydra, capsys):
    config, _ = configured(f"model.n_head={n_head}")
    assert (config.model.n_head, config.model.n_kv_head) == (n_head, fitting)
    noted = "model.n_kv_head is 1, since the preset's 2" in capsys.readouterr().out
    assert noted == (n_head == 1)


def test_kv_heads_become_the_largest_divisor_that_is_not_more(hydra):
    config, _ = configured("model=llama3_8b", "model.n_head=12", "model.n_embd=96")
    assert config.model.n_kv_head == 6


@pytest.mark.parametrize("argv", [["model.n_head=1", "model.n_kv_head=2"], ["model.n_kv_head=3"]])
def test_kv_heads_that_are_typed_and_do_not_fit_are_refused(argv, hydra):
    with pytest.raises(UserError, match="does not divide"):
        configured(*argv)


def test_a_run_is_planned_with_its_own_configuration(hydra, tmp_path):
    kept = Config(model=GPTConfig(vocab_size=77, n_layer=3), tokenizer=TokenizerConfig("char"))
    (tmp_path / "config.yaml").write_text(config_yaml(kept))
    config, _ = configured(f"run_dir={tmp_path}", "dry_run=true", "max_steps=5")
    assert (config.model, config.max_steps) == (kept.model, 5)
    config, continues = configured(f"run_dir={tmp_path / 'new'}", "dry_run=true")
    assert (config.model.n_layer, continues) == (4, False)
    with pytest.raises(UserError, match="n_layer: 3 in the run, 8 asked for"):
        configured(f"run_dir={tmp_path}", "dry_run=true", "model.n_layer=8")


def test_home_is_found_behind_an_equals_sign(hydra, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.yaml").write_text(config_yaml(Config()))
    config, _ = configured("run_dir=~/run", "init_from=~/base")
    assert (config.run_dir, config.init_from) == (str(tmp_path / "run"), str(tmp_path / "base"))
    checked = cli.check_arguments(["-m", "hydra.sweep.dir=~/a (1)"])
    assert cli.typed_value("hydra.sweep.dir", checked) == str(tmp_path / "a (1)")


def test_neither_what_is_asked_for_nor_the_run_that_goes_on_is_changed():
    run, asked = Config(model=GPTConfig(vocab_size=9)), Config(max_steps=7, run_dir="x")
    before = deepcopy((run, asked))
    config, _ = cli.continued(run, asked, ["experiment", "max_steps", "optim.lr"])
    assert config.max_steps == 7 and config.model.vocab_size == 9
    assert cli.fit_kv_heads(replace(asked, model=GPTConfig(None, n_head=1, n_kv_head=2)))
    assert (run, asked) == before


# --- outputs that cannot show every character -----------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("encoding, argv", [
    ("ascii", ["train.py", "--help"]), ("cp1252", ["train.py", "--help"]),
    ("latin-1", ["sample.py", "--help"]), ("ascii", ["data.prepare", "--help"]),
    ("ascii", ["sweeps", "--help"]), ("ascii", ["interop", "--help"]),
    ("ascii", ["benchmarks.throughput", "help=true"]),
    ("ascii", ["benchmarks.sampling", "help=true"])])
def test_help_is_printed_in_every_encoding(encoding, argv, tmp_path):
    done = processes.run(tmp_path, *argv, env={"PYTHONIOENCODING": encoding}, text=False)
    assert (done.returncode, done.stderr) == (0, b"") and len(done.stdout.decode(encoding)) > 200


@pytest.mark.slow
@pytest.mark.parametrize("argv", [["seed=1"], ["dry_run=true"], ["-m", "seed=1,2"], pytest.param(
    ["-m", "seed=1,2", "hydra/launcher=joblib"], marks=pytest.mark.soak)])
def test_a_run_or_a_sweep_ends_in_every_encoding(argv, own, tmp_path):
    text = tmp_path / "café – 日本.txt"
    text.write_text("the glass model attends to every token before it – café\n" * 30)
    done = run(tmp_path, "train.py", own(OWN), "experiment=mine", "data=text", f"data.path={text}",
               *argv, PYTHONIOENCODING="ascii")
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
