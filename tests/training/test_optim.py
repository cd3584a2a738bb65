import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from steps import Steps

from config import Config, GPTConfig, OptimConfig
from model import GPT
from training.optimizer_state import load_optimizer_tensors, optimizer_tensors
from training.optimizers import (
    ROW_SQUARES_DECAY,
    Muon,
    RowAdagrad,
    build_optimizers,
    orthogonalize,
)
from training.schedule import lr_factor


@given(st.integers(1, 3), st.integers(2, 24), st.integers(2, 24), st.integers(0, 1000))
def test_orthogonalize_keeps_the_singular_vectors_and_levels_the_singular_values(
    batch, rows, columns, seed
):
    torch.manual_seed(seed)
    matrices = torch.randn(batch, rows, columns, dtype=torch.float64)
    result = orthogonalize(matrices, torch.float64)
    u, s, vt = torch.linalg.svd(matrices, full_matrices=False)
    core = u.mT @ result @ vt.mT  # diagonal where the singular vectors are kept
    levels = torch.diagonal(core, dim1=-2, dim2=-1)
    assert torch.allclose(core, torch.diag_embed(levels), atol=1e-8)
    # Five steps bring these to the plateau; smaller ones are on their way.
    large = s / s.norm(dim=-1, keepdim=True) > 0.02
    assert ((levels > 0.6) & (levels < 1.3))[large].all()


def test_orthogonalize_takes_a_batch_as_it_takes_each_matrix():
    torch.manual_seed(0)
    matrices = torch.randn(3, 8, 5)
    alone = torch.stack([orthogonalize(m[None])[0] for m in matrices])
    assert torch.allclose(orthogonalize(matrices), alone, atol=1e-6)


def test_muon_moves_a_matrix_by_the_written_out_rule():
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(6, 4))
    expected, momentum, squares = p.detach().clone(), torch.zeros(6, 4), torch.full((6, 1), 1 / 6)
    optimizer = Muon([p], lr=0.1, momentum=0.9, weight_decay=0.01)
    for _ in range(3):
        p.grad = torch.randn(6, 4)
        momentum = 0.9 * momentum + 0.1 * p.grad
        update = orthogonalize((0.1 * p.grad + 0.9 * momentum)[None])[0]
        squares = ROW_SQUARES_DECAY * squares + (1 - ROW_SQUARES_DECAY) * (update**2).mean(
            dim=1, keepdim=True
        )
        update = update / (squares * 6).sqrt()
        expected = expected * (1 - 0.1 * 0.01) - 0.1 * math.sqrt(6 / 4) * update
        optimizer.step()
    assert torch.allclose(p, expected, atol=1e-6)


@pytest.mark.parametrize("sparse", [True, False])
def test_row_adagrad_moves_the_rows_that_were_used_by_the_written_out_rule(sparse):
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(6, 4))
    expected, sums = p.detach().clone(), torch.zeros(6)
    optimizer = RowAdagrad([p], lr=0.1)
    for rows in ([1, 4, 1], [0, 1, 4]):  # a row twice, and one that comes later
        used = torch.nn.functional.embedding(torch.tensor(rows), p, sparse=sparse)
        used.square().sum().backward()
        for row in set(rows):
            gradient = 2 * expected[row] * rows.count(row)
            sums[row] += gradient.square().mean()
            expected[row] -= 0.1 * gradient / sums[row].sqrt()
        p.grad = p.grad.coalesce() if sparse else p.grad
        optimizer.step()
        optimizer.zero_grad()
    assert torch.allclose(p, expected, atol=1e-6)


def test_all_rows_of_a_matrix_move_as_far_by_muon():
    """Where one row has most of the gradient, it has most of the orthogonal update too."""
    torch.manual_seed(0)
    p, scale = torch.nn.Parameter(torch.zeros(8, 3)), torch.tensor([3.0] + [1] * 7)[:, None]
    optimizer, moved, orthogonal = Muon([p], lr=1, momentum=0, weight_decay=0), 0, 0
    for step in range(300):
        before, p.grad = p.detach().clone(), torch.randn(8, 3) * scale
        orthogonal = orthogonal + orthogonalize(p.grad[None])[0].square().mean(dim=1)
        optimizer.step()
        moved = moved + (p.detach() - before).square().mean(dim=1) * (step >= 50)
    assert orthogonal.max() > 1.8 * orthogonal.min() and moved.max() < 1.25 * moved.min()


def test_a_row_without_a_gradient_stays_where_it_is():
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(4, 3))
    start, optimizer = p.detach().clone(), Muon([p], lr=0.01, momentum=0.9, weight_decay=0)
    for _ in range(1200):  # until its mean square is as good as 0
        p.grad = torch.randn(4, 3)
        p.grad[1] = 0
        optimizer.step()
    assert optimizer.state[p]["row_squares"][1] < 1e-30
    assert torch.equal(p[1], start[1]) and p.isfinite().all() and not torch.equal(p, start)


def model_and_optimizers(name: str):
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=11, block_size=8, n_layer=2, n_head=2, n_embd=16, bias=True))
    return model, build_optimizers(model, OptimConfig(name=name))


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_every_weight_has_one_optimizer_and_only_matrices_decay(name):
    model, optimizers = model_and_optimizers(name)
    groups = [g for o in optimizers for g in o.param_groups]
    owned = [id(p) for g in groups for p in g["params"]]
    assert sorted(owned) == sorted(id(p) for p in model.parameters())
    assert all((p.dim() >= 2) == (g["weight_decay"] > 0) for g in groups for p in g["params"])


def test_muon_takes_the_matrices_of_the_blocks_and_nothing_else():
    model, optimizers = model_and_optimizers("muon")
    by_muon = {
        id(p)
        for o in optimizers
        if isinstance(o, Muon)
        for g in o.param_groups
        for p in g["params"]
    }
    names = {name for name, p in model.named_parameters() if id(p) in by_muon}
    assert names == {
        f"blocks.{layer}.{part}.weight"
        for layer in range(2)
        for part in (
            "attention.W_Q",
            "attention.W_K",
            "attention.W_V",
            "attention.W_O",
            "mlp.W_in",
            "mlp.W_out",
        )
    }


def steps(model, optimizers, count: int, seed: int):
    torch.manual_seed(seed)
    for _ in range(count):
        tokens = torch.randint(0, 11, (2, 9))
        model(tokens[:, :-1], tokens[:, 1:])[1].backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_saved_and_loaded_state_continues_to_the_same_bits(name, tmp_path):
    model, optimizers = model_and_optimizers(name)
    steps(model, optimizers, 3, seed=1)
    again, others = model_and_optimizers(name)
    again.load_state_dict(model.state_dict())
    save_file(optimizer_tensors(optimizers, model), tmp_path / "state.safetensors")
    load_optimizer_tensors(others, again, tmp_path / "state.safetensors")
    steps(model, optimizers, 3, seed=2)
    steps(again, others, 3, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters()))


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_step_is_that_of_the_mean_gradient_clipped_however_it_is_split(name):
    tokens, weights = torch.randint(0, 11, (4, 9), generator=torch.Generator().manual_seed(0)), []
    x, y = tokens[:, :-1], tokens[:, 1:]
    for accumulate in (1, 2, 4):
        take_step = Steps(
            Config(
                device="cpu",
                precision="fp32",
                compile=False,
                batch_size=4,
                accumulate=accumulate,
                max_steps=100,
                optim=OptimConfig(name=name, grad_clip=0.01, warmup_steps=9),
                model=GPTConfig(11, block_size=8, n_layer=2, n_head=2, n_embd=16, bias=True),
            )
        )
        parameters, seen = list(take_step.model.parameters()), []
        loss = take_step.model(x, y)[1]
        grads = torch.autograd.grad(loss, parameters)
        take_step.optimizers[0].register_step_pre_hook(
            lambda *_, seen=seen, parameters=parameters: seen.extend(
                p.grad.clone() for p in parameters
            )
        )
        measured, norms = take_step(x, y)
        assert measured.item() == pytest.approx(loss.item(), abs=1e-6)
        assert torch.allclose(norms, torch.stack([g.norm() for g in grads]), atol=1e-6)
        clip = 0.01 / norms.norm()
        assert all(torch.allclose(a, b * clip, atol=1e-6) for a, b in zip(seen, grads))
        assert all(
            group["lr"] == pytest.approx(group["peak_lr"] / 10)
            for optimizer in take_step.optimizers
            for group in optimizer.param_groups
        )
        weights.append([p.detach().clone() for p in parameters])
    for other in weights[1:]:
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(weights[0], other))


def schedule(steps: int, **optim) -> list[float]:
    return [lr_factor(step, OptimConfig(**optim), steps) for step in range(steps)]


def test_the_cosine_rises_linearly_and_ends_at_its_floor():
    factors = schedule(2000, warmup_steps=100, min_lr_ratio=0.1)
    assert factors[:3] == pytest.approx([1 / 101, 2 / 101, 3 / 101])
    assert factors[100] == 1.0
    assert factors[1050] == pytest.approx(0.55)
    assert factors[-1] == pytest.approx(0.1, abs=1e-4)


def test_warm_up_stable_decay_is_flat_and_then_falls_linearly():
    factors = schedule(100, schedule="wsd", warmup_steps=5, decay_share=0.4, min_lr_ratio=0.0)
    assert set(factors[5:61]) == {1.0}
    assert factors[80] == pytest.approx(0.5)
    assert factors[99] == pytest.approx(1 / 40)


def test_the_constant_schedule_stays():
    assert set(schedule(50, schedule="constant", warmup_steps=0)) == {1.0}


def test_after_the_decay_the_rate_stays_at_its_floor():
    assert lr_factor(60, OptimConfig(min_lr_ratio=0.2), max_steps=50) == 0.2
