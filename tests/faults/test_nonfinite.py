"""A NaN or Inf ends the run before the update and names step and tensor; checkpoints stay."""

import math
from types import SimpleNamespace

import pytest
import torch
from processes import assert_same_run, rows, run_to_end, tiny_arguments
from run_folders import open_record

import model
from common.errors import UserError
from config import GPTConfig, ResolvedConfig
from data.tokenizer import CharTokenizer
from generation.scoring import score_tokens
from glass.heads.measure.analysis import analyze
from run.run_dir import RunDir
from training.activity_timer import ActivityTimer
from training.checkpoint import Checkpoints
from training.loss_scale import LossScaler
from training.losses import Losses, PendingCheck
from training.optimizers import clip_gradients
from training.stored_model import check_finite_weights
from training.world import World


def replace_loss(step: int, wrong):
    """Return a fault that replaces the loss of update `step`, from 1, by wrong(model, loss)."""

    def fault():
        updates, forward = iter(range(1, 100)), model.GPT.forward

        def poisoned(self, *args, **more):
            logits, loss = forward(self, *args, **more)
            trains = self.training and torch.is_grad_enabled()
            return logits, wrong(self, loss) if trains and next(updates) == step else loss

        model.GPT.forward = poisoned

    return fault


def nan_loss(model, loss):
    return loss * math.nan


def infinite_gradient(model, loss):
    """Keep the loss and make the gradient of one matrix infinite: √x has an infinite slope at 0."""
    return loss + (model.blocks[1].mlp.W_in.weight[0, 0] * 0).abs().sqrt()


@pytest.mark.slow
def test_a_nan_loss_ends_the_run_before_the_update_and_names_the_step(
    tmp_path, text_file, finished_run
):
    run_to_end(tmp_path, *tiny_arguments(text_file), status=1, fault=replace_loss(7, nan_loss))
    (message,) = (tmp_path / "err.txt").read_text().splitlines()
    assert "step 7" in message and "loss" in message and "resume=auto" in message
    assert RunDir(tmp_path / "run").checkpoint("last", pytest.fail).step == 4
    assert [row["step"] for row in rows(tmp_path / "run")] == list(range(7))
    run_to_end(tmp_path, *tiny_arguments(text_file, "resume=auto"))  # the fault is gone
    assert_same_run(finished_run, tmp_path / "run")


@pytest.mark.parametrize(
    "wrong, named",
    [
        (nan_loss, "step 6: the loss"),
        (infinite_gradient, "step 6: the gradient of blocks.1.mlp.W_in.weight"),
    ],
)
def test_the_tensor_is_named(wrong, named):
    small = model.GPT(model.GPTConfig(vocab_size=11, block_size=8, n_layer=2, n_head=2, n_embd=16))
    tokens = torch.randint(0, 11, (4, 9))
    loss = wrong(small, small(tokens[:, :-1], tokens[:, 1:])[1])
    loss.backward()
    losses, norms = Losses(small, "cpu"), clip_gradients(small, 1.0, World(), loss_scale=1.0)
    with pytest.raises(UserError) as error:
        losses.add(5, loss.detach(), norms, is_skipped=False)
    assert str(error.value).startswith(named)


def test_on_a_gpu_the_check_of_the_last_step_ends_the_run_before_its_weights_are_saved(tmp_path):
    config = ResolvedConfig(
        device="cpu", model=GPTConfig(11, block_size=8, n_layer=1, n_head=1, n_embd=4)
    )
    small, text = model.GPT(config.model), SimpleNamespace(fingerprint="f")
    losses, scaler = Losses(small, "cpu"), LossScaler("fp32")
    checkpoints = Checkpoints(RunDir(tmp_path), config, text, World(), small, [], scaler, losses)
    # A GPU's result is pending when the step returns.
    losses._pending = PendingCheck(3, torch.tensor([False]), None)
    with pytest.raises(UserError, match="step 4"):
        checkpoints.save(4, {}, ActivityTimer("cpu", {}))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", [math.nan, 3e38])
@pytest.mark.parametrize(
    "use",
    [
        lambda small, tokenizer: score_tokens(small, tokenizer.encode("abba")),
        lambda small, tokenizer: small.generate(torch.tensor([[1]]), 3, temperature=0.0),
        lambda small, tokenizer: analyze(small, tokenizer, "abba", log=len),
    ],
    ids=["score", "greedy", "analyze"],
)
def test_a_model_that_is_not_finite_is_refused_with_one_sentence(use, value):
    config = GPTConfig(3, block_size=8, n_layer=2, n_head=2, n_embd=16, tie_embeddings=False)
    small = model.GPT(config)
    torch.nn.init.constant_(small.norm.weight, value)
    torch.nn.init.constant_(small.head.weight, 1e30)  # finite weights can give infinite logits
    with pytest.raises(UserError) as error:
        use(small, CharTokenizer("ab\n"))
    assert "\n" not in str(error.value)


def test_a_weight_that_is_not_finite_is_named():
    small = model.GPT(GPTConfig(3, block_size=8, n_layer=2, n_head=2, n_embd=16))
    small.blocks[1].mlp.W_in.weight.data[0, 0] = -math.inf
    with pytest.raises(UserError, match=r"model\.gguf: blocks\.1\.mlp\.W_in\.weight"):
        check_finite_weights(small, "model.gguf")


def test_values_that_are_not_finite_are_not_written_to_metrics(tiny, tmp_path):
    with open_record(tiny, tmp_path) as record:
        record.write(2, {"val/loss": math.nan, "train/lr": 1.0, "train/loss": math.inf})
    (row,) = RunDir(tmp_path).rows()
    assert row["train/lr"] == 1.0 and not {"val/loss", "train/loss"} & row.keys()
