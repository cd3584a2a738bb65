"""What a page of a prompt shows: every head's attention over it, what its predictions needed, and
what each head does on repeats."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from attention_maps import scores
from attention_maps.capture import capture
from attention_maps.card import copying, explain
from attention_maps.probe import LONGEST, make_probes, words
from data.tokenizer import Tokenizer
from model import GPT

DRAWN = 1 << 16  # tokens of which those that repeat are taken
# What the predictions of a text needed is measured up to so many tokens² · parameters: minutes on
# two cores, for GPT-2 at 200 tokens.
EXPLAINED = 5e12


def look(model: GPT, tokenizer: Tokenizer, ids: list[int],
         note: Callable[[str], None]) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Of a text of T tokens what `report.page.attention_page` takes, and the scores of every head
    with their errors, named as in metrics.jsonl. `note` is told what would take too long."""
    text = np.array(ids)
    drawn = expected_tokens(model, text, tokenizer.vocab_size)
    probes = make_probes(drawn, drawn, tokenizer, min(LONGEST, model.config.block_size), seed=0)
    probes = replace(probes, text=text, words=words(tokenizer, text))
    seen = capture(model, probes, step=0)
    found = {"text": seen.text.astype(np.float16), "text_value_norms": seen.text_value_norms,
             "text_tokens": np.array(probes.words)}
    if len(ids) ** 2 * model.num_parameters() <= EXPLAINED:
        found |= explain(model, text, tokenizer)
    else:
        note(f"attention: to measure what each of {len(ids)} predictions needed would take too "
             "long with this model, so the page lacks it; fewer tokens have it")
    tables = scores.tables(seen.text, seen.repeat, seen.control, probes.periods)
    tables["copying"] = copying(model, probes.control[:1])
    return found, scores.as_metrics(tables)


@torch.no_grad()
def expected_tokens(model: GPT, text: np.ndarray, vocab_size: int) -> np.ndarray:
    """Tokens (DRAWN,) by how likely the model holds them anywhere in the text (T,): of a model of
    others the training text is not known, and what it never saw tells nothing of its heads."""
    with model.evaluating():
        logits = model(torch.from_numpy(text[None]).to(model.head.weight.device))[0][0]  # (T, V)
    share = logits[:, :vocab_size].double().softmax(dim=-1).mean(dim=0).cpu().numpy()
    return np.random.default_rng(0).choice(vocab_size, DRAWN, p=share / share.sum())
