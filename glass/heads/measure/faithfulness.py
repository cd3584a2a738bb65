"""Measure the faithfulness of a circuit: the behavior that remains if it works alone."""

from collections.abc import Callable, Collection

import numpy as np
import torch

from common.statistics import ratio_with_error
from generation.scoring import token_losses
from glass.heads.measure import scores
from glass.heads.measure.ablation import rows_per_pass
from glass.heads.measure.capture import ForwardPass, next_tokens
from glass.heads.measure.circuit import SUFFICIENT_SHARE
from glass.heads.measure.interventions import Interventions
from model import GPT, Taps
from run.row import Estimate, Head, Row

ALL_ROWS = slice(None)
# The best of many sets looks better than it is, so its share is measured on rows that were not used
# to find it. Both halves have rows of every period.
SELECTION_ROWS = slice(0, None, 2)
HELD_OUT_ROWS = slice(1, None, 2)


@torch.no_grad()
def measure_isolated_gains(
    model: GPT,
    forward: ForwardPass,
    periods: np.ndarray,
    heads: Collection[Head],
    rows: slice = ALL_ROWS,
) -> np.ndarray:
    """Return the copying gain in nats of some of P rows, with only `heads` active.

    `forward` is the pass over P repeated, then P reshuffled rows. Every other head outputs its mean
    over all tokens of the pass.
    """
    taps = _ablate_others(forward, heads)
    # Nothing changes below the first layer with an ablated head.
    first = min((layer for _, layer in taps), default=model.config.n_layer)
    chosen = torch.arange(len(forward.tokens)).view(2, -1)[:, rows].flatten()
    losses = []
    with model.evaluating():
        for some in chosen.split(rows_per_pass(model, forward.tokens.shape[1])):
            tokens = forward.tokens[some]
            entry = first, forward.residuals[first, some]
            x = model.run_blocks(tokens, taps=taps, entry=entry)
            losses.append(token_losses(model, x, next_tokens(tokens)))
    repeated, reshuffled = np.split(torch.cat(losses).cpu().numpy(), 2)
    return scores.copying_gains(repeated, reshuffled, periods[rows])


def _ablate_others(forward: ForwardPass, heads: Collection[Head]) -> Taps:
    """Return taps that replace the outputs of all heads but some by their means over the pass."""
    means = forward.heads.mean(dim=(1, 2))  # (L, H, d_v)
    others = {Head(*index) for index in np.ndindex(*means.shape[:2])} - {*heads}
    means_by_tap = {("heads", layer): mean for layer, mean in enumerate(means)}
    return Interventions(tuple(others), means=means_by_tap).taps()


def measure_faithfulness(
    copying_gains: Callable[[list[Head], slice], np.ndarray],
    all_heads: list[Head],
    circuit: list[Head],
    finds_sufficient: bool = True,
) -> Row:
    """Measure the share of the copying gain that remains with only some heads active.

    `copying_gains` returns the gains of some rows with only the given heads active. With
    `all_heads` of the model active, the share is 1.

    Returns:
        The shares `faithfulness/<set>`, and `circuit/<head>` and `sufficient/<head>`, which are 1
        for each head of these sets.

    Reference: Wang et al. 2022, "Interpretability in the Wild"; Hanna et al. 2024, "Have Faith in
    Faithfulness".
    """
    gains_of_all = copying_gains(all_heads, ALL_ROWS)

    def share(heads: list[Head], rows: slice = ALL_ROWS) -> Estimate:
        kept, error = ratio_with_error(copying_gains(heads, rows), gains_of_all[rows])
        return Estimate(float(kept), float(error))

    layer_0 = [head for head in all_heads if head.layer == 0]
    row = Row({f"circuit/{head}": 1 for head in circuit})
    row.put("faithfulness", share([]), "none")
    row.put("faithfulness", share(circuit), "circuit")
    row.put("faithfulness", share(sorted({*circuit, *layer_0})), "circuit_and_layer_0")
    if finds_sufficient:
        sufficient = find_sufficient_heads(
            lambda heads: share(heads, SELECTION_ROWS).value, all_heads
        )
        row |= {f"sufficient/{head}": 1 for head in sufficient}
        row.put("faithfulness", share(sufficient, HELD_OUT_ROWS), "sufficient")
    return row


def find_sufficient_heads(
    share: Callable[[list[Head]], float], all_heads: list[Head]
) -> list[Head]:
    """Find a small set of heads whose share reaches `SUFFICIENT_SHARE`, by backward elimination.

    A head is removed if the remaining ones still reach it. Heads are tried in the order of the
    share that remains without them, highest first, until none of those left can be removed.

    Reference: Conmy et al. 2023, "Towards Automated Circuit Discovery", which removes edges.
    """

    def without(head: Head, heads: list[Head]) -> list[Head]:
        return [other for other in heads if other != head]

    heads = sorted(all_heads, key=lambda head: -share(without(head, all_heads)))
    count = None
    while len(heads) != count:
        count = len(heads)
        for head in list(heads):
            if share(without(head, heads)) >= SUFFICIENT_SHARE:
                heads = without(head, heads)
    return sorted(heads)
