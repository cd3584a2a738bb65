"""Answer the page's requests about a model.

Requests of the same name in glass/page/web/requests.js, which runs in the page, mean the same.
"""

import random
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import numpy as np
import torch

from common.errors import UserError
from generation.decoder import window_start
from generation.sampling import Sampling, draw_tokens
from glass.heads.ablation import iterate_head_effects, iterate_token_effects
from glass.heads.logit_attribution import attribute_logits, find_promoted_tokens
from glass.heads.score_attribution import attribute_score
from glass.live.jobs import Requests
from glass.live.parameters import Parameters, max_tokens
from glass.live.patch_requests import contrast, patch_cells
from glass.live.reading import to_float32
from glass.live.session import Session

Handler = Callable[[Session, Parameters], Generator[Any, None, Any]]

MAX_PART_BYTES = 2_000_000  # of attention patterns in float16
MAX_ARRAY_NUMBERS = 1 << 24  # of logits or attention maps that are asked for as a whole
MAX_CONTINUED_TOKENS = 1000
MAX_SCORE_TERMS = 2000  # of one attention score; the smallest beyond these are added up


def answer_alone(respond: Callable[[Session, Parameters], Any]) -> Handler:
    """Return the handler of a request that is answered without parts."""

    def handle(session: Session, parameters: Parameters) -> Generator[Any, None, Any]:
        yield from ()
        return respond(session, parameters)

    return handle


# --- requests that are answered at once -----------------------------------------------------------


def encode(session: Session, parameters: Parameters) -> list[int]:
    """Return the ids of a text: begin-of-text first, if there is one; none for an empty text."""
    ids = session.tokenizer.encode(parameters.text("text"))
    begin_of_text = session.tokenizer.begin_of_text
    if not ids or begin_of_text is None:
        return ids
    return [begin_of_text, *ids]


def decode(session: Session, parameters: Parameters) -> str:
    """Return the text of ids without begin-of-text."""
    return session.decode(parameters.ids("ids"))


def token_texts(session: Session, parameters: Parameters) -> list[str]:
    """Return the text of each token."""
    return [session.spell_token(id) for id in parameters.ids("ids")]


def version(session: Session, parameters: Parameters) -> dict[str, Any]:
    """Return what a page compares with what it shows, to notice that there is something new."""
    return {
        "version": session.version,
        "step": session.step,
        "isFollowing": session.explored.is_following,
    }


# --- predictions and attention maps ---------------------------------------------------------------


def read(session: Session, parameters: Parameters) -> dict[str, Any]:
    """Return predictions and value norms; `was` has the predictions without interventions."""
    request = parameters.model_input(session.step)
    reading = session.read(request)
    next_ids = reading.predict().next_ids
    norms, largest = reading.measure_norms()
    results = {
        "norms": to_float32(norms),
        "largest": largest,
        "next": next_ids.tolist(),
        "chances": reading.log_probabilities(next_ids).exp().tolist(),
        "losses": reading.losses(),
        "was": None,
        "words": session.spell_tokens(next_ids.flatten().tolist()),
    }
    if any(request.interventions):
        plain = session.read(request.without_interventions())
        results["was"] = {
            "chances": plain.log_probabilities(next_ids).exp().tolist(),
            "losses": plain.losses(),
        }
    return results


def patterns(session: Session, parameters: Parameters) -> Generator[Any, None, None]:
    """Yield the attention weights of some heads as lower triangles, row after row, in float16."""
    request, heads = parameters.model_input(session.step), parameters.heads("heads")
    weights = session.read(request).forward.weights[:, 0]  # (L, H, T, T)
    T = len(request.ids)
    rows, columns = torch.tril_indices(T, T, device=weights.device)
    heads_per_part = max(1, MAX_PART_BYTES // (2 * len(rows)))
    for start in range(0, len(heads), heads_per_part):
        some = heads[start : start + heads_per_part]
        maps = torch.stack([weights[head][rows, columns] for head in some])
        yield {
            "heads": [layer * session.model.config.n_head + number for layer, number in some],
            "maps": maps.half().cpu().numpy(),
        }


def logits(session: Session, parameters: Parameters) -> np.ndarray:
    """Return the logits (T, V)."""
    request = parameters.model_input(session.step)
    _check_size("logits", len(request.ids) * session.model.head.out_features)
    return to_float32(session.model.head(session.read(request).final_states()))


def maps(session: Session, parameters: Parameters) -> np.ndarray:
    """Return the attention weights (L, H, T, T)."""
    request = parameters.model_input(session.step)
    config = session.model.config
    _check_size("attention maps", config.n_layer * config.n_head * len(request.ids) ** 2)
    return to_float32(session.read(request).forward.weights[:, 0])


def _check_size(name: str, count: int) -> None:
    if count > MAX_ARRAY_NUMBERS:
        raise UserError(
            f"the {name} of this text contain {count:,} numbers, more than "
            f"{MAX_ARRAY_NUMBERS:,}: use a shorter text"
        )


def continue_text(session: Session, parameters: Parameters) -> Generator[Any, None, None]:
    """Continue the text token by token; beyond `max_tokens` only its end is read."""
    request = parameters.model_input(session.step)
    temperature = parameters.number("temperature")
    count = parameters.integer("maxTokens", MAX_CONTINUED_TOKENS)
    ids, maximum = list(request.ids), max_tokens(session.model.config)

    @torch.inference_mode(False)  # later requests change the reading's tensors in place
    @torch.no_grad()
    def next_logits(tokens: torch.Tensor) -> torch.Tensor:
        start = window_start(tokens.shape[1], maximum)
        reading = session.read(request.window(tokens[0].tolist(), start))
        return session.model.head(reading.final_states(-1))  # (1, V)

    prompt = torch.tensor([ids], device=session.model.head.weight.device)  # (1, T)
    sampling = Sampling(temperature, vocab_size=session.tokenizer.vocab_size)
    for token in draw_tokens(next_logits, prompt, count, sampling, [random.getrandbits(64)]):
        ids.append(int(token))
        yield {"ids": list(ids), "text": session.decode(ids)}


# --- explanations ---------------------------------------------------------------------------------


def break_down(session: Session, parameters: Parameters) -> dict[str, Any]:
    """Return the logit lens and the direct logit attribution of the prediction after token i."""
    request = parameters.model_input(session.step)
    i = parameters.integer("i", len(request.ids) - 1)
    head = parameters.head("of")
    forward = session.read(request).forward.first_tokens(i + 2)
    attribution = attribute_logits(session.model, forward, first=i)
    predicted = [id for id in attribution.predicted_ids[i].tolist() if id >= 0]
    targets = [*request.ids[i + 1 : i + 2], *predicted[:1]][:1] + predicted
    promoted = find_promoted_tokens(session.model, forward, head.layer, [head.number], first=i)
    writes = [id for id in promoted[0, i].tolist() if id >= 0]
    return {
        "i": i,
        "of": list(head),
        "targets": targets,
        "lens": attribution.logit_lens[:, i],
        "direct": attribution.logit_attribution[:, i, : len(targets)].tolist(),
        "writes": writes,
        "words": session.spell_tokens([*targets, *writes]),
    }


def head_effects(session: Session, parameters: Parameters) -> Generator[Any, None, None]:
    """Yield the loss increase in nats of the token after i without each head (zero ablation)."""
    request = parameters.model_input(session.step)
    i = parameters.integer("i", len(request.ids) - 2)
    forward, H = session.read(request).forward, session.model.config.n_head
    target, interventions = request.ids[i + 1], request.first_tokens(i + 1).interventions
    for layer, nats in iterate_head_effects(session.model, forward, i, target, interventions):
        yield {"heads": list(range(layer * H, (layer + 1) * H)), "nats": nats.astype(np.float32)}


def token_effects(session: Session, parameters: Parameters) -> Generator[Any, None, None]:
    """Yield, for each token j, the effects of hiding it on the later predictions, in nats."""
    request = parameters.model_input(session.step)
    forward = session.read(request).forward
    for hidden, loss, kl in iterate_token_effects(session.model, forward, request.interventions):
        for row in reversed(range(len(hidden))):
            if hidden[row] not in request.interventions.hidden:
                yield {
                    "j": hidden[row],
                    "effects": loss[row:, row].astype(np.float32),
                    "kl": kl[row:, row].astype(np.float32),
                }


def explain_score(session: Session, parameters: Parameters) -> list[dict[str, Any]]:
    """Return the terms of one attention score."""
    request, head = parameters.model_input(session.step), parameters.layer_and_head()
    i = parameters.integer("i", len(request.ids) - 1)
    j = parameters.integer("j", i)
    forward = session.read(request).forward
    terms = attribute_score(session.model, forward, head, i, j, request.interventions.hidden)
    if len(terms) <= MAX_SCORE_TERMS:
        return [term._asdict() for term in terms]
    terms = sorted(terms, key=lambda term: -abs(term.value))
    rest = sum(term.value for term in terms[MAX_SCORE_TERMS:])
    kept = [term._asdict() for term in terms[:MAX_SCORE_TERMS]]
    return [*kept, {"query": "others", "key": "others", "value": rest}]


# --- scores of the heads --------------------------------------------------------------------------


def measure_heads(session: Session, parameters: Parameters) -> Generator[Any, None, None]:
    """Measure the scores of all heads for the page; yield a line of progress before each stage."""
    ids = parameters.text_ids("ids")
    for line in session.measure_heads(ids):
        yield {"line": line}


IMMEDIATE: dict[str, Callable[[Session, Parameters], Any]] = {
    "encode": encode,
    "decode": decode,
    "tokenTexts": token_texts,
    "version": version,
}

HANDLERS: dict[str, Handler] = {
    "read": answer_alone(read),
    "patterns": patterns,
    "logits": answer_alone(logits),
    "maps": answer_alone(maps),
    "continue": continue_text,
    "breakDown": answer_alone(break_down),
    "headEffects": head_effects,
    "tokenEffects": token_effects,
    "explainScore": answer_alone(explain_score),
    "contrast": answer_alone(contrast),
    "patchCells": patch_cells,
    "measureHeads": measure_heads,
}


def make_requests(session: Session) -> Requests:
    """Return the functions that answer the requests of a session's page."""
    config = session.model.config

    def answer(name: str, values: dict[str, Any]) -> object:
        return IMMEDIATE[name](session, Parameters(values, config))

    @torch.no_grad()
    def handle(name: str, values: dict[str, Any]) -> Generator[Any, None, Any]:
        return (yield from HANDLERS[name](session, Parameters(values, config)))

    return Requests(
        immediate={name: partial(answer, name) for name in IMMEDIATE},
        handlers={name: partial(handle, name) for name in HANDLERS},
    )
