"""The model that explore.py shows is found by its settings, and follows its run's checkpoints."""

import shutil
from pathlib import Path

import pytest
import torch
from models import small
from run_folders import SHAPE, TEXT, write_run

from cli.explore_config import ExploreConfig
from common.checkpoints import (
    MODEL_FILE,
    TOKENIZER_FILE,
    read_manifest,
    step_folder,
    write_manifest,
)
from common.errors import UserError
from config import GPTConfig
from data.tokenizer import PATTERNS, BPETokenizer, CharTokenizer, save_tokenizer
from glass.live.checkpoints import EXAMPLE_PROMPT, RunFollower, find_prompt, load_exploration
from interop import save_hf
from model import GPT
from training.checkpoint import load_run, load_weights
from variants import build_model


@pytest.fixture
def run(tmp_path) -> Path:
    """A run in runs/ with checkpoints of steps 3 and 6, of which the first is the best."""
    write_run(tmp_path / "runs" / "mine")
    return tmp_path / "runs" / "mine"


def load(**settings):
    return load_exploration(ExploreConfig(**settings), print)


def same_weights(model: GPT, other: GPT) -> bool:
    tensors = other.tensors()
    return all(torch.equal(tensor, tensors[name]) for name, tensor in model.tensors().items())


@pytest.mark.slow
@pytest.mark.parametrize(
    "path, checkpoint, step, is_followed",
    [
        ("", "last", 6, True),
        ("", "best", 3, False),
        ("", "3", 3, False),
        ("checkpoints/last", "last", 6, True),
        ("checkpoints/best", "last", 3, False),
        ("checkpoints/step_00000003", "last", 3, False),
        ("checkpoints/step_00000003", "3", 3, False),
    ],
)
@pytest.mark.parametrize("key", ["run_dir", "init_from"])
def test_the_checkpoint_of_a_run_is_chosen(run, key, path, checkpoint, step, is_followed):
    loaded = load(**{key: str(run / path), "checkpoint": checkpoint})
    assert (loaded.explored.title, loaded.explored.step) == ("mine", step)
    assert loaded.explored.is_following == (loaded.followed_run is not None) == is_followed
    assert same_weights(loaded.model, load_run(run, step)[0])


def test_the_newest_run_is_the_default(run, monkeypatch):
    monkeypatch.chdir(run.parents[1])
    assert load().explored.title == "mine"


def test_a_checkpoint_outside_of_its_run_is_not_followed(run, tmp_path):
    copy = shutil.copytree(step_folder(run, 3), tmp_path / "copy")
    loaded = load(init_from=str(copy))
    assert (loaded.explored.title, loaded.explored.step) == ("copy", 3)
    assert loaded.followed_run is None and not loaded.explored.is_following


def test_the_model_of_another_library_has_no_steps(tmp_path):
    tokenizer = CharTokenizer("abcdefgh")
    save_hf(build_model(small(vocab_size=8)), tmp_path / "theirs", tokenizer)
    explored = load(init_from=str(tmp_path / "theirs")).explored
    assert (explored.title, explored.max_steps, explored.scores) == ("theirs", None, None)


def test_a_prompt_with_an_unknown_character_is_a_mistake(run):
    assert load(run_dir=str(run), prompt="abba").explored.prompt == "abba"
    with pytest.raises(UserError, match="'x'"):
        load(run_dir=str(run), prompt="abx")


def test_the_example_is_shown_if_the_model_can_read_it():
    assert (
        find_prompt(BPETokenizer(PATTERNS["gpt2"], [bytes([b]) for b in range(256)], 256), None)
        == EXAMPLE_PROMPT
    )
    assert find_prompt(CharTokenizer(TEXT), None) == ""


class Followed:
    """A follower of a run that has only the checkpoint of step 3 at first."""

    def __init__(self, run: Path, later: Path):
        step_folder(run, 6).rename(later)
        self.run, self.later, self.lines = run, later, []
        self.model, tokenizer, self.explored, followed_run = load(run_dir=str(run))
        self.follower = RunFollower(followed_run, tokenizer, self.lines.append)

    def save(self) -> Path:
        """Save the checkpoint of step 6, and return its folder."""
        return shutil.copytree(self.later, step_folder(self.run, 6))

    def load_newer(self):
        return self.follower.load_newer(self.model, self.explored)

    def shows(self, step: int) -> bool:
        folder = self.later if step == 6 else step_folder(self.run, step)
        saved = build_model(GPTConfig(len(TEXT), **SHAPE))
        load_weights(saved, folder / MODEL_FILE)
        return same_weights(self.model, saved)


@pytest.fixture
def followed(run, tmp_path) -> Followed:
    return Followed(run, tmp_path / "later")


def test_newer_weights_are_copied_into_the_model(followed):
    assert followed.load_newer() is None and followed.shows(3)
    followed.save()
    newer = followed.load_newer()
    assert newer.step == 6 and newer.is_following and followed.shows(6)
    followed.explored = newer
    assert followed.load_newer() is None
    assert followed.lines == []


def test_weights_of_fewer_bits_are_followed_too(followed):
    followed.model.to(torch.bfloat16)
    followed.save()
    assert followed.load_newer().step == 6
    rounded = load(run_dir=str(followed.run)).model.to(torch.bfloat16)
    assert same_weights(followed.model, rounded)


def damage(folder: Path) -> None:
    path = folder / MODEL_FILE
    path.write_bytes(path.read_bytes()[:-1] + b"\0")


def remove_weights(folder: Path) -> None:
    (folder / MODEL_FILE).unlink()


def remove_folder(folder: Path) -> None:
    shutil.rmtree(folder.parent)


def change_tokenizer(folder: Path) -> None:
    """Make it the checkpoint of another run, whose weights have the same shapes."""
    manifest = read_manifest(folder)
    save_tokenizer(CharTokenizer("xyz"), folder / TOKENIZER_FILE)
    write_manifest(folder, manifest)


@pytest.mark.slow
@pytest.mark.parametrize("harm", [damage, remove_weights, remove_folder, change_tokenizer])
def test_a_checkpoint_that_cannot_be_read_is_reported_once_and_changes_nothing(followed, harm):
    before = build_model(followed.model.config)
    before.load_state_dict(followed.model.state_dict())
    harm(followed.save())
    assert followed.load_newer() is None and followed.load_newer() is None
    assert same_weights(followed.model, before)
    (line,) = followed.lines
    assert "\n" not in line and str(followed.run) in line

    # An intact checkpoint is shown as soon as there is one
    shutil.rmtree(followed.run, ignore_errors=True)
    write_run(followed.run)
    assert followed.load_newer().step == 6 and followed.shows(6)
