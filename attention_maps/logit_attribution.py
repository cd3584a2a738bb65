"""What a model predicts after each token of a text, and which of its parts said so."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention_maps.ablation import measure_head_effects, measure_token_effects
from attention_maps.capture import LOGITS, Forward, next_tokens, token_losses, written
from attention_maps.probes import word
from attention_maps.scores import mean_and_error
from data.tokenizer import Tokenizer
from model import GPT

PREDICTED, WRITTEN = 5, 3  # likeliest next tokens; tokens that a head pushes up most, and down most
LONGEST = 40  # characters of a token that is named
TEN = 10  # among so many of all tokens the copying score looks for the token itself
ASKED = 8  # tokens of each text that it looks at


def explain_predictions(model: GPT, whole: Forward, tokenizer: Tokenizer) -> dict[str, np.ndarray]:
    """What each prediction in a text needed, its card, and as text the tokens that it names."""
    found = {
        **measure_token_effects(model, whole),
        "head_effect": measure_head_effects(model, whole),
        **attribute_logits(model, whole),
    }
    named = np.unique(
        np.concatenate(
            [found["predicted_ids"].ravel(), found["promoted_and_suppressed_ids"].ravel()]
        )
    )
    named = named[named >= 0]
    # A model of others may have more ids than its tokenizer.
    spelt = [
        word(tokenizer, id)[:LONGEST] if id < tokenizer.vocab_size else f"<{id}>"
        for id in named.tolist()
    ]
    return found | {"named_ids": named, "named_tokens": np.array(spelt)}


@torch.no_grad()
def attribute_logits(model: GPT, whole: Forward) -> dict[str, np.ndarray]:
    """Of each token of one text the prediction of the next:

    predicted_ids, predicted (T, 5): the likeliest tokens and their probabilities.
    lens (L + 1, T): the loss after the embedding and after each block, through the last norm, in
        nats (the "logit lens"); nan after the last token.
    direct (1 + L·(H + 1) + 1, T, 6): what the embedding, each head and then the MLP of each layer,
        and all other biases, give to the logits of the token that follows (after the last: of
        the likeliest) and of the likeliest five; they sum to the logit less the mean of all logits
        (Elhage et al. 2021): what raises all alike changes no probability.
    writes_ids (L, H, T, 6): the three tokens that a head pushes up most, and down most.
    Ids are -1 where the vocabulary has too few."""
    tokens, E = whole.tokens[0], whole.residuals[:, 0]  # (T), (L + 1, T, C)
    L, H = model.config.n_layer, model.config.n_head
    logits = model.head(model.norm(E[-1]))  # (T, V)
    ids = extreme(logits, PREDICTED)  # (T, 5)
    follows = torch.where(next_tokens(tokens) < 0, ids[:, 0], next_tokens(tokens))
    lens = token_losses(model, E, follows.expand(L + 1, -1))
    lens[:, -1] = torch.nan
    parts = [E[0]]
    for layer, block in enumerate(model.blocks):
        heads, bias = written(block.attention, whole.heads[layer, 0]), block.attention.W_O.bias
        mlp = E[layer + 1] - E[layer] - heads.sum(dim=1)  # (T, C)
        parts += [*heads.unbind(1), mlp if bias is None else mlp - bias]
    parts = unscaled(model.norm, torch.stack(parts), E[-1])  # (1 + L · (H + 1), T, C)
    told = torch.cat((follows[:, None], ids), dim=1).clamp(min=0)  # (T, 6)
    W = model.head.weight
    direct = torch.einsum("ptc,tkc->ptk", parts, W[told] - W.mean(dim=0))
    rest = logits.gather(1, told) - logits.mean(dim=1, keepdim=True) - direct.sum(dim=0)
    heads = parts[1:].unflatten(0, (L, H + 1))[:, :H].flatten(0, 2)  # (L · H · T, C)
    writes = []
    for some in heads.split(max(1, LOGITS // model.config.vocab_size)):
        pushed = some @ model.head.weight.T  # (…, V)
        writes.append(torch.cat((extreme(pushed, WRITTEN), extreme(-pushed, WRITTEN)), dim=-1))
    chances = logits.float().softmax(dim=-1)
    found = {
        "predicted_ids": ids,
        "predicted_probs": chances.gather(1, told[:, 1:]),
        "logit_lens": lens,
        "logit_attribution": torch.cat((direct, rest[None])),
        "promoted_and_suppressed_ids": torch.cat(writes).view(L, H, len(tokens), 2 * WRITTEN),
    }
    return {
        name: (value.float() if value.is_floating_point() else value.int()).cpu().numpy()
        for name, value in found.items()
    }


def extreme(logits: Tensor, count: int) -> Tensor:
    """The ids (…, count) of the largest of logits (…, V), and -1 where there are fewer."""
    ids = logits.topk(min(count, logits.shape[-1])).indices
    return F.pad(ids, (0, count - ids.shape[-1]), value=-1)


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
def copying_scores(model: GPT, whole: Forward, asked: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How a head tells of a token that it looks at, (L, H), and its standard error over texts: the
    share of tokens j that v_j W_O puts among the ten likeliest, through the last norm and the
    output layer, less the share that it puts among the ten least likely. Of each text (T) some
    tokens, evenly spread; nan for the heads that are not `asked` (L, H)."""
    some = slice(None, None, max(1, whole.tokens.shape[1] // ASKED))
    own = whole.tokens[:, some].flatten()[:, None, None]
    found = np.full((*asked.shape, len(whole.tokens)), np.nan, np.float32)
    for layer in np.flatnonzero(asked.any(axis=1)):
        block, v, heads = model.blocks[layer], whole.v[layer][..., some, :], asked[layer]
        v = v.repeat_interleave(model.config.n_head // v.shape[1], dim=1)  # (B, H, T, d_v)
        o = written(block.attention, v.transpose(1, 2)).flatten(0, 1)[:, heads]  # (B · T, n, C)
        pushed = unscaled(model.norm, o, o) @ model.head.weight.T  # (B · T, n, V)
        itself = pushed.gather(2, own.expand(-1, pushed.shape[1], 1))
        top = (pushed > itself).sum(dim=-1) < TEN  # (B · T, n)
        bottom = (pushed < itself).sum(dim=-1) < TEN
        shares = (top.float() - bottom.float()).unflatten(0, (len(whole.tokens), -1)).mean(1)
        found[layer, heads] = shares.T.cpu().numpy()
    return mean_and_error(found)
