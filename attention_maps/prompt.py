"""What a page of a prompt shows: every head's attention over it, what its predictions needed, and
what each head does on repeats."""

from collections.abc import Callable

import numpy as np
import torch

from attention_maps import scores
from attention_maps.capture import Forward, arrays, capture, in_float32
from attention_maps.card import copying, explain
from attention_maps.probe import LONGEST, make_probes, words
from data.tokenizer import Tokenizer
from model import GPT

DRAWN = 1 << 16  # tokens of which those that repeat are taken
# What the predictions of a text needed is measured up to so many tokens² · parameters: minutes on
# two cores, for GPT-2 at 200 tokens.
EXPLAINED = 5e12


def look(model: GPT, tokenizer: Tokenizer, ids: list[int],
         log: Callable[[str], None]) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Of a text of T tokens what `report.page.attention_page` takes, and the scores of every head
    with their errors, named as in metrics.jsonl. `log` is told what would take too long."""
    model, ids = in_float32(model), np.array(ids)
    text = capture(model, ids[None])
    drawn = expected_tokens(model, text, tokenizer.vocab_size)
    probes = make_probes(drawn, drawn, tokenizer, min(LONGEST, model.config.block_size), seed=0)
    random = capture(model, np.concatenate((probes.repeat, probes.control)))
    held = arrays(model, text, random)
    found = {"text": held["text"].astype(np.float16), "text_value_norms": held["text_value_norms"],
             "text_tokens": np.array(words(tokenizer, ids))}
    if len(ids) ** 2 * model.num_parameters() <= EXPLAINED:
        found |= explain(model, text, tokenizer)
    else:
        log(f"attention: to measure what each of {len(ids)} predictions needed would take too "
             "long with this model, so the page lacks it; fewer tokens have it")
    maps = held["text"], held["repeat"], held["control"]
    tables = scores.tables(*maps, probes.periods)
    tables["copying"] = copying(model, random.rows([len(probes.repeat)]))
    return found, scores.as_metrics(tables)


@torch.no_grad()
def expected_tokens(model: GPT, text: Forward, vocab_size: int) -> np.ndarray:
    """Tokens (DRAWN,) by how likely the model holds them anywhere in the text: of a model of others
    the training text is not known, and what it never saw tells nothing of its heads."""
    logits = model.head(model.norm(text.residuals[-1, 0]))  # (T, V)
    share = logits[:, :vocab_size].double().softmax(dim=-1).mean(dim=0).cpu().numpy()
    return np.random.default_rng(0).choice(vocab_size, DRAWN, p=share / share.sum())
