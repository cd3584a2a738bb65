import numpy as np
import pytest
import torch

from attention_maps.ablation import importance, losses_without_heads
from attention_maps.capture import capture
from attention_maps.probe import make_probes
from attention_maps.scores import mean_and_error, readings
from config import GPTConfig
from data.tokenizer import CharTokenizer, train_bpe
from model import GPT


@pytest.fixture(params=[1, 2, 4])
def model(request):
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=60, block_size=64, n_layer=2, n_head=4, n_kv_head=request.param,
                         n_embd=32, dropout=0.3))


ALPHABET = CharTokenizer("".join(chr(c) for c in range(64, 123)) + "\n")


@pytest.fixture
def probes():
    ids = np.random.default_rng(0).integers(0, 60, 5000)
    return make_probes(ids, ids[:500], ALPHABET, 24, seed=1)


def test_probes_repeat_what_they_say_and_nothing_else(probes):
    for row, control, period in zip(probes.repeat, probes.control, probes.periods):
        assert np.array_equal(row[:period], row[period:2 * period])
        assert len(set(row)) == len(row) - period
        assert len(set(control)) == len(control)
    assert len(set(probes.periods)) >= 3 and len(probes.periods) >= 16
    assert probes.repeat.shape == probes.control.shape == (len(probes.periods), 24)


def test_random_tokens_are_drawn_by_their_frequency_in_training_and_none_is_unseen():
    share = np.where(np.arange(500) % 3 == 0, 0, 1 / np.arange(1, 501))  # a third is never seen
    train = np.random.default_rng(0).choice(500, 400_000, p=share / share.sum())
    tokenizer = CharTokenizer("".join(map(chr, range(1000, 1500))))
    probes = make_probes(train, np.arange(100), tokenizer, 48, seed=3)
    drawn = np.concatenate([probes.repeat.ravel(), probes.control.ravel()])
    assert np.isin(drawn, train).all()
    assert np.isin(np.arange(1, 10), drawn).sum() == 6  # the commonest: of nine, three are unseen
    seen = np.flatnonzero(share)
    assert (drawn < np.median(seen)).mean() > 0.7  # uniform ids would be 0.5
    # Of a long split pieces are counted, to its end.
    late = np.concatenate([np.zeros(5_000_000, np.int64), np.arange(1, 60)])
    probes = make_probes(late, np.arange(100), tokenizer, 48, seed=3)
    assert set(probes.control.ravel()) > {0, 1, 59}


def test_probes_never_hold_the_end_of_text_token_and_fit_a_small_vocabulary():
    tokenizer = train_bpe(["some text"], 257)
    probes = make_probes(np.arange(257), np.arange(200), tokenizer, 48, seed=0)
    assert tokenizer.end_of_text not in probes.repeat
    few = make_probes(np.arange(3), np.zeros(50, int), CharTokenizer("ab\n"), 48, seed=0)
    assert few.repeat.shape == (16, 3) and (few.periods >= 1).all()
    long = make_probes(np.arange(257), np.arange(200), tokenizer, 150, seed=0)
    assert len(long.text) == 150 and long.repeat.shape == (16, 64)


def test_the_text_probe_starts_at_a_line_and_its_words_are_its_tokens(probes):
    assert [ALPHABET.decode([i]) for i in probes.text] == probes.words


def test_a_snapshot_holds_the_exact_weights_of_every_query_head(model, probes):
    snap = capture(model, probes, step=3)
    assert snap.text.shape == (2, 4, 24, 24)
    assert snap.repeat.shape == snap.control.shape == (2, len(probes.periods), 4, 24, 24)
    for maps in (snap.text, snap.repeat, snap.control):
        assert maps.dtype == np.float32
        assert np.abs(maps.sum(axis=-1) - 1).max() < 1e-5
        assert (np.triu(maps, 1) == 0).all()
    found = readings(snap.text, snap.repeat, snap.control, probes.periods)
    assert {values.shape[:2] for values in found.values()} == {(2, 4)}
    assert {values.shape[2] for values in found.values()} == {len(probes.periods), 22, 23, 24}


def test_the_maps_times_the_values_are_what_the_fused_attention_gives(model, probes):
    tokens = torch.from_numpy(probes.text[None])
    snap = capture(model, probes, step=0)
    model.eval()
    for layer, (attention, x, rotary) in enumerate(model.attention_inputs(tokens)):
        # (1, H, T, d_v)
        v = attention.project(x, rotary)[2].repeat_interleave(4 // model.config.kv_heads, dim=1)
        heads = torch.from_numpy(snap.text[layer])[None] @ v
        written_out = attention.W_O(heads.transpose(1, 2).flatten(2))
        assert torch.allclose(written_out, attention(x, rotary), atol=1e-5)


def test_capture_leaves_no_trace(model, probes):
    model.train()
    before = [p.clone() for p in model.parameters()]
    state = torch.get_rng_state()
    capture(model, probes, step=0)
    assert model.training
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(a, b) and b.grad is None for a, b in zip(before, model.parameters()))


def test_a_saved_snapshot_needs_no_pickle_and_keeps_rows_whole(model, probes, tmp_path):
    snap = capture(model, probes, step=7)
    snap.save(tmp_path / "step.npz")
    with np.load(tmp_path / "step.npz", allow_pickle=False) as saved:
        assert saved["text"].dtype == np.float16
        assert np.abs(saved["text"].astype(np.float32).sum(-1) - 1).max() < 2e-3
        assert list(saved["text_tokens"]) == probes.words
        assert saved["step"] == 7
        for name in ("text", "repeat", "control"):
            assert np.array_equal(saved[f"{name}_ids"], getattr(probes, name))
            again = GPT.attention_maps(model, torch.from_numpy(np.atleast_2d(saved[f"{name}_ids"])))
            assert np.allclose(again.detach().squeeze(1) if name == "text" else again.detach(),
                               saved[name], atol=1e-3)
        # All that a score is computed from is there.
        kept = (saved[name].astype(np.float32) for name in ("text", "repeat", "control"))
        found = readings(*kept, saved["repeat_periods"])
        for name, values in readings(snap.text, snap.repeat, snap.control, probes.periods).items():
            for a, b in zip(mean_and_error(found[name]), mean_and_error(values)):
                assert np.allclose(a, b, atol=5e-3), name
    assert [p.name for p in tmp_path.iterdir()] == ["step.npz"]


def test_value_norms_are_the_lengths_of_what_a_head_writes_for_each_token(model, probes):
    norms = capture(model, probes, step=0).text_value_norms
    for layer, (attention, x,
                rotary) in enumerate(model.attention_inputs(torch.from_numpy(probes.text[None]))):
        v = attention.project(x, rotary)[2][0]  # (G, T, d_v)
        for head in range(4):
            W_O = attention.W_O.weight[:, head * 8:(head + 1) * 8]  # (C, d_v)
            written = v[head // (4 // model.config.kv_heads)] @ W_O.T  # (T, C)
            assert np.allclose(norms[layer, head], written.norm(dim=-1).detach().numpy(), atol=1e-6)


def test_importance_is_what_the_loss_gains_when_a_heads_output_is_nothing(model):
    torch.manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(5)
    tokens = torch.randint(0, 60, (5, 33))
    x, y = tokens[:, :-1], tokens[:, 1:].clone()
    y[0, 20:] = -1
    model.train()
    before, state = [p.clone() for p in model.parameters()], torch.get_rng_state()
    losses = losses_without_heads(model, x, y, rows=2)
    table, error = importance(**losses)
    assert table.shape == (2, 4) and model.training and torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
    model.eval()
    with torch.no_grad():
        whole = model(x, y)[1].item()
        for layer, head in ((0, 0), (1, 3)):
            def without(module, inputs, head=head):
                y = inputs[0].clone()
                y[..., head * 8:(head + 1) * 8] = 0  # before W_O: the head's own output
                return (y,)

            hook = model.blocks[layer].attention.W_O.register_forward_pre_hook(without)
            assert table[layer, head] == pytest.approx(model(x, y)[1].item() - whole, abs=1e-5)
            hook.remove()
    assert np.abs(table).max() > 1e-3
    # The error is that of a bootstrap over windows, of which one has fewer tokens.
    gain = losses["loss_without"] - losses["loss"]  # (2, 4, 5, 32)
    chosen = np.random.default_rng(0).integers(0, 5, (4000, 5))
    sums, counts = np.nansum(gain, axis=-1), (y >= 0).sum(dim=-1).numpy()
    drawn = sums[..., chosen].sum(axis=-1) / counts[chosen].sum(axis=-1)  # (2, 4, 4000)
    assert error == pytest.approx(drawn.std(axis=-1) * np.sqrt(5 / 4), rel=0.1)


def test_importance_is_left_where_a_signal_asks(model):
    class Asked(Exception):
        pass

    def between():
        raise Asked

    x = torch.randint(0, 60, (2, 8))
    with pytest.raises(Asked):
        losses_without_heads(model.train(), x, x, 2, between=between)
    assert model.training
