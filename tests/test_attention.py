"""The formula of attention, and the kernels that compute it."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from models import few, seeds
from torch import nn

from generation.decoder import attend_from_last_token
from kernels import attend, attend_short
from model import Context, GPTConfig, SelfAttention, attention, causal_mask

close = torch.testing.assert_close


# --- The formula ----------------------------------------------------------------------------------


@few
@given(
    leading=st.sampled_from([(), (3,), (2, 4), (2, 3, 4)]),
    heads_per_group=st.integers(1, 3),
    T_q=st.integers(1, 7),
    T_k=st.integers(1, 7),
    d_k=st.integers(1, 9),
    d_v=st.integers(1, 9),
    scale=st.sampled_from([None, 1.0, 0.3]),
    mask_type=st.sampled_from(["none", "boolean", "additive"]),
    seed=seeds,
)
def test_attention_is_torchs_scaled_dot_product_attention(
    leading, heads_per_group, T_q, T_k, d_k, d_v, scale, mask_type, seed
):
    torch.manual_seed(seed)
    q_leading = (*leading[:-1], heads_per_group * leading[-1]) if leading else ()
    q, k, v = (
        torch.randn(*shape, dtype=torch.float64)
        for shape in ((*q_leading, T_q, d_k), (*leading, T_k, d_k), (*leading, T_k, d_v))
    )
    mask = None
    if mask_type == "boolean":
        mask = torch.rand(T_q, T_k) < 0.6
        mask[:, 0] = True
    elif mask_type == "additive":
        mask = torch.randn(T_q, T_k, dtype=torch.float64)
    output, weights = attention(q, k, v, mask, scale)
    if leading:
        k, v = (x.repeat_interleave(heads_per_group, dim=-3) for x in (k, v))
    close(output, F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale))
    close(output, weights @ v)
    assert weights.shape == (*q_leading, T_q, T_k)
    close(weights.sum(dim=-1), torch.ones(*q_leading, T_q, dtype=torch.float64))


@pytest.mark.parametrize("is_additive", [False, True])
def test_a_query_that_may_attend_to_nothing_gives_zeros_and_finite_gradients(is_additive):
    q, k, v = (torch.randn(2, 4, 3, requires_grad=True) for _ in range(3))
    boolean = causal_mask(4, 4)
    boolean[2] = False
    additive = torch.zeros(4, 4).masked_fill(~boolean, -math.inf)
    output, weights = attention(q, k, v, additive if is_additive else boolean)
    assert not output[:, 2].any() and not weights[:, 2].any()
    others = [0, 1, 3]
    close((output[:, others], weights[:, others]), attention(q[:, others], k, v, boolean[others]))
    (output.square().sum() + weights.square().sum()).backward()
    assert all(t.grad.isfinite().all() for t in (q, k, v))
    assert not q.grad[:, 2].any() and q.grad[:, 3].abs().min() > 0


@few
@given(T_q=st.integers(0, 9), T_k=st.integers(0, 9))
def test_the_causal_mask_aligns_the_last_query_to_the_last_key(T_q, T_k):
    expected = [[j <= i + T_k - T_q for j in range(T_k)] for i in range(T_q)]
    assert causal_mask(T_q, T_k).tolist() == expected


# --- The matrices worked out in an introduction to attention --------------------------------------


def read_worked_matrices():
    """Name → the numbers of a matrix, as they are printed in the text."""
    text = Path(__file__).with_name("worked.txt").read_text()
    matrices = re.findall(r"^([A-Z_]+\d?)\n(\[\[.*?\]\])$", text, re.MULTILINE | re.DOTALL)
    return {name: matrix.split() for name, matrix in matrices}


WORKED = read_worked_matrices()


def printed(x):
    """The numbers of a tensor, as NumPy prints them."""
    return str(x.detach().numpy()).split()


class WorkedStream:
    """The random numbers of the text, which draws from NumPy with seed 0."""

    def __init__(self):
        self.random = np.random.RandomState(0)

    def randn(self, *shape):
        return torch.from_numpy(self.random.randn(*shape))


def test_the_worked_matrices_are_reproduced_as_printed():
    stream = WorkedStream()
    x, zeros = stream.randn(4, 5), torch.zeros(4, 1, dtype=torch.float64)
    lengths = torch.arange(1, 5)[:, None]

    # Sums over tokens are uniform attention times the number of tokens.
    only_itself = torch.eye(4, dtype=torch.bool)
    assert printed(attention(x, x, x, only_itself)[0]) == WORKED["ALONE"]
    assert printed(attention(zeros, zeros, x)[0] * 4) == WORKED["SUMMED"]
    causal_sum = attention(zeros, zeros, x, causal_mask(4, 4))[0] * lengths
    assert printed(causal_sum) == WORKED["SUMMED_CAUSALLY"]

    # A random matrix without and with softmax, then a projection.
    assert printed(stream.randn(4, 4) @ x) == WORKED["ANY_MATRIX"]
    identity = torch.eye(4, dtype=torch.float64)
    mixed, mixing = attention(stream.randn(4, 4), identity, x, scale=1.0)
    assert printed(mixing) == WORKED["MIXING"]
    assert printed(mixed) == WORKED["MIXED"]
    assert printed(x @ stream.randn(5, 6)) == WORKED["PROJECTED"]

    # Three attention layers: number, C, d_k, d_v, and whether it is masked.
    for number, C, d_k, d_v, masked in [
        (1, 5, 7, 6, False),
        (2, 5, 5, 5, False),
        (3, 5, 5, 5, True),
    ]:
        check_worked_layer(stream, number, C, d_k, d_v, masked)


def check_worked_layer(stream, number, C, d_k, d_v, masked):
    """One attention layer of the text, by `attention` and, if masked, by the layer itself."""
    weights, values, output = (WORKED[f"{name}_{number}"] for name in ("L", "V", "LV"))
    x = stream.randn(4, C)[None]
    W_Q, W_K, W_V = stream.randn(C, d_k), stream.randn(C, d_k), stream.randn(C, d_v)
    config = GPTConfig(1, n_embd=C, n_head=1, head_dim=d_k, value_head_dim=d_v)
    layer = SelfAttention(config).double()
    for linear, matrix in ((layer.W_Q, W_Q), (layer.W_K, W_K), (layer.W_V, W_V)):
        linear.weight = nn.Parameter(matrix.T)
    q, k, v = layer.project(x)
    y, A = attention(q, k, v, causal_mask(4, 4) if masked else None, scale=1.0)
    assert printed(A[0, 0]) == weights
    assert printed(v[0, 0]) == values
    assert printed(y[0, 0]) == output
    if masked:  # with W_O = I, and queries enlarged by the √d_k that the layer divides by
        layer.W_O.weight = nn.Parameter(torch.eye(C, dtype=torch.float64))
        layer.W_Q.weight = nn.Parameter(W_Q.T * math.sqrt(d_k))
        assert printed(layer(x, Context())[0]) == output


# --- Kernels --------------------------------------------------------------------------------------


@given(
    B=st.integers(1, 3),
    G=st.integers(1, 3),
    heads_per_group=st.integers(1, 3),
    T=st.integers(1, 20),
    d_k=st.integers(1, 9),
    d_v=st.integers(1, 9),
)
def test_short_attention_is_causal_attention_with_equal_gradients(
    B, G, heads_per_group, T, d_k, d_v
):
    torch.manual_seed(T)
    q = torch.randn(B, G * heads_per_group, T, d_k, requires_grad=True)
    k = torch.randn(B, G, T, d_k, requires_grad=True)
    v = torch.randn(B, G, T, d_v, requires_grad=True)
    short = attend_short(q, k, v, dropout=0.0, scale=1 / math.sqrt(d_k))
    written_out = attention(q, k, v, causal_mask(T, T))[0]
    assert torch.allclose(short, written_out, atol=1e-5)
    direction = torch.randn_like(short)
    gradients = torch.autograd.grad((short * direction).sum(), (q, k, v))
    expected = torch.autograd.grad((written_out * direction).sum(), (q, k, v))
    for a, b in zip(gradients, expected):
        assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # two kernels
def test_attention_weights_are_dropped_and_keep_their_mean(dtype):
    torch.manual_seed(0)
    q, k = (torch.randn(1, 2, 6, 4).to(dtype).expand(10_000, -1, -1, -1) for _ in range(2))
    v = torch.eye(6, dtype=dtype).expand(10_000, 2, -1, -1)  # the output is the weights
    dropped = attend(q, k, v, dropout=0.3)
    causal = causal_mask(6, 6)
    assert (dropped[..., causal] == 0).float().mean().item() == pytest.approx(0.3, abs=0.01)
    expected = attention(q[0], k[0], v[0], causal)[0]
    close(dropped.float().mean(dim=0), expected.float(), atol=0.03, rtol=0)


@few
@given(
    B=st.integers(1, 3),
    G=st.integers(1, 3),
    heads_per_group=st.integers(1, 3),
    T_k=st.integers(1, 20),
    d_k=st.integers(1, 9),
    d_v=st.integers(1, 9),
    seed=seeds,
)
def test_the_attention_of_the_last_token_is_the_last_row_of_the_formula(
    B, G, heads_per_group, T_k, d_k, d_v, seed
):
    torch.manual_seed(seed)
    q = torch.randn(B, G * heads_per_group, d_k, dtype=torch.float64)
    k = torch.randn(B, G, T_k, d_k, dtype=torch.float64)
    v = torch.randn(B, G, T_k, d_v, dtype=torch.float64)
    expected = attention(q[:, :, None], k, v)[0]  # (B, H, 1, d_v)
    close(attend_from_last_token(q, k, v), expected.flatten(1))
