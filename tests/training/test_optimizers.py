"""Each optimizer follows its written-out rule."""

import math
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.settings import explain_unused
from config import Config, GPTConfig, OptimConfig
from training.optimizers import (
    ROW_SQUARES_DECAY,
    Muon,
    RowAdagrad,
    build_optimizers,
    clip_gradients,
    orthogonalize,
)
from training.schedule import lr_factor
from training.world import World
from variants import build_model


@given(st.integers(1, 3), st.integers(2, 24), st.integers(2, 24), st.integers(0, 1000))
def test_orthogonalize_keeps_singular_vectors_and_equalizes_singular_values(
    batch, rows, columns, seed
):
    torch.manual_seed(seed)
    matrices = torch.randn(batch, rows, columns, dtype=torch.float64)
    result = orthogonalize(matrices, torch.float64)
    u, s, vt = torch.linalg.svd(matrices, full_matrices=False)
    core = u.mT @ result @ vt.mT  # diagonal if the singular vectors are kept
    new_values = torch.diagonal(core, dim1=-2, dim2=-1)
    assert torch.allclose(core, torch.diag_embed(new_values), atol=1e-8)
    expected = s / s.norm(dim=-1, keepdim=True)
    for _ in range(5):
        expected = 3.4445 * expected - 4.7750 * expected**3 + 2.0315 * expected**5
    assert torch.allclose(new_values, expected, atol=1e-6)


def test_muon_follows_its_written_out_rule_for_tall_wide_and_square_matrices():
    torch.manual_seed(0)
    shapes = [(6, 4), (4, 6), (5, 5), (6, 4), (3, 24)]  # two of one shape
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    expected = [p.detach().clone() for p in params]
    momenta = [torch.zeros(shape) for shape in shapes]
    squares = [torch.full((rows, 1), 1 / max(rows, columns)) for rows, columns in shapes]
    optimizer = Muon(params, lr=0.1, momentum=0.9, weight_decay=0.01)
    for _ in range(3):
        for n, (rows, columns) in enumerate(shapes):
            gradient = params[n].grad = torch.randn(rows, columns)
            momenta[n] = 0.9 * momenta[n] + 0.1 * gradient
            update = orthogonalize((0.1 * gradient + 0.9 * momenta[n])[None])[0]
            new_squares = (update**2).mean(dim=1, keepdim=True)
            squares[n] = ROW_SQUARES_DECAY * squares[n] + (1 - ROW_SQUARES_DECAY) * new_squares
            update = update / (squares[n] * max(rows, columns)).sqrt()
            step_size = 0.1 * math.sqrt(rows / columns) if rows > columns else 0.1
            expected[n] = expected[n] * (1 - 0.1 * 0.01) - step_size * update
        optimizer.step()
        assert all(p.grad is None for p in params)
    for p, weights in zip(params, expected):
        assert torch.allclose(p, weights, atol=1e-6)


@pytest.mark.parametrize("sparse", [True, False])
def test_row_adagrad_follows_its_written_out_rule(sparse):
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(6, 4))
    expected, sums = p.detach().clone(), torch.zeros(6)
    optimizer = RowAdagrad([p], lr=0.1)
    for rows in ([1, 4, 1], [0, 1, 4]):  # one row twice, and one that occurs later
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


def model_and_optimizers(name: str):
    torch.manual_seed(0)
    model = build_model(
        GPTConfig(vocab_size=11, block_size=8, n_layer=2, n_head=2, n_embd=16, bias=True)
    )
    return model, build_optimizers(model, OptimConfig(name=name), "fp32")


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_every_parameter_has_one_optimizer_and_only_matrices_decay(name):
    model, optimizers = model_and_optimizers(name)
    groups = [g for o in optimizers for g in o.param_groups]
    optimized = [id(p) for g in groups for p in g["params"]]
    assert sorted(optimized) == sorted(id(p) for p in model.parameters())
    assert all((p.dim() >= 2) == (g["weight_decay"] > 0) for g in groups for p in g["params"])
    names = {id(p): key for key, p in model.named_parameters()}
    matrices = {key for key, p in model.blocks.named_parameters(prefix="blocks") if p.dim() == 2}
    muon = [o for o in optimizers if isinstance(o, Muon)]
    owned = {names[id(p)] for o in muon for g in o.param_groups for p in g["params"]}
    assert owned == (matrices if name == "muon" else set())


@pytest.mark.parametrize("loss_scale", [1, 8])
@pytest.mark.parametrize("max_norm", [0, 0.01, 1e9])
def test_gradients_are_scaled_to_the_maximum_norm_unless_it_is_0(max_norm, loss_scale):
    shape = {"block_size": 8, "n_layer": 1, "n_head": 1, "n_embd": 4}
    model = build_model(GPTConfig(11, **shape, ngrams=2, ngram_rows=5, smear_keys=True))
    parameters, tokens = list(model.parameters()), torch.tensor([[1, 2, 1, 2, 1, 2, 1, 2]])
    expected = torch.autograd.grad(model(tokens, tokens)[1], parameters)
    model.ngrams.sparse = True  # the same rows occur several times
    (loss_scale * model(tokens, tokens)[1]).backward()
    norms = clip_gradients(model, max_norm, World(), loss_scale)
    assert torch.allclose(norms, torch.stack([grad.norm() for grad in expected]))
    scale = 0.01 / norms.norm() if max_norm == 0.01 else 1
    for p, grad in zip(parameters, expected):
        assert torch.allclose(p.grad.to_dense(), grad * scale, atol=1e-6)


def observe(optim: OptimConfig) -> tuple:
    """What an optimizer and its schedule do with their settings."""
    model = build_model(GPTConfig(vocab_size=11, block_size=8, n_layer=1, n_head=2, n_embd=16))
    groups = [group for one in build_optimizers(model, optim, "fp32") for group in one.param_groups]
    kept = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    return kept, [lr_factor(step, optim, 100) for step in range(101)], optim.grad_clip


CHOICES = {field.name: field.metadata.get("choices") for field in fields(OptimConfig)}


@pytest.mark.parametrize("schedule", CHOICES["schedule"])
@pytest.mark.parametrize("name", CHOICES["name"])
def test_exactly_the_settings_that_an_optimizer_reads_are_accepted(name, schedule):
    optim = OptimConfig(name=name, schedule=schedule)
    for key, choices in CHOICES.items():
        value = getattr(optim, key)
        if choices:
            other = next(choice for choice in choices if choice != value)
        else:
            other = 0.7 * (value or 0.01)
        changed = replace(optim, **{key: other})
        is_read = observe(changed) != observe(optim)
        assert is_read == (explain_unused(Config(optim=changed), f"optim.{key}") is None), key


def test_each_optimizer_gets_its_settings():
    model = build_model(
        GPTConfig(11, block_size=8, n_layer=1, n_head=1, n_embd=4, ngrams=2, ngram_rows=5)
    )
    optim = OptimConfig(
        name="muon",
        lr=0.1,
        beta1=0.7,
        beta2=0.8,
        muon_lr_multiple=2,
        momentum=0.5,
        weight_decay=0.6,
    )
    adamw, muon, adagrad = (one.param_groups[0] for one in build_optimizers(model, optim, "fp32"))
    assert (adamw["lr"], adamw["betas"], adamw["weight_decay"]) == (0.1, (0.7, 0.8), 0.6)
    assert (muon["lr"], muon["momentum"], muon["weight_decay"]) == (0.2, 0.5, 0.6)
    assert adagrad["lr"] == 0.1 and adagrad["params"] == [model.ngrams.table]
    assert all(group["peak_lr"] == group["lr"] for group in (adamw, muon, adagrad))
