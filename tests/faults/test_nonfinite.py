"""NaN and Inf: the update is not made, the step and the tensor are named, checkpoints stay; or such
steps are left out and counted."""

import math

import pytest
import torch
from processes import KILL, Process, assert_same_run, at_call, finished, kill_me, rows, tiny
from safetensors.numpy import load_file

import model
import training.optim
from config import Config, OptimConfig
from training.checkpoint import find_checkpoint
from training.optim import (
    Watch,
    build_optimizers,
    optimizer_tensors,
    update,
)


def faulty(steps, wrong):
    """A fault: in these updates, `wrong` makes another loss of (model, loss)."""
    def fault():
        now, seed, forward = -1, training.optim.seed_micro_step, model.GPT.forward

        def seeded(seed_, step, *more):
            nonlocal now
            now = step + 1
            seed(seed_, step, *more)

        def poisoned(self, *args, **more):
            logits, loss = forward(self, *args, **more)
            trains = self.training and torch.is_grad_enabled()
            return logits, wrong(self, loss) if trains and now in steps else loss

        training.optim.seed_micro_step, model.GPT.forward = seeded, poisoned

    return fault


def nan_loss(model, loss):
    return loss * math.nan


def infinite_gradient(model, loss):
    """The loss is as it was; a gradient of one matrix is infinite: √x at 0 rises without end."""
    return loss + (model.blocks[1].attention.W_K.weight[0, 0] * 0).abs().sqrt()


@pytest.mark.slow
@pytest.mark.parametrize("optim, wrong, named",
                         [("adamw", nan_loss, "the loss and the gradient of "),
                          ("muon", infinite_gradient,
                           "the gradient of blocks.1.attention.W_K.weight ")])
def test_what_is_not_finite_ends_the_run_before_the_update_with_step_and_tensor(
        tmp_path, text_file, optim, wrong, named):
    argv = tiny(text_file, f"optim={optim}")
    said = finished(tmp_path, *argv, status=1, fault=faulty({7}, wrong))
    sentence, = (tmp_path / "err.txt").read_text().splitlines()
    assert sentence.startswith(f"error: step 7: {named}") and "resume=true" in sentence, said
    assert find_checkpoint(tmp_path / "run", "last", pytest.fail)[1]["step"] == 4
    assert [row["step"] for row in rows(tmp_path / "run")] == list(range(7))
    finished(tmp_path, *argv, "resume=true")  # the fault is gone
    finished(tmp_path, *argv, "run_dir=whole")
    assert_same_run(tmp_path / "whole", tmp_path / "run")


@pytest.mark.slow
def test_what_is_not_finite_before_the_first_checkpoint_names_a_way_on_that_works(
        tmp_path, text_file):
    argv = tiny(text_file)
    finished(tmp_path, *argv, status=1, fault=faulty({2}, nan_loss))
    sentence, = (tmp_path / "err.txt").read_text().splitlines()
    assert "no checkpoint yet: start again with resume=auto and a lower optim.lr" in sentence
    assert "resume=true" not in sentence
    finished(tmp_path, *argv, "resume=auto", "optim.lr=1e-4")
    assert rows(tmp_path / "run")[-1]["step"] == 12


@pytest.mark.slow
def test_steps_left_out_are_counted_and_a_resumed_run_counts_on(tmp_path, text_file):
    argv, fault = tiny(text_file, "on_nonfinite=skip"), faulty({3, 6, 7, 10}, nan_loss)
    finished(tmp_path, *argv, "run_dir=whole", fault=fault)
    skipped = [row["train/skipped"] for row in rows(tmp_path / "whole")[1:]]
    assert skipped == [0, 0, 1, 1, 1, 2, 3, 3, 3, 4, 4, 4]
    assert [row["step"] for row in rows(tmp_path / "whole")
            if "train/loss" not in row] == [0, 3, 6, 7, 10]
    assert "NaN" not in (tmp_path / "whole" / "metrics.jsonl").read_text()

    def killed():
        fault()
        at_call(training.optim, "seed_micro_step", 10, kill_me)()

    assert Process(tmp_path, *argv, fault=killed).wait() == -KILL
    finished(tmp_path, *argv, "resume=true", fault=fault)
    assert_same_run(tmp_path / "whole", tmp_path / "run")


@pytest.mark.slow
def test_ten_steps_left_out_in_a_row_end_the_run(tmp_path, text_file):
    finished(tmp_path, *tiny(text_file, "on_nonfinite=skip", "max_steps=20"), status=1,
             fault=faulty(range(5, 99), nan_loss))
    sentence, = (tmp_path / "err.txt").read_text().splitlines()
    assert "step 14" in sentence and "the 9 before it" in sentence
    assert rows(tmp_path / "run")[-1]["train/skipped"] == 9


@pytest.mark.slow
def test_a_spike_of_the_gradient_is_clipped_and_logged(tmp_path, text_file):
    argv = tiny(text_file, "checkpoint.every=1", "checkpoint.keep=99")
    finished(tmp_path, *argv, fault=faulty({7}, lambda model, loss: loss * 100))
    norms = {row["step"]: row["train/grad_norm"] for row in rows(tmp_path / "run") if row["step"]}
    assert norms[7] == max(norms.values()) > 30 * norms[6]
    mean = load_file(tmp_path / "run" / "checkpoints" / "step_00000007" / "optimizer.safetensors")
    squares = sum((mean[key] ** 2).sum() for key in mean if key.endswith("exp_avg"))
    assert squares <= 1  # a mean of gradients of norm 1 at most
    assert all(math.isfinite(row["train/loss"]) for row in rows(tmp_path / "run")[1:])


# --- the parts ------------------------------------------------------------------------------------


def model_and_optimizers(name: str):
    torch.manual_seed(0)
    small = model.GPT(model.GPTConfig(vocab_size=11, block_size=8, n_layer=1, n_head=2, n_embd=16,
                                      bias=True))
    config = Config(device="cpu", batch_size=4, max_steps=100,
                    optim=OptimConfig(name=name, warmup_steps=0))
    return small, build_optimizers(small, config.optim), config


def updated(small, optimizers, config, step):
    tokens = torch.randint(0, 11, (4, 9), generator=torch.Generator().manual_seed(step))
    return update(small, small, optimizers, tokens[:, :-1], tokens[:, 1:], config, step)


def state(small, optimizers) -> dict:
    return {**{name: p.detach().clone() for name, p in small.named_parameters()},
            **{name: t.clone() for name, t in optimizer_tensors(optimizers, small).items()}}


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("on_device", [False, True], ids=["left out", "left out by the device"])
def test_an_update_that_is_left_out_changes_nothing(name, on_device):
    small, optimizers, config = model_and_optimizers(name)
    updated(small, optimizers, config, 0)
    before = state(small, optimizers)
    if on_device:  # as on a GPU, where no one waits to see whether the gradient is finite
        for p in small.parameters():
            p.grad = torch.full_like(p, math.nan)
        for optimizer in optimizers:
            optimizer.found_inf = torch.ones(())
            optimizer.step()
    else:
        with torch.no_grad():
            small.blocks[0].mlp.W_in.weight[0, 0] = math.nan
        *_, finite = updated(small, optimizers, config, 1)
        assert not finite.any()
        with torch.no_grad():
            small.blocks[0].mlp.W_in.weight[0, 0] = before["blocks.0.mlp.W_in.weight"][0, 0]
    after = state(small, optimizers)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_an_update_that_the_device_decides_on_is_the_same_update(name):
    one, other = model_and_optimizers(name), model_and_optimizers(name)
    for step in range(3):
        for optimizer in other[1]:
            optimizer.found_inf = torch.zeros(())
        updated(*one, step)
        updated(*other, step)
    a, b = state(*one[:2]), state(*other[:2])
    assert all(torch.allclose(a[key], b[key], rtol=1e-6, atol=1e-7) for key in a)


def test_only_steps_in_a_row_count_towards_giving_up():
    small, *_ = model_and_optimizers("adamw")
    fine = torch.ones(len(list(small.parameters())) + 2, dtype=torch.bool)
    watch = Watch(small, "skip")
    for step in range(1, 60):
        watch.note(step, fine if step % 10 == 0 else ~fine)
    assert (watch.skipped, watch.in_a_row) == (54, 9)
