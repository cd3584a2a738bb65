"""A run's record that was damaged, or is not what it should be: nothing that is known is lost, and
what is wrong is a sentence."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from processes import Process, after_8_steps, finished, rows, tiny
from safetensors.torch import load_file, save_file
from test_hostile import forge

import training.evaluate
import training.optim
from config import UserError
from files import best_row, read_rows
from training.checkpoint import (
    MANIFEST,
    _sealed,
    find_checkpoint,
    load_run,
    read_pointer,
    saved_steps,
)

pytestmark = pytest.mark.slow


def losses(*values):
    """A fault: the evaluations give these losses, one after the other."""

    def fault():
        rest = iter(values)
        training.evaluate.Validation.evaluate = lambda self, model, between: (next(rest), 1.0)

    return fault


@pytest.fixture(scope="module")
def best_at_4(text_file, tmp_path_factory) -> Path:
    """A run of 12 steps whose loss was best after 4, with checkpoints of steps 4 and 12."""
    folder = tmp_path_factory.mktemp("best")
    finished(folder, *tiny(text_file, "attention.every=0", "checkpoint.keep=1"),
             fault=losses(5.0, 1.0, 2.0, 3.0))
    assert saved_steps(folder / "run") == [4, 12] and read_pointer(folder / "run", "best") == 4
    return folder / "run"


@pytest.fixture
def run(best_at_4, tmp_path) -> Path:
    return shutil.copytree(best_at_4, tmp_path / "run")


def sealed_without(run: Path, *keys: str) -> None:
    """Take entries out of the manifests, as an earlier version wrote them."""
    for path in run.glob(f"checkpoints/step_*/{MANIFEST}"):
        manifest = {
            key: value
            for key, value in json.loads(path.read_text()).items()
            if key not in (*keys, "sha256")
        }
        path.write_text(_sealed(json.dumps(manifest, indent=1)))


def blank_line(run):
    path = run / "metrics.jsonl"
    path.write_text("\n" + path.read_text())


def flipped_byte(run):
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    lines[4] = bytes([lines[4][0] ^ 1]) + lines[4][1:]  # the best row
    (run / "metrics.jsonl").write_bytes(b"".join(lines))


def no_metrics(run):
    (run / "metrics.jsonl").unlink()


def empty_best(run):
    (run / "checkpoints" / "best").write_text("")


def both(run):
    flipped_byte(run)
    empty_best(run)


DAMAGES = [blank_line, flipped_byte, no_metrics, empty_best, both]


@pytest.mark.parametrize("damage, version", [
    *((damage, "now") for damage in DAMAGES), (both, "earlier"),
    *(pytest.param(damage, "earlier", marks=pytest.mark.soak) for damage in DAMAGES[:-1])])
def test_a_damaged_record_costs_neither_the_best_checkpoint_nor_a_row_that_can_be_read(
    tmp_path, run, damage, version
):
    if version == "earlier":
        sealed_without(run, "best", "kept", "changes")
    damage(run)
    before = [row["step"] for row in read_rows(run / "metrics.jsonl")]
    said = finished(
        tmp_path, "run_dir=run", "resume=true", "max_steps=20", fault=losses(2.5, 2.5, 2.5)
    )
    assert 4 in saved_steps(run)
    assert {row["step"] for row in rows(run)} >= {*before, 16, 20}
    if version == "now" or damage in (blank_line, empty_best, flipped_byte):
        assert read_pointer(run, "best") == 4
    if version == "now":
        assert best_row(rows(run))["step"] == 4 and "best validation loss 1.0000" in " ".join(
            said.split()
        )
    assert (run / "metrics.jsonl.damaged").exists() == (damage in (blank_line, flipped_byte, both))
    assert ("metrics.jsonl has damaged lines (1)" in said) == (
        damage in (blank_line, flipped_byte, both)
    )


def test_a_record_that_is_damaged_again_is_kept_beside_the_first(tmp_path, run):
    for name, steps in (("metrics.jsonl.damaged", 13), ("metrics.jsonl.damaged1", 14)):
        blank_line(run)
        before = (run / "metrics.jsonl").read_bytes()
        finished(tmp_path, "run_dir=run", "resume=true", f"max_steps={steps}")
        assert (run / name).read_bytes() == before


NO_ROWS = [
    "{}",
    "[]",
    "7",
    "null",
    '{"step": "9"}',
    '{"step": true}',
    '{"step": -1}',
    '{"step": 9.5}',
    "\0",
    "[" * 100_000,
    '{"step": 9, "val/loss": "low"}',
    '{"step": ' + "9" * 5000 + "}",
]


def test_rows_of_another_kind_are_left_out_and_no_traceback(tmp_path, run):
    for name in ("metrics.jsonl", "samples.jsonl"):
        (run / name).write_text("\n".join(NO_ROWS) + "\n" + (run / name).read_text())
    assert "is finished" in finished(tmp_path, "run_dir=run", "resume=true")
    said = finished(tmp_path, "run_dir=run", "resume=true", "max_steps=13", fault=losses(2.5))
    assert said.count(f"damaged lines ({len(NO_ROWS)})") == 2
    assert [row["step"] for row in rows(run)] == list(range(14))


def test_a_damaged_best_gives_way_to_the_checkpoints_before_it_and_then_to_those_after_it(
    tmp_path, text_file, whole
):
    run = after_8_steps(whole, tmp_path / "run")
    shutil.copytree(whole / "checkpoints" / "step_00000006", run / "checkpoints" / "step_00000006")
    (run / "checkpoints" / "best").write_text("step_00000006")
    said = []
    for damaged, taken in ((6, 4), (4, 8)):
        (run / "checkpoints" / f"step_{damaged:08d}" / "model.safetensors").write_bytes(b"")
        assert find_checkpoint(run, "best", said.append)[1]["step"] == taken
        assert "is damaged" in said[-1] and f"taking that of step {taken}" in said[-1]
    finished(tmp_path, "run_dir=run", "max_new_tokens=5", script="sample.py")


def test_a_finished_run_with_an_emptied_best_is_sampled_from_its_best(run):
    empty_best(run)
    assert find_checkpoint(run, "best", pytest.fail)[1]["step"] == 4


def test_after_the_text_changed_best_is_the_best_on_the_present_text(tmp_path, text_file):
    mine = tmp_path / "mine.txt"
    mine.write_text(text_file.read_text(encoding="utf-8"), encoding="utf-8")
    finished(tmp_path, *tiny(mine, "attention.every=0"), fault=losses(5.0, 1.0, 2.0, 3.0))
    mine.write_text(text_file.read_text(encoding="utf-8")[::-1], encoding="utf-8")
    go_on = ["run_dir=run", "resume=true", "accept_changed_data=true"]
    said = finished(tmp_path, *go_on, "max_steps=24", fault=losses(4.0, 3.5, 3.8))
    assert "best validation loss 3.5000" in " ".join(said.split()) and "after 20 steps" in said
    assert read_pointer(tmp_path / "run", "best") == 20
    assert best_row(rows(tmp_path / "run"))["step"] == 20
    said = finished(tmp_path, *go_on, "max_steps=28", fault=losses(3.6))
    assert "best validation loss 3.5000" in " ".join(said.split())
    assert read_pointer(tmp_path / "run", "best") == 20


# --- what is no file, or leads elsewhere


@pytest.mark.parametrize("name", ["checkpoints", "attention", "wandb"])
def test_a_link_for_a_folder_of_the_run_is_refused_and_nothing_is_written_where_it_leads(
    tmp_path, run, name
):
    outside = tmp_path / "outside"
    (run / name).mkdir(exist_ok=True)
    shutil.move(run / name, outside)
    (run / name).symlink_to(outside)
    before = {path: path.stat().st_mtime_ns for path in (outside, *outside.rglob("*"))}
    said = finished(tmp_path, "run_dir=run", "resume=true", "max_steps=16", status=1)
    assert f"run_dir=run has a link for its {name}" in said and said.count("\n") == 1
    assert {path: path.stat().st_mtime_ns for path in (outside, *outside.rglob("*"))} == before


@pytest.mark.parametrize(
    "name",
    [
        "config.yaml",
        "metrics.jsonl",
        "checkpoints/best",
        *(
            f"checkpoints/step_00000012/{name}"
            for name in ("manifest.json", "tokenizer.json", "model.safetensors")
        ),
    ],
)
def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path, run, name):
    (run / name).unlink()
    os.mkfifo(run / name)
    for script, *argv in (
        ("train.py", "resume=true", "max_steps=16"),
        ("sample.py", "max_new_tokens=5"),
    ):
        process = Process(tmp_path, "run_dir=run", *argv, script=script)
        assert process.wait(60) in (0, 1) and "Traceback" not in process.said()
        if process.status:
            assert "it is not an ordinary file" in process.said()


# --- configurations and tensors that lie


ANCHORS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefghi", "bcdefghij")
)


@pytest.mark.parametrize(
    "content, why",
    [
        (ANCHORS, "anchors"),
        ("[" * 50_000, "does not fit"),
        ("# " + "x" * 2_000_000, "at most 1,048,576 bytes"),
        ("model: {n_layer: 1000000000}", "n_layer=1000000000 must be at most"),
        ("model: {n_embd: -1}", "n_embd=-1 must be at least 1"),
        ("model: {n_embd: " + "9" * 5000 + "}", "does not fit"),
        ("seed: [1]", "does not fit"),
        ("[]", "does not fit"),
        ("", "does not fit"),
    ],
    ids=range(9),
)
def test_a_configuration_that_would_fill_the_memory_or_makes_no_sense_is_a_sentence(
    tmp_path, run, content, why
):
    (run / "config.yaml").write_text(content)
    said = finished(tmp_path, "run_dir=run", "resume=true", status=1)
    assert why in said and said.count("\n") == 1
    for folder in run.glob("checkpoints/step_*"):
        (folder / "config.yaml").write_text(content)
        forge(folder)
    with pytest.raises(UserError, match=r"does not fit|cannot be read"):
        load_run(run)


@pytest.mark.parametrize(
    "change, why",
    [
        (("n_layer: 2", "n_layer: 9000"), "too few for the 9000 layers"),
        (("n_embd: 32", "n_embd: 32000000"), "holds another model"),
        (("n_embd: 32", "n_embd: 9000000000000"), "larger than any memory"),
        (("n_embd: 32", "n_embd: 3200"), "holds another model"),
        (("block_size: 32", "block_size: 33"), "holds another model"),
    ],
    ids=range(5),
)
def test_a_model_that_its_weights_do_not_fill_is_never_made(tmp_path, run, change, why):
    for path in run.rglob("config.yaml"):
        path.write_text(
            path.read_text().replace(*change).replace("position: rope", "position: learned")
        )
    for folder in run.glob("checkpoints/step_*"):
        forge(folder)
    with pytest.raises(UserError, match=why):
        load_run(run)
    said = finished(tmp_path, "run_dir=run", "resume=true", "max_steps=16", status=1)
    assert why in said and "Traceback" not in said
    assert "error: " in finished(
        tmp_path, *tiny(Path("x.txt"), "run_dir=new", "init_from=run"), status=1
    )


WRONG = [
    {"fingerprint": None},
    {"fingerprint": 7},
    {"seconds": [1]},
    {"seconds": {"train": "long"}},
    {"metrics": {"a": []}},
    {"skipped": [1]},
    {"skipped": "ab"},
    {"machine": {}},
    {"changes": "2"},
    {"kept": {"a": 1}},
    {"kept": ["4"]},
    {"best": 7},
    {"best": {"step": "4"}},
    {"best": {"val/loss": 1.0}},
    {"step": 12.0},
]


@pytest.mark.parametrize("changes", WRONG, ids=str)
def test_a_manifest_with_a_wrong_type_is_a_damaged_checkpoint(run, changes):
    forge(run / "checkpoints" / "step_00000012", **changes)
    said = []
    assert find_checkpoint(run, "last", said.append)[1]["step"] == 4
    assert "step_00000012 is damaged" in said[0]


@pytest.mark.parametrize("key", ["fingerprint", "seconds", "metrics", "step", "files"])
def test_a_manifest_that_lacks_an_entry_is_a_damaged_checkpoint(run, key):
    sealed_without(run, key)
    said = []
    with pytest.raises(UserError, match="is whole"):
        find_checkpoint(run, "last", said.append)
    assert "manifest.json is damaged" in said[0]


def wrong_shape(state):
    state["token_embedding.weight/exp_avg"] = torch.zeros(3)


def wrong_dtype(state):
    state["token_embedding.weight/exp_avg"] = state["token_embedding.weight/exp_avg"].to(
        torch.int64
    )


def wrong_parameter(state):
    state["a.weight/exp_avg"] = torch.zeros(3)


def wrong_field(state):
    state["token_embedding.weight/momentum"] = state.pop("token_embedding.weight/exp_avg")


def one_missing(state):
    del state["token_embedding.weight/step"]


def no_slash(state):
    state["\n" * 300] = torch.zeros(3)


@pytest.mark.parametrize(
    "change", [wrong_shape, wrong_dtype, wrong_parameter, wrong_field, one_missing, no_slash]
)
def test_an_optimizers_state_of_another_shape_name_or_dtype_is_a_sentence(tmp_path, run, change):
    path = run / "checkpoints" / "step_00000012" / "optimizer.safetensors"
    state = load_file(path)
    change(state)
    save_file(state, path)
    forge(path.parent)
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    finished(tmp_path, "run_dir=run", "resume=true", "max_steps=16", status=1)
    (sentence,) = (tmp_path / "err.txt").read_text().splitlines()
    assert (
        sentence.startswith("error: the optimizer's state in the checkpoint is not this run's: ")
        and len(sentence) < 400
    )
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize(
    "alphabet", [lambda kept: kept[:-3], lambda kept: kept + "ẞ"], ids=["smaller", "larger"]
)
def test_a_tokenizer_of_another_size_than_the_model_is_a_sentence(tmp_path, run, alphabet):
    for folder in run.glob("checkpoints/step_*"):
        kept = json.loads((folder / "tokenizer.json").read_text())
        (folder / "tokenizer.json").write_text(
            json.dumps(kept | {"alphabet": alphabet(kept["alphabet"])})
        )
        forge(folder)
    for script, *argv in (
        ("train.py", "resume=true", "max_steps=16"),
        ("sample.py", "prompt=the"),
        ("train.py", "run_dir=new", "init_from=run"),
    ):
        finished(tmp_path, "run_dir=run", *argv, script=script, status=1)
        (sentence,) = (tmp_path / "err.txt").read_text().splitlines()
        assert "they do not belong together" in sentence


@pytest.mark.parametrize("content", [b"../../x", *(
    pytest.param(content, marks=pytest.mark.soak) for content in (b"\xff\0", b"", b"x" * 5000))])
def test_a_damaged_id_of_a_wandb_run_does_not_end_the_run(tmp_path, run, content, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    (run / "wandb").mkdir()
    (run / "wandb" / "glassgpt-run-id").write_bytes(content)
    said = finished(tmp_path, "run_dir=run", "resume=true", "max_steps=13")
    assert "glassgpt-run-id" in said and rows(run)[-1]["step"] == 13
