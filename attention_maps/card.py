"""What a model predicts after each token of a text, and which of its parts said so."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from attention_maps.ablation import LOGITS, knockout, nats, need, next_tokens, streams
from attention_maps.probe import word
from attention_maps.scores import mean_and_error
from data.tokenizer import Tokenizer
from model import GPT, SelfAttention

PREDICTED, WRITTEN = 5, 3  # likeliest next tokens; tokens that a head pushes up most, and down most
LONGEST = 40  # characters of a token that is named
TEN = 10  # among so many of all tokens the copying score looks for the token itself


def explain(model: GPT, ids: np.ndarray, tokenizer: Tokenizer, prefix: str = "",
            between: Callable[[], None] = lambda: None) -> dict[str, np.ndarray]:
    """What each prediction of a text (T,) needed, and its card, under names with the prefix; the
    tokens that it names, `words_ids` (n,), as text, `words`. Computed in float32."""
    model = in_float32(model)
    tokens = torch.from_numpy(ids).to(model.head.weight.device)
    found = {"need": need(model, tokens, between), "knockout": knockout(model, tokens, between),
             **card(model, tokens)}
    named = np.unique(np.concatenate([found["predicted_ids"].ravel(), found["writes_ids"].ravel()]))
    # A model of others may have more ids than its tokenizer.
    spelt = [word(tokenizer, id)[:LONGEST] if id < tokenizer.vocab_size else f"<{id}>"
             for id in named.tolist()]
    found |= {"words_ids": named, "words": np.array(spelt)}
    return {prefix + name: value for name, value in found.items()}


def in_float32(model: GPT) -> GPT:
    """The model, or, of one in fewer bits, a copy: differences of losses are small."""
    if torch.finfo(model.head.weight.dtype).bits >= 32:
        return model
    copy = GPT(model.config).to(model.head.weight.device)
    copy.load_state_dict(model.state_dict())
    return copy


@torch.no_grad()
def card(model: GPT, tokens: Tensor) -> dict[str, np.ndarray]:
    """Of tokens (T,), at each the prediction of the next:

    predicted_ids, predicted (T, 5): the likeliest tokens and their probabilities.
    lens (L + 1, T): the loss after the embedding and after each block, through the last norm, in
        nats (the "logit lens"); nan after the last token.
    direct (1 + L·(H + 1) + 1, T, 6): what the embedding, each head and then the MLP of each layer,
        and all other biases, give to the logits of the token that follows (after the last: of
        the likeliest) and of the likeliest five; they sum to the logit (Elhage et al. 2021).
    writes_ids (L, H, T, 6): the three tokens that a head pushes up most, and down most.
    """
    with model.evaluating():
        E, rotary = streams(model, tokens[None])
        logits = model.head(model.norm(E[-1]))[0]  # (T, V)
        ids = extreme(logits, PREDICTED)  # (T, 5)
        probabilities = logits.float().softmax(dim=-1).gather(1, ids)
        follows = torch.where(next_tokens(tokens) < 0, ids[:, 0], next_tokens(tokens))
        lens = torch.stack([nats(model, x[0], follows) for x in E])
        lens[:, -1] = torch.nan
        parts, rest = [E[0][0]], 0
        for block, x, after in zip(model.blocks, E, E[1:]):
            heads = written(block.attention, gathered(block.attention, block.norm_1(x), rotary))[0]
            bias = 0 if block.attention.W_O.bias is None else block.attention.W_O.bias
            parts += [*heads.unbind(1), after[0] - x[0] - heads.sum(dim=1) - bias]
            rest = rest + bias
        parts = unscaled(model.norm, torch.stack(parts), E[-1][0])  # (1 + L · (H + 1), T, C)
        targets = model.head.weight[torch.cat((follows[:, None], ids), dim=1)]  # (T, 6, C)
        direct = torch.einsum("ptc,tkc->ptk", parts, targets)
        whole = logits.gather(1, torch.cat((follows[:, None], ids), dim=1))  # (T, 6)
        direct = torch.cat((direct, (whole - direct.sum(dim=0))[None]))
        L, H = model.config.n_layer, model.config.n_head
        heads = parts[1:].unflatten(0, (L, H + 1))[:, :H].flatten(0, 2)  # (L · H · T, C)
        writes = []
        for some in heads.split(max(1, LOGITS // model.config.vocab_size)):
            pushed = some @ model.head.weight.T  # (…, V)
            writes.append(torch.cat((extreme(pushed, WRITTEN), extreme(-pushed, WRITTEN)), dim=-1))
    found = {"predicted_ids": ids, "predicted": probabilities, "lens": lens, "direct": direct,
             "writes_ids": torch.cat(writes).view(L, H, len(tokens), 2 * WRITTEN)}
    return {name: array(value) for name, value in found.items()}


def extreme(logits: Tensor, count: int) -> Tensor:
    """The ids (…, count) of the largest of logits (…, V), the last again where there are fewer."""
    ids = logits.topk(min(count, logits.shape[-1])).indices
    return torch.cat((ids, ids[..., -1:].expand(*ids.shape[:-1], count - ids.shape[-1])), dim=-1)


def array(value: Tensor) -> np.ndarray:
    return (value.float() if value.is_floating_point() else value.int()).cpu().numpy()


def gathered(attention: SelfAttention, x: Tensor, rotary: Tensor | None) -> Tensor:
    """What each head reads together, its weights times the values, (B, T, H, d_v)."""
    c = attention.config
    v = attention.project(x, rotary)[2].repeat_interleave(c.n_head // c.kv_heads, dim=1)
    return (attention.weights(x, rotary).to(v.dtype) @ v).transpose(1, 2)


def written(attention: SelfAttention, z: Tensor) -> Tensor:
    """What each head writes of what it gathered, (B, T, H, d_v): (B, T, H, C)."""
    W_O = attention.W_O.weight.unflatten(1, (-1, z.shape[-1]))  # (C, H, d_v)
    return torch.einsum("bthd,chd->bthc", z, W_O)


def unscaled(norm: nn.Module, parts: Tensor, x: Tensor) -> Tensor:
    """Parts (…, T, C) of what the last norm gets, x (T, C), as it scales them: a linear map, once
    its scale is that of x; without its bias."""
    if isinstance(norm, nn.LayerNorm):
        scale = (x.var(dim=-1, correction=0, keepdim=True) + norm.eps).rsqrt()
        parts = parts - parts.mean(dim=-1, keepdim=True)
    else:
        scale = (x.square().mean(dim=-1, keepdim=True) + norm.eps).rsqrt()
    return parts * scale * norm.weight


@torch.no_grad()
def copying(model: GPT, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How a head tells of a token that it looks at, (L, H), and its standard error over tokens
    (B, T): the share of tokens j that v_j W_O puts among the ten likeliest, through the last norm
    and the output layer, less the share that it puts among the ten least likely.
    """
    model, c, found = in_float32(model), model.config, []
    tokens = torch.from_numpy(ids).to(model.head.weight.device)
    with model.evaluating():
        for attention, x, rotary in model.attention_inputs(tokens):
            v = attention.project(x, rotary)[2].repeat_interleave(c.n_head // c.kv_heads, dim=1)
            o = written(attention, v.transpose(1, 2)).flatten(0, 1)  # (B · T, H, C)
            pushed = unscaled(model.norm, o, o) @ model.head.weight.T  # (B · T, H, V)
            own = pushed.gather(2, tokens.flatten()[:, None, None].expand(-1, c.n_head, 1))
            top = (pushed > own).sum(dim=-1) < TEN  # (B · T, H)
            bottom = (pushed < own).sum(dim=-1) < TEN
            found.append((top.float() - bottom.float()).T)
    return mean_and_error(torch.stack(found).cpu().numpy())
