"""The plan of a run: nothing is left open, and estimates agree with real steps."""

from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch
from conftest import soak

from common.errors import UserError
from config import Config, GPTConfig, ModelConfig, OptimConfig, ResolvedConfig
from precision import autocast
from train import train_step
from training import plan
from training.memory import memory_needed, model_size
from training.plan import resolve
from training.processes import World
from training.state import build_state

SHAPES = {
    "gpt2": {"bias": True, "mlp": "gelu"},
    "llama": {"n_kv_head": 2, "norm": "rmsnorm", "position": "rope", "mlp": "swiglu"},
    "attention only": {"mlp": "none", "position": "rope"},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape, precision", [soak("gpt2", "fp32"), ("llama", "bf16"), ("attention only", "bf16")]
)
def test_estimated_memory_is_close_to_that_of_a_real_step(shape, precision):
    model = GPTConfig(500, n_layer=2, n_embd=64, **SHAPES[shape])
    config = ResolvedConfig(
        device="cpu",
        precision=precision,
        batch_size=4,
        model=model,
        optim=OptimConfig(name="muon"),
    )
    state = build_state(config, World())
    x = torch.zeros(4, 256, dtype=torch.int64)
    parameters = list(state.model.parameters())
    saved_bytes = {}  # of the tensors that the backward pass needs, by address

    def note(tensor):
        storage = tensor.untyped_storage()
        saved_bytes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t), autocast("cpu", precision):
        logits, loss = state.model(x, x)
    loss.backward()
    note(logits)
    for tensor in (x, *parameters, *state.model.buffers()):
        saved_bytes.pop(tensor.untyped_storage().data_ptr(), None)
    train_step(state, 0, x.numpy(), x.numpy())
    optimizer_bytes = sum(
        t.nbytes for o in state.optimizers for s in o.state.values() for t in s.values()
    )
    num_parameters, _ = model_size(model)
    assert 4 * num_parameters == sum(p.nbytes for p in parameters)
    real_bytes = 4 * num_parameters + optimizer_bytes + sum(saved_bytes.values())
    assert memory_needed(config, 1) == pytest.approx(real_bytes, rel=0.2)


def test_a_resolved_configuration_has_no_auto_and_resolves_to_itself(monkeypatch):
    monkeypatch.setattr(plan, "has_compiler", lambda: True)
    tokenizer = SimpleNamespace(vocab_size=65)
    text = SimpleNamespace(ngrams=None, tokenizer=tokenizer, train=range(999), val=range(99))
    config = Config(device="cpu", max_steps=10, model=ModelConfig(None, block_size=32))
    resolved = resolve(config, World(), text)
    settings = asdict(resolved)
    del settings["distributed"], settings["wandb"]  # they depend on each command's environment
    assert "auto" not in str(settings) and resolved.model.vocab_size == 65
    assert (resolved.compile, resolved.shard) == (False, 1)
    assert resolve(resolved, World(), text) == resolved
    assert resolve(replace(config, max_steps=10**7), World(), text).compile


def test_a_text_shorter_than_the_context_is_refused():
    tokenizer = SimpleNamespace(vocab_size=65)
    text = SimpleNamespace(ngrams=None, tokenizer=tokenizer, train=range(999), val=range(99))
    config = Config(device="cpu", model=ModelConfig(None, block_size=128))
    with pytest.raises(UserError) as error:
        resolve(config, World(), text)
    assert "model.block_size=128" in str(error.value)
    assert "model.block_size=64" in str(error.value)  # the remedy
