"""Weights of a byte each: how far they are from what they stand for, and what uses them."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import configs, few, lively, random_tokens, seeds, small
from torch import nn

from config import UserError
from model import GPT, Decoder
from training import int8
from training.evaluate import surprise
from training.int8 import Int8Linear, int8_linear
from training.runtime import for_sampling

BF16 = 2 ** -8  # the largest relative error of a number that is rounded to bf16


def quantized(model):
    return for_sampling(copy.deepcopy(model), "cpu", quantized="int8").eval()


def layers(model):
    return [m for m in model.modules() if isinstance(m, Int8Linear)]


@few
@given(out=st.integers(1, 40), size=st.sampled_from([1, 6, 16, 24, 48, 100, 352]),
       spread=st.sampled_from([1e-6, 1.0, 1e4]), seed=seeds)
def test_a_weight_is_within_half_a_step_of_what_it_was(out, size, spread, seed):
    torch.manual_seed(seed)
    layer = nn.Linear(size, out)
    with torch.no_grad():
        layer.weight.mul_(spread * torch.rand(out, 1))
        layer.weight[0] = 0
    made = Int8Linear(layer)
    assert made.q.dtype == torch.int8 and made.scale.dtype == torch.bfloat16
    exact, step = layer.weight.double(), made.scale.double()[:, None]
    assert ((made.q.double() * step - exact).abs() <= step * (0.5 + 1e-6)).all()
    # No step is wasted: the largest weight of a row is the largest number, or next to it.
    assert (made.q.abs().amax(dim=1)[1:] >= 126).all() and (made.q[0] == 0).all()
    assert (step <= exact.abs().amax(dim=1, keepdim=True) / 127 * (1 + BF16) + 1e-29).all()


@few
@given(out=st.integers(1, 70), size=st.sampled_from([1, 6, 8, 16, 31, 40, 48, 352]),
       rows=st.sampled_from([(1,), (3,), (16,), (17,), (2, 5), (3, 40)]), bias=st.booleans(),
       piece=st.sampled_from([1, 300, 1 << 20]), seed=seeds)
def test_a_product_is_that_of_the_weights_it_stands_for_within_rounding(
        out, size, rows, bias, piece, seed):
    torch.manual_seed(seed)
    made = Int8Linear(nn.Linear(size, out, bias=bias)).to(torch.bfloat16)
    x = torch.randn(*rows, size).bfloat16()
    with torch.no_grad(), pytest.MonkeyPatch.context() as patched:
        patched.setattr(int8, "PIECE", piece)
        got = made(x)
    weight = made.q.double() * made.scale.double()[:, None]
    exact = x.double() @ weight.T
    # Two roundings, and a sum in float32.
    bound = 2.01 * BF16 * exact.abs() + 1e-7 * size * (x.double().abs() @ weight.abs().T)
    if bias:
        exact = exact + made.bias.double()
        bound = bound + 1.01 * BF16 * exact.abs()
    assert got.shape == (*rows, out) and got.dtype == torch.bfloat16
    assert ((got.double() - exact).abs() <= bound).all()


def test_a_row_of_a_batch_is_bit_for_bit_that_row_alone_while_the_kernel_takes_it():
    torch.manual_seed(0)
    made, x = Int8Linear(nn.Linear(96, 70)).to(torch.bfloat16), torch.randn(16, 96).bfloat16()
    with torch.no_grad():
        assert torch.equal(made(x), torch.cat([made(row[None]) for row in x]))


@pytest.mark.parametrize("tied", [True, False])
def test_only_matrices_change_and_each_takes_a_byte_a_weight(tied):
    model = GPT(small(n_embd=32, tie_embeddings=tied, bias=True))
    made = quantized(model)
    assert sum(layer.q.nbytes for layer in layers(made)) == sum(
        m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    assert not any(isinstance(m, nn.Linear) for m in made.modules())
    assert made.token_embedding.weight.dtype == torch.bfloat16
    assert torch.equal(made.token_embedding.weight, model.token_embedding.weight.bfloat16())
    assert made.head.q.shape == made.token_embedding.weight.shape
    rest = sum(p.numel() for p in made.parameters())
    assert sum(t.nbytes for t in (*made.parameters(), *made.buffers())) == 2 * rest + sum(
        layer.q.nbytes + layer.scale.nbytes for layer in layers(made))
    model.load_state_dict(made.state_dict())  # as a page of attention does, which counts in float32
    assert torch.equal(model.blocks[0].mlp.W_in.weight, made.blocks[0].mlp.W_in.weight.float())


@few
@given(config=configs, rows=st.integers(1, 3), filled=st.integers(1, 15), seed=seeds)
def test_logits_are_those_of_a_model_with_the_rounded_weights(config, rows, filled, seed):
    model, tokens = lively(GPT(config), seed), random_tokens(rows, 16, seed=seed)
    made = quantized(model)
    # The same model in bf16, its matrices those that the bytes stand for.
    same = copy.deepcopy(made)
    for module in list(same.modules()):
        for name, layer in module.named_children():
            if isinstance(layer, Int8Linear):
                plain = nn.Linear(*layer.q.T.shape, bias=layer.bias is not None)
                plain.weight.data, plain.bias = layer.weight.float(), layer.bias
                setattr(module, name, plain)
    same.double()
    with torch.no_grad():
        expected = same(tokens)[0]
        decoder = Decoder(made, made.make_cache(rows))
        got = [decoder.fill(tokens[:, :filled])]
        got += [decoder.step(tokens[:, t]) for t in range(filled, 16)]
        whole = made(tokens)[0]
    for logits, right in ((torch.stack(got, dim=1), expected[:, filled - 1:]), (whole, expected)):
        error = (logits.double() - right).square().mean().sqrt()  # by the roundings of bf16
        assert error < 0.05 * expected.std()


def test_a_score_costs_little_more_than_without():
    model, tokens = lively(GPT(small(n_embd=64))), random_tokens(200)
    plain, bytes_ = (torch.cat(list(surprise(m, tokens))).mean()
                     for m in (for_sampling(copy.deepcopy(model), "cpu", "bf16"),
                               quantized(model)))
    assert 0 < abs(plain - bytes_) < 0.05


def test_a_width_that_the_kernel_would_read_beyond_takes_another_way():
    """Rows of 6 numbers: torch's kernel ends the process there."""
    made = Int8Linear(nn.Linear(6, 23)).to(torch.bfloat16)
    for _ in range(50):
        assert torch.isfinite(int8_linear(torch.ones(1, 6).bfloat16(), made.q, made.scale)).all()


def test_a_device_without_the_kernel_is_refused_in_a_sentence():
    with pytest.raises(UserError, match=r"quantize=int8 is for device=cpu and cuda.*this is mps"):
        for_sampling(GPT(small()), "mps", quantized="int8")
