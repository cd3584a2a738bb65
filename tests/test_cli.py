"""What is typed: checked before anything is made, and carried unchanged."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

import cli
from config import Config, SampleConfig, UserError, knobs

ROOT = Path(__file__).parents[1]
many = settings(deadline=None, max_examples=50)
# An argument is any text without NUL.
arguments = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
# Signs that mean something to a shell, to Hydra or to OmegaConf, thickly sown.
SIGNS = [*"'\"\\,=()[]{}<>~+$:;|&*?#@!%^ \t\n", "${", "}", "${x}", "${oc.env:HOME}", "\\'", "\\\\", "???", "null", "true", "1e3",
         "é", "日本", "😀", "choice(", "--"]
awkward = st.lists(st.sampled_from([*SIGNS, "a"]), max_size=8).map("".join)
typed = arguments | awkward
KNOWN_HARD = ["", " ", "it's", "Hello, world", "~/notes (1).txt", "café", "a=b", "[1,2]", "{a: 1}", "${seed}", r"\${seed}", "\\", "\\'", "a\\",
              "'quoted'", '"quoted"', "None", "Null", "NULL", "true", "1", "1e3", "-", "--help", "a  b", "#",
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


# --- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("typo, meant", [("max_step=3", "max_steps"), ("model.n_heads=3", "model.n_head"), ("optim.lrr=1", "optim.lr"),
                                         ("modle=small", "model"), ("optm=muon", "optim"), ("n_layer=4", "model.n_layer"),
                                         ("experimnt=default", "experiment"), ("max_step", "max_steps")])
def test_a_misspelt_setting_is_named_with_the_nearest_one(typo, meant):
    assert refused(typo).startswith(typo.partition("=")[0])
    assert re.search(rf"did you mean {re.escape(meant)}\b", refused(typo))


def test_an_unknown_setting_is_told_where_all_are_listed():
    assert refused("zzz=1") == "zzz is not a setting; python train.py --help lists them"


@pytest.mark.parametrize("arg", ["+model.typo=4", "++model.typo=4", "+zzz=1", "~zzz", "++zzz=1", "~model.typo=4", "+model.n_layers=4"])
def test_what_does_not_exist_cannot_be_added_or_removed(arg):
    assert arg.partition("=")[0] in refused(arg)


@pytest.mark.parametrize("arg", ["+max_steps=3", "++max_steps=3", "~max_steps", "~optim.lr=3", "+model.n_layer=4"])
def test_a_setting_is_changed_and_not_added_or_removed(arg):
    name = arg.lstrip("+~").partition("=")[0]
    assert f"write {name}=VALUE" in refused(arg)


@pytest.mark.parametrize("arg", ["+experiment=default", "~model", "~model=small", "++optim=muon"])
def test_a_group_is_chosen_from_and_not_added_or_removed(arg):
    assert re.search(r"did you mean (experiment|model|optim)\b", refused(arg))


@pytest.mark.parametrize("arg", ["steps", "max_steps", "hello world", "seed:3"])
def test_an_argument_without_an_equals_sign_is_refused(arg):
    assert refused(arg).startswith(f"{arg} is not of the form key=value")


@pytest.mark.parametrize("arg", ["model=gpt3", "data=web", "tokenizer=words", "optim=sgd", "experiment=best", "model=", "model=null"])
def test_an_unknown_preset_is_named_with_those_there_are(arg):
    group, _, preset = arg.partition("=")
    assert f"{arg} is not one of {', '.join(cli.groups()[group])}" in refused(arg)
    if preset == "gpt3":
        assert "did you mean gpt2" in refused(arg)


@pytest.mark.parametrize("arg", ["model.n_layer=1,2", "seed=[1,2]", "optim.lr=1e-3,1e-4", "compile=true,false"])
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


# --- what is taken -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("argv", [["max_steps=3"], ["model=small", "optim=muon"], ["hydra.sweep.dir=x"], ["hydra/launcher=basic"], ["--cfg", "job"],
                                  ["-c", "job", "seed=1"], ["-m", "seed=1,2"], ["-m", "model=small,gpt2"], ["-m", "model=glob(*)"],
                                  ["--config-dir", "x"], ["-m", "seed=range(1,4)"], ["-m", "optim.lr=choice(1,2)"],
                                  ["-m", "model=choice(small,gpt2)"]])
def test_what_needs_no_quotes_is_passed_on_as_it_is(argv):
    assert cli.check_arguments(argv) == argv


unquoted = st.characters(categories=["L", "N"], include_characters=" ~=[]{}<>:;|&*?#@!%^-_./+")


def sweep_of(value):
    """The alternatives that Hydra makes of wandb.name=VALUE in a sweep."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    (override,) = OverridesParser.create().parse_overrides(cli.check_arguments(["-m", f"wandb.name={value}"])[1:])
    if not override.is_sweep_override():
        return [override.value()]
    return [OverridesParser.create().parse_override(f"wandb.name={text}").value() for text in override.sweep_string_iterator()]


@many
@given(names=st.lists(st.text(unquoted, min_size=1), min_size=2, max_size=4))
@example(names=["~/notes", "café", "a=b", "[x", "y]", " a "])
def test_the_alternatives_of_a_sweep_arrive_as_they_are(names):
    if "null" not in names:
        assert sweep_of(",".join(names)) == names


@pytest.mark.parametrize("value, alternatives", [("a", ["a"]), ("it's,two", ["it's", "two"]), ("'a,b',c", ["a,b", "c"]), ('"a,b",c', ["a,b", "c"]),
                                                 ("notes (1, 2).txt,b", ["notes (1, 2).txt", "b"]), ("choice(a,b)", ["a", "b"])])
def test_a_sweep_separates_alternatives_at_the_commas_between_them(value, alternatives):
    assert sweep_of(value) == alternatives


def test_null_among_the_alternatives_of_a_sweep_is_null():
    assert sweep_of("null,a") == [None, "a"]


def test_the_groups_are_the_folders_of_presets():
    assert cli.groups()["optim"] == ["adamw", "muon"]
    assert {"data", "experiment", "model", "optim", "tokenizer"} <= set(cli.groups())


@pytest.mark.parametrize("group, preset", [(group, preset) for group, presets in cli.groups().items() for preset in presets if group != "sweep"])
def test_the_command_above_a_preset_composes_a_configuration_that_is_right(group, preset, hydra):
    lines = (cli.CONFIGS / group / f"{preset}.yaml").read_text(encoding="utf-8").splitlines()
    command = next(line for line in lines if line.startswith("# python train.py")).removeprefix("# python train.py")
    for argv in (shlex.split(re.sub(r"\[.*?\]", "", command)), shlex.split(re.sub(r"[\[\]]", "", command))):
        composed(*argv).check()


def test_a_typed_preset_wins_over_the_one_that_the_experiment_chose(hydra):
    assert composed("experiment=nanogpt_cpu").data.source == "shakespeare"
    assert composed("experiment=nanogpt_cpu", "data=stdlib").data.source == "stdlib"
    assert composed("data=stdlib", "experiment=nanogpt_cpu").data.source == "stdlib"


def test_an_experiments_settings_win_over_a_typed_preset_and_a_typed_setting_over_both(hydra):
    nanogpt = composed("experiment=nanogpt_cpu", "optim=muon").optim
    assert (nanogpt.name, nanogpt.beta2) == ("muon", 0.99)
    assert composed("experiment=nanogpt_cpu", "optim.beta2=0.9").optim.beta2 == 0.9


def test_null_is_nothing(hydra):
    config = composed("wandb.name=null", "tokenizer.vocab_size=null")
    assert config.wandb.name is None and config.tokenizer.vocab_size is None


# --- texts arrive unchanged ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["data.path", "wandb.name"])
@many
@given(text=typed)
@example(text="\\\n")
@example(text="a'\\\n")
def test_a_text_arrives_as_it_was_typed(name, text, hydra):
    if text in ("null", "???"):
        return
    config = composed(f"{name}={text}")
    assert getattr(getattr(config, name.split(".")[0]), name.split(".")[1]) == text


@pytest.mark.parametrize("text", KNOWN_HARD)
def test_a_text_that_others_take_for_syntax_arrives_as_it_was_typed(text, hydra):
    config = composed(f"data.path={text}", f"wandb.name={text}", f"run_dir={text}")
    assert (config.data.path, config.wandb.name, config.run_dir) == (text, text, text)


@many
@given(text=typed)
def test_a_prompt_arrives_as_it_was_typed(text):
    if text != "null":
        assert cli.sample_config([f"prompt={text}"]).prompt == text


@pytest.mark.parametrize("text", [*KNOWN_HARD, "???"])
def test_a_prompt_that_others_take_for_syntax_arrives_as_it_was_typed(text):
    config = cli.sample_config([f"prompt={text}", f"run_dir={text}"])
    assert (config.prompt, config.run_dir) == (text, text)


# --- the settings of sample.py -------------------------------------------------------------------------------------


def test_the_settings_of_sample_have_their_types():
    config = cli.sample_config(["temperature=0", "top_k=5", "top_p=0.9", "max_new_tokens=7", "checkpoint=600", "prompt=5", "seed=3"])
    assert (config.temperature, config.top_k, config.top_p, config.max_new_tokens) == (0.0, 5, 0.9, 7)
    assert (config.checkpoint, config.prompt, config.seed) == ("600", "5", 3)
    assert cli.sample_config(["top_k=null"]).top_k is None
    assert cli.sample_config([]) == SampleConfig()


@pytest.mark.parametrize("argv, sentence", [
    (["temprature=1"], "temprature is not a setting of sample.py; did you mean temperature"),
    (["hello"], "hello is not of the form key=value; a prompt is prompt=TEXT"),
    (["--prompt"], "--prompt is not of the form key=value; did you mean prompt"), (["temperature=-1"], "temperature=-1.0 must be at least 0"),
    (["prompt=a", "prompt_file=b"], "both given"), (["checkpoint=newest"], "checkpoint=newest is not best, last or a step's number")])
def test_a_mistake_in_the_settings_of_sample_is_one_sentence(argv, sentence):
    with pytest.raises(UserError) as error:
        cli.sample_config(argv)
    assert sentence in str(error.value)


@pytest.mark.parametrize("typed, meant", [(r"\n\n", "\n\n"), (r"a\tb", "a\tb"), (r"\\n", r"\n"), (r"\\\n", "\\\n"), ("\n", "\n"), ("é", "é"),
                                          ("null", "null"), ("[a]", "[a]"), ("=", "=")])
def test_a_stop_string_is_what_is_meant_by_what_is_typed(typed, meant):
    assert cli.sample_config([f"stop={typed}", "stop=second", r"stop=\t"]).stop == [meant, "second", "\t"]
    assert cli.sample_config([]).stop == []


@many
@given(text=typed.filter(bool))
def test_any_stop_string_can_be_typed(text):
    assert cli.sample_config(["stop=" + text.replace("\\", "\\\\")]).stop == [text]


@pytest.mark.parametrize("typed", ["\\", r"a\q", "\\\\\\", r"\x41"])
def test_a_backslash_in_a_stop_string_that_means_nothing_is_refused(typed):
    with pytest.raises(UserError, match="has a backslash that means nothing: write"):
        cli.sample_config([f"stop={typed}"])


# --- the help ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [80, 200])
def test_the_help_of_train_lists_every_setting_and_every_preset_and_fits_the_window(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert all(len(line) <= min(columns, 120) for line in cli.train_help().splitlines())
    text = " ".join(cli.train_help().split())
    for name, f, _ in knobs(Config()):
        assert re.search(rf" {re.escape(name)}=\S+ {re.escape(f.metadata['help'])}", text)
    for group, presets in cli.groups().items():
        assert f" {group} {', '.join(presets)}" in text
    assert " max_steps=1000 " in text and "(true | false | auto)" in text


def test_the_help_of_sample_lists_every_setting():
    lines = cli.sample_help().splitlines()
    assert all(len(line) <= 160 for line in lines)
    for name, f, _ in knobs(SampleConfig()):
        (line,) = [line for line in lines if line.startswith(f"  {name}=")]
        assert f.metadata["help"] in line


# --- as a user runs it ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def no_torch(tmp_path_factory):
    """A folder before all others on Python's path, whose torch cannot be imported."""
    folder = tmp_path_factory.mktemp("path")
    (folder / "torch.py").write_text("raise SystemExit('torch was imported')")
    return str(folder)


def run(folder, script, *argv, path=""):
    env = {**os.environ, "WANDB_MODE": "disabled", "GLASSGPT_CACHE": str(folder / "cache"), "PYTHONPATH": path}
    return subprocess.run([sys.executable, str(ROOT / script), *argv], cwd=folder, env=env, capture_output=True, text=True, timeout=120,
                          stdin=subprocess.DEVNULL)


def one_sentence(folder, script, *argv, path):
    """What a mistaken command says: one line on stderr, with status 1, no file made, and torch not imported."""
    done = run(folder, script, *argv, path=path)
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


@pytest.mark.parametrize("argv, fragment", BAD, ids=lambda v: " ".join(v) if isinstance(v, list) else "")
def test_a_mistaken_command_is_one_sentence_and_makes_nothing(argv, fragment, tmp_path, no_torch):
    assert fragment in one_sentence(tmp_path, "train.py", *argv, path=no_torch)


@pytest.mark.slow
def test_a_gpu_that_is_not_there_is_one_sentence(tmp_path):
    done = run(tmp_path, "train.py", "device=cuda:99", "run_dir=run")
    assert done.returncode == 1 and done.stderr.startswith("error: device=cuda:99 is not available here") and done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_text_that_is_not_there_is_one_sentence_and_leaves_no_run(tmp_path):
    done = run(tmp_path, "train.py", "data=text", "data.path=nowhere, ${x} (1).txt", "run_dir=run")
    assert done.stderr == "error: data.path=nowhere, ${x} (1).txt does not exist: give the path of a text file\n"
    assert (done.returncode, done.stdout) == (1, "")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("argv, fragment", [(["temprature=1"], "did you mean temperature"), (["top_p=2"], "top_p=2.0 must be at most 1"),
                                            ([], "runs/"), (["top_k=1.5"], "top_k"), (["prompt_file=none.txt"], "none.txt"), (["seed=???"], "seed")],
                         ids=lambda v: " ".join(v) if isinstance(v, list) else "")
def test_a_mistaken_sample_is_one_sentence_and_makes_nothing(argv, fragment, tmp_path, no_torch):
    assert fragment in one_sentence(tmp_path, "sample.py", *argv, path=no_torch)


@pytest.mark.parametrize("script, flag", [("train.py", "--help"), ("train.py", "-h"), ("sample.py", "--help")])
def test_help_is_given_without_making_anything(script, flag, tmp_path):
    done = run(tmp_path, script, "max_steps=3", flag)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Settings (KEY=VALUE)" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("argv", [["--cfg", "job", "max_steps=3", "wandb.name=it's, ${x}"], ["max_steps=3", "wandb.name=it's, ${x}", "--cfg", "job"],
                                  ["max_steps=3", "--cfg", "job", "wandb.name=it's, ${x}"]], ids=["first", "last", "between"])
def test_the_configuration_is_printed_wherever_the_option_stands(argv, tmp_path):
    done = run(tmp_path, "train.py", *argv)
    assert (done.returncode, done.stderr) == (0, "")
    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.create(done.stdout)))
    assert (config.max_steps, config.wandb.name) == (3, "it's, ${x}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["runs/s (1)", "my runs, [x]=1", "it's"])
def test_a_sweeps_folder_is_taken_as_it_is_typed(path):
    checked = cli.check_arguments(["-m", f"hydra.sweep.dir={path}"])
    assert cli.typed_value("hydra.sweep.dir", checked) == path
