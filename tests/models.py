"""Small models of every kind, for the tests of several modules."""

import math

import torch
from hypothesis import settings
from hypothesis import strategies as st

from config import GPTConfig
from decoder import Decoder
from decoding import stream

few = settings(max_examples=settings.default.max_examples // 3)  # a model is built for each

# Small models of every kind. All head sizes are even, which rotary positions need.
configs = st.builds(
    GPTConfig,
    vocab_size=st.just(23),
    block_size=st.just(16),
    n_layer=st.just(2),
    n_head=st.just(4),
    n_kv_head=st.sampled_from([None, 1, 2, 4]),
    n_embd=st.just(16),
    head_dim=st.sampled_from([None, 6]),
    value_head_dim=st.sampled_from([None, 3]),
    mlp=st.sampled_from(["gelu", "swiglu", "relu2"]),
    norm=st.sampled_from(["layernorm", "rmsnorm"]),
    position=st.sampled_from(["learned", "rope"]),
    rope_theta=st.sampled_from([100.0, 10000.0]),
    rope_factor=st.sampled_from([1.0, 4.0]),
    rope_trained=st.sampled_from([None, 8]),
    qk_norm=st.sampled_from([False, True, "gains"]),
    bias=st.sampled_from([False, True, "attention", "qkv"]),
    tie_embeddings=st.booleans(),
    ngrams=st.sampled_from([0, 3]),
    ngram_rows=st.just(600),
    ngram_size=st.sampled_from([None, 5]),
)
seeds = st.integers(0, 2**31)


def small(**changes):
    return GPTConfig(
        **{"vocab_size": 23, "block_size": 16, "n_layer": 2, "n_head": 4, "n_embd": 16, **changes}
    )


def lively(module, seed=0):
    """The module with weights as large as trained ones: attention far from uniform, gains and
    biases far from 1 and 0."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            if p.dim() == 2:
                p.normal_(std=1 / math.sqrt(p.shape[1]))
            else:
                p.add_(0.3 * torch.randn_like(p))
        if getattr(module, "ngrams", None):  # 200 of all pairs, and 400 of those with a token more
            V = module.config.vocab_size
            some = torch.randperm(V * V)[:200], V * V + torch.randperm(200 * V)[:400]
            module.ngrams.keys.copy_(torch.cat([keys.sort().values for keys in some]))
    return module.eval()


def of_ngrams(model, tokens, hidden=None):
    """What n-grams of tokens (T,) add to embeddings, (T, C), looked up one by one; `hidden` is a
    token that is not there for later ones."""
    n, V, found = model.config.ngrams, model.config.vocab_size, {}
    for row, key in enumerate(model.ngrams.keys.tolist()):
        parent, last = divmod(key, V)
        found[(*((parent,) if parent < V else list(found)[parent - V]), last)] = row
    sums = []
    for t in range(len(tokens)):
        rows = []
        for length in range(2, n + 1):
            gram = tuple(tokens[max(0, t + 1 - length) : t + 1].tolist())
            begins_later = len(gram) < length or (
                hidden is not None and t + 1 - length <= hidden < t
            )
            rows.append(
                2 * (length - 2) + 1
                if begins_later
                else 2 * (n - 1) + found[gram]
                if gram in found
                else 2 * (length - 2)
            )
        sums.append(model.ngrams.table[rows].sum(dim=0))
    return torch.nn.functional.pad(torch.stack(sums), (0, model.ngrams.untouched_channels))


def random_tokens(*shape, seed=0):
    return torch.randint(23, shape, generator=torch.Generator().manual_seed(seed))


def streamed(model, prompts, new, seeds=None, cache=None, **more):
    """`decoding.stream` with the model's decoder, over a cache of its own where none is given."""
    decoder = Decoder(model, model.make_cache(len(prompts)) if cache is None else cache)
    return stream(decoder, prompts, new, seeds, **more)
