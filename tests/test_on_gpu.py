"""Training, attention and decoding with the kernels of a GPU.

GLASSGPT_TEST_DEVICE=cpu runs these tests on a CPU.
"""

import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import lively, random_tokens, small
from processes import assert_same_run, copy_after_8_steps, same_tensors
from steps import Steps
from torch.nn.attention import SDPBackend, sdpa_kernel

from config import Config, GPTConfig, OptimConfig, ResolvedConfig
from distributed.world import DistributedWorld, apply_fsdp
from generation.decoder import Decoder
from kernels import MAX_FLOAT32_LOGITS, cross_entropy
from model import Context, SelfAttention, attention, causal_mask
from training.device import configure_process
from training.world import World
from variants import build_model

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
    """A deterministic run of 12 steps in bf16, with dropout and heads for flash attention."""
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


def test_snapshots_and_evaluation_change_no_weight(on_device, train_in_process, tmp_path):
    train_in_process(on_device)
    on_device.attention.every = on_device.eval.every = 0
    train_in_process(on_device, run_dir=str(tmp_path / "unobserved"))
    checkpoint = Path("checkpoints") / "step_00000012"
    observed = Path(on_device.run_dir) / checkpoint
    unobserved = tmp_path / "unobserved" / checkpoint
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert same_tensors(observed / name, unobserved / name)


@pytest.mark.parametrize("n_kv_head", [1, 2, 4])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 3e-5), (torch.bfloat16, 2e-2)])
def test_fused_and_written_out_attention_agree_and_so_do_their_gradients(
    dtype, tolerance, n_kv_head
):
    module = lively(SelfAttention(GPTConfig(1, n_head=4, n_kv_head=n_kv_head, n_embd=256)))
    module.to(DEVICE, dtype)
    x = torch.randn(2, 600, 256, device=DEVICE, dtype=dtype, requires_grad=True)  # (B, T, C)
    is_flash = dtype == torch.bfloat16 and DEVICE == "cuda"
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if is_flash else nullcontext():
        fused = module(x, Context())
        (fused_gradient,) = torch.autograd.grad(fused.square().sum(), x)
    y, _ = attention(*module.project(x), causal_mask(600, 600, x.device))  # (B, H, T, d_v)
    written_out = module.W_O(y.transpose(1, 2).flatten(2))
    (written_out_gradient,) = torch.autograd.grad(written_out.square().sum(), x)
    for a, b in ((fused, written_out), (fused_gradient, written_out_gradient)):
        assert (a - b).abs().max() <= tolerance * b.abs().max()


def test_captured_maps_are_the_weights_of_the_fused_kernel():
    model = lively(build_model(small(n_embd=64, n_kv_head=2))).to(DEVICE)
    tokens = random_tokens(3, 16).to(DEVICE)
    _, values = model.run_with_cache(tokens, "v", "heads")
    for layer, weights in enumerate(model.attention_maps(tokens)):
        expected = weights @ values["v", layer].repeat_interleave(2, dim=1)  # (B, H, T, d_v)
        assert torch.allclose(values["heads", layer], expected.transpose(1, 2), atol=1e-5)


@pytest.mark.parametrize("batch_size", [1, 5])
def test_the_decoder_and_the_forward_pass_agree(batch_size):
    model = lively(build_model(small(n_embd=64, n_kv_head=2, block_size=128))).to(DEVICE)
    tokens = random_tokens(batch_size, 128).to(DEVICE)
    decoder = Decoder(model, batch_size)
    with torch.inference_mode():
        expected = model(tokens)[0]
        logits = [decoder.read(tokens[:, :3])]
        for t in range(3, 128):
            logits.append(decoder.read(tokens[:, t : t + 1]))
    assert torch.allclose(torch.stack(logits, dim=1), expected[:, 2:], atol=1e-4)


@pytest.mark.skipif(DEVICE == "cpu", reason="a CPU has no queue to wait for")
@pytest.mark.parametrize("compile", [False, True])
def test_a_step_does_not_synchronize_with_the_gpu(compile):
    config = ResolvedConfig(
        device=DEVICE, precision="bf16", compile=compile, batch_size=4, model=small(n_embd=64)
    )
    steps, x = Steps(config), random_tokens(4, 16).numpy()
    for step in range(6):
        if step == 3:  # kernels are compiled
            torch.cuda.set_sync_debug_mode("error")
        try:
            steps.take(step, x, x)
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
        steps, x = Steps(config), random_tokens(4, 16).numpy()
        losses.append(torch.stack([steps.take(step, x, x).loss for step in range(8)]))
    assert torch.allclose(*losses, rtol=1e-3 if precision == "fp32" else 3e-2)


def losses_of_steps(
    config: ResolvedConfig, count: int = 5, world: World | None = None
) -> torch.Tensor:
    """Train a model on one batch, and return the losses (count,)."""
    steps = Steps(config, world)
    x = random_tokens(config.batch_size, config.model.block_size).numpy()
    return torch.stack([steps.take(step, x, x).loss for step in range(count)])


@pytest.fixture
def process_group():
    """A process group of this process alone, with the backend of the device."""
    backend = "nccl" if DEVICE == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class ShardedWorld(DistributedWorld):
    """One process, whose model FSDP2 shards as that of several processes."""

    def place(self, model, config):
        apply_fsdp(model, config, self.size)


@pytest.mark.parametrize("world", [DistributedWorld, ShardedWorld])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_process_group_takes_the_same_steps(process_group, optimizer, world):
    config = ResolvedConfig(
        device=DEVICE,
        precision="fp32",
        shard=1,
        batch_size=8,
        accumulate=2,
        model=small(n_embd=64),
        optim=OptimConfig(name=optimizer, warmup_share=0.001),
    )
    expected = losses_of_steps(config)
    losses = losses_of_steps(config, world=world(0, 1))
    assert torch.allclose(losses, expected, atol=1e-3)


def test_recomputed_activations_change_no_bit():
    config = ResolvedConfig(
        device=DEVICE,
        precision="bf16",
        batch_size=4,
        deterministic=True,
        model=small(n_embd=64, dropout=0.1),
    )
    configure_process(config)
    recomputed = replace(config, checkpoint_activations=True)
    assert torch.equal(losses_of_steps(recomputed), losses_of_steps(config))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_cross_entropy_in_chunks_agrees_and_needs_no_float32_logits(dtype):
    N, V = 300, 5000  # tokens, vocabulary
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(N, V, generator=generator).to(DEVICE, dtype)
    targets = torch.randint(V, (N,), generator=generator).to(DEVICE)
    targets[::7] = -1

    losses, gradients, peaks = [], [], []
    for max_float32_logits in (10 * V, None):
        logits = start.clone().requires_grad_()
        if DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()
            allocated = torch.cuda.memory_allocated()
        if max_float32_logits is None:
            loss = F.cross_entropy(logits.float(), targets, ignore_index=-1)
        else:
            with patch.dict(MAX_FLOAT32_LOGITS, {DEVICE: max_float32_logits}):
                loss = cross_entropy(logits, targets)
        (gradient,) = torch.autograd.grad(loss, logits)
        if DEVICE == "cuda":
            peaks.append(torch.cuda.max_memory_allocated() - allocated)
        losses.append(loss.detach())
        gradients.append(gradient.float())

    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    assert torch.allclose(*losses, rtol=1e-5)
    assert (gradients[0] - gradients[1]).abs().max() <= tolerance * gradients[1].abs().max()
    if peaks and dtype != torch.float32:
        logits_bytes = N * V * dtype.itemsize
        assert peaks[0] < 1.5 * logits_bytes < peaks[1]
