"""What a head is good for, and what a prediction needed: the loss without them.

Each is the real model, of which the blocks above what was changed are computed again.
"""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from model import GPT, Block, autocast

TOKENS, LOGITS = 4096, 1 << 25  # that go through the model, and are made, at once, at most


@torch.no_grad()
def streams(model: GPT, tokens: Tensor) -> tuple[list[Tensor], Tensor | None]:
    """The embeddings (B, T, C) that each block gets and what the last one gives, n_layer + 1; the
    rotary angles. The model is in evaluation."""
    x, rotary = model._embed(tokens)
    found = [x]
    for block in model.blocks:
        found.append(block(found[-1], rotary))
    return found, rotary


def nats(model: GPT, x: Tensor, targets: Tensor) -> Tensor:
    """-ln p of targets (…, T), of embeddings x (…, T, C) after the last block: (…, T); nan for -1.
    """
    found, most = [], max(1, LOGITS // model.config.vocab_size)
    for some, ids in zip(x.flatten(0, -2).split(most), targets.flatten().split(most)):
        logits = model.head(model.norm(some))  # (…, V)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        found.append(F.cross_entropy(logits, ids, ignore_index=-1, reduction="none"))
    return torch.cat(found).view(targets.shape).masked_fill(targets < 0, torch.nan)


def at_once(model: GPT, length: int) -> int:
    """Rows of so many tokens that go through the model at once."""
    return max(1, min(TOKENS, LOGITS // model.config.vocab_size) // length)


def next_tokens(tokens: Tensor) -> Tensor:
    """The token that follows each of tokens (…, T); -1 after the last."""
    return F.pad(tokens[..., 1:], (0, 1), value=-1)


@torch.no_grad()
def losses_without_heads(
    model: GPT, x: Tensor, y: Tensor, rows: int, precision: str = "fp32",
    between: Callable[[], None] = lambda: None
) -> dict[str, np.ndarray]:
    """The loss of every token of windows x, y (W, T) in nats, nan where y is -1: `loss` (W, T), and
    for each head `loss_without` (L, H, W, T), when its output is zeroed.

    `rows` windows go through the model at once; `between` is called before each head. The model
    stays as it is: a call with a copy of one matrix, of which the head's columns are zero, stands
    for the model without the head.
    """
    c, whole, without = model.config, [], []
    with model.evaluating(), autocast(x.device.type, precision):
        for xs, ys in zip(x.split(rows), y.split(rows)):
            E, rotary = streams(model, xs)
            whole.append(nats(model, E[-1], ys))
            without.append([])
            for layer in range(c.n_layer):
                for heads in torch.arange(c.n_head).split(max(1, rows // len(xs))):
                    some = []
                    for head in heads.tolist():
                        between()
                        some.append(without_head(model, layer, head, E[layer], rotary))
                    found = torch.cat(some)
                    for block in model.blocks[layer + 1:]:
                        found = block(found, rotary)
                    targets = ys.repeat(len(heads), 1)
                    without[-1].append(nats(model, found, targets).unflatten(0, (-1, len(xs))))
    shape = (c.n_layer, c.n_head, *x.shape)
    without = torch.cat([torch.cat(heads) for heads in without], dim=1)  # (L · H, W, T)
    return {"loss": torch.cat(whole).cpu().numpy(),
            "loss_without": without.cpu().numpy().reshape(shape)}


def without_head(model: GPT, layer: int, head: int, x: Tensor, rotary: Tensor | None) -> Tensor:
    """What a block makes of x (B, T, C) when a head of it writes nothing."""
    block, d_v = model.blocks[layer], model.config.value_dim
    W_O = block.attention.W_O.weight.clone()  # (C, H · d_v)
    W_O[:, head * d_v:(head + 1) * d_v] = 0
    return functional_call(block, {"attention.W_O.weight": W_O}, (x, rotary))


@torch.no_grad()
def knockout(model: GPT, tokens: Tensor, between: Callable[[], None] = lambda: None) -> np.ndarray:
    """knockout[l, h, i] (L, H, T): how many nats the token after i costs more without head (l, h),
    of tokens (T,); nan for the last, after which nothing is known."""
    found = losses_without_heads(model, tokens[None], next_tokens(tokens)[None],
                                 at_once(model, len(tokens)), between=between)
    return (found["loss_without"] - found["loss"])[:, :, 0]


@torch.no_grad()
def need(model: GPT, tokens: Tensor, between: Callable[[], None] = lambda: None) -> np.ndarray:
    """need[i, j] (T, T) of tokens (T,): how many nats the token after i costs more where token j is
    hidden from all later queries, in all layers and heads. 0 for j ≥ i; nan in the last row, after
    which nothing is known. `between` is called before each pass, and may raise.

    Queries up to j see what they saw: only what follows the first hidden token of a pass is
    computed again, over the keys and values of those before it.
    """
    T, place = len(tokens), torch.arange(len(tokens), device=tokens.device)
    targets, start = next_tokens(tokens), 0
    with model.evaluating():
        E, rotary = streams(model, tokens[None])
        past = [block.attention.project(block.norm_1(x), rotary)[1:]  # k, v (1, G, T, d)
                for block, x in zip(model.blocks, E)]
        whole = nats(model, E[-1], targets[None])  # (1, T)
        found = torch.zeros(T, T, dtype=whole.dtype, device=tokens.device)
        while start < T - 1:
            between()
            rest = place[start + 1:]
            # As many as are worth that a pass begins at the first of them.
            hidden = place[start:min(T - 1, start + at_once(model, len(rest)),
                                     start + max(8, len(rest) // 4))][:, None]  # (R, 1)
            later = rest > hidden  # (R, rest)
            mask = (place <= rest[:, None]) & ~((place == hidden)[:, None] & later[..., None])
            x = E[0][:, start + 1:].expand(len(hidden), -1, -1)
            angles = None if rotary is None else rotary[:, start + 1:]
            for block, (k, v) in zip(model.blocks, past):
                before = k[:, :, :start + 1], v[:, :, :start + 1]
                x = with_mask(block, x, angles, before, mask[:, None])
            loss = nats(model, x, targets[start + 1:].expand(len(hidden), -1))  # (R, rest)
            more = (loss - whole[:, start + 1:]).masked_fill(~later, 0)
            found[start + 1:, start:start + len(hidden)] = more.T
            start += len(hidden)
    found[-1] = torch.nan
    return found.cpu().numpy()


def with_mask(block: Block, x: Tensor, rotary: Tensor | None, past: tuple[Tensor, Tensor],
              mask: Tensor) -> Tensor:
    """A block's x (R, T, C) after past keys and values (1, G, P, d), where a query may attend to
    what mask (R, 1, T, P + T) says."""
    c, a = block.attention.config, block.attention
    q, *new = a.project(block.norm_1(x), rotary)
    k, v = (torch.cat((old.expand(len(x), -1, -1, -1), more), dim=2)
            for old, more in zip(past, new))
    y = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=c.kv_heads != c.n_head)
    x = x + a.W_O(y.transpose(1, 2).flatten(2))  # (R, T, C)
    return x + block.mlp(block.norm_2(x))


def importance(loss: np.ndarray, loss_without: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Increase of the mean loss without each head and its standard error over windows, (L, H) each.

    loss (W, T) and loss_without (L, H, W, T) are what `losses_without_heads` gives. The error is
    that of a ratio of sums, since a window may have fewer tokens than another; nan for one window.
    """
    gain = loss_without.astype(np.float64) - loss  # (L, H, W, T)
    counts = (~np.isnan(loss)).sum(axis=-1)  # (W,)
    with np.errstate(invalid="ignore", divide="ignore"):  # nan for one window, or losses of nan
        mean = np.nansum(gain, axis=(-2, -1)) / counts.sum()
        apart = np.nansum(gain, axis=-1) - mean[..., None] * counts  # (L, H, W)
        spread = (apart ** 2).sum(axis=-1) / np.float64(1 - 1 / len(counts))
        return mean, np.sqrt(spread) / counts.sum()


def costs(x: Tensor, y: Tensor, loss: np.ndarray,
          loss_without: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """`importance` at two kinds of tokens y that follow x (W, T) in windows: pair_cost, at those
    that followed the same token before, and new_cost, at those that did not come before."""
    x, y = x.cpu().numpy(), y.cpu().numpy()
    earlier = np.tri(x.shape[1], dtype=bool)  # (T, T): j up to i
    seen = ((y[:, :, None] == x[:, None]) & earlier).any(axis=-1)
    pair = (x[:, :, None] == x[:, None]) & (y[:, :, None] == y[:, None])
    pair = (pair & (earlier & ~np.eye(x.shape[1], dtype=bool))).any(axis=-1)
    return {name: importance(np.where(told, loss, np.nan), loss_without)
            for name, told in (("pair_cost", pair), ("new_cost", ~seen))}
