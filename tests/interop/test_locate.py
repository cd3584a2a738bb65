"""What `init_from` and `run_dir` name is decided by content, however it is named."""

import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from hf_models import EMBEDDING, WEIGHTS, write_model, write_model_and_tokenizer
from models import lively
from run_folders import SHAPE, TEXT, write_run
from safetensors.torch import load_file, save_file
from test_gguf import make_model, write_gguf
from test_nanogpt import nanogpt_tensors

import interop
from cli.sample_config import SampleConfig
from common.errors import UserError
from config import GPTConfig
from data.hf_tokenizer import HFTokenizer
from interop.__main__ import main as export
from sample import sample
from variants import build_model

HEAD = "lm_head.weight"
LFS_POINTER = "version https://git-lfs.github.com/spec/v1"


def write_nanogpt(path: Path, **options) -> None:
    """Write a checkpoint as nanoGPT does, with the vocabulary of a text."""
    config = GPTConfig(len(TEXT), **SHAPE, bias=True)
    tensors = nanogpt_tensors(lively(build_model(config)))
    state = {f"_orig_mod.{name}": tensor for name, tensor in tensors.items()}
    state["_orig_mod.lm_head.weight"] = state["_orig_mod.transformer.wte.weight"]
    torch.save({"model": state, "model_args": asdict(config)}, path, **options)


@pytest.fixture(scope="module")
def intact(tmp_path_factory) -> Path:
    """A folder with a model of each kind: gpt2, llama, shards, m.gguf, ckpt.pt and runs/x."""
    root = tmp_path_factory.mktemp("intact")
    write_model_and_tokenizer("gpt2", root / "gpt2")
    write_model_and_tokenizer("llama", root / "llama")
    write_model_and_tokenizer("llama", root / "shards")
    (root / "shards" / WEIGHTS).unlink()
    write_model("llama", root / "shards", max_shard_size="70KB")
    write_gguf(root / "m.gguf", make_model("llama", n_layer=1))
    write_nanogpt(root / "ckpt.pt")
    write_run(root / "runs" / "x")
    return root


@pytest.fixture
def here(intact, tmp_path, monkeypatch) -> Path:
    """A copy of `intact`, which is the current folder and the home folder."""
    shutil.copytree(intact, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def rename(old: str, new: str):
    return lambda: Path(old).rename(new)


def change_weights(path: str, change):
    def apply():
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    return apply


def add_tokens(*tokens: dict):
    """Return a function that adds tokens, from id 420 on, to the tokenizer of gpt2."""

    def apply():
        path = Path("gpt2/tokenizer.json")
        content = json.loads(path.read_text())
        for id, token in enumerate(tokens, 420):
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            content["added_tokens"].append({"id": id, **flags, **token})
            content["model"]["vocab"][token["content"]] = id
        path.write_text(json.dumps(content))

    return apply


def index_of_one_file():
    tensors = load_file("gpt2/" + WEIGHTS)
    Path("gpt2", WEIGHTS).rename("gpt2/weights.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "weights.safetensors")}
    Path("gpt2/model.safetensors.index.json").write_text(json.dumps(index))


def rename_tensors(path: str, rename_one):
    def change(tensors):
        for name in list(tensors):
            tensors[rename_one(name)] = tensors.pop(name)

    return change_weights(path + WEIGHTS, change)


def bare_llama_with_buffer():
    rename_tensors("llama/", lambda name: name.removeprefix("model."))()
    buffer = {"rotary_emb.inv_freq": torch.ones(4)}
    change_weights("llama/" + WEIGHTS, lambda tensors: tensors.update(buffer))()


def nothing():
    pass


STEP_3, STEP_6 = (f"runs/x/checkpoints/step_0000000{step}" for step in (3, 6))
# What is done to the models, the name of one, and the original that it is.
ACCEPTED = [
    (nothing, "gpt2/", "gpt2"),
    (nothing, "~/gpt2", "gpt2"),
    (nothing, "file://{here}/gpt2/", "gpt2"),
    (nothing, "gpt2/model.safetensors", "gpt2"),
    (nothing, "gpt2/config.json", "gpt2"),
    (rename("gpt2/model.safetensors", "gpt2/any name.safetensors"), "gpt2", "gpt2"),
    (lambda: (Path("gpt2/checkpoints").mkdir(), Path("gpt2/config.yaml").touch()), "gpt2", "gpt2"),
    (index_of_one_file, "gpt2", "gpt2"),
    (rename_tensors("gpt2/", lambda name: name.replace(EMBEDDING, HEAD)), "gpt2", "gpt2"),
    (rename_tensors("gpt2/", lambda name: name.removeprefix("transformer.")), "gpt2", "gpt2"),
    (rename_tensors("gpt2/", lambda name: "module._orig_mod." + name), "gpt2", "gpt2"),
    (bare_llama_with_buffer, "llama", "llama"),
    (add_tokens({"content": "<pad>", "special": True}), "gpt2", "gpt2"),
    (nothing, "shards/model-00001-of-00003.safetensors", "shards"),
    (rename("m.gguf", "m"), "m", "m.gguf"),
    (rename("m.gguf", "m.pt"), "m.pt", "m.gguf"),
    (rename("m.gguf", "runs/x/m.gguf"), "runs/x/m.gguf", "m.gguf"),
    (lambda: os.symlink("m.gguf", "link"), "link", "m.gguf"),
    (rename("gpt2", "runs/x/export"), "runs/x/export", "gpt2"),
    (nothing, "runs/x/", STEP_3),
    (nothing, "runs/x/checkpoints/best", STEP_3),
    (nothing, "runs/x/checkpoints/last", STEP_6),
    (nothing, STEP_6 + "/", STEP_6),
    (nothing, STEP_6 + "/model.safetensors", STEP_6),
    (rename(STEP_6, "my best"), "my best", STEP_6),
    (rename(STEP_6, "my best"), "my best/model.safetensors", STEP_6),
    (lambda: Path("runs/x/config.yaml").unlink(), "runs/x", STEP_3),
]


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    return dict(interop.load(path)[0].named_parameters())


@pytest.mark.parametrize(("prepare", "name", "original"), ACCEPTED)
def test_a_model_is_loaded_by_whatever_names_it(prepare, name, original, here, intact):
    prepare()
    name = name.format(here=here)
    expected = weights_of(intact / original)

    model, tokenizer = interop.load(name)
    weights = dict(model.named_parameters())
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[key], expected[key]) for key in expected)
    vocab_size = model.config.vocab_size
    assert all(id < vocab_size for id in [*tokenizer.encode(TEXT), tokenizer.end_of_text or 0])

    # Training starts from the same weights
    start = interop.read_starting_model(name)
    assert vocab_size == start.model.vocab_size
    copy = build_model(GPTConfig.from_settings(start.model))
    interop.open_starting_weights(start.init_from).copy_to(copy)
    copied = dict(copy.named_parameters())
    assert all(torch.equal(copied[key], expected[key].float()) for key in expected)


def two_weight_files():
    shutil.copy("gpt2/" + WEIGHTS, "gpt2/b.safetensors")
    Path("gpt2", WEIGHTS).rename("gpt2/a.safetensors")


# What is done to the models, the name of one, and what the message names.
REFUSED = [
    (lambda: Path("gpt2/tokenizer.json").unlink(), "gpt2", ["tokenizer.json"]),
    (rename("gpt2/model.safetensors", "gpt2/model.bin"), "gpt2", ["model.bin", "save_pretrained"]),
    (rename("ckpt.pt", "gpt2/model.bin"), "gpt2/model.bin", ["model.bin", "save_pretrained"]),
    (nothing, ".", ["give"]),
    (lambda: Path("out").mkdir(), "out", ["out"]),
    (lambda: Path("t.txt").write_text("text"), "t.txt", ["t.txt"]),
    (lambda: Path("t.gguf").write_text(""), "t.gguf", ["t.gguf"]),
    (lambda: Path("t").write_text(LFS_POINTER), "t", ["lfs"]),
    (
        lambda: Path("gpt2/tokenizer.json").write_text(LFS_POINTER),
        "gpt2",
        ["tokenizer.json", "lfs"],
    ),
    (
        lambda: torch.save(torch.nn.Linear(2, 2), "m.pt"),
        "m.pt",
        ["code", "nn.modules.linear.Linear"],
    ),
    (two_weight_files, "gpt2", ["model.safetensors.index.json"]),
    (rename("gpt2/" + WEIGHTS, "gpt2/optimizer.pt"), "gpt2", ["download"]),
    (lambda: os.symlink("nowhere", "link"), "link", ["link"]),
    (lambda: os.mkfifo("pipe"), "pipe", ["pipe"]),
    (lambda: Path("shards/model-00002-of-00003.safetensors").unlink(), "shards", ["00002"]),
    (add_tokens({"content": "word", "special": False}), "gpt2", ["421", "420"]),
    (nothing, "runs/x/checkpoints/step_00000009", ["step_00000009"]),
    (nothing, "gpt3", ["init_from=gpt3"]),
    (nothing, "runs/mine", ["init_from=runs/mine"]),
    (nothing, "gpt2/small", ["init_from=gpt2/small"]),
    (nothing, "https://example.com/m.gguf", ["https://example.com"]),
    (nothing, "", ["init_from="]),
]


@pytest.mark.parametrize(("prepare", "name", "named"), REFUSED)
def test_what_is_not_a_model_is_refused_with_what_it_is(prepare, name, named, here):
    prepare()
    with pytest.raises((UserError, OSError)) as error:
        interop.load(name)
    message = str(error.value)
    assert all(part in message for part in named) and "\n" not in message
    is_missing = name and not os.path.lexists(name) and "://" not in name
    assert ("does not exist" in message) == bool(is_missing or os.path.islink(name))


def test_special_tokens_that_the_model_lacks_are_removed(here):
    add_tokens({"content": "<pad>", "special": True}, {"content": "<x>", "special": True})()
    tokenizer = interop.load("gpt2")[1]
    assert isinstance(tokenizer, HFTokenizer) and tokenizer.vocab_size <= 420
    assert not tokenizer.special.keys() & {420, 421}
    text = "the <pad> glass<x>"
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("options", [{}, {"_use_new_zipfile_serialization": False}])
def test_a_checkpoint_of_nanogpt_may_have_any_name_age_and_settings_left_out(options, here):
    write_nanogpt(here / "mine", **options)
    saved = torch.load("mine")
    for name in ("bias", "dropout"):  # which older versions do not save
        del saved["model_args"][name]
    torch.save(saved, "mine", **options)
    model = interop.load_hf("mine")
    original = interop.load_hf("ckpt.pt")
    assert model.config.tie_embeddings and model.config.bias is True
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), original.parameters()))

    # A head of its own is not tied
    saved["model"]["_orig_mod.lm_head.weight"] = torch.ones(len(TEXT), SHAPE["n_embd"])
    torch.save(saved, "mine", **options)
    assert not interop.load_hf("mine").config.tie_embeddings


@pytest.mark.parametrize("key", ["run_dir", "init_from"])
@pytest.mark.parametrize("name", ["~/m.gguf", "runs/x/checkpoints/last", "gpt2/"])
def test_the_commands_take_every_kind_of_model(key, name, here, capsys, monkeypatch):
    sample(SampleConfig(**{key: name}, prompt="a", max_new_tokens=2))
    assert capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["interop", f"run_dir={name}", "to=out"])
    export()
    exported, original = weights_of(Path("out")), weights_of(Path(name))
    assert torch.equal(
        exported["token_embedding.weight"], original["token_embedding.weight"].float()
    )


@pytest.mark.parametrize("key", ["run_dir", "init_from"])
def test_the_commands_name_the_setting_of_a_model_that_does_not_exist(key, here):
    config = SampleConfig(**{key: "runs/y"})
    with pytest.raises(UserError) as error:
        config.check()
        sample(config)
    assert f"{key}=runs/y" in str(error.value)


def test_a_step_is_only_taken_of_a_run(here):
    shutil.copytree(STEP_3, "copy")
    for name in (STEP_3, "copy", "gpt2", "m.gguf"):
        with pytest.raises(UserError) as error:
            interop.load(name, 6)
        assert "checkpoint=6" in str(error.value)
    assert interop.load(STEP_3, 3) and interop.load(STEP_3, "last") and interop.load("copy", "last")
