"""Small models of all kinds, for the tests of several modules."""

import math
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from config import GPTConfig
from glass.heads.measure.capture import capture
from glass.heads.measure.interventions import NO_INTERVENTIONS
from variants import build_model

# Fewer examples than usual, for tests that build a model for each.
few = settings(max_examples=settings.default.max_examples // 3)

VOCAB_SIZE = 23

# Fewer still, for tests that ask a browser about each.
in_browser = settings(
    max_examples=12,
    phases=[Phase.explicit, Phase.generate],  # shrinking a failure takes minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

# All values of the settings that have a finite number of them.
CHOICES = {
    field.name: field.metadata.get("choices", (False, True))
    for field in fields(GPTConfig)
    if field.type is bool or "choices" in field.metadata
}
smear_keys = CHOICES.pop("smear_keys")  # such a model reads only whole texts
# Rotary positions need even head sizes.
configs = st.builds(
    GPTConfig,
    vocab_size=st.just(VOCAB_SIZE),
    block_size=st.just(16),
    n_layer=st.just(2),
    n_head=st.just(4),
    n_kv_head=st.sampled_from([None, 1, 2, 4]),
    n_embd=st.just(16),
    head_dim=st.sampled_from([None, 6]),
    value_head_dim=st.sampled_from([None, 3]),
    rope_theta=st.sampled_from([100.0, 10000.0]),
    rope_factor=st.sampled_from([1.0, 4.0]),
    rope_trained=st.sampled_from([None, 8]),
    rope_share=st.sampled_from([1.0, 2 / 3]),  # 2 of 4 channels, 4 of 6
    ngrams=st.sampled_from([0, 3]),
    ngram_rows=st.just(600),
    ngram_size=st.sampled_from([None, 5]),
    **{name: st.sampled_from(choices) for name, choices in CHOICES.items()},
)
page_configs = configs.map(lambda config: replace(config, ngrams=0))  # a page can run them
# Of models that read only whole texts
smeared_configs = configs.map(lambda config: replace(config, smear_keys=True))
seeds = st.integers(0, 2**31)


@dataclass
class LaterConfig(GPTConfig):
    """A configuration with a setting that was added later."""

    later: str = "off"


@st.composite
def patched_models(draw):
    """A model's config, and the parts of a request that change its activations."""
    config = draw(page_configs)
    patches = ["L0T4", "L1T6", "L0H2", "L1H1"] + ["L0MLP"] * (config.mlp != "none")

    def some(choices):
        return draw(st.lists(st.sampled_from(choices), max_size=2, unique=True))

    return config, {
        "off": some(["L0H1", "L1H0", "L1H3"]),
        "hidden": some(range(10)),
        "patched": some(patches),
        "direction": draw(st.sampled_from(["denoising", "noising"])),
    }


def small(**changes):
    """A configuration of a small model."""
    defaults = {
        "vocab_size": VOCAB_SIZE,
        "block_size": 16,
        "n_layer": 2,
        "n_head": 4,
        "n_embd": 16,
    }
    return GPTConfig(**(defaults | changes))


def lively(module, seed=0):
    """The module with weights as large as trained ones: attention far from uniform, gains far from
    1, biases far from 0, and 600 frequent n-grams."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            if p.dim() == 2:
                p.normal_(std=1 / math.sqrt(p.shape[1]))
            else:
                p.add_(0.3 * torch.randn_like(p))
        if getattr(module, "ngrams", None):
            V = module.config.vocab_size
            pairs = torch.randperm(V * V)[:200].sort().values
            triples = V * V + torch.randperm(200 * V)[:400].sort().values
            module.ngrams.keys.copy_(torch.cat((pairs, triples)))
    return module.eval()


def induction_model(V, T, norm="rmsnorm"):
    """A model with an induction head L1H1 that reads the previous-token head L0H0 through its keys.

    It has V tokens and contexts of T tokens. The other two heads write noise. A token's embedding
    has its id in the first V channels and its position in the next T; L0H0 writes the id of the
    previous token to the last V.
    """
    torch.manual_seed(0)
    C, d, sharp = 2 * V + T, max(V, T), 200.0
    model = build_model(
        GPTConfig(
            vocab_size=V,
            block_size=T,
            n_layer=2,
            n_head=2,
            n_embd=C,
            head_dim=d,
            norm=norm,
        )
    )
    id, position, previous = slice(V), slice(V, V + T), slice(V + T, C)
    with torch.no_grad():
        for p in model.blocks.parameters():
            if p.dim() == 2:
                p.zero_()
        model.token_embedding.weight.zero_()[:, id] = torch.eye(V)
        model.position_embedding.weight.zero_()[:, position] = torch.eye(T)
        first, second = (block.attention for block in model.blocks)
        first.W_Q.weight[1:T, position] = sharp * torch.eye(T)[: T - 1]  # query i is key i - 1
        first.W_Q.weight[:T, position] = sharp * torch.eye(T).roll(-1, dims=0)
        first.W_K.weight[:T, position] = torch.eye(T)
        first.W_V.weight[:V, id] = torch.eye(V)
        first.W_O.weight[previous, :V] = 4 * torch.eye(V)
        second.W_Q.weight[d : d + V, id] = sharp * torch.eye(V)
        second.W_K.weight[d : d + V, previous] = torch.eye(V)
        second.W_V.weight[d : d + V, id] = torch.eye(V)
        second.W_O.weight[id, d : d + V] = torch.eye(V)
        for layer, head in ((first, 1), (second, 0)):
            layer.W_V.weight[head * d : (head + 1) * d].normal_(std=0.03)
            layer.W_O.weight[:, head * d : (head + 1) * d].normal_(std=0.03)
    return model


def decoded_ngrams(keys, vocab_size):
    """The n-grams that keys stand for, as tuples of token ids."""
    ngrams = []
    for key in keys:
        parent, last = divmod(key, vocab_size)
        prefix = (parent,) if parent < vocab_size else ngrams[parent - vocab_size]
        ngrams.append((*prefix, last))
    return ngrams


def ngram_vectors(model, tokens, hidden=None):
    """What the n-grams of tokens (T,) add to their embeddings, (T, C), looked up one by one.

    n-grams of later tokens cannot read the token at position `hidden`."""
    n, V = model.config.ngrams, model.config.vocab_size
    shared_rows = 2 * (n - 1)
    ngrams = decoded_ngrams(model.ngrams.keys.tolist(), V)
    own_rows = {ngram: shared_rows + place for place, ngram in enumerate(ngrams)}
    sums = []
    for t in range(len(tokens)):
        rows = []
        for length in range(2, n + 1):
            start = t + 1 - length
            rare_row, incomplete_row = 2 * (length - 2), 2 * (length - 2) + 1
            if start < 0 or (hidden is not None and start <= hidden < t):
                rows.append(incomplete_row)
            else:
                rows.append(own_rows.get(tuple(tokens[start : t + 1].tolist()), rare_row))
        sums.append(model.ngrams.table[rows].sum(dim=0))
    return F.pad(torch.stack(sums), (0, model.ngrams.untouched_channels))


def page_weights(model) -> dict:
    """The weights of a model as the page's code reads them."""
    return {
        name: {"shape": list(tensor.shape), "data": tensor.flatten().tolist()}
        for name, tensor in model.tensors().items()
    }


def random_tokens(*shape, seed=0):
    """Token ids of a shape."""
    return torch.randint(VOCAB_SIZE, shape, generator=torch.Generator().manual_seed(seed))


def captured_with(model, ids, interventions=NO_INTERVENTIONS):
    """The activations of a pass over ids (T,) with some heads ablated and some tokens hidden."""
    return capture(model, np.asarray(ids)[None], interventions)
