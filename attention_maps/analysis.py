"""A look at one text by any model: every head's attention on it, what its heads do on random
tokens, what each prediction needed. The page of `sample.py attention=…` is made of it."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from attention_maps import capture, composition, scores
from attention_maps.faithfulness import Alone, enough
from attention_maps.findings import CLEAR, ERRORS, told_heads
from attention_maps.logit_attribution import copying_scores, explain_predictions
from attention_maps.probes import Probes, make_probes, words
from data.tokenizer import Tokenizer, encode_prompt
from model import GPT

LENGTH, DRAWN = 32, 1 << 16  # tokens of a random text, enough for its scores; of which it is taken
LOOKED_AT = 5e12  # tokens² · parameters up to which needs are measured: minutes on two cores
LARGE = 20_000_000  # parameters from which fewer heads are asked what they copy and who feeds them
PARTS = 4  # of a large model that are asked whether they feed a head

WIRE = np.dtype(
    [
        ("score", "U20"),
        ("head", "U10"),
        ("reads", "U7"),
        ("from", "U10"),
        ("share", float),
        ("error", float),
    ]
)


class Analysis(NamedTuple):
    """What was seen of a model of L layers and H heads on a text of T tokens.

    arrays: `text` (L, H, T, T), the maps; `text_value_norms` (L, H, T), ‖v_j W_O‖; `text_ids`,
        `text_tokens` (T,); `composition`, a row of WIRE for each share; and, unless the text is too
        long for the model, what `attention_maps.logit_attribution.explain_predictions` gives:
        `token_effect`, `token_effect_kl` (T, T),
        `head_effect` (L, H, T) in nats, …
    scores: name → values and standard errors (L, H) each, of random texts; nan: not measured.
    metrics: all figures by the names of metrics.jsonl."""

    arrays: dict[str, np.ndarray]
    scores: scores.Tables
    metrics: dict[str, float]


def analyze(
    model: GPT, tokenizer: Tokenizer, text: str | Sequence[int], log: Callable[[str], None] = print
) -> Analysis:
    """Look at a text, or at ids: the last of them that the model takes. `log` hears how far it is.
    The scores are of random tokens drawn as the model expects them in the text: of a model of
    others the training text is not known, and what it never saw tells nothing of its heads."""
    model = capture.in_float32(model)
    ids = encode_prompt(tokenizer, text) if isinstance(text, str) else text
    ids = np.array(ids[-model.config.block_size :])
    whole = capture.capture(model, ids[None])
    drawn = expected_tokens(model, whole, tokenizer.vocab_size)
    probes = make_probes(drawn, drawn, tokenizer, min(LENGTH, model.config.block_size), seed=0)
    windows = probes.control if len(probes.control) else probes.windows  # random tokens all alike
    log("attention: what each head does on random tokens")
    seen = Seen(model, replace(probes, text=ids, windows=windows), whole)
    held, tables = seen.score()
    metrics = {"step": 0, **scores.as_metrics(tables)}
    metrics |= scores.births(metrics, metrics, windows.shape[1])  # here: what it is now
    log("attention: who feeds whom")
    metrics |= seen.circuits(held, tables)
    if not seen.large:
        metrics |= seen.enough(metrics)
    arrays = {name: held[name] for name in ("text", "text_value_norms")} | {
        "text_ids": ids,
        "text_tokens": np.array(words(tokenizer, ids)),
        "composition": wires(metrics),
    }
    if len(ids) ** 2 * model.num_parameters() <= LOOKED_AT:
        log(f"attention: what each of {len(ids)} predictions needed, and of which heads")
        arrays |= explain_predictions(model, whole, tokenizer)
    else:
        log(f"attention: {len(ids)} tokens are too many to measure what each prediction needed")
    return Analysis(arrays, tables, metrics)


def wires(metrics: dict[str, float]) -> np.ndarray:
    """Who feeds whom, of metrics, as rows of WIRE: see `attention_maps.composition`."""
    keys = (
        re.fullmatch(r"composition/(previous_token|induction)(/(\w+)/(\w+)/(\w+))", key)
        for key in metrics
    )
    return np.array(
        [
            (
                key[1],
                *key.groups()[2:],
                metrics[key[0]],
                metrics[f"composition/{key[1]}_se{key[2]}"],
            )
            for key in keys
            if key
        ],
        WIRE,
    )


@torch.no_grad()
def expected_tokens(model: GPT, text: capture.Forward, vocab_size: int) -> np.ndarray:
    """Tokens (DRAWN,) by how likely the model holds them anywhere in the text."""
    logits = model.head(model.norm(text.residuals[-1, 0]))  # (T, V)
    share = logits[:, :vocab_size].double().softmax(dim=-1).mean(dim=0).cpu().numpy()
    return np.random.default_rng(0).choice(vocab_size, DRAWN, p=share / share.sum())


class Seen:
    """The forward passes of a model over all probes."""

    def __init__(self, model: GPT, probes: Probes, text: capture.Forward | None = None):
        """text: the pass over the text, where it is known."""
        self.model, self.probes = model, probes
        self.large = model.num_parameters() > LARGE
        self.text = text or capture.capture(model, probes.text[None])
        self.random = capture.capture(model, probes.random)
        self.windows = (
            capture.thirds(self.random)[2]
            if probes.windows is probes.control
            else capture.capture(model, probes.windows)
        )

    def score(self) -> tuple[dict[str, np.ndarray], scores.Tables]:
        """What is kept of the passes, by `capture.arrays`, and the scores of every head."""
        held, periods = capture.arrays(self.model, self.text, self.random), self.probes.periods
        windows = self.windows.weights.cpu().numpy()
        tables = scores.tables(windows, held.get("repeated"), held.get("control"), periods)
        if len(periods):
            least = scores.threshold("induction", windows.shape[-1]) if self.large else -np.inf
            mean, error = tables["induction"]
            tables["copying"] = copying_scores(
                self.model, capture.thirds(self.random)[2], mean - error >= least
            )
        return held, tables

    def circuits(self, held: dict[str, np.ndarray], tables: scores.Tables) -> dict[str, float]:
        """The repeat gain, and who feeds the strongest heads, as metrics."""
        periods, length = self.probes.periods, self.windows.tokens.shape[1]
        if not len(periods):
            return {}
        gains = scores.copying_gains(held["repeated_loss"], held["reshuffled_loss"], periods)
        asked = (
            {"induction": 1} if self.large else dict.fromkeys(composition.SCORES, composition.MOST)
        )
        heads = {
            name: strongest(*tables[name], scores.threshold(name, length))[:most]
            for name, most in asked.items()
        }
        rows = [*range(len(periods)), *range(2 * len(periods), 3 * len(periods))]
        found = composition.composition(
            self.model,
            self.windows,
            self.random.rows(rows),
            periods,
            heads,
            PARTS if self.large else None,
        )
        return scores.probed({"copying_gain": gains}) | found

    def enough(self, metrics: dict[str, float]) -> dict[str, float]:
        """Whether the heads that findings name are enough for a clear repeat gain, as metrics."""
        gain, error = (metrics.get(f"probe/copying_gain{end}", 0) for end in ("", "_se"))
        if gain < max(CLEAR, ERRORS * error):
            return {}
        twice = self.random.rows(range(2 * len(self.probes.periods)))
        return enough(Alone(self.model, twice, self.probes.periods), told_heads(metrics))


def strongest(mean: np.ndarray, error: np.ndarray, threshold: float) -> list[tuple[int, int]]:
    """The heads (layer, head) that composition asks for: of a kind, the strongest first."""
    found = np.argwhere(mean - error >= threshold)
    return sorted(map(tuple, found.tolist()), key=lambda head: -mean[head])
