"""Answer the page's requests about a model.

A function returns the answer, or yields parts. Those that run the model get the text of the request
as it was read. Requests of the same name in glass/page/web/engine/requests.js mean the same.
"""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.errors import UserError
from data.tokenizer import decode_characters, encode_prompt
from glass.heads.measure.ablation import iterate_token_effects
from glass.heads.measure.analysis import ProbeRun, make_expected_probes
from glass.heads.measure.capture import in_float32
from glass.heads.measure.logit_attribution import (
    PREDICTED_TOKENS,
    attribute_logits,
    find_promoted_tokens,
)
from glass.heads.measure.patching import Contrast, Patching
from glass.heads.measure.score_attribution import ScoreTerm, attribute_score
from glass.heads.measure.text_pass import TextPass, to_float32
from glass.live.parameters import Parameters
from glass.live.session import Session
from glass.page.describe import describe_scores
from kernels import in_float32_or_finer
from run.row import Head, Row

Parts = Iterator[dict[str, Any]]

MAX_PART_BYTES = 2_000_000  # of attention patterns in float16
MAX_SCORE_TERMS = 2000  # of one attention score; the smallest beyond these are added up


def encode(session: Session, parameters: Parameters) -> list[int]:
    """Return the ids with which the model reads a text."""
    return encode_prompt(session.tokenizer, parameters.text)


def decode(session: Session, parameters: Parameters) -> str:
    """Return the text of ids without special tokens and parts of characters."""
    return decode_characters(session.tokenizer, parameters.ids)


def token_texts(session: Session, parameters: Parameters) -> list[str]:
    """Return the text of each token."""
    texts = session.spell_tokens(parameters.ids)
    return [texts[id] for id in parameters.ids]


def read(session: Session, parameters: Parameters, text_pass: TextPass) -> dict[str, Any]:
    """Return predictions and value norms.

    With interventions, the likeliest tokens without them follow in `next`, and `was` has the
    predictions without them.
    """
    _, next_ids = text_pass.predict()  # (T, 5)
    was = None
    if any(text_pass.interventions):
        plain = session.read(parameters.ids)
        next_ids = torch.cat((next_ids, plain.predict()[1]), dim=1)  # (T, 10)
        was = _predictions(plain, next_ids)
    norms, largest = text_pass.measure_norms()
    return {
        "norms": to_float32(norms),
        "largest": largest,
        "next": next_ids.tolist(),
        **_predictions(text_pass, next_ids),
        "was": was,
        "words": session.spell_tokens(next_ids.flatten().tolist()),
    }


def _predictions(text_pass: TextPass, ids: Tensor) -> dict[str, Any]:
    """Return the probabilities of some next tokens (T, k), and the loss after each token."""
    chances = text_pass.log_probabilities(ids).exp()
    return {"chances": chances.tolist(), "losses": text_pass.losses()}


def patterns(session: Session, parameters: Parameters, text_pass: TextPass) -> Parts:
    """Yield the attention weights of some heads as lower triangles, row after row, in float16."""
    weights = text_pass.forward.weights[:, 0].flatten(0, 1)  # (L · H, T, T)
    T = len(parameters.ids)
    rows, columns = torch.tril_indices(T, T, device=weights.device)
    heads_per_part = max(1, MAX_PART_BYTES // (2 * len(rows)))
    for start in range(0, len(parameters.heads), heads_per_part):
        heads = parameters.heads[start : start + heads_per_part]
        maps = torch.stack([weights[head][rows, columns] for head in heads])
        yield {"heads": heads, "maps": maps.half().cpu().numpy()}


def logits(session: Session, parameters: Parameters, text_pass: TextPass) -> np.ndarray:
    """Return the logits (T, V)."""
    return to_float32(text_pass.logits())


def maps(session: Session, parameters: Parameters, text_pass: TextPass) -> np.ndarray:
    """Return the attention weights (L, H, T, T)."""
    return to_float32(text_pass.forward.weights[:, 0])


def continue_text(session: Session, parameters: Parameters, text_pass: TextPass) -> Parts:
    """Continue the text token by token up to its end, which the last part may say."""
    ids = list(parameters.ids)
    seed = random.getrandbits(64)
    for id in text_pass.continue_text(
        session.tokenizer, parameters.max_tokens, parameters.temperature, seed
    ):
        if id in session.tokenizer.end_of_text_ids:
            yield {"ids": ids, "isComplete": True}
            return
        ids.append(id)
        yield {"ids": list(ids)}


def break_down(session: Session, parameters: Parameters, text_pass: TextPass) -> dict[str, Any]:
    """Return the logit lens and the direct logit attribution of the prediction after token i."""
    i = parameters.i
    layer, number = parameters.of
    forward = text_pass.forward.first_tokens(i + 2)
    attribution = attribute_logits(session.model, forward, i, parameters.answer)
    predicted = [id for id in attribution.predicted_ids[i].tolist() if id >= 0]
    targets = [parameters.answer, *predicted]
    promoted = find_promoted_tokens(session.model, forward, layer, [number], first=i)
    writes = [id for id in promoted[0, i].tolist() if id >= 0]
    return {
        "i": i,
        "of": [layer, number],
        "targets": targets,
        "lens": attribution.logit_lens[:, i],
        "direct": attribution.logit_attribution[:, i, : len(targets)].tolist(),
        "writes": writes,
        "words": session.spell_tokens([*targets, *writes]),
    }


def head_effects(session: Session, parameters: Parameters, text_pass: TextPass) -> Parts:
    """Yield the loss increase in nats of the token after i without each head (zero ablation)."""
    i = parameters.i
    H = session.model.config.n_head
    if i + 1 >= len(parameters.ids):
        raise UserError(f"i={i} is the last token: no token follows")
    for layer, nats in enumerate(text_pass.head_effects(i)):
        yield {"heads": list(range(layer * H, (layer + 1) * H)), "nats": nats.astype(np.float32)}


def token_effects(session: Session, parameters: Parameters, text_pass: TextPass) -> Parts:
    """Yield, for each token j, the effects of hiding it on the later predictions, in nats."""
    interventions = text_pass.interventions
    effects = iterate_token_effects(session.model, text_pass.forward, interventions)
    for hidden, loss, kl in effects:
        for row in reversed(range(len(hidden))):
            if hidden[row] not in interventions.hidden:
                yield {
                    "j": hidden[row],
                    "effects": loss[row:, row].astype(np.float32),
                    "kl": kl[row:, row].astype(np.float32),
                }


def explain_score(session: Session, parameters: Parameters, text_pass: TextPass) -> list[dict]:
    """Return the terms of one attention score, those beyond the largest added up."""
    i = parameters.i
    j = parameters.j
    if j > i:
        raise UserError(f"token {i} attends to no later token: j={j}")
    head = Head(parameters.layer, parameters.head)
    hidden = text_pass.interventions.hidden
    terms = attribute_score(session.model, text_pass.forward, head, i, j, hidden)
    if len(terms) > MAX_SCORE_TERMS:
        terms.sort(key=lambda term: -abs(term.value))
        others = sum(term.value for term in terms[MAX_SCORE_TERMS:])
        terms = [*terms[:MAX_SCORE_TERMS], ScoreTerm("others", "others", others)]
    return [term._asdict() for term in terms]


def contrast(session: Session, parameters: Parameters, text_pass: TextPass) -> dict[str, Any]:
    """Return the three runs' logit differences and the patched run's likeliest next tokens."""
    corrupted, patching = _patch(session, parameters, text_pass)
    probabilities = in_float32_or_finer(patching.logits()).softmax(dim=-1)  # (V,)
    top = probabilities.topk(min(PREDICTED_TOKENS, len(probabilities)))
    next_ids = top.indices.tolist()
    chances = top.values.tolist()
    return {
        "clean": text_pass.logit_difference(patching.contrast),
        "corrupted": corrupted.logit_difference(patching.contrast),
        "patched": patching.value(),
        "next": [{"id": id, "chance": chance} for id, chance in zip(next_ids, chances)],
        "words": session.spell_tokens(next_ids),
    }


def patch_cells(session: Session, parameters: Parameters, text_pass: TextPass) -> Parts:
    """Yield, for each cell, the logit difference with its activation and those kept patched."""
    _, patching = _patch(session, parameters, text_pass)
    is_residual = parameters.kind == "residual"
    measured = patching.patch_residuals() if is_residual else patching.patch_components()
    for cells, values in measured:
        yield {"cells": cells.tolist(), "values": values.astype(np.float32)}


def _patch(
    session: Session, parameters: Parameters, text_pass: TextPass
) -> tuple[TextPass, Patching]:
    """Run the corrupted text, and the patched one."""
    corrupted = session.read(parameters.corrupted, text_pass.interventions, "corrupted")
    answer = Contrast(parameters.i, parameters.answer, parameters.wrong)
    source, base = text_pass, corrupted
    if parameters.direction == "noising":
        source, base = base, source
    return corrupted, source.patch_into(base, answer, session.tokenizer, parameters.patched)


def show_scores(session: Session, parameters: Parameters, text_pass: TextPass) -> Iterator[str]:
    """Measure all heads, and show their scores from now on; yield the name of each stage."""
    model = in_float32(session.model)
    row = Row()
    probes = make_expected_probes(model, session.tokenizer, parameters.ids)
    yield from ProbeRun(model, probes).measure_in_stages(row)
    session.scores = describe_scores(session.step, [row], decode(session, parameters))


TOKENIZER_REQUESTS: dict[str, Callable[[Session, Parameters], Any]] = {
    "encode": encode,
    "decode": decode,
    "tokenTexts": token_texts,
}

MODEL_REQUESTS: dict[str, Callable[[Session, Parameters, TextPass], Any]] = {
    "read": read,
    "patterns": patterns,
    "logits": logits,
    "maps": maps,
    "continue": continue_text,
    "breakDown": break_down,
    "headEffects": head_effects,
    "tokenEffects": token_effects,
    "explainScore": explain_score,
    "contrast": contrast,
    "patchCells": patch_cells,
    "measureHeads": show_scores,
}
