"""What holds on a GPU, by its real kernels. Without one: GLASSGPT_TEST_DEVICE=cpu runs it there."""

import os
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from models import lively, random_tokens, small
from processes import assert_same_run, copy_after_8_steps, same_tensors
from torch.nn.attention import SDPBackend, sdpa_kernel

from config import Config, GPTConfig, ResolvedConfig
from decoder import Decoder
from model import GPT, SelfAttention, attention, causal_mask, store
from train import build_state, train_step
from training.processes import World

DEVICE = os.environ.get("GLASSGPT_TEST_DEVICE", "cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(
        DEVICE == "cuda" and not torch.cuda.is_available(), reason="there is no GPU here"
    ),
]


@pytest.fixture
def on_device(tiny: Config) -> Config:
    """A run of 12 steps in bf16 on the device, of equal bits, with dropout and heads for flash
    attention."""
    model = replace(tiny.model, n_embd=64, dropout=0.2)
    tiny.checkpoint.keep = 9
    return replace(tiny, device=DEVICE, precision="bf16", model=model, deterministic=True)


@pytest.mark.parametrize(
    "compile",
    [False, pytest.param(True, marks=pytest.mark.skipif(DEVICE == "cpu", reason="a minute"))],
)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_resumed_run_has_the_same_bits(on_device, train_in_process, tmp_path, compile, optimizer):
    on_device.optim.name, on_device.compile = optimizer, compile
    train_in_process(on_device)
    resumed = copy_after_8_steps(Path(on_device.run_dir), tmp_path / "resumed")
    train_in_process(replace(on_device, run_dir=str(resumed)), resume=True)
    assert_same_run(on_device.run_dir, resumed)


def test_looking_at_attention_beside_the_fused_kernel_changes_no_bit(
    on_device, train_in_process, tmp_path
):
    train_in_process(on_device)
    on_device.attention.every = on_device.eval.every = 0
    train_in_process(on_device, run_dir=str(tmp_path / "unseen"))
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert same_tensors(
            *(
                run / "checkpoints" / "step_00000012" / name
                for run in (Path(on_device.run_dir), tmp_path / "unseen")
            )
        )


@pytest.mark.parametrize("n_kv_head", [1, 2, 4])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 3e-5), (torch.bfloat16, 2e-2)])
def test_fused_and_written_out_attention_agree_and_so_do_their_gradients(
    dtype, tolerance, n_kv_head
):
    module = lively(SelfAttention(GPTConfig(1, n_head=4, n_kv_head=n_kv_head, n_embd=256)))
    module.to(DEVICE, dtype)
    x = torch.randn(2, 600, 256, device=DEVICE, dtype=dtype, requires_grad=True)  # (B, T, C)
    flash = dtype == torch.bfloat16 and DEVICE == "cuda"
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if flash else nullcontext():  # no other is used
        fused = module(x)
        (of_fused,) = torch.autograd.grad(fused.square().sum(), x)
    y, _ = attention(*module.project(x), causal_mask(600, 600, x.device))  # (B, H, T, d_v)
    written = module.W_O(y.transpose(1, 2).flatten(2))
    (of_written,) = torch.autograd.grad(written.square().sum(), x)
    for one, other in ((fused, written), (of_fused, of_written)):
        assert (one - other).abs().max() <= tolerance * other.abs().max()


def test_captured_maps_are_the_weights_of_the_fused_kernel():
    model = lively(GPT(small(n_embd=64, n_kv_head=2))).to(DEVICE)
    tokens = random_tokens(3, 16).to(DEVICE)
    seen = {"v": [], "heads": []}
    model.run_blocks(tokens, taps={name: partial(store, found) for name, found in seen.items()})
    for weights, v, gathered in zip(model.attention_maps(tokens), seen["v"], seen["heads"]):
        expected = weights @ v.repeat_interleave(2, dim=1)  # (B, H, T, d_v)
        assert torch.allclose(gathered, expected.transpose(1, 2), atol=1e-5)


@pytest.mark.parametrize("rows", [1, 5])
def test_decoding_gives_the_logits_of_the_whole_text(rows):
    model = lively(GPT(small(n_embd=64, n_kv_head=2, block_size=128))).to(DEVICE)
    tokens = random_tokens(rows, 128).to(DEVICE)
    decoder = Decoder(model, model.make_cache(rows))
    with torch.inference_mode():
        expected = model(tokens)[0]
        made = [decoder.read(tokens[:, :3])] + [decoder.step(tokens[:, t]) for t in range(3, 128)]
    assert torch.allclose(torch.stack(made, dim=1), expected[:, 2:], atol=1e-4)


@pytest.mark.skipif(DEVICE == "cpu", reason="nothing waits for a CPU")
@pytest.mark.parametrize("compile", [False, True])
def test_steps_make_nobody_wait(compile):
    config = ResolvedConfig(
        device=DEVICE, precision="bf16", compile=compile, batch_size=4, model=small(n_embd=64)
    )
    state, x = build_state(config, World()), random_tokens(4, 16).numpy()
    for step in range(6):
        if step == 3:  # all is set up
            torch.cuda.set_sync_debug_mode("error")
        try:
            train_step(state, step, x, x)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(DEVICE == "cpu", reason="a minute; test_train.py has it")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_compiled_step_is_the_eager_one_within_rounding(precision):
    losses = []
    for compile in (False, True):
        config = ResolvedConfig(
            device=DEVICE,
            precision=precision,
            compile=compile,
            batch_size=4,
            model=small(n_embd=64),
        )
        state, x = build_state(config, World()), random_tokens(4, 16).numpy()
        losses.append(torch.stack([train_step(state, step, x, x).loss for step in range(8)]))
    assert torch.allclose(*losses, rtol=1e-3 if precision == "fp32" else 3e-2)
