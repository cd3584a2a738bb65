"""Damaged and unsupported models give one sentence, and exports are complete or absent."""

import json
import os
import resource
import shutil
from pathlib import Path

import pytest
import torch
from hf_models import EMBEDDING, WEIGHTS, write_model, write_model_and_tokenizer
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from common.errors import UserError
from config import GPTConfig
from data.hf_tokenizer import HFTokenizer
from data.tokenizer import load_tokenizer
from interop import find_model, load_hf, save_hf
from variants import build_model

MAX_SENTENCE = 600


@pytest.fixture(scope="module")
def intact(tmp_path_factory) -> dict[str, Path]:
    """Folders of intact models: families, and shards: a llama with several weight files."""
    root = tmp_path_factory.mktemp("intact")
    write_model_and_tokenizer("gpt2", root / "gpt2")
    write_model_and_tokenizer("gpt_neox", root / "gpt_neox")
    write_model_and_tokenizer("llama", root / "llama")
    write_model("llama", root / "shards", max_shard_size="10KB")
    return {path.name: path for path in root.iterdir()}


def change_settings(**changes):
    def change(folder):
        settings = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(settings | changes))

    return change


def change_tensors(change_dict):
    def change(folder):
        tensors = load_file(folder / WEIGHTS)
        change_dict(tensors)
        save_file(tensors, folder / WEIGHTS)

    return change


def truncate(glob):
    return lambda folder: os.truncate(next(folder.glob(glob)), 4000)


@pytest.mark.parametrize(
    "family, damage, named",
    [
        ("gpt2", change_settings(n_layer=9), ["h.2.attn.c_attn.bias"]),
        ("gpt2", change_settings(vocab_size=10**12), ["[1000000000000, 32]"]),
        ("gpt2", change_settings(model_type="bert"), ["bert", "gpt2"]),
        ("llama", change_settings(model_type="mistral", sliding_window=1), ["sliding_window=1"]),
        ("gpt2", change_settings(activation_function="relu"), ["activation_function=relu"]),
        ("gpt_neox", change_settings(hidden_act="silu"), ["hidden_act=silu", "gelu_new"]),
        ("llama", change_settings(hidden_act="gelu"), ["hidden_act=gelu", "silu"]),
        ("llama", change_settings(rope_parameters={"rope_type": "yarn"}), ["rope_type=yarn"]),
        ("gpt2", change_tensors(lambda tensors: tensors.pop(EMBEDDING)), ["wte.weight"]),
        ("gpt2", change_tensors(lambda tensors: tensors.update(extra=torch.zeros(2))), ["extra"]),
        ("gpt2", truncate(WEIGHTS), [WEIGHTS]),
        ("shards", truncate("*1-of-*"), ["1-of-"]),
    ],
)
def test_a_damaged_or_unsupported_model_is_refused_by_name(family, damage, named, intact, tmp_path):
    folder = shutil.copytree(intact[family], tmp_path / "hf")
    damage(folder)
    with pytest.raises(UserError) as error:
        load_hf(folder)
    message = str(error.value)
    assert str(folder) in message and all(part in message for part in named)
    assert "\n" not in message and len(message) < MAX_SENTENCE


junk = st.sampled_from([None, True, 0, -1, 1.5, 10**9, float("inf"), "x", "${n_head}", [], {}, [1]])


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "llama"])
def test_any_config_json_gives_a_model_or_one_sentence(family, intact, tmp_path):
    folder = shutil.copytree(intact[family], tmp_path / "hf")
    settings = json.loads((folder / "config.json").read_text())

    @given(st.dictionaries(st.sampled_from([*sorted(settings), "rope_scaling"]), junk, max_size=3))
    @example({"head_dim": 10**9, "hidden_size": 10**9})
    def check(changes):
        (folder / "config.json").write_text(json.dumps(settings | changes))
        try:
            find_model(folder)
        except UserError as e:
            assert "\n" not in str(e) and len(str(e)) < MAX_SENTENCE

    check()


@pytest.mark.parametrize(
    "new, named", [('"vocab": [', []), ('"vocab": {"zz": 99999,', ["100,000", "420"])]
)
def test_a_folder_without_a_usable_tokenizer_is_refused_by_name(new, named, intact, tmp_path):
    folder = shutil.copytree(intact["gpt2"], tmp_path / "hf")
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace('"vocab": {', new, 1))
    with pytest.raises(UserError) as error:
        find_model(folder).read_tokenizer()
    assert all(part in str(error.value) for part in [str(folder), *named])


@pytest.mark.parametrize("id", [2**31, 10_000_000])
def test_an_id_that_is_too_high_takes_no_memory(id, intact, tmp_path):
    folder = shutil.copytree(intact["gpt2"], tmp_path / "hf")
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace('"vocab": {', f'"vocab": {{"zz": {id},', 1))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError) as error:
        find_model(folder).read_tokenizer()
    assert str(folder) in str(error.value) and f"{id:,}" in str(error.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 200_000  # KiB

    (tmp_path / "saved.json").write_text(
        json.dumps({"kind": "bpe", "pattern": ".", "tokens": ["YQ=="], "end_of_text": id})
    )
    with pytest.raises(UserError, match=f"{id:,}"):
        load_tokenizer(tmp_path / "saved.json")


def test_a_tokenizer_on_which_the_library_panics_gives_an_error(intact):
    description = json.loads((intact["gpt2"] / "tokenizer.json").read_text())
    description["normalizer"] = {
        "type": "Replace",
        "pattern": {"Regex": "(a+)+$"},  # backtracks without end
        "content": "b",
    }
    with pytest.raises(Exception):  # noqa: B017  a panic is no Exception
        HFTokenizer(json.dumps(description)).encode("a" * 40 + "b")


def test_only_a_new_or_empty_folder_is_written_and_completely_or_not_at_all(disk, tmp_path):
    model = build_model(GPTConfig(vocab_size=400, block_size=16, n_layer=1, n_head=2, n_embd=16))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="to="):
        save_hf(model, tmp_path / "full")
    with pytest.raises(UserError) as error:
        save_hf(model, disk / "hf")  # a disk without enough space
    assert f"to={disk / 'hf'} " in str(error.value) and "No space left" in str(error.value)
    assert not list(disk.iterdir())
    (tmp_path / "empty").mkdir()
    save_hf(model, tmp_path / "empty")
    names = sorted(path.name for path in (tmp_path / "empty").iterdir())
    assert names == ["config.json", "model.safetensors"]
