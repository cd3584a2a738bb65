"""Damaged and malicious files: they are read or give a one-line error, and nothing is executed.

No intact checkpoint is lost.
"""

import hashlib
import json
import os
import pickle
import re
import shutil
import signal
import struct
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import ROOT
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from processes import (
    assert_same_run,
    copy_after_8_steps,
    drop_privileges,
    pointer,
    rows,
    run_to_end,
)
from processes import tiny_arguments as typed
from run_folders import load_run
from safetensors.torch import load_file

import train
import training.device
import training.evaluate
from common.errors import UserError
from common.terminal import explain_error
from data.tokens import Tokens, prepare
from run.checkpoints import (
    CHECKPOINT_FILES,
    CHECKPOINT_FORMAT,
    MANIFEST_FILE,
    MODEL_FILE,
    seal,
)
from run.config_file import read_config
from run.run_dir import RunDir

# --- damaged files --------------------------------------------------------------------------------


class Canary:
    """An object that creates a folder when its pickle is loaded."""

    def __reduce__(self):
        return os.mkdir, (CANARY,)


CANARY = str(Path(tempfile.gettempdir(), f"canary_{os.getpid()}"))
HEADER = json.dumps(
    {"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}
).encode()
CONTENTS = [
    b"",
    b"\0",
    b"{}",
    b"null",
    b"[" * 100_000,
    b"\xff\xfe" * 50,
    b"a: &a [x, x]\nb: [*a, *a]",
    pickle.dumps(Canary()),
    f"!!python/object/apply:os.mkdir ['{CANARY}']\n".encode(),
    b"run_dir: ${oc.env:HOME}\nmodel:\n  _target_: os.system\n",
    b"model: {n_layer: 1000000000}",
    b"model: {n_embd: " + b"9" * 5000 + b"}",
    struct.pack("<Q", 1 << 60),
    struct.pack("<Q", len(HEADER)) + HEADER,
    struct.pack("<Q", 2) + b"{}",
    b'{"kind": "os.system"}',
    b'{"kind": "bpe", "pattern": "(", "tokens": []}',
    b'{"kind": "char", "alphabet": 7}',
]
PIECES = [b"null", b"-", b"9" * 30, b'"', b"[", b"{}", b"NaN", b"\0", b"\n", b": "]
places = st.floats(0, 1, exclude_max=True)
damages = st.one_of(
    st.tuples(st.just("cut"), places, st.just(b"")),
    st.tuples(st.just("flip"), places, st.integers(1, 255).map(lambda bits: bytes([bits]))),
    st.tuples(st.just("insert"), places, st.sampled_from(PIECES)),
    st.tuples(st.just("replace"), st.just(0.0), st.sampled_from(CONTENTS)),
    st.tuples(st.sampled_from(["absent", "folder"]), st.just(0.0), st.just(b"")),
)


def damage(path: Path, kind: str, place: float, piece: bytes) -> None:
    """Truncate a file, flip bits, insert or replace content, or replace it by something else.

    `place` is where in the file, from 0 to 1; `piece` holds the bits to flip, or the content.
    """
    data = path.read_bytes()
    at = int(place * len(data))
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind != "absent":
        flipped = bytes(a ^ b for a, b in zip(data[at : at + 1], piece)) + data[at + 1 :]
        path.write_bytes(
            {
                "cut": data[:at],
                "flip": data[:at] + flipped,
                "replace": piece,
                "insert": data[:at] + piece + data[at:],
            }[kind]
        )


def remove(path: Path) -> None:
    """Remove a file or a folder, if it exists."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def at_most_a_one_line_error():
    """Check that the body neither hangs nor executes what it reads, nor fails with a traceback."""

    def late(*_):
        raise AssertionError("still running after 30 seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(30)
    try:
        yield
    except Exception as e:
        why = explain_error(e)
        if why is None or "\n" in why:
            raise
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        assert not os.path.exists(CANARY)


def forge(folder: Path, **changes) -> None:
    """Rewrite the manifest of a checkpoint with the right hashes of its files and some changes."""
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    for name in manifest["files"]:
        if (folder / name).is_file():
            content = (folder / name).read_bytes()
            manifest["files"][name] = {
                "bytes": len(content),
                "sha256": hashlib.sha256(content).hexdigest(),
            }
    manifest.pop("sha256")
    (folder / MANIFEST_FILE).write_text(seal(json.dumps(manifest | changes, indent=1)))


@pytest.fixture
def place(pristine, tmp_path) -> Path:
    return shutil.copytree(pristine, tmp_path / "place")


def prepared(place: Path) -> Tokens:
    """Prepare the text of the run there, with its own cache."""
    config = read_config(place / "run" / "config.yaml")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLASSGPT_CACHE", str(place / "cache"))
        return prepare(config.data, config.tokenizer, lambda line: None)


@pytest.fixture(scope="module")
def pristine(finished_run, shared) -> Path:
    """A run with checkpoints of steps 4 and 8, and a token cache."""

    def make(folder: Path) -> None:
        run = copy_after_8_steps(finished_run, folder / "run")
        prepared(folder)
        shutil.copytree(run / "checkpoints", folder / "undamaged")  # tests damage the others

    return shared("pristine", make)


@pytest.fixture
def run(finished_run, tmp_path) -> Path:
    """A copy of the finished run with the checkpoints of steps 4 and 8."""
    return copy_after_8_steps(finished_run, tmp_path / "run")


def read_checkpoint(place: Path) -> None:
    """Load the newest checkpoint; if a note was printed, it is the previous one."""
    notes = []
    loaded = load_run(place / "run", "last", notes.append)[0].state_dict()
    expected = load_file(place / "undamaged" / f"step_{4 if notes else 8:08d}" / MODEL_FILE)
    assert all(loaded[name].equal(tensor) for name, tensor in expected.items())


def read_cache(place: Path) -> None:
    """Prepare the text, which replaces damaged files."""
    assert prepared(place).train.tobytes() == prepared(place).train.tobytes()


STEP = "run/checkpoints/step_00000008"
READ = [
    *((f"{STEP}/{name}", read_checkpoint) for name in (*CHECKPOINT_FILES, MANIFEST_FILE)),
    *((f"cache/*/{name}", read_cache) for name in ("meta.json", "tokenizer.json", "train.bin")),
]


@pytest.mark.slow
@pytest.mark.parametrize("name, read", READ, ids=lambda value: getattr(value, "__name__", value))
@settings(
    max_examples=settings.default.max_examples // 5,
    phases=[Phase.explicit, Phase.generate],  # shrinking a failure takes minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@example(how=("replace", 0.0, pickle.dumps(Canary())))
@given(how=damages)
def test_a_damaged_file_is_read_or_gives_a_one_line_error(place, name, read, how):
    (path,) = place.glob(name)
    originals = {path: path.read_bytes() for path in (path, place / STEP / MANIFEST_FILE)}
    damage(path, *how)
    try:
        with at_most_a_one_line_error():
            read(place)
    finally:
        for path, content in originals.items():
            remove(path)
            path.write_bytes(content)


# --- checkpoints ----------------------------------------------------------------------------------


def test_a_damaged_best_checkpoint_is_replaced_by_the_next_best(finished_run, run):
    best = run / "checkpoints" / "step_00000006"
    shutil.copytree(finished_run / "checkpoints" / best.name, best)
    forge(best, metrics={"val/loss": 0.1})
    forge(run / "checkpoints" / "step_00000004", metrics={"val/loss": 0.3})
    forge(run / "checkpoints" / "step_00000008", metrics={"val/loss": 0.2})
    assert RunDir(run).checkpoint("best", pytest.fail).step == 6
    notes = []
    for damaged, name, taken in ((6, MODEL_FILE, 8), (8, MANIFEST_FILE, 4)):
        (run / "checkpoints" / f"step_{damaged:08d}" / name).write_bytes(b"")
        assert RunDir(run).checkpoint("best", notes.append).step == taken
        assert any(f"step_{damaged:08d}" in note for note in notes) and f"{taken}" in notes[-1]


def test_a_checkpoint_of_another_format_is_refused_with_both_formats(run):
    newest = run / "checkpoints" / "step_00000008"
    forge(newest, format=3)
    with pytest.raises(UserError) as error:
        RunDir(run).checkpoint("last", pytest.fail)
    for part in (str(newest), "3", str(CHECKPOINT_FORMAT)):
        assert part in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("name", [MANIFEST_FILE, MODEL_FILE])
def test_a_resume_loses_neither_a_damaged_best_checkpoint_nor_the_best_intact_one(
    tmp_path, text_file, name
):
    run = tmp_path / "run"
    argv = typed(text_file, "attention.every=0", "checkpoint.keep=3")
    run_to_end(tmp_path, *argv, fault=losses(9.0, 1.0, 2.0, 3.0))
    best = run / "checkpoints" / "step_00000004"
    damage(best / name, "flip", 0.5, b"\1")
    damaged = (best / name).read_bytes()
    notes = []
    finished = train.report_finished(
        RunDir(run).config, RunDir(run), RunDir(run).find_start(pytest.fail), notes.append
    )
    assert finished == 2.0 and any(best.name in note for note in notes)
    command = ("run_dir=run", "resume=true", "max_steps=20", "checkpoint.keep=1")
    output = run_to_end(tmp_path, *command, fault=losses(2.5, 2.5))
    aside = best.with_name(f"aside_1_{best.name}")
    assert [*best.parent.glob("aside_*")] == [aside] and aside.name in output
    assert (aside / name).read_bytes() == damaged
    assert RunDir(run).steps() == [8, 20] and pointer(run, "best") == 8


@pytest.mark.slow
@pytest.mark.parametrize("name", [MANIFEST_FILE, MODEL_FILE])
def test_a_checkpoint_without_permission_is_not_called_damaged_and_nothing_is_removed(
    tmp_path, run, name
):
    file = run / "checkpoints" / "step_00000008" / name
    file.chmod(0)
    before = sorted(run.glob("checkpoints/*/*"))
    command = ("run_dir=run", "resume=true", "checkpoint.keep=1")
    run_to_end(tmp_path, *command, status=1, fault=drop_privileges)
    (message,) = (tmp_path / "err.txt").read_text().splitlines()
    assert name in message and "ermission denied" in message and "damaged" not in message
    assert sorted(run.glob("checkpoints/*/*")) == before


NO_ROWS = ["\0", "", "7", '{"step": 9', '{"stdp": 9}']


def losses(*values):
    """Return a fault: the evaluations give these losses in turn, and then 9.0."""

    def fault():
        remaining = iter(values)
        training.evaluate.Windows.measure = lambda self, model: {"loss": next(remaining, 9.0)}

    return fault


@pytest.mark.slow
def test_a_damaged_log_loses_neither_the_best_checkpoint_nor_a_readable_row(tmp_path, text_file):
    run = tmp_path / "run"
    argv = typed(text_file, "attention.every=0", "checkpoint.keep=1")
    run_to_end(tmp_path, *argv, fault=losses(5.0, 1.0, 2.0, 3.0))
    assert RunDir(run).steps() == [4, 12] and pointer(run, "best") == 4
    lines = (run / "metrics.jsonl").read_text().splitlines()
    del lines[4]  # the best row
    (run / "metrics.jsonl").write_text("\n".join([*NO_ROWS, *lines, '{"step": 1']))
    before = (run / "metrics.jsonl").read_bytes()
    (run / "checkpoints" / "best").write_text("")
    output = run_to_end(
        tmp_path, "run_dir=run", "resume=true", "max_steps=20", fault=losses(2.5, 2.5)
    )
    assert any(
        "metrics.jsonl" in note and f"{len(NO_ROWS)}" in note for note in output.splitlines()
    )
    assert [row["step"] for row in rows(run)] == [0, 1, 2, 3, *range(5, 21)]
    assert (run / "metrics.jsonl.before").read_bytes() == before
    assert RunDir(run).steps() == [4, 20] and pointer(run, "best") == 4


@pytest.mark.slow
def test_a_resume_sets_unreadable_checkpoints_aside_and_drops_later_snapshots(
    tmp_path, text_file, run
):
    newer = run / "checkpoints" / "step_00000008"
    (newer / MANIFEST_FILE).write_text("{}")
    weights = (newer / MODEL_FILE).read_bytes()
    output = run_to_end(
        tmp_path, *typed(text_file, "resume=true", "max_steps=5", "attention.every=0")
    )
    assert "step_00000008" in output and "step 4" in output
    assert (newer.with_name("aside_1_step_00000008") / MODEL_FILE).read_bytes() == weights
    assert sorted(p.name for p in run.glob("attention/*.npz")) == [
        "step_00000000.npz",
        "step_00000005.npz",
    ]  # that of step 6 belonged to the other continuation


# --- configuration --------------------------------------------------------------------------------


def test_a_resume_takes_the_settings_of_the_checkpoint_and_writes_config_yaml_anew(
    tmp_path, run, finished_run
):
    path = run / "config.yaml"
    path.write_text("}{")
    run_to_end(tmp_path, "run_dir=run", "resume=true")
    assert_same_run(finished_run, run)
    assert path.read_text() == (run / "checkpoints" / "step_00000012" / "config.yaml").read_text()


# --- the code -------------------------------------------------------------------------------------

FORBIDDEN = re.compile(
    r"^ *(?:import|from) (?:c?[pP]ickle|dill|joblib|shelve|marshal|subprocess)\b|allow_pickle"
    r"|(?<![.\w])(?:eval|exec|compile|__import__|input)\("
    r"|\b(?:torch\.load|torch\.save|yaml\.(?:unsafe_)?load|os\.system|os\.popen|instantiate)\(",
    re.MULTILINE,
)


def test_the_code_neither_loads_pickles_nor_evaluates_text_nor_starts_processes():
    uses = {
        (path.relative_to(ROOT).as_posix(), what)
        for path in ROOT.rglob("*.py")
        if path.relative_to(ROOT).parts[0] not in (".ci", "tests", "benchmarks", ".venv")
        for what in FORBIDDEN.findall(path.read_text(encoding="utf-8"))
    }
    assert uses == {
        ("glass/heads/say/attention_grid.py", "import subprocess"),  # of fontconfig
        ("interop/torch_file.py", "torch.load("),  # with weights_only=True
        ("sample.py", "input("),  # of interactive=true
    }
