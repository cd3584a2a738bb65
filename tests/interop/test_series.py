"""A model at several steps: the checkpoints of a run, and folders with numbers in their names."""

import json
import shutil
import weakref
from itertools import pairwise
from math import log1p
from pathlib import Path

import pytest
import torch
from hub_server import serve_hub
from huggingface_hub import constants
from hypothesis import given
from hypothesis import strategies as st
from models import lively
from run_folders import write_run
from safetensors.torch import load_file

import glass
import interop
from common.errors import UserError
from config import GPTConfig
from data.tokenizer import train_bpe
from interop import find_series, save_hf
from interop.series import choose_steps, number_names, spread_steps
from run.checkpoints import MODEL_FILE
from run.run_dir import RunDir
from variants import build_model

STEPS = (0, 500, 1000)
PYTHIA = [0, *(2**n for n in range(10)), *range(1000, 144000, 1000)]


def write_checkpoints(folder: Path, seeds: dict[int, int], **changes) -> None:
    """Write models as transformers' Trainer does, whose weights depend on the seed of the step."""
    tokenizer = train_bpe(["a glass model"], 300)
    shape = {"block_size": 16, "n_layer": 1, "n_head": 2, "n_embd": 16}
    for step, seed in seeds.items():
        model = lively(build_model(GPTConfig(tokenizer.vocab_size, **shape | changes)), seed)
        save_hf(model, folder / f"checkpoint-{step}", tokenizer)


@pytest.fixture
def trained(tmp_path) -> Path:
    """A folder of three steps, and a subfolder of another kind."""
    write_checkpoints(tmp_path, dict(zip(STEPS, STEPS)))
    (tmp_path / "runs-2000").mkdir()
    return tmp_path


def test_the_steps_of_a_run_are_those_of_their_exports(tmp_path):
    run_dir = RunDir(tmp_path / "run")
    write_run(run_dir.path)
    run_dir.snapshots.mkdir()
    checkpoint = run_dir.checkpoint_folder(3) / MODEL_FILE
    run_dir.snapshot(4, ".safetensors").write_bytes(checkpoint.read_bytes())
    of_run = find_series(run_dir.path)
    assert of_run.steps == [3, 4, 6]
    for step in of_run.steps:
        model, tokenizer = of_run.open(step).load()
        save_hf(model, tmp_path / "out" / f"checkpoint-{step}", tokenizer)

    exported = find_series(tmp_path / "out")
    assert exported.steps == of_run.steps
    for step in exported.steps:
        ours, theirs = (dict(each.open(step).read_tensors()) for each in (of_run, exported))
        assert all(torch.equal(theirs[name], ours[name]) for name in ours)
    assert of_run.group_equal() == exported.group_equal() == {4: [3], 6: []}

    # No other step is opened in the place of a damaged one
    (run_dir.checkpoint_folder(6) / MODEL_FILE).write_bytes(b"")
    with pytest.raises(UserError, match="step_00000006 is damaged"):
        of_run.open(6)


def test_steps_with_equal_weights_count_once_as_the_last_of_them(tmp_path):
    write_checkpoints(tmp_path, {0: 9, 500: 5, 1000: 7, 2000: 5, 3000: 9})
    notes = []
    groups = find_series(tmp_path, log=notes.append).group_equal()
    assert groups == {1000: [], 2000: [500], 3000: [0]}
    assert ["500" in note and "2000" in note for note in notes] == [True, False]


def test_from_python_each_step_is_opened_after_the_one_before_and_repeats_are_named(
    tmp_path, capsys
):
    write_checkpoints(tmp_path, {0: 9, 500: 5, 1000: 7, 2000: 5})
    seen = []
    for step, opened in glass.series(tmp_path):
        one = glass.open(tmp_path / f"checkpoint-{step}")
        assert torch.equal(one.model.head.weight, opened.model.head.weight)
        seen.append((step, weakref.ref(opened.model)))
    assert [step for step, _ in seen] == [0, 1000, 2000]
    assert [model() is None for _, model in seen] == [True, True, False]
    assert "step 2000: step 500" in capsys.readouterr().err


def test_a_run_is_opened_at_a_step(tmp_path):
    write_run(tmp_path)
    for checkpoint in (3, 6):
        weights = find_series(tmp_path).open(checkpoint).build().head.weight
        assert torch.equal(glass.open(tmp_path, checkpoint=checkpoint).model.head.weight, weights)


def change_vocabulary(folder: Path) -> None:
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(content))


@pytest.mark.parametrize("changed", ["shape", "tokenizer"])
def test_a_step_of_another_model_is_refused_by_its_number(changed, trained):
    if changed == "shape":
        write_checkpoints(trained, {1500: 0}, n_embd=32)
    else:
        write_checkpoints(trained, {1500: 0})
        change_vocabulary(trained / "checkpoint-1500")
    series = find_series(trained)
    assert series.open(500)
    with pytest.raises(UserError) as error:
        series.open(1500)
    assert all(part in str(error.value) for part in ("1500", changed, "step 500"))


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ("all", [0, 500, 1000]),
        ("1000,0", [0, 1000]),
        ("500,", [500]),
        ([500, 500], [500]),
        (2, [0, 1000]),
        ("1", [1000]),
        (9, [0, 500, 1000]),
    ],
)
def test_steps_are_a_list_a_number_of_steps_or_all(steps, expected, trained):
    assert find_series(trained, steps).steps == expected


@pytest.mark.parametrize(
    ("steps", "named"),
    [
        ("700,0", ["step 700", "500 or 1000"]),
        ([2000], ["step 2000", "choose 1000"]),
        ("x", ["steps='x'"]),
        (0, ["steps=0"]),
        ([], ["steps=[]"]),
    ],
)
def test_steps_that_do_not_exist_are_refused_by_name(steps, named, trained):
    with pytest.raises(UserError) as error:
        find_series(trained, steps)
    assert all(part in str(error.value) for part in named)


def test_one_model_is_no_series_and_a_step_is_that_of_one_model(trained):
    with pytest.raises(UserError, match=r"path_or_name=.*checkpoint-500 "):
        find_series(trained / "checkpoint-500")
    write_checkpoints(trained / "more", {0: 0})
    (trained / "more" / "checkpoint-0").rename(trained / "checkpoint-00500")
    assert find_series(trained, [0]).open(0)
    with pytest.raises(UserError, match="several models of step 500"):
        find_series(trained)


@given(st.sets(st.integers(0, 10**6), min_size=1), st.integers(1, 30))
def test_a_number_of_steps_gives_that_many_with_both_ends(existing, count):
    existing = sorted(existing)
    chosen = spread_steps(existing, count)
    assert len(chosen) == min(count, len(existing))
    assert chosen == sorted(set(chosen))
    assert set(chosen) <= set(existing) and chosen[-1] == existing[-1]
    assert count == 1 or chosen[0] == existing[0]


def test_twelve_of_pythias_steps_lie_evenly_on_a_logarithmic_scale():
    places = [log1p(step) for step in choose_steps("pythia", PYTHIA, "12")]
    widths = [after - before for before, after in pairwise(places)]
    assert len(places) == 12 and max(widths) < 2.5 * min(widths)


def test_the_step_of_a_name_comes_after_that_word_or_is_its_first_number():
    names = {"step0": 0, "step1000-tokens4B": 1000, "stage1-step-500": 500, "global_step7": 7}
    assert number_names([*names, "main", "fp16"]) == names
    assert number_names(["checkpoint-500", "iter_0020", "last"]) == {
        "checkpoint-500": 500,
        "iter_0020": 20,
    }


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A model on the hub with the branches main, step0, step2, step8-tokens1B and step16."""
    branches = tmp_path / "branches"
    write_checkpoints(branches, {0: 16, 2: 2, 8: 8, 16: 16})
    for step, name in {0: "step0", 2: "step2", 8: "step8-tokens1B", 16: "step16"}.items():
        (branches / f"checkpoint-{step}").rename(branches / name)
    pickle_weights(branches / "step0")  # the same tensors in another file
    (branches / "step16" / "pytorch_model.bin").write_bytes(b"not needed")
    (branches / "step16" / "optimizer.pt").write_bytes(b"not needed")
    shutil.copytree(branches / "step16", branches / "main")
    with serve_hub(branches, monkeypatch) as server:
        yield server


def pickle_weights(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def test_branches_of_the_hub_are_downloaded_once_after_their_size_was_said(hub, monkeypatch):
    notes = []
    series = find_series("owner/model", "all", notes.append)
    assert series.steps == [0, 2, 8, 16] and not notes and not hub.sent
    assert series.group_equal() == {2: [], 8: [], 16: [0]}
    branches = ["step0", "step2", "step8-tokens1B", "step16"]
    assert [f"owner/model@{name} " in note for name, note in zip(branches, notes)] == [True] * 4
    size = sum(file.stat().st_size for file in hub.branches["step2"].iterdir())
    assert f" {size / 1e6:,.1f} MB" in notes[1]
    assert not {"optimizer.pt", "pytorch_model.bin"} & {
        key.partition("/")[2] for key in hub.sent if key.startswith("step16")
    }

    # A second series, and one step by its name, are read from the cache, which needs no network
    sent = hub.sent.copy()
    single, _ = interop.load("owner/model@step2")
    assert torch.equal(single.head.weight, series.open(2).build().head.weight)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    again = find_series("owner/model", [0, 8], notes.append)
    assert again.hash(0) == series.hash(16) and again.hash(8) == series.hash(8)
    assert hub.sent == sent and len(notes) == 5
    with pytest.raises(UserError, match="path_or_name=owner/other"):
        find_series("owner/other")


def test_a_branch_without_weights_and_one_that_breaks_off_give_one_sentence(hub):
    (hub.branches["step2"] / "model.safetensors").unlink()
    weights = "step8-tokens1B/model.safetensors"
    size = (hub.branches["step8-tokens1B"] / "model.safetensors").stat().st_size
    hub.breaks_off = weights
    series = find_series("owner/model")
    for step, named in ((2, "model.safetensors"), (8, "owner/model@step8-tokens1B")):
        with pytest.raises(UserError) as error:
            series.open(step)
        assert str(error.value).startswith(f"step {step} ") and "\n" not in str(error.value)
        assert named in str(error.value)

    # What is missing is taken at the next call, and no more
    sent = hub.sent.copy()
    assert 0 < sent.pop(weights) < size
    hub.breaks_off = ""
    assert series.open(8)
    assert hub.sent.pop(weights) >= size and hub.sent == sent
