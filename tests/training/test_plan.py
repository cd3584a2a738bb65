"""The plan of a run: nothing is left open, and what cannot work is refused."""

from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import yaml

from common.errors import UserError
from config import Config, GPTConfig, ModelConfig, ResolvedConfig
from training import plan
from training.memory import memory_needed
from training.plan import find_memory_remedy, fits, resolve


def test_a_resolved_configuration_has_no_auto_and_resolves_to_itself(monkeypatch):
    monkeypatch.setattr(plan, "has_compiler", lambda: True)
    tokenizer = SimpleNamespace(vocab_size=65)
    text = SimpleNamespace(ngrams=None, tokenizer=tokenizer, train=range(999), val=range(99))
    config = Config(device="cpu", max_steps=10, model=ModelConfig(None, block_size=32))
    resolved = resolve(config, 1, text)
    settings = asdict(resolved)
    del settings["distributed"], settings["wandb"]  # they depend on each command's environment
    assert "auto" not in str(settings) and resolved.model.vocab_size == 65
    assert (resolved.compile, resolved.shard) == (False, 1)
    assert resolve(resolved, 1, text) == resolved
    assert resolve(replace(config, max_steps=10**7), 1, text).compile


def test_a_text_shorter_than_the_context_is_refused():
    tokenizer = SimpleNamespace(vocab_size=65)
    text = SimpleNamespace(ngrams=None, tokenizer=tokenizer, train=range(999), val=range(99))
    config = Config(device="cpu", model=ModelConfig(None, block_size=128))
    with pytest.raises(UserError) as error:
        resolve(config, 1, text)
    assert "model.block_size=128" in str(error.value)
    assert "model.block_size=64" in str(error.value)  # the remedy


@pytest.mark.parametrize("processes", [1, 4])
def test_the_remedy_for_too_little_memory_is_enough_if_there_is_one(processes):
    config = ResolvedConfig(
        model=GPTConfig(1000, block_size=512, n_layer=8, n_embd=64),
        device="cpu",
        precision="fp32",
        batch_size=8,
    )
    needed = memory_needed(config, processes)
    changed = set()
    for share in (0.9, 0.5, 0.25, 0.1):
        remedy = find_memory_remedy(config, processes, share * needed)
        if remedy.startswith("set "):
            changes = yaml.safe_load(remedy[4:].replace(" ", "\n").replace("=", ": "))
            assert fits(replace(config, **changes), processes, share * needed)
            changed |= changes.keys()
    assert "accumulate" in changed
    assert "model.n_layer" in find_memory_remedy(config, processes, 0.01 * needed)
