"""The plan of a run: nothing is left open, and what cannot work is refused."""

from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch

from common.errors import UserError
from config import Config, EvalConfig, ModelConfig
from training import plan
from training.device import pick_device
from training.plan import resolve


def test_a_resolved_configuration_has_no_auto_and_resolves_to_itself(monkeypatch):
    monkeypatch.setattr(plan, "has_compiler", lambda: True)
    tokenizer = SimpleNamespace(vocab_size=65)
    text = SimpleNamespace(
        ngrams=None, task=None, tokenizer=tokenizer, train=range(999), val=range(99)
    )
    config = Config(device="cpu", max_steps=10, model=ModelConfig(None, block_size=32))
    resolved = resolve(config, 1, text)
    settings = asdict(resolved)
    del settings["distributed"], settings["wandb"]  # they depend on each command's environment
    assert "auto" not in str(settings) and resolved.model.vocab_size == 65
    assert (resolved.compile, resolved.shard) == (False, 1)
    assert resolved.threads == torch.get_num_threads()
    assert resolve(replace(config, threads=3), 1, text).threads == 3
    assert resolve(resolved, 1, text) == resolved
    assert resolve(replace(config, max_steps=10**7), 1, text).compile


@pytest.mark.parametrize(
    ("tokens", "every", "first", "resolved_first"),
    [
        (128 * 40, 500, 100, 40),  # an epoch of 40 steps
        (128 * 40, 500, 0, 40),
        (128 * 40, 500, 10, 10),
        (128 * 40, 30, 0, 0),
        (128 * 400, 500, 100, 100),
        (128 * 400, 500, 0, 400),
        (128 * 4000, 500, 0, 0),
        (50, 500, 100, 1),  # shorter than a step
        (50, 0, 0, 0),  # evaluated only at the end
    ],
)
def test_a_text_is_evaluated_after_one_epoch_at_the_latest(tokens, every, first, resolved_first):
    text = SimpleNamespace(
        ngrams=None,
        task=None,
        tokenizer=SimpleNamespace(vocab_size=65),
        train=range(tokens),
        val=range(99),
    )
    config = Config(
        device="cpu",
        batch_size=4,
        model=ModelConfig(None, block_size=32),
        eval=EvalConfig(every, first),
    )
    resolved = resolve(config, 1, text)
    assert (resolved.eval.every, resolved.eval.first) == (every, resolved_first)
    assert resolve(resolved, 1, text) == resolved
    text.task = object()  # its sequences are generated and have no epochs
    assert resolve(config, 1, text).eval.first == first


@pytest.mark.parametrize("device", ["cuda:99", "mps", "meta", "no", ""])
def test_a_device_that_is_not_there_is_refused_in_one_sentence(device):
    if device == "mps" and torch.backends.mps.is_available():
        pytest.skip("it is there")
    with pytest.raises(UserError) as error:
        pick_device(device)
    message = str(error.value)
    assert f"device={device} " in message and len(message) < 400 and "\n" not in message
