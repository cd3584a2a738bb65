"""Size of a model, floating-point operations of its training, and the rate of a device."""

from dataclasses import astuple, replace
from functools import cache

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from config import GPTConfig, ResolvedConfig
from training.device import has_tf32, peak_memory
from variants import build_model

# Dense operations per second in bf16 or fp16 with float32 sums, from NVIDIA's data sheets, by the
# device's exact name: variants of a card differ. TF32 has half the rate on each card that has it.
PUBLISHED_16_BIT_FLOPS = {
    "NVIDIA B200": 2250e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA A10G": 70e12,
    "NVIDIA L4": 121e12,
    "NVIDIA GeForce RTX 4090": 165e12,
    "NVIDIA GeForce RTX 3090": 71e12,
    "Tesla V100-SXM2-16GB": 125e12,
    "Tesla V100-SXM2-32GB": 125e12,
    "Tesla T4": 65e12,
}


def model_size(config: GPTConfig) -> tuple[int, int]:
    """Count the parameters of a model, and the operations of a training step per token.

    As in the reference, masked pairs of tokens count. The backward pass takes twice the operations
    of the forward pass.

    Reference: Chowdhery et al. 2022, "PaLM", appendix B.
    """
    one_layer, two_layers = (_count_forward(astuple(replace(config, n_layer=n))) for n in (1, 2))
    parameters, flops = (
        once + (config.n_layer - 1) * (twice - once) for once, twice in zip(one_layer, two_layers)
    )
    return parameters, 3 * flops // config.block_size


@cache
def _count_forward(model_settings: tuple) -> tuple[int, int]:
    """Count the parameters of a model, and the operations of a forward pass of one sequence."""
    config = GPTConfig(*model_settings)  # is not hashable, so its fields are the key
    with torch.device("meta"):
        parameters = build_model(config).num_parameters()
        # Sink logits and the padding of the vocabulary are no operations of the model.
        model = build_model(replace(config, attention_sink=False, vocab_multiple=None))
        tokens = torch.zeros(1, config.block_size, dtype=torch.int64)
    # The counter does not know the fused attention of a CPU.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model(tokens)
    return parameters, counter.get_total_flops()


def peak_flops(device: str, precision: str) -> float | None:
    """Return the published operations per second of a GPU's tensor cores, or None if unknown."""
    if not device.startswith("cuda"):
        return None
    rate = PUBLISHED_16_BIT_FLOPS.get(torch.cuda.get_device_name(device))
    if rate is None or precision != "fp32":
        return rate
    return rate / 2 if has_tf32(device) else None


def speed_metrics(step_seconds: float, config: ResolvedConfig, processes: int) -> dict[str, float]:
    """Return the speed, milliseconds per step, and on a known GPU the model FLOPs utilization.

    Reference: Chowdhery et al. 2022, "PaLM", appendix B.
    """
    tokens_per_second = tokens_per_step(config) / step_seconds
    metrics = {
        "train/tokens_per_second": tokens_per_second,
        "train/ms_per_step": 1000 * step_seconds,
    }
    peak = peak_flops(config.device, config.precision)
    if peak is not None:
        _, flops_per_token = model_size(config.model)
        metrics["train/mfu"] = tokens_per_second * flops_per_token / (peak * processes)
    return metrics


def memory_metrics(device: str) -> dict[str, float]:
    """Return the peak memory of this process so far, on a GPU that of its tensors, if known."""
    memory = peak_memory(device)
    return {} if memory is None else {"memory/peak_gib": memory / 2**30}


def tokens_per_step(config: ResolvedConfig) -> int:
    """Return the number of tokens in the batch of an optimizer step."""
    return config.batch_size * config.model.block_size
