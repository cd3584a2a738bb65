"""Files that mean harm: none of them is executed, nothing outside the run's folder is written or
removed, and the code could do neither."""

import ast
import hashlib
import json
import os
import pickle
import struct
from pathlib import Path

import pytest
from conftest import ROOT
from processes import after_8_steps, assert_same_run, finished, tiny

from config import DataConfig, TokenizerConfig, UserError
from data.tokens import prepare
from training.checkpoint import MANIFEST, _sealed, find_checkpoint, load_run

# --- the code -------------------------------------------------------------------------------------

FORBIDDEN_NAMES = {"eval", "exec", "compile", "__import__", "input"}
# What starts another process: this Python.
COMMANDS = {"data/learn.py": "subprocess.Popen", "report/__main__.py": "subprocess.run",
            "training/compiling.py": "subprocess.Popen"}
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "joblib", "shelve", "marshal", "subprocess"}
FORBIDDEN_CALLS = {"torch.load", "torch.save", "yaml.load", "yaml.unsafe_load", "os.system",
                   "os.popen", "np.load", "hydra.utils.instantiate"}


def test_the_code_loads_no_pickle_and_evaluates_nothing():
    found = []
    for path in (p for p in ROOT.rglob("*.py") if p.relative_to(ROOT).parts[0] not in (
        "tests", "benchmarks") and ".venv" not in p.parts):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                allowed = ((called == "np.load"
                            and not any(k.arg == "allow_pickle" for k in node.keywords))
                           # which reads a line, on request
                           or (called == "input" and path.name == "sample.py"))
                if called in FORBIDDEN_NAMES | FORBIDDEN_CALLS and not allowed:
                    found.append(f"{path}:{node.lineno} {called}")
            names = [a.name for a in node.names] if isinstance(
                node, ast.Import) else [node.module] if isinstance(node, ast.ImportFrom) else []
            found += [f"{path}:{node.lineno} {name}" for name in names if name
                      and name.partition(".")[0] in FORBIDDEN_MODULES
                      and not (name == "subprocess"
                               and path.relative_to(ROOT).as_posix() in COMMANDS)]
    assert not found


@pytest.mark.parametrize("name, function", COMMANDS.items())
def test_a_command_that_the_code_starts_is_python_itself_without_a_shell(name, function):
    tree = ast.parse((ROOT / name).read_text(encoding="utf-8"))
    call, = (node for node in ast.walk(tree) if isinstance(node, ast.Call)
             and ast.unparse(node.func).startswith("subprocess."))
    command, = (node.value for node in ast.walk(tree) if isinstance(node, ast.Assign)
                and ast.unparse(node.targets[0]) == "command")
    assert (ast.unparse(call.func), ast.unparse(call.args[0])) == (function, "command")
    assert ast.unparse(command).startswith("[sys.executable, ")
    assert not any(k.arg in ("shell", "executable") for k in call.keywords)


# --- a run from a stranger ------------------------------------------------------------------------


class Canary:
    """What runs where its pickle is loaded: it leaves a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture
def run(whole, tmp_path) -> Path:
    """A copy of the whole run with the checkpoints of steps 4 and 8."""
    return after_8_steps(whole, tmp_path / "run")


def forge(folder: Path, **changes) -> None:
    """Write the manifest of a checkpoint as its author would, with the hashes of what is there and
    these changes."""
    manifest = json.loads((folder / MANIFEST).read_text())
    for name in manifest["files"]:
        content = (folder / name).read_bytes()
        manifest["files"][name] = {"bytes": len(content),
                                   "sha256": hashlib.sha256(content).hexdigest()}
    manifest.pop("sha256")
    (folder / MANIFEST).write_text(_sealed(json.dumps(manifest | changes, indent=1)))


YAML_CANARY = "!!python/object/apply:os.mkdir ['{}']\n"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "tokenizer.json",
                                  "config.yaml"])
def test_a_pickle_in_place_of_a_file_is_never_loaded(tmp_path, text_file, run, name):
    canary = tmp_path / "canary"
    for folder in (run / "checkpoints").glob("step_*"):
        (folder / name).write_bytes(YAML_CANARY.format(canary).encode() if name == "config.yaml"
                                    else pickle.dumps(Canary(canary)))
        forge(folder)
    # sampling needs no optimizer
    with pytest.raises(UserError) if name != "optimizer.safetensors" else os.scandir():
        load_run(run)
    finished(tmp_path, *tiny(text_file, "resume=true"), status=1)
    assert len((tmp_path / "err.txt").read_text().splitlines()) == 1
    assert not canary.exists()


@pytest.mark.slow
def test_a_hostile_configuration_of_the_run_is_not_executed(tmp_path, run):
    (run / "config.yaml").write_text(YAML_CANARY.format(tmp_path / "canary"))
    finished(tmp_path, "run_dir=run", "resume=true", status=1)
    (run / "config.yaml").write_text("run_dir: ${oc.env:HOME}\nmodel:\n  _target_: os.system\n")
    finished(tmp_path, "run_dir=run", "resume=true", status=1)
    assert not (tmp_path / "canary").exists()


HEADER = json.dumps({"a": {"dtype": "F32", "shape": [1 << 40],
                           "data_offsets": [0, 1 << 42]}}).encode()


@pytest.mark.parametrize("content", [b"", struct.pack("<Q", 1 << 60),
                                     struct.pack("<Q", len(HEADER)) + HEADER, b"\xff" * 100,
                                     struct.pack("<Q", 2) + b"{}", struct.pack("<Q", 9) + b"[" * 9],
                         ids=range(6))
def test_weights_whose_sizes_lie_are_a_sentence(run, content):
    for folder in (run / "checkpoints").glob("step_*"):
        (folder / "model.safetensors").write_bytes(content)
        forge(folder)
    with pytest.raises(UserError):
        load_run(run)


@pytest.mark.parametrize("manifest", ["", "[]", "null", "7", "[" * 100_000, '{"format": 1}',
                                      '{"format": 1, "step": "../../x", "files": {}}',
                                      '{"format": [1], "step": 8, "files": {}}',
                                      '{"format": 1, "step": 8, "files": {"../../../outside": 1}}',
                                      '{"format": 1, "step": 8, "files": {"model.safetensors": '
                                      '{"bytes": -1, "sha256": 5}}}'], ids=range(10))
def test_a_manifest_that_makes_no_sense_is_a_damaged_checkpoint(run, manifest):
    (run / "checkpoints" / "step_00000008" / MANIFEST).write_text(manifest)
    said = []
    assert find_checkpoint(run, "last", said.append)[1]["step"] == 4
    assert len(said) == 1 and "step_00000008 is damaged" in said[0]


@pytest.mark.parametrize("name", ["../../outside", "/etc", "step_00000004/../../..", "step_9",
                                  "x" * 5000, "step_00000004\0"])
def test_a_name_that_climbs_out_of_the_folder_is_not_followed(run, name):
    for pointer in ("best", "last"):
        (run / "checkpoints" / pointer).write_text(name)
        assert find_checkpoint(run, pointer, pytest.fail)[1]["step"] == 8


@pytest.mark.parametrize("tokenizer", ["[]", "null", '{"kind": "bpe"}',
                                       '{"kind": "bpe", "pattern": "(", "tokens": []}',
                                       "[" * 100_000,
                                       '{"kind": "char", "alphabet": 7}', '{"kind": "os.system"}',
                                       '{"kind": "bpe", "pattern": "x", "tokens": {"a": "b"}}'],
                         ids=range(8))
def test_a_tokenizer_that_is_none_is_a_sentence(run, tokenizer):
    for folder in (run / "checkpoints").glob("step_*"):
        (folder / "tokenizer.json").write_text(tokenizer)
        forge(folder)
    with pytest.raises(UserError, match="does not hold a tokenizer"):
        load_run(run)


# --- links ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_links_in_a_run_are_replaced_and_never_written_through(tmp_path, text_file, whole, run):
    outside = tmp_path / "outside"
    (outside / "folder").mkdir(parents=True)
    (outside / "folder" / "kept").write_text("mine")
    names = ["metrics.jsonl", "samples.jsonl", "config.yaml", "attention/step_00000012.npz",
             "attention/step_00000012.png",
             "checkpoints/last", "checkpoints/best", "checkpoints/.last.part",
             "attention/.step_00000012.npz.part", ".metrics.jsonl.part"]
    for number, name in enumerate(names):
        inside, target = run / name, outside / str(number)
        target.write_bytes(inside.read_bytes() if inside.exists() else b"mine")
        inside.unlink(missing_ok=True)
        inside.symlink_to(target)
    for name in ("step_00000012", ".step_00000012.part", "step_00000002"):
        (run / "checkpoints" / name).symlink_to(outside / "folder")
    before = {p: p.read_bytes() for p in outside.rglob("*") if p.is_file()}
    finished(tmp_path, *tiny(text_file, "resume=true"))
    assert_same_run(whole, run)
    assert {p: p.read_bytes() for p in outside.rglob("*") if p.is_file()} == before


@pytest.mark.slow
def test_a_link_for_a_lock_is_refused_and_not_emptied(tmp_path, text_file, run):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (run / ".lock").unlink(missing_ok=True)
    (run / ".lock").symlink_to(victim)
    assert "has a link for its .lock" in finished(tmp_path, *tiny(text_file, "resume=true"),
                                                  status=1)
    assert victim.read_text() == "mine"


# --- the cache of prepared text -------------------------------------------------------------------


@pytest.mark.parametrize("change", [{"dtype": "object"}, {"dtype": "O8"}, {"dtype": "float64"},
                                    {"train_tokens": 1 << 60}, {"train_tokens": -1},
                                    {"train_tokens": "all"}, {"dtype": ["u1"]}, {"dtype": None}],
                         ids=str)
def test_prepared_text_whose_sizes_or_types_lie_is_prepared_again(
        tmp_path, text_file, monkeypatch, change):
    monkeypatch.setenv("GLASSGPT_CACHE", str(tmp_path / "cache"))
    settings = DataConfig(source="text", path=str(text_file)), TokenizerConfig(name="char")
    whole = prepare(*settings, print).train.tolist()
    meta, = (tmp_path / "cache").glob("*/meta.json")
    meta.write_text(json.dumps(json.loads(meta.read_text()) | change))
    said = []
    tokens = prepare(*settings, said.append)
    assert tokens.train.tolist() == whole and "is damaged" in said[0]


@pytest.mark.parametrize("name", ["meta.json", "tokenizer.json"])
def test_a_pickle_in_the_cache_is_never_loaded(tmp_path, text_file, monkeypatch, name):
    monkeypatch.setenv("GLASSGPT_CACHE", str(tmp_path / "cache"))
    settings = DataConfig(source="text", path=str(text_file)), TokenizerConfig(name="char")
    prepare(*settings, print)
    file, = (tmp_path / "cache").glob(f"*/{name}")
    file.write_bytes(pickle.dumps(Canary(tmp_path / "canary")))
    prepare(*settings, print)
    assert not (tmp_path / "canary").exists()
