"""Who feeds whom, in a model of two layers whose heads are set by hand."""

from functools import partial

import numpy as np
import pytest
import torch
from models import lively, small

from attention_maps import scores
from attention_maps.capture import capture
from attention_maps.composition import composition
from config import GPTConfig
from model import GPT, attention_weights, causal_mask, store

V, T, SHARP = 40, 24, 200.0


@pytest.fixture(params=["rmsnorm", "layernorm"])
def model(request) -> GPT:
    """L0H0 looks at the token before and writes it down; L1H1 looks where what is written down is
    the token that it is at: an induction head, by its keys. The other two heads write noise.

    A token's embedding has its id in the first V places, its position in the next T; what L0H0
    writes is in the last V.
    """
    torch.manual_seed(0)
    C, d = 2 * V + T, max(V, T)
    model = GPT(
        GPTConfig(
            vocab_size=V,
            block_size=T,
            n_layer=2,
            n_head=2,
            n_embd=C,
            head_dim=d,
            norm=request.param,
        )
    )
    id, place, note = slice(V), slice(V, V + T), slice(V + T, C)
    with torch.no_grad():
        for p in model.blocks.parameters():
            if p.dim() == 2:
                p.zero_()
        model.token_embedding.weight.zero_()[:, id] = torch.eye(V)
        model.position_embedding.weight.zero_()[:, place] = torch.eye(T)
        first, second = (block.attention for block in model.blocks)
        first.W_Q.weight[1:T, place] = SHARP * torch.eye(T)[: T - 1]  # query i is key i - 1
        first.W_Q.weight[:T, place] = SHARP * torch.eye(T).roll(-1, dims=0)
        first.W_K.weight[:T, place] = torch.eye(T)
        first.W_V.weight[:V, id] = torch.eye(V)
        first.W_O.weight[note, :V] = 4 * torch.eye(V)
        second.W_Q.weight[d : d + V, id] = SHARP * torch.eye(V)
        second.W_K.weight[d : d + V, note] = torch.eye(V)
        second.W_V.weight[d : d + V, id] = torch.eye(V)
        second.W_O.weight[id, d : d + V] = torch.eye(V)
        for layer, head in ((first, 1), (second, 0)):
            layer.W_V.weight[head * d : (head + 1) * d].normal_(std=0.03)
            layer.W_O.weight[:, head * d : (head + 1) * d].normal_(std=0.03)
    return model


PERIODS = np.repeat([6, 8, 10, 12], 4)


@pytest.fixture
def texts() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Windows, texts that repeat, texts that do not: (16, T) each."""
    rng = np.random.default_rng(0)
    windows, repeat, control = np.stack([rng.permutation(V)[:T] for _ in range(48)]).reshape(
        3, 16, T
    )
    for row, period in zip(repeat, PERIODS):
        row[period : 2 * period] = row[:period]
    return windows, repeat, control


def fed(model, texts, heads):
    """`composition` on the texts."""
    windows, repeat, control = texts
    random = capture(model, np.concatenate((repeat, control)))
    return composition(model, capture(model, windows), random, PERIODS, heads)


def test_an_induction_head_is_fed_by_the_previous_token_head_through_its_keys(model, texts):
    maps = [model.attention_maps(torch.from_numpy(ids)).numpy() for ids in texts]
    found = scores.readings(*maps, PERIODS)
    assert found["previous_token"][0, 0].mean() > 0.95
    assert found["induction"][1, 1].mean() > 0.8  # the first token notes itself
    row = fed(model, texts, {"induction": [(1, 1), (1, 0)], "previous_token": [(0, 0)]})
    feeders = {key.rpartition("/")[2] for key in row if "/L1H1/" in key}
    # Ids come from the embedding; the head that writes noise feeds nobody, nor does an empty MLP.
    assert feeders == {"L0H0", "embedding"}
    assert not any("/L0H0/keys" in key for key in row)  # nothing is below layer 0
    by_name = {
        read: row[f"composition/induction/L1H1/{read}/L0H0"]
        for read in ("queries", "keys", "values")
    }
    assert by_name["keys"] == pytest.approx(1, abs=0.02)
    assert by_name["queries"] == pytest.approx(0, abs=0.05)
    assert by_name["values"] == pytest.approx(0, abs=0.02)  # it moves ids, not what was noted
    assert row["composition/induction/L1H1/values/embedding"] > 0.8
    assert row["composition/induction_se/L1H1/keys/L0H0"] < 0.05


def test_values_tell_how_much_of_what_a_head_moves_came_from_below(model, texts):
    second, d = model.blocks[1].attention, max(V, T)
    with torch.no_grad():  # now it moves what was noted
        second.W_V.weight[d : d + V].zero_()[:, V + T :] = torch.eye(V)
    row = fed(model, texts, {"induction": [(1, 1)]})
    assert row["composition/induction/L1H1/values/L0H0"] > 0.9


@pytest.mark.parametrize(
    "kind",
    [{"norm": "layernorm", "bias": True}, {"norm": "rmsnorm", "position": "rope", "n_kv_head": 2}],
)
def test_the_blocks_between_are_computed_again(kind, texts):
    """Against a slow loop in float64 that changes what a part adds and runs all blocks."""
    model = lively(GPT(small(n_layer=3, vocab_size=V, block_size=T, **kind))).double()
    tokens, mask = torch.from_numpy(texts[0]), causal_mask(T, T)

    def keys_and_queries(changed: str, direct: bool = False):
        x = model.embed(tokens)
        wrote = x if changed == "embedding" else None
        x = x.mean(dim=(0, 1)).expand_as(x) if changed == "embedding" and not direct else x
        for layer, block in enumerate(model.blocks[:2]):
            heads = []
            with torch.no_grad():
                block.attention(
                    block.norm_1(x),
                    model.rotary_at(0, T),
                    taps={"heads": partial(store, heads)},
                )
            y = heads[0].clone()
            if changed == f"L{layer}H1":
                wrote = y[:, :, 1] @ block.attention.W_O.weight[:, 4:8].T
                if not direct:
                    y[:, :, 1] = y[:, :, 1].mean(dim=(0, 1))
            x = x + block.attention.W_O(y.flatten(2))
            added = block.mlp(block.norm_2(x))
            if changed == f"L{layer}MLP":
                wrote = added
                added = added if direct else added.mean(dim=(0, 1)).expand_as(added)
            x = x + added
        x = x - wrote + wrote.mean(dim=(0, 1)) if direct else x
        block = model.blocks[2]
        q, k, _ = block.attention.project(block.norm_1(x), model.rotary_at(0, T))
        return q, k

    def score(q, k):
        A = attention_weights(q, k, mask).detach()
        return torch.diagonal(A, offset=-1, dim1=-2, dim2=-1).mean(dim=(0, 2))  # (H,)

    row = fed(model, texts, {"previous_token": [(2, head) for head in range(4)]})
    parts = {key.rpartition("/")[2] for key in row}
    assert len(parts) > 5 and "embedding" in parts
    for part in parts & {"embedding", "L0H1", "L1H1", "L0MLP", "L1MLP"}:
        for end, direct in (("", False), ("_direct", True)):
            with torch.no_grad():
                q, k = keys_and_queries(part, direct)
                x = capture(model, texts[0]).residuals[2]
                block = model.blocks[2]
                q0, k0, _ = block.attention.project(block.norm_1(x), model.rotary_at(0, T))
            whole = score(q0, k0)
            for read, lost in (
                ("queries", 1 - score(q, k0) / whole),
                ("keys", 1 - score(q0, k) / whole),
            ):
                for head in range(4):
                    key = f"composition/previous_token{end}/L2H{head}/{read}/{part}"
                    if key in row:
                        assert row[key] == pytest.approx(lost[head].item(), abs=1e-6)


def test_a_share_is_the_mean_of_a_slow_loop_and_its_error_a_bootstrap():
    rng = np.random.default_rng(0)
    before = rng.gamma(4, 0.1, 16)
    after = before * rng.uniform(0.2, 0.6, 16)
    share, error = scores.ratio(after, before)
    assert share == pytest.approx(after.sum() / before.sum())
    drawn = rng.integers(0, 16, (8000, 16))
    ratios = after[drawn].sum(axis=1) / before[drawn].sum(axis=1)
    assert error == pytest.approx(ratios.std() * np.sqrt(16 / 15), rel=0.1)
