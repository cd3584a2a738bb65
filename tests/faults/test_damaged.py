"""Whatever a file that is read holds, and where a link leads: what is known stays known, what is
wrong is a sentence, nothing is executed, and nothing is written elsewhere."""

import errno
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
from processes import Process, assert_same_run, copy_after_8_steps, fault_at_call, rows, run_to_end
from processes import tiny_arguments as typed
from safetensors.torch import load_file

import attention_maps.snapshot
import training.evaluate
from cli.command import explain_error
from cli.config_file import read_config
from common.errors import UserError
from data.tokens import Tokens, prepare
from report.page import write_page
from report.sweep import read_sweep
from training.checkpoint import (
    FILES,
    MANIFEST,
    MODEL,
    _remove,
    _sealed,
    find_checkpoint,
    load_run,
    read_pointer,
    saved_steps,
)

# --- whatever a file holds ------------------------------------------------------------------------


class Canary:
    """What runs where its pickle is loaded: it leaves a file."""

    def __reduce__(self):
        return os.mkdir, (CANARY,)


CANARY = str(Path(tempfile.gettempdir(), f"canary_{os.getpid()}"))
HEADER = json.dumps(
    {"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}
).encode()
ANCHORS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefghi", "bcdefghij")
)
CONTENTS = [
    b"",
    b"\0",
    b"{}",
    b"[]",
    b"null",
    b"7",
    b"\n\n",
    b"[" * 100_000,
    b"\xff\xfe" * 50,
    b"# " + b"x" * 2_000_000,
    ANCHORS.encode(),
    pickle.dumps(Canary()),
    f"!!python/object/apply:os.mkdir ['{CANARY}']\n".encode(),
    b"run_dir: ${oc.env:HOME}\nmodel:\n  _target_: os.system\n",
    b"seed: [1]",
    b"model: {n_layer: 1000000000}",
    b"model: {n_embd: " + b"9" * 5000 + b"}",
    struct.pack("<Q", 1 << 60),
    struct.pack("<Q", len(HEADER)) + HEADER,
    struct.pack("<Q", 2) + b"{}",
    struct.pack("<Q", 9) + b"[" * 9,
    b'{"step": 9, "val/loss": "low"}\n',
    b'{"step": ' + b"9" * 5000 + b"}\n",
    b'{"step": -1}\n',
    b'{"format": 1, "step": 8, "files": {"../../../outside": 1}}',
    b'{"format": [1], "step": 8}',
    b'{"kind": "os.system"}',
    b'{"kind": "bpe", "pattern": "(", "tokens": []}',
    b'{"kind": "char", "alphabet": 7}',
    b"../../outside",
    b"/etc",
    b"step_00000004/../../..",
    b"step_00000004\0",
    b"x" * 5000,
]
PIECES = [b"null", b"-", b"9" * 30, b'"', b"[", b"{}", b"NaN", b"\0", b"\n", b": "]
places = st.floats(0, 1, exclude_max=True)
damages = st.one_of(
    st.tuples(st.just("cut"), places, st.just(b"")),
    st.tuples(st.just("flip"), places, st.integers(1, 255).map(lambda bits: bytes([bits]))),
    st.tuples(st.just("put"), places, st.sampled_from(PIECES)),
    st.tuples(st.just("hold"), st.just(0.0), st.sampled_from(CONTENTS)),
    st.tuples(st.sampled_from(["absent", "pipe", "folder", "loop"]), st.just(0.0), st.just(b"")),
)


def damage(path: Path, kind: str, place: float, piece: bytes) -> None:
    """Cut a file at a place, flip bits there, put a piece there, hold another content, or be no
    file at all."""
    data = path.read_bytes()
    at = int(place * len(data))
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind != "absent":
        flipped = bytes(a ^ b for a, b in zip(data[at : at + 1], piece)) + data[at + 1 :]
        path.write_bytes(
            {
                "cut": data[:at],
                "flip": data[:at] + flipped,
                "hold": piece,
                "put": data[:at] + piece + data[at:],
            }[kind]
        )


@contextmanager
def at_most_a_sentence():
    """Within this nothing hangs, nothing of what is read is executed, and what is raised is told by
    the command line in a sentence."""

    def late(*_):
        raise AssertionError("it waits, or takes very long")

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
    """Write the manifest of a checkpoint as its author would, with the hashes of what is there and
    these changes."""
    manifest = json.loads((folder / MANIFEST).read_text())
    for name in manifest["files"]:
        if (folder / name).is_file():
            content = (folder / name).read_bytes()
            manifest["files"][name] = {
                "bytes": len(content),
                "sha256": hashlib.sha256(content).hexdigest(),
            }
    manifest.pop("sha256")
    (folder / MANIFEST).write_text(_sealed(json.dumps(manifest | changes, indent=1)))


@pytest.fixture
def place(pristine, tmp_path) -> Path:
    return shutil.copytree(pristine, tmp_path / "place")


def prepared(place: Path) -> Tokens:
    """The text of the run there, with a cache of its own."""
    config = read_config(place / "sweep" / "job" / "config.yaml")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLASSGPT_CACHE", str(place / "cache"))
        return prepare(config.data, config.tokenizer, lambda line: None)


@pytest.fixture(scope="module")
def pristine(finished_run, shared) -> Path:
    """A run with checkpoints of steps 4 and 8, which is the job of a sweep too, and a cache."""

    def make(folder: Path) -> None:
        run = copy_after_8_steps(finished_run, folder / "sweep" / "job")
        job = {"overrides": {"seed": "1"}, "swept": ["seed"], "failed": ""}
        (run / "job.json").write_text(json.dumps(job))
        prepared(folder)

    return shared("pristine", make)


@pytest.fixture
def run(finished_run, tmp_path) -> Path:
    """A copy of the whole run, as it was after 8 steps, with the checkpoints of steps 4 and 8."""
    return copy_after_8_steps(finished_run, tmp_path / "run")


def read_checkpoint(place: Path) -> None:
    """What is loaded is the newest checkpoint, or with a note the one before."""
    run, said = place / "sweep" / "job", []
    loaded = load_run(run, "last", said.append)[0].state_dict()
    right = load_file(run / "checkpoints" / f"step_0000000{4 if said else 8}" / MODEL)
    assert all(loaded[name].equal(tensor) for name, tensor in right.items())


def read_forged(place: Path) -> None:
    """What an author wrote with the right hashes is loaded, or is a sentence."""
    forge(place / STEP)
    load_run(place / "sweep" / "job", "8", lambda note: None)


def read_pointers(place: Path) -> None:
    run = place / "sweep" / "job"
    for which in ("best", "last"):
        assert find_checkpoint(run, which, pytest.fail)[0].parent == run / "checkpoints"


def read_folder(place: Path) -> None:
    """What is read for a page, for the table of a sweep, to go on, and to sample."""
    run = place / "sweep" / "job"
    for read in (
        lambda: read_config(run / "config.yaml"),
        lambda: read_sweep(place / "sweep"),
        lambda: write_page(run),
        lambda: find_checkpoint(run, "best", pytest.fail),
    ):
        with at_most_a_sentence():
            read()


def read_cache(place: Path) -> None:
    """What is damaged is prepared again."""
    assert prepared(place).train.tobytes() == prepared(place).train.tobytes()


STEP = "sweep/job/checkpoints/step_00000008"
READ = [
    *((f"{STEP}/{name}", read_checkpoint) for name in (*FILES, MANIFEST)),
    *((f"{STEP}/{name}", read_forged) for name in FILES if name != "optimizer.safetensors"),
    *((f"sweep/job/checkpoints/{name}", read_pointers) for name in ("best", "last")),
    *(
        (f"sweep/job/{name}", read_folder)
        for name in (
            "config.yaml",
            "metrics.jsonl",
            "samples.jsonl",
            "job.json",
            "attention/step_00000012.npz",
        )
    ),
    *((f"cache/*/{name}", read_cache) for name in ("meta.json", "tokenizer.json", "train.bin")),
]


@pytest.mark.slow
@pytest.mark.parametrize("name, read", READ, ids=lambda value: getattr(value, "__name__", value))
@settings(
    max_examples=settings.default.max_examples // 5,
    phases=[Phase.explicit, Phase.generate],  # others take minutes where one fails
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@example(how=("hold", 0.0, pickle.dumps(Canary())))
@example(how=("pipe", 0.0, b""))
@given(how=damages)
def test_whatever_a_file_holds_is_read_or_is_told_in_a_sentence(place, name, read, how):
    (path,) = place.glob(name)
    kept = {path: path.read_bytes() for path in (path, place / STEP / MANIFEST)}
    damage(path, *how)
    try:
        with at_most_a_sentence():
            read(place)
    finally:
        for path, content in kept.items():
            _remove(path)
            path.write_bytes(content)


# --- checkpoints ----------------------------------------------------------------------------------


def test_a_damaged_best_gives_way_to_the_checkpoints_before_it_and_then_to_those_after_it(
    finished_run, run
):
    shutil.copytree(
        finished_run / "checkpoints" / "step_00000006", run / "checkpoints" / "step_00000006"
    )
    (run / "checkpoints" / "best").write_text("step_00000006")
    said = []
    for damaged, taken in ((6, 4), (4, 8)):
        (run / "checkpoints" / f"step_{damaged:08d}" / "model.safetensors").write_bytes(b"")
        assert find_checkpoint(run, "best", said.append)[1]["step"] == taken
        assert "is damaged" in said[-1] and f"taking that of step {taken}" in said[-1]


NO_ROWS = [
    "{}",
    "[]",
    "7",
    "null",
    '{"step": "9"}',
    '{"step": true}',
    '{"step": -1}',
    "\0",
    "",
    '{"step": 9.5}',
    "[" * 100_000,
    '{"step": 9, "val/loss": ' + "9" * 401 + "}",
    '{"step": 9, "val/loss": "low"}',
    '{"step": 9',
]


def losses(*values):
    """A fault: the evaluations give these losses, one after the other."""

    def fault():
        rest = iter(values)  # at last the training split's comes too
        training.evaluate.Windows.loss = lambda self, model: next(rest, 9.0)

    return fault


@pytest.mark.slow
def test_a_damaged_record_costs_neither_the_best_checkpoint_nor_a_row_that_can_be_read(
    tmp_path, text_file
):
    run = tmp_path / "run"
    argv = typed(text_file, "attention.every=0", "checkpoint.keep=1")
    run_to_end(tmp_path, *argv, fault=losses(5.0, 1.0, 2.0, 3.0))
    assert saved_steps(run) == [4, 12] and read_pointer(run, "best") == 4
    lines = (run / "metrics.jsonl").read_text().splitlines()
    del lines[4]  # the best row
    (run / "metrics.jsonl").write_text("\n".join([*NO_ROWS, *lines, '{"step": 1']))
    before = (run / "metrics.jsonl").read_bytes()
    (run / "checkpoints" / "best").write_text("")
    said = run_to_end(
        tmp_path, "run_dir=run", "resume=true", "max_steps=20", fault=losses(2.5, 2.5)
    )
    assert re.search(rf"^note: .*\b{len(NO_ROWS)}\b.*metrics\.jsonl", said, re.MULTILINE)
    assert [row["step"] for row in rows(run)] == [0, 1, 2, 3, *range(5, 21)]
    assert (run / "metrics.jsonl.before").read_bytes() == before
    assert saved_steps(run) == [4, 20] and read_pointer(run, "best") == 4


@pytest.mark.slow
def test_a_resume_keeps_what_it_cannot_read_and_drops_what_came_later(tmp_path, text_file, run):
    newer = run / "checkpoints" / "step_00000008"
    forge(newer, format=9)
    weights = (newer / MODEL).read_bytes()
    said = run_to_end(
        tmp_path, *typed(text_file, "resume=true", "max_steps=5", "attention.every=0")
    )
    assert "its format is 9" in said and "taking that of step 4" in said
    assert (newer.with_name("aside_1_step_00000008") / MODEL).read_bytes() == weights
    assert sorted(p.name for p in run.glob("attention/*.npz")) == [
        "step_00000000.npz",
        "step_00000005.npz",
    ]  # that of step 6 was on another way


@pytest.mark.slow
def test_a_best_that_could_not_be_noted_once_is_kept_and_noted_the_next_time(tmp_path, text_file):
    argv = typed(text_file, "attention.every=0", "checkpoint.keep=1")

    def fault():
        losses(5.0, 1.0, 2.0, 3.0)()
        fault_at_call(Path, "replace", 1, no_room, when=lambda part, to: Path(to).name == "best")()

    def no_room():
        raise OSError(errno.ENOSPC, "No space left on device")

    run_to_end(tmp_path, *argv, fault=fault)
    assert saved_steps(tmp_path / "run") == [4, 12]
    assert read_pointer(tmp_path / "run", "best") == 4


@pytest.mark.slow
def test_what_fails_while_it_looks_at_the_run_finds_the_steps_checkpoint_on_disk(
    tmp_path, text_file
):
    def fail():
        raise RuntimeError("on purpose")

    process = Process(
        tmp_path,
        *typed(text_file, "attention.every=8"),
        fault=fault_at_call(attention_maps.snapshot.Snapshots, "take", 2, fail),
    )
    assert process.wait() == 1 and "on purpose" in process.output()
    assert find_checkpoint(tmp_path / "run", "last", pytest.fail)[1]["step"] == 8


@pytest.mark.parametrize(
    "change",
    [("n_embd: 32", "n_embd: 3200"), ("n_layer: 2", "n_layer: 3"), ("n_head: 2", "n_head: 4")],
)
def test_a_model_that_its_weights_do_not_fill_is_never_made(run, change, monkeypatch):
    for folder in run.glob("checkpoints/step_*"):
        path = folder / "config.yaml"
        path.write_text(path.read_text().replace(*change))
        forge(folder)
    with pytest.raises(UserError, match="holds another model"):
        load_run(run)


# --- links ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_links_in_a_run_are_replaced_and_never_written_through(
    tmp_path, text_file, finished_run, run
):
    outside = tmp_path / "outside"
    (outside / "folder").mkdir(parents=True)
    (outside / "folder" / "kept").write_text("mine")
    names = [
        "metrics.jsonl",
        "metrics.jsonl.before",
        "samples.jsonl",
        "config.yaml",
        "attention/step_00000012.npz",
        "attention/step_00000012.png",
        "checkpoints/last",
        "checkpoints/best",
        "checkpoints/.last.part",
        "attention/.step_00000012.npz.part",
        ".metrics.jsonl.part",
    ]
    for number, name in enumerate(names):
        inside, target = run / name, outside / str(number)
        target.write_bytes(inside.read_bytes() if inside.exists() else b"mine")
        inside.unlink(missing_ok=True)
        inside.symlink_to(target)
    for name in ("step_00000012", ".step_00000012.part", "step_00000002"):
        (run / "checkpoints" / name).symlink_to(outside / "folder")
    before = {p: p.read_bytes() for p in outside.rglob("*") if p.is_file()}
    run_to_end(tmp_path, *typed(text_file, "resume=true"))
    assert_same_run(finished_run, run)
    assert {p: p.read_bytes() for p in outside.rglob("*") if p.is_file()} == before


# --- the code -------------------------------------------------------------------------------------

FORBIDDEN = re.compile(
    r"^ *(?:import|from) (?:c?[pP]ickle|dill|joblib|shelve|marshal|subprocess)\b|allow_pickle"
    r"|(?<![.\w])(?:eval|exec|compile|__import__|input)\("
    r"|\b(?:torch\.load|torch\.save|yaml\.(?:unsafe_)?load|os\.system|os\.popen|instantiate)\(",
    re.MULTILINE,
)


def test_the_code_loads_no_pickle_evaluates_nothing_and_starts_no_process():
    found = {
        (path.relative_to(ROOT).as_posix(), what)
        for path in ROOT.rglob("*.py")
        if path.relative_to(ROOT).parts[0] not in (".ci", "tests", "benchmarks", ".venv")
        for what in FORBIDDEN.findall(path.read_text(encoding="utf-8"))
    }
    assert found == {  # a line that is asked for
        ("interop/nanogpt.py", "torch.load(")
    }  # with weights_only=True
