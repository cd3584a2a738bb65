"""nanoGPT's checkpoints are read without running anything in them."""

import os
from pathlib import Path

import pytest
import torch
from models import lively
from processes import run_to_end
from run_folders import load_run

from common.errors import UserError
from config import DataConfig, GPTConfig, TokenizerConfig
from data.tokens import prepare
from interop import find_model, load, open_pinned
from interop.names import map_tensors
from model import GPT
from run.config_file import read_config
from run.run_dir import RunDir
from training.evaluate import Windows
from training.stored_model import tensor_shapes
from training.world import World
from variants import build_model

NORM = "_orig_mod.transformer.ln_f.weight"


class CreatesAFolder:
    """An object whose pickle creates the folder `ran` when it is loaded."""

    def __reduce__(self):
        return os.mkdir, ("ran",)


def nanogpt_tensors(model: GPT) -> dict[str, torch.Tensor]:
    """Return the weights of a model as nanoGPT saves them."""
    parameters = dict(model.named_parameters())
    return {
        mapping.name: torch.cat([parameters[name] for name in mapping.parameters])
        for mapping in map_tensors(tensor_shapes(model.config), "gpt2")
    }


@pytest.mark.slow
def test_a_checkpoint_of_nanogpt_is_trained_from_and_no_code_in_it_runs(
    text_file, tmp_path, monkeypatch
):
    # Write a checkpoint as nanoGPT does, and train from it
    monkeypatch.chdir(tmp_path)
    shape = {
        "vocab_size": len(set(text_file.read_text("utf-8"))),
        "block_size": 32,
        "n_layer": 2,
        "n_head": 2,
        "n_embd": 16,
        "bias": True,
        "dropout": 0.0,
    }
    model = lively(build_model(GPTConfig(**shape, mlp="gelu_exact")))
    state = {f"_orig_mod.{name}": tensor for name, tensor in nanogpt_tensors(model).items()}
    torch.save({"model": state, "model_args": shape, "iter_num": 9}, "ckpt.pt")
    run_to_end(
        tmp_path,
        "init_from=ckpt.pt",
        "data=text",
        f"data.path={text_file}",
        "max_steps=1",
        "run_dir=run",
        "eval.every=1",
        "optim.warmup_share=0",
        "precision=fp32",
        "attention.every=0",
        "compile=false",
        "batch_size=2",
    )

    # The run begins with the loss of that model
    trained, tokenizer, _ = load_run("run")
    assert tokenizer.vocab_size == shape["vocab_size"] and trained.config.mlp == "gelu_exact"
    text = prepare(DataConfig("text", str(text_file)), TokenizerConfig("char"))
    config = read_config(Path("run/config.yaml"))
    windows = Windows(text.val, text.tokenizer, config, World())
    loss = windows.measure(model)["loss"]
    assert RunDir(Path("run")).rows()[0]["val/loss"] == pytest.approx(loss, rel=1e-6)

    # Without its text, or with other contents, it is refused
    with pytest.raises(UserError) as error:
        load(Path("ckpt.pt"))
    assert "ckpt.pt" in str(error.value)
    other_shape = {"model": state, "model_args": {**shape, "n_embd": 18}}
    dense = {"model": state, "model_args": shape}
    expanded = {**state, NORM: torch.ones(1).expand(16)}
    sparse = {**state, NORM: torch.ones(16).to_sparse()}
    contents = [dense | {"model": changed} for changed in (expanded, sparse)]
    for content in (*contents, other_shape, {"model": CreatesAFolder()}, []):
        torch.save(content, "ckpt.pt")
        with pytest.raises(UserError) as error:
            open_pinned("ckpt.pt").copy_to(build_model(GPTConfig(**shape)))
        assert "ckpt.pt" in str(error.value)
    assert not os.path.exists("ran")


def test_tensors_that_share_their_memory_are_refused(tmp_path):
    shape = {"vocab_size": 9, "block_size": 8, "n_layer": 4, "n_head": 2, "n_embd": 64}
    tensors = nanogpt_tensors(build_model(GPTConfig(**shape, bias=True)))
    shared = torch.zeros(max(tensor.numel() for tensor in tensors.values()))
    state = {name: shared[: t.numel()].view(t.shape) for name, t in tensors.items()}
    torch.save({"model": state, "model_args": shape}, tmp_path / "ckpt.pt")
    with pytest.raises(UserError, match="share") as error:
        find_model(tmp_path / "ckpt.pt")
    assert str(tmp_path / "ckpt.pt") in str(error.value)
