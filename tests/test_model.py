import math
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from models import configs, few, lively, ngram_vectors, random_tokens, seeds, small
from omegaconf import OmegaConf
from torch import nn

from attention import ROPE_HIGH, ROPE_LOW, rotate, short_attention
from kernels import cross_entropy, rms_norm
from model import (
    GPT,
    MLP,
    GPTConfig,
    KVCache,
    SelfAttention,
    attention,
    causal_mask,
    rotary_table,
    store,
)

PRESETS = sorted((Path(__file__).parents[1] / "configs" / "model").glob("*.yaml"))
FLOAT32_MAX_PARAMETERS = 200_000_000  # larger presets are only counted, on the meta device

close = torch.testing.assert_close


def preset(name, **changes):
    settings = dict(OmegaConf.load(PRESETS[0].with_name(f"{name}.yaml")))
    for base in settings.pop("defaults", ()):
        settings = {**OmegaConf.load(PRESETS[0].with_name(f"{base}.yaml")), **settings}
    return GPTConfig(**{**settings, **changes})


def weights_of(layer, x):
    """The attention weights (B, H, T, T) of a layer on x (B, T, C)."""
    found = []
    layer(x, taps={"weights": partial(store, found)})
    return found[0]


def angles(config, T):
    """The rotary angles (2, T, d_k) of the first T positions; None without rotary positions."""
    return rotary_table(T, config) if config.is_rotary else None


# --- by hand: the same layers from their formulas, head by head and row by row --------------------


def frequency_by_hand(c, i):
    """Radians that pair i turns by from one token to the next."""
    f = c.rope_theta ** (-2 * i / c.key_dim)
    turns = (c.rope_trained or 0) * f / (2 * math.pi)
    if turns >= ROPE_HIGH:
        return f
    if turns <= ROPE_LOW:
        return f / c.rope_factor
    share = (turns - ROPE_LOW) / (ROPE_HIGH - ROPE_LOW)
    return share * f + (1 - share) * f / c.rope_factor


def rotate_by_hand(x, c):
    """Positions as complex rotations (RoFormer); x (B, T, d)."""
    T, d = x.shape[-2:]
    angles = torch.arange(T)[:, None] * torch.tensor(
        [frequency_by_hand(c, i) for i in range(d // 2)], dtype=torch.float64
    )
    z = torch.complex(*x.chunk(2, dim=-1)) * torch.polar(torch.ones_like(angles), angles).to(
        x.to(torch.complex64).dtype
    )
    return torch.cat((z.real, z.imag), dim=-1).to(x.dtype)


def attention_by_hand(a, x):
    c, T, heads = a.config, x.shape[1], []
    for h in range(c.n_head):
        g = h // (c.n_head // c.kv_heads)

        def part(linear, i, size):
            rows = slice(i * size, (i + 1) * size)
            return F.linear(
                x, linear.weight[rows], None if linear.bias is None else linear.bias[rows]
            )

        q, k, v = part(a.W_Q, h, c.key_dim), part(a.W_K, g, c.key_dim), part(a.W_V, g, c.value_dim)
        if c.qk_norm:
            eps = c.norm_eps if c.qk_norm == "gains" else 0
            q, k = (y / (y.square().mean(dim=-1, keepdim=True) + eps).sqrt() for y in (q, k))
        if c.qk_norm == "gains":
            q, k = q * a.norm_q.weight, k * a.norm_k.weight
        if c.position == "rope":
            q, k = rotate_by_hand(q, c), rotate_by_hand(k, c)
        rows = []
        # a query sees the keys up to its own: nothing is masked, the rest is not there
        for t in range(T):
            scores = (k[:, : t + 1] @ q[:, t, :, None])[..., 0] / math.sqrt(c.key_dim)  # (B, t + 1)
            weights = scores.exp() / scores.exp().sum(dim=-1, keepdim=True)
            rows.append((weights[..., None] * v[:, : t + 1]).sum(dim=1))  # (B, d_v)
        heads.append(torch.stack(rows, dim=1))
    return a.W_O(torch.cat(heads, dim=-1))


def norm_by_hand(norm, x, c):
    if c.norm == "rmsnorm":
        return x / (x.square().mean(dim=-1, keepdim=True) + c.norm_eps).sqrt() * norm.weight
    x = x - x.mean(dim=-1, keepdim=True)
    x = x / (x.square().mean(dim=-1, keepdim=True) + c.norm_eps).sqrt() * norm.weight
    return x if norm.bias is None else x + norm.bias


def mlp_by_hand(mlp, x):
    h = mlp.W_in(x)
    if mlp.config.mlp == "gelu":
        h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
    elif mlp.config.mlp == "relu2":
        h = torch.where(h > 0, h * h, torch.zeros_like(h))
    else:
        gate = mlp.W_gate(x)
        h = gate / (1 + torch.exp(-gate)) * h
    return mlp.W_out(h)


# --- attention(q, k, v, mask, scale) --------------------------------------------------------------


@few
@given(
    leading=st.sampled_from([(), (3,), (2, 4), (2, 3, 4)]),
    T_q=st.integers(1, 7),
    T_k=st.integers(1, 7),
    d_k=st.integers(1, 9),
    d_v=st.integers(1, 9),
    scale=st.sampled_from([None, 1.0, 0.3]),
    kind=st.sampled_from(["none", "boolean", "additive"]),
    seed=seeds,
)
def test_the_written_out_formula_is_torchs_scaled_dot_product_attention(
    leading, T_q, T_k, d_k, d_v, scale, kind, seed
):
    torch.manual_seed(seed)
    q, k, v = (
        torch.randn(*leading, *s, dtype=torch.float64) for s in ((T_q, d_k), (T_k, d_k), (T_k, d_v))
    )
    mask = (
        None
        if kind == "none"
        else torch.rand(T_q, T_k) < 0.6
        if kind == "boolean"
        else torch.randn(T_q, T_k, dtype=torch.float64)
    )
    if kind == "boolean":
        mask[:, 0] = True
    output, weights = attention(q, k, v, mask, scale)
    close(output, F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale))
    close(output, weights @ v)
    assert weights.shape == (*leading, T_q, T_k)
    close(weights.sum(dim=-1), torch.ones(*leading, T_q, dtype=torch.float64))


@pytest.mark.parametrize(("scale", "score"), [(None, 2 * 3 / math.sqrt(4)), (1.0, 2 * 3)])
def test_scores_are_divided_by_the_root_of_the_key_size_or_left_as_they_are(scale, score):
    q = torch.tensor([[2.0, 0.0, 0.0, 0.0]])
    k = torch.tensor([[3.0, 1.0, 1.0, 1.0], [0.0, 1.0, 1.0, 1.0]])
    weights = attention(q, k, torch.zeros(2, 1), scale=scale)[1]
    close(weights, torch.tensor([[score, 0.0]]).softmax(dim=-1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_dtype_given_is_the_dtype_returned(dtype):
    x = torch.randn(2, 5, 4, dtype=dtype)
    for mask in (None, causal_mask(5, 5), torch.zeros(5, 5)):
        assert [t.dtype for t in attention(x, x, x, mask)] == [dtype, dtype]


@few
@given(T_q=st.integers(1, 6), T_k=st.integers(1, 6), seed=seeds)
def test_a_boolean_mask_is_an_additive_one_of_zeros_and_minus_infinity(T_q, T_k, seed):
    torch.manual_seed(seed)
    q, k, v, allowed = (
        torch.randn(2, 3, T_q, 4),
        torch.randn(2, 3, T_k, 4),
        torch.randn(2, 3, T_k, 5),
        torch.rand(2, 1, T_q, T_k) < 0.5,
    )
    added = torch.zeros(allowed.shape).masked_fill(~allowed, -math.inf)
    for a, b in zip(attention(q, k, v, allowed), attention(q, k, v, added)):
        assert torch.equal(a, b)


@pytest.mark.parametrize("additive", [False, True])
def test_a_row_with_every_key_masked_gives_zeros(additive):
    q, k, v = (torch.randn(2, 4, 3) for _ in range(3))
    mask = causal_mask(4, 4)
    mask[2] = False
    given_mask = torch.zeros(4, 4).masked_fill(~mask, -math.inf) if additive else mask
    output, weights = attention(q, k, v, given_mask)
    assert torch.equal(output[:, 2], torch.zeros(2, 3))
    assert torch.equal(weights[:, 2], torch.zeros(2, 4))
    close(weights[:, [0, 1, 3]].sum(dim=-1), torch.ones(2, 3))
    close(output[:, [0, 1, 3]], attention(q[:, [0, 1, 3]], k, v, mask[[0, 1, 3]])[0])


@pytest.mark.parametrize("additive", [False, True])
def test_a_row_with_every_key_masked_has_finite_gradients(additive):
    q, k, v = (torch.randn(2, 4, 3, requires_grad=True) for _ in range(3))
    mask = causal_mask(4, 4) & (torch.arange(4) != 0)  # the first query may see nothing
    if additive:
        mask = torch.zeros(4, 4).masked_fill(~mask, -math.inf)
    output, weights = attention(q, k, v, mask)
    (output.square().sum() + weights.square().sum()).backward()
    for t in (q, k, v):
        assert t.grad.isfinite().all()
    assert torch.equal(q.grad[:, 0], torch.zeros(2, 3))
    assert q.grad[:, 2:].abs().min() > 0


@few
@given(T_q=st.integers(0, 9), T_k=st.integers(0, 9))
def test_the_causal_mask_lets_the_last_query_see_the_last_key(T_q, T_k):
    expected = [[j <= i + T_k - T_q for j in range(T_k)] for i in range(T_q)]
    assert causal_mask(T_q, T_k).tolist() == expected


@few
@given(
    groups=st.integers(1, 4),
    share=st.integers(1, 4),
    batch=st.sampled_from([(), (2,), (2, 3)]),
    seed=seeds,
)
def test_grouped_attention_is_multi_head_attention_with_keys_and_values_repeated(
    groups, share, batch, seed
):
    torch.manual_seed(seed)
    q, k, v = (
        torch.randn(*batch, groups * share, 5, 4),
        torch.randn(*batch, groups, 7, 4),
        torch.randn(*batch, groups, 7, 3),
    )
    output, weights = attention(q, k, v, causal_mask(5, 7))
    for h in range(groups * share):
        expected = attention(
            q[..., h, :, :], k[..., h // share, :, :], v[..., h // share, :, :], causal_mask(5, 7)
        )
        close((output[..., h, :, :], weights[..., h, :, :]), expected)


@pytest.mark.parametrize(("heads", "groups"), [(4, 3), (2, 4), (6, 4)])
def test_heads_that_are_not_a_multiple_of_the_groups_are_refused(heads, groups):
    with pytest.raises(ValueError):
        attention(
            torch.randn(1, heads, 5, 4), torch.randn(1, groups, 5, 4), torch.randn(1, groups, 5, 4)
        )


@pytest.mark.parametrize("bias", [False, True])
def test_attention_to_another_sequence_is_torchs_cross_attention(bias):
    torch.manual_seed(0)
    peer = nn.MultiheadAttention(24, 4, bias=bias, kdim=10, vdim=14, batch_first=True)
    if bias:
        nn.init.normal_(peer.in_proj_bias)
    x, keys, values = torch.randn(2, 5, 24), torch.randn(2, 9, 10), torch.randn(2, 9, 14)
    biases = peer.in_proj_bias.chunk(3) if bias else (None, None, None)
    weights = (peer.q_proj_weight, peer.k_proj_weight, peer.v_proj_weight)
    q, k, v = (
        F.linear(s, w, b).unflatten(-1, (4, 6)).transpose(1, 2)
        for s, w, b in zip((x, keys, values), weights, biases)
    )
    output, maps = attention(q, k, v)
    expected, expected_maps = peer(x, keys, values, average_attn_weights=False)
    close(peer.out_proj(output.transpose(1, 2).flatten(2)), expected, atol=1e-5, rtol=1e-5)
    close(maps, expected_maps, atol=1e-5, rtol=1e-5)


# --- the worked matrices of 004_2e522ac47f105ae6.txt, as printed there ----------------------------

# name → what str() of the matrix has between white space
PRINTED = {
    name: rest.split()
    for name, rest in re.findall(
        r"^([A-Z_]+\d?)\n(\[\[.*?\]\])$",
        Path(__file__).with_name("worked.txt").read_text(),
        re.M | re.S,
    )
}
# Of each worked attention its E, H2 (d_k) and H1 (d_v), and whether it is masked.
WORKED = [(5, 7, 6, False), (5, 5, 5, False), (5, 5, 5, True)]


def printed(x):
    return str(x.detach().numpy()).split()


def test_the_worked_matrices_of_the_document_are_reproduced_as_printed():
    random = np.random.RandomState(0)  # the stream of np.random after np.random.seed(0)

    def randn(*shape):
        return torch.from_numpy(random.randn(*shape))

    x, nothing = randn(4, 5), torch.zeros(4, 1, dtype=torch.float64)
    lengths = torch.arange(1, 5)[:, None]
    assert printed(attention(x, x, x, torch.eye(4, dtype=torch.bool))[0]) == PRINTED["ALONE"]
    # uniform weights of 1/4
    assert printed(attention(nothing, nothing, x)[0] * 4) == PRINTED["SUMMED"]
    assert (
        printed(attention(nothing, nothing, x, causal_mask(4, 4))[0] * lengths)
        == PRINTED["SUMMED_CAUSALLY"]
    )
    # no weights yet: before the document turns to softmax
    assert printed(randn(4, 4) @ x) == PRINTED["ANY_MATRIX"]
    mixed, mixing = attention(randn(4, 4), torch.eye(4, dtype=torch.float64), x, scale=1.0)
    assert (printed(mixing), printed(mixed)) == (PRINTED["MIXING"], PRINTED["MIXED"])
    assert printed(x @ randn(5, 6)) == PRINTED["PROJECTED"]
    for number, (E, H2, H1, masked) in enumerate(WORKED, 1):
        L, V, LV = (PRINTED[f"{name}_{number}"] for name in ("L", "V", "LV"))
        X, weights = randn(4, E), [randn(E, H2), randn(E, H2), randn(E, H1)]
        layer = SelfAttention(
            GPTConfig(vocab_size=1, n_embd=E, n_head=1, head_dim=H2, value_head_dim=H1)
        ).double()
        for linear, W in zip((layer.W_Q, layer.W_K, layer.W_V), weights):
            linear.weight = nn.Parameter(W.T)
        q, k, v = layer.project(X[None])
        output, maps = attention(q, k, v, causal_mask(4, 4) if masked else None, scale=1.0)
        assert [printed(t[0, 0]) for t in (maps, v, output)] == [L, V, LV]
        # the layer itself, with W_O = I and the queries enlarged by the √d_k that it divides by
        if masked:
            layer.W_O.weight = nn.Parameter(torch.eye(E, dtype=torch.float64))
            layer.W_Q.weight = nn.Parameter(weights[0].T * math.sqrt(H2))
            assert printed(layer(X[None])[0]) == LV
            assert printed(weights_of(layer, X[None])[0, 0]) == L


# --- SelfAttention --------------------------------------------------------------------------------


@few
@given(config=configs, T=st.integers(1, 9), seed=seeds)
def test_fused_attention_is_the_formula_head_by_head_with_its_gradients(config, T, seed):
    layer = lively(SelfAttention(config).double(), seed)
    x = torch.randn(2, T, config.n_embd, dtype=torch.float64, requires_grad=True)
    fused, by_hand = layer(x, angles(config, T)), attention_by_hand(layer, x)
    close(fused, by_hand, atol=1e-5, rtol=1e-5)  # the rotary angles are float32's
    direction = torch.randn_like(fused)
    inputs = [x, *layer.parameters()]
    for a, b in zip(
        *(torch.autograd.grad((y * direction).sum(), inputs) for y in (fused, by_hand))
    ):
        close(a, b, atol=1e-5 * max(1, b.abs().max().item()), rtol=1e-5)  # qk_norm makes some large


@pytest.mark.parametrize("position", ["learned", "rope"])
@pytest.mark.parametrize("n_kv_head", [1, 2, 8])
def test_fused_attention_is_the_written_out_attention_with_its_gradients(n_kv_head, position):
    layer = lively(
        SelfAttention(
            small(n_embd=32, n_head=8, n_kv_head=n_kv_head, value_head_dim=6, position=position)
        )
    )
    x = torch.randn(3, 70, 32, requires_grad=True)
    rotary = angles(layer.config, 70)
    output = attention(*layer.project(x, rotary), causal_mask(70, 70))[0]  # (B, H, T, d_v)
    fused, written = layer(x, rotary), layer.W_O(output.transpose(1, 2).flatten(2))
    close(fused, written, atol=1e-5, rtol=0)
    direction = torch.randn_like(fused) / 70
    inputs = [x, *layer.parameters()]
    for a, b in zip(
        *(torch.autograd.grad((y * direction).sum(), inputs) for y in (fused, written))
    ):
        close(a, b, atol=1e-5, rtol=0)


@pytest.mark.parametrize("bias", [False, True])
def test_self_attention_is_torchs_multihead_attention(bias):
    layer = lively(SelfAttention(small(n_embd=24, bias=bias)))
    peer = nn.MultiheadAttention(24, 4, bias=bias, batch_first=True)
    with torch.no_grad():
        peer.in_proj_weight.copy_(torch.cat([w.weight for w in (layer.W_Q, layer.W_K, layer.W_V)]))
        peer.out_proj.weight.copy_(layer.W_O.weight)
        if bias:
            peer.in_proj_bias.copy_(torch.cat([w.bias for w in (layer.W_Q, layer.W_K, layer.W_V)]))
            peer.out_proj.bias.copy_(layer.W_O.bias)
    x = torch.randn(2, 9, 24)
    output, maps = peer(x, x, x, attn_mask=~causal_mask(9, 9), average_attn_weights=False)
    close(layer(x), output, atol=1e-5, rtol=1e-5)
    close(weights_of(layer, x), maps, atol=1e-5, rtol=1e-5)


# 32 over 8: Llama 3, 000_634833161fd3075e.txt


def test_qk_norm_makes_attention_blind_to_the_size_of_queries_and_keys():
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    for qk_norm in (True, "gains", False):
        layer = lively(SelfAttention(small(qk_norm=qk_norm, norm_eps=1e-12)).double())
        before = layer(x)
        with torch.no_grad():
            layer.W_Q.weight *= 7
            layer.W_K.weight *= 0.5
        assert torch.allclose(layer(x), before) == bool(qk_norm)


def test_dropout_drops_in_training_only_and_keeps_the_mean():
    layer = lively(SelfAttention(small(dropout=0.3)))
    x = torch.randn(1, 6, 16)
    expected = layer(x)
    close(expected, attention_by_hand(layer, x), atol=1e-5, rtol=1e-5)
    dropped = layer.train()(x.expand(20_000, -1, -1))
    assert 0.29 < (dropped == 0).float().mean() < 0.31
    # attention weights are dropped too, not the output alone
    assert dropped[dropped != 0].unique().numel() > 1000
    close(dropped.mean(dim=0, keepdim=True), expected, atol=0.06, rtol=0)


@pytest.mark.parametrize("training", [True, False])
def test_dropout_reaches_the_mlp_and_the_embeddings_in_training_only(training):
    model, mlp = (
        lively(GPT(small(dropout=0.3))).train(training),
        lively(MLP(small(dropout=0.3))).train(training),
    )
    seen = []
    model.blocks[0].norm_1.register_forward_hook(lambda layer, given, y: seen.append(given[0]))
    model(random_tokens(500, 16))
    for output in (seen[0], mlp(torch.randn(500, 16, 16))):
        assert (output == 0).float().mean().item() == pytest.approx(
            0.3 if training else 0.0, abs=0.01
        )


@few
@given(config=configs, T=st.integers(2, 16), data=st.data())
def test_a_token_changes_nothing_before_itself(config, T, data):
    model, t = lively(GPT(config)), data.draw(st.integers(0, T - 1))
    tokens = random_tokens(2, T)
    changed = tokens.clone()
    changed[:, t] = (changed[:, t] + data.draw(st.integers(1, 22))) % 23
    before, after = model(tokens)[0], model(changed)[0]
    assert torch.equal(before[:, :t], after[:, :t])
    assert not torch.equal(before[:, t:], after[:, t:])


# --- rotary positions -----------------------------------------------------------------------------


@few
@given(
    m=st.integers(0, 200),
    n=st.integers(0, 200),
    shift=st.integers(0, 300),
    dim=st.sampled_from([2, 6, 16]),
    seed=seeds,
)
def test_rotary_products_depend_on_the_relative_position_only(m, n, shift, dim, seed):
    torch.manual_seed(seed)
    q, k, table = (
        torch.randn(1, 1, 1, dim).double(),
        torch.randn(1, 1, 1, dim).double(),
        rotary_table(501, small(head_dim=dim)),
    )
    near, far = (
        (rotate(q, table[:, [a]]) * rotate(k, table[:, [b]])).sum()
        for a, b in ((m, n), (m + shift, n + shift))
    )
    close(near, far, atol=1e-3, rtol=0)


# --- GPT ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "vocab_size", "parameters"),
    [
        ("gpt2", 50257, 124_439_808),
        ("gpt2_medium", 50257, 354_823_168),
        ("gpt2_large", 50257, 774_030_080),
        ("gpt2_xl", 50257, 1_557_611_200),
        ("llama3_8b", 128256, 8_030_261_248),
    ],
)
def test_the_preset_has_the_published_number_of_parameters(name, vocab_size, parameters):
    with torch.device("meta"):
        assert GPT(preset(name, vocab_size=vocab_size)).num_parameters() == parameters


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "name",
    [pytest.param(p.stem, marks=[pytest.mark.soak] * p.stem.startswith("gpt2")) for p in PRESETS],
)
def test_the_first_loss_is_that_of_a_uniform_guess(name, tied):
    config = preset(name, vocab_size=2048, block_size=32, tie_embeddings=tied)
    with torch.device("meta"):
        if GPT(config).num_parameters() > FLOAT32_MAX_PARAMETERS:
            pytest.skip("too large to be built in a test")
    torch.manual_seed(0)
    tokens = torch.randint(2048, (8, 33))
    with torch.no_grad():
        loss = GPT(config).eval()(tokens[:, :-1], tokens[:, 1:])[1].item()
    assert loss == pytest.approx(math.log(2048), rel=0.05)


@few
@given(config=configs, T=st.integers(1, 16), seed=seeds)
def test_the_logits_are_those_of_the_formulas_written_by_hand(config, T, seed):
    model, tokens = lively(GPT(config).double(), seed), random_tokens(2, T, seed=seed)
    x = model.token_embedding.weight[tokens]
    if config.position == "learned":
        x = x + model.position_embedding.weight[:T]
    if config.ngrams:
        x = x + torch.stack([ngram_vectors(model, text) for text in tokens])
    for block in model.blocks:
        x = x + attention_by_hand(block.attention, norm_by_hand(block.norm_1, x, config))
        x = x + mlp_by_hand(block.mlp, norm_by_hand(block.norm_2, x, config))
    head = model.token_embedding.weight if config.tie_embeddings else model.head.weight
    logits, loss = model(tokens)
    assert logits.shape == (2, T, 23)
    assert loss is None
    close(logits, norm_by_hand(model.norm, x, config) @ head.T, atol=1e-6, rtol=1e-6)


def test_tied_embeddings_are_one_parameter_and_untied_ones_two():
    tied, untied = GPT(small()), GPT(small(tie_embeddings=False))
    assert tied.head.weight is tied.token_embedding.weight
    assert untied.num_parameters() == tied.num_parameters() + 23 * 16
    tied(random_tokens(1, 4), random_tokens(1, 4))[1].backward()
    # tokens that were not read learn as outputs
    assert tied.token_embedding.weight.grad.abs().min() > 0


def test_the_loss_is_the_mean_surprise_and_leaves_out_negative_targets():
    model, tokens, targets = lively(GPT(small())), random_tokens(2, 5), random_tokens(2, 5, seed=1)
    targets[0, 1] = targets[1, 4] = -1
    logits, loss = model(tokens, targets)
    surprise = [
        -logits[b, t].log_softmax(dim=0)[targets[b, t]].item()
        for b in range(2)
        for t in range(5)
        if targets[b, t] >= 0
    ]
    assert len(surprise) == 8
    assert loss.item() == pytest.approx(sum(surprise) / 8, rel=1e-5)


def test_the_loss_of_a_half_precision_model_is_computed_in_float32():
    model, tokens, targets = (
        lively(GPT(small())).bfloat16(),
        random_tokens(2, 16),
        random_tokens(2, 16, seed=1),
    )
    logits, loss = model(tokens, targets)
    assert (logits.dtype, loss.dtype) == (torch.bfloat16, torch.float32)
    close(loss, F.cross_entropy(logits.double().flatten(0, 1), targets.flatten()).float())


def test_the_first_weights_have_the_documented_spread():
    torch.manual_seed(0)
    model = GPT(
        small(
            vocab_size=300,
            n_embd=128,
            block_size=128,
            n_layer=8,
            bias=True,
            mlp="swiglu",
            tie_embeddings=False,
        )
    )
    for name, p in model.named_parameters():
        if p.dim() == 2:
            std = 0.02 / math.sqrt(16) if "W_O" in name or "W_out" in name else 0.02
            assert p.std().item() == pytest.approx(std, rel=0.04), name
            assert abs(p.mean().item()) < 0.04 * std, name
        else:
            assert torch.equal(
                p, torch.full_like(p, 1.0 if "norm" in name and "weight" in name else 0.0)
            ), name


def test_more_tokens_than_the_block_are_refused():
    for position in ("learned", "rope"):
        model = GPT(small(position=position))
        assert model(random_tokens(1, 16))[0].shape == (1, 16, 23)
        with pytest.raises(ValueError):
            model(random_tokens(1, 17))
        with pytest.raises(ValueError):
            model.attention_maps(random_tokens(1, 17))


# --- the KV cache ---------------------------------------------------------------------------------


# 000_634833161fd3075e.txt: 32 heads share 8 keys and values
def test_llama_3s_cache_is_a_quarter_of_the_multi_head_one():
    grouped, multi = (
        KVCache(preset("llama3_8b", vocab_size=1, **more), 1, device="meta", dtype=torch.bfloat16)
        for more in ({}, {"n_kv_head": 32})
    )
    assert grouped.nbytes * 4 == multi.nbytes
    # keys and values · layers · groups · tokens · d · bytes: 1 GiB
    assert grouped.nbytes == 2 * 32 * 8 * 8192 * 128 * 2
    assert grouped.capacity == 8192


def test_the_cache_holds_keys_and_values_of_their_own_sizes():
    cache = KVCache(small(n_kv_head=2, head_dim=6, value_head_dim=3), 5, 7)
    assert (cache.keys.shape, cache.values.shape) == ((2, 5, 2, 7, 6), (2, 5, 2, 7, 3))
    assert cache.nbytes == 4 * 2 * 5 * 2 * 7 * (6 + 3)


@few
@given(config=configs, chunks=st.lists(st.integers(1, 16), min_size=1, max_size=16), seed=seeds)
def test_cached_decoding_gives_the_logits_of_the_whole_text(config, chunks, seed):
    chunks = [c for i, c in enumerate(chunks) if sum(chunks[: i + 1]) <= 16]
    model, tokens = lively(GPT(config), seed), random_tokens(2, sum(chunks), seed=seed)
    cache = KVCache(config, 2, length=sum(chunks))
    with torch.no_grad():
        parts = [model(part, cache=cache)[0] for part in tokens.split(chunks, dim=1)]
        close(torch.cat(parts, dim=1), model(tokens)[0], atol=1e-5, rtol=1e-5)
    assert cache.length == sum(chunks)


def test_more_tokens_than_the_cache_or_the_block_can_hold_are_refused():
    model, tokens = GPT(small()).eval(), random_tokens(1, 17)
    cache = KVCache(model.config, 1, length=5)
    model(tokens[:, :3], cache=cache)
    with pytest.raises(ValueError):
        model(tokens[:, 3:6], cache=cache)
    assert cache.length == 3
    with pytest.raises(ValueError):
        model(tokens, cache=KVCache(model.config, 1, length=20))


# --- taps, masks, entries -------------------------------------------------------------------------

TAPPED = ("embedding", "q", "k", "v", "weights", "heads", "attention", "mlp", "residual")


@few
@given(
    config=configs,
    T=st.integers(1, 16),
    layer=st.integers(0, 1),
    seed=seeds,
    doubled=st.sampled_from([None, *TAPPED]),
)
def test_taps_read_each_value_and_what_follows_is_made_of_what_they_return(
    config, T, layer, seed, doubled
):
    model, tokens = lively(GPT(config).double(), seed), random_tokens(2, T, seed=seed)
    layer, read = 0 if doubled == "embedding" else layer, {name: [] for name in TAPPED}

    def changed(name, at, value):
        return value * 2 if (name, at) == (doubled, layer) else value

    y = model.run_blocks(
        tokens,
        taps={
            name: lambda at, value, name=name: store(read[name], at, changed(name, at, value))
            for name in TAPPED
        },
    )
    rotary = model.rotary_at(0, T)
    x = changed("embedding", 0, model.embed(tokens))
    close(read.pop("embedding"), [x])
    for at, (block, *values) in enumerate(zip(model.blocks, *read.values())):
        expected, part = {}, block.attention
        for name, value in zip("qkv", part.project(block.norm_1(x), rotary)):
            expected[name] = changed(name, at, value)
        weights = attention(*expected.values(), causal_mask(T, T))[1]
        expected["weights"] = changed("weights", at, weights)
        v = expected["v"].repeat_interleave(4 // config.kv_heads, dim=1)  # (B, H, T, d_v)
        expected["heads"] = changed("heads", at, (expected["weights"] @ v).transpose(1, 2))
        expected["attention"] = changed("attention", at, part.W_O(expected["heads"].flatten(2)))
        x = x + expected["attention"]
        expected["mlp"] = changed("mlp", at, block.mlp(block.norm_2(x)))
        x = expected["residual"] = changed("residual", at, x + expected["mlp"])
        for name, value in zip(read, values, strict=True):
            close(value, expected[name])
    close(y, x)
    if doubled is None:
        close(y, model.run_blocks(tokens))


@few
@given(config=configs, T=st.integers(1, 16), seed=seeds)
def test_a_pass_that_enters_above_is_the_upper_part_of_the_whole(config, T, seed):
    model, tokens, entering = lively(GPT(config), seed), random_tokens(2, T, seed=seed), []
    y = model.run_blocks(
        tokens, taps=dict.fromkeys(("embedding", "residual"), partial(store, entering))
    )
    for layer, x in enumerate(entering):
        seen = []
        mlp = {"mlp": lambda at, value, seen=seen: seen.append(at) or value}
        assert torch.equal(model.run_blocks(tokens, taps=mlp, entry=(layer, x)), y)
        assert seen == list(range(layer, 2))  # what is below is not computed


@few
@given(config=configs, T=st.integers(1, 16), additive=st.booleans(), each=st.booleans(), seed=seeds)
def test_a_mask_is_that_of_the_written_out_attention(config, T, additive, each, seed):
    model, tokens = lively(GPT(config).double(), seed), random_tokens(3, T, seed=seed)
    allowed = torch.rand(3, 1, T, T) < 0.6 if each else torch.rand(T, T) < 0.6
    mask = torch.zeros(allowed.shape).double().masked_fill(~allowed, -math.inf)
    mask, q, k, v, heads = mask if additive else allowed, [], [], [], []
    taps = {name: partial(store, values) for name, values in (("q", q), ("k", k), ("v", v))}
    y = model.run_blocks(tokens, mask=mask, taps={**taps, "heads": partial(store, heads)})
    for *inputs, output in zip(q, k, v, heads):
        close(output, attention(*inputs, mask)[0].transpose(1, 2))
    close(model.run_blocks(tokens, mask=mask, taps={"weights": lambda layer, value: value}), y)


# --- attention maps -------------------------------------------------------------------------------


@few
@given(config=configs, T=st.integers(1, 16), seed=seeds)
def test_the_maps_times_the_values_are_what_fused_attention_adds(config, T, seed):
    model, tokens = lively(GPT(config), seed), random_tokens(2, T, seed=seed)
    maps, fused = model.attention_maps(tokens), []
    hooks = [
        b.attention.register_forward_hook(lambda layer, given, y: fused.append((given[0], y)))
        for b in model.blocks
    ]
    with torch.no_grad():
        model(tokens)
        for hook in hooks:
            hook.remove()
        for A, block, (x, expected) in zip(maps, model.blocks, fused):
            # (B, G, T, d_v)
            values = block.attention.W_V(x).unflatten(-1, (config.kv_heads, -1)).transpose(1, 2)
            output = A @ values.repeat_interleave(4 // config.kv_heads, dim=1)  # (B, H, T, d_v)
            close(
                block.attention.W_O(output.transpose(1, 2).flatten(2)),
                expected,
                atol=1e-5,
                rtol=1e-5,
            )


@pytest.mark.parametrize("training", [True, False])
def test_looking_at_attention_leaves_no_trace(training):
    model, tokens = lively(GPT(small(dropout=0.5))).train(training), random_tokens(2, 9)
    model(tokens, tokens)[1].backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    weights = [p.detach().clone() for p in model.parameters()]
    state = torch.get_rng_state()
    maps = model.attention_maps(tokens)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(m.training == training for m in model.modules())
    assert torch.is_grad_enabled()
    assert not maps.requires_grad
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients))
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights))
    # nothing was dropped from them
    close(maps, model.eval().attention_maps(tokens), atol=0, rtol=0)


def test_maps_are_exact_under_autocast_too():
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=11, block_size=64, n_layer=2, n_head=2, n_embd=16))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        maps = model.attention_maps(torch.randint(0, 11, (1, 64)))
    assert maps.dtype == torch.float32 and (maps.sum(-1) - 1).abs().max() < 1e-5


def test_normalised_embeddings_have_a_mean_square_of_one():
    model = GPT(
        GPTConfig(vocab_size=11, block_size=16, n_layer=1, n_head=2, n_embd=16, norm_embedding=True)
    )
    x = model.embed(torch.randint(0, 11, (2, 16)))
    assert torch.allclose(x.square().mean(-1), torch.ones(2, 16), atol=1e-2)


@given(
    B=st.integers(1, 3),
    G=st.integers(1, 3),
    group=st.integers(1, 3),
    T=st.integers(1, 20),
    d_k=st.integers(1, 9),
    d_v=st.integers(1, 9),
)
def test_short_attention_is_causal_attention_and_so_are_its_gradients(B, G, group, T, d_k, d_v):
    torch.manual_seed(T)
    inputs = [
        torch.randn(B, heads, T, d, requires_grad=True)
        for heads, d in ((G * group, d_k), (G, d_k), (G, d_v))
    ]
    outputs = short_attention(*inputs), attention(*inputs, causal_mask(T, T))[0]
    assert torch.allclose(*outputs, atol=1e-5)
    weight = torch.randn_like(outputs[0])
    for a, b in zip(*(torch.autograd.grad((y * weight).sum(), inputs) for y in outputs)):
        assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("n_kv_head", [1, 2, 4])
def test_in_bf16_on_a_cpu_the_loss_is_that_of_float32_within_rounding(n_kv_head):
    torch.manual_seed(0)
    model = GPT(
        GPTConfig(
            vocab_size=50,
            block_size=64,
            n_layer=2,
            n_head=4,
            n_kv_head=n_kv_head,
            n_embd=64,
            position="rope",
        )
    )
    tokens = torch.randint(0, 50, (4, 65))
    exact = model(tokens[:, :-1], tokens[:, 1:])[1]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = model(tokens[:, :-1], tokens[:, 1:])[1]
    assert rounded.item() == pytest.approx(exact.item(), abs=5e-3)


@few
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
    st.integers(1, 40),
    st.booleans(),
    st.sampled_from([None, 1e-5, 0.1]),
    seeds,
)
def test_the_rms_norm_of_a_cpu_is_torchs_with_its_gradients(leading, width, with_gains, eps, seed):
    torch.manual_seed(seed)
    x = torch.randn(*leading, width, dtype=torch.float64, requires_grad=True)
    gains = torch.randn(width, dtype=torch.float64, requires_grad=True) if with_gains else None
    ours, torchs = rms_norm(x, gains, eps), F.rms_norm(x, (width,), gains, eps)
    assert torch.allclose(ours, torchs)
    grad, inputs = torch.randn_like(x), [t for t in (x, gains) if t is not None]
    for a, b in zip(
        torch.autograd.grad(ours, inputs, grad), torch.autograd.grad(torchs, inputs, grad)
    ):
        assert torch.allclose(a, b)


@few
@given(
    st.integers(1, 40),
    st.integers(2, 30),
    st.integers(0, 200),
    st.integers(0, 9),
    st.sampled_from([torch.float32, torch.bfloat16]),
    seeds,
)
def test_the_loss_of_many_logits_is_torchs_with_its_gradients(N, V, at_once, left_out, dtype, seed):
    torch.manual_seed(seed)
    logits = (4 * torch.randn(N, V)).to(dtype).requires_grad_()
    targets = torch.randint(V, (N,)).where(torch.rand(N) > left_out / 10, -1)
    targets[0] = 1
    ours = cross_entropy(logits, targets, max_float32_logits=at_once)
    torchs = F.cross_entropy(logits.float(), targets, ignore_index=-1)
    close(ours, torchs)
    grads = [torch.autograd.grad(loss, logits, torch.tensor(0.25))[0] for loss in (ours, torchs)]
    assert grads[0].dtype == dtype
    close(*grads, rtol=2**-6 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)


def test_a_token_without_a_chance_and_a_logit_that_is_no_number():
    logits = torch.tensor([[0.0, 1e4], [0.0, 0.0]], requires_grad=True)
    loss = cross_entropy(logits, torch.tensor([0, -1]), max_float32_logits=0)
    loss.backward()
    assert 87 < loss.item() < 88 and logits.grad.tolist() == [[-1, 1], [0, 0]]
    nan = logits * math.nan
    assert cross_entropy(nan, torch.tensor([0, 1]), max_float32_logits=0).isnan()
