"""The plan of a run agrees with what runs: bytes and operations with real steps, within the shares
that docs/scaling.md has; and it touches nothing."""

from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch
from conftest import soak
from steps import Steps
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from common.errors import UserError
from config import Config, GPTConfig, OptimConfig
from model import autocast
from training import plan
from training.plan import memory_needed, model_size, resolve
from training.processes import World

SHAPES = {
    "gpt2": {"bias": True, "mlp": "gelu"},
    "llama": {"n_kv_head": 2, "norm": "rmsnorm", "position": "rope", "mlp": "swiglu"},
}


def run_of(model: GPTConfig, **changes) -> Config:
    return Config(
        **{
            "device": "cpu",
            "precision": "fp32",
            "compile": False,
            "batch_size": 4,
            "shard": 1,
            "model": model,
            **changes,
        }
    )


@pytest.mark.slow
@pytest.mark.parametrize("shape, precision", [soak("gpt2", "fp32"), ("llama", "bf16")])
def test_bytes_and_operations_are_about_those_of_a_real_step(shape, precision):
    model = GPTConfig(500, n_layer=2, n_embd=64, **SHAPES[shape])
    config, kept = run_of(model, precision=precision, optim=OptimConfig(name="muon")), {}
    take_step, x = Steps(config), torch.zeros(4, 256, dtype=torch.int64)
    parameters = list(take_step.model.parameters())

    def note(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    # A CPU's fused attention is not counted.
    with FlopCounterMode(display=False) as counted, sdpa_kernel(SDPBackend.MATH):
        take_step.model(x, x)[1].backward()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t), autocast("cpu", precision):
        logits, loss = take_step.model(x, x)
    loss.backward()
    note(logits)
    for tensor in (x, *parameters, *take_step.model.buffers()):
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    take_step(x, x)
    state = sum(
        t.nbytes for o in take_step.optimizers for s in o.state.values() for t in s.values()
    )
    count, flops = model_size(model)
    assert 4 * count == sum(p.nbytes for p in parameters)
    held = 4 * count + state + sum(kept.values())
    assert memory_needed(config, 1) == pytest.approx(held, rel=0.2)
    assert flops * x.numel() == pytest.approx(counted.get_total_flops(), rel=0.25)


def test_what_is_settled_has_no_auto_left_and_settles_to_itself(monkeypatch):
    monkeypatch.setattr(plan, "has_compiler", lambda: True)
    text = SimpleNamespace(
        ngrams=None, tokenizer=SimpleNamespace(vocab_size=65), train=range(999), val=range(99)
    )
    config = Config(device="cpu", max_steps=10, model=GPTConfig(None, block_size=32))
    done = resolve(config, World(), text)
    settled = {
        name: value for name, value in asdict(done).items() if name not in ("distributed", "wandb")
    }
    assert "auto" not in str(settled) and done.model.vocab_size == 65
    assert (done.compile, done.shard) == (False, 1) and resolve(done, World(), text) == done
    assert resolve(replace(config, max_steps=10**7), World(), text).compile
    with pytest.raises(UserError, match="too few for model"):
        resolve(replace(config, model=GPTConfig(None, block_size=128)), World(), text)
