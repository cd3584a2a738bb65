"""The plan of a run: nothing is left open, and what cannot work is refused."""

from dataclasses import asdict, replace
from types import SimpleNamespace

from config import Config, ModelConfig
from training import plan
from training.plan import resolve


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
