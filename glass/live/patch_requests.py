"""Answer the requests of activation patching: see `glass.heads.patching`."""

from collections.abc import Generator
from typing import Any, NamedTuple

import numpy as np

from common.errors import UserError
from common.text import pluralize
from glass.heads.logit_attribution import PREDICTED_TOKENS
from glass.heads.patching import Contrast, Patch, Patching, measure_logit_difference, parse_patch
from glass.live.parameters import Parameters, describe
from glass.live.session import Session
from kernels import in_float32_or_finer


class PatchingRequest(NamedTuple):
    """The runs of a request: both texts, and one patched with activations of the other."""

    clean: float  # logit difference of the clean text
    corrupted: float  # that of the corrupted text
    patching: Patching


def contrast(session: Session, parameters: Parameters) -> dict[str, Any]:
    """Return the three runs' logit differences and the patched run's likeliest next tokens."""
    clean, corrupted, patching = _prepare_patching(session, parameters)
    probabilities = in_float32_or_finer(patching.logits()).softmax(dim=-1)  # (V,)
    top = probabilities.topk(min(PREDICTED_TOKENS, len(probabilities)))
    next_ids = top.indices.tolist()
    return {
        "clean": clean,
        "corrupted": corrupted,
        "patched": patching.logit_difference(),
        "next": [{"id": id, "chance": chance} for id, chance in zip(next_ids, top.values.tolist())],
        "words": session.spell_tokens(next_ids),
    }


def patch_cells(session: Session, parameters: Parameters) -> Generator[Any, None, None]:
    """Yield, for each cell, the logit difference with its activation and those kept patched."""
    kind = parameters.choice("kind", ("residual", "component"))
    patching = _prepare_patching(session, parameters).patching
    measured = patching.patch_residuals() if kind == "residual" else patching.patch_components()
    for cells, values in measured:
        yield {"cells": cells.tolist(), "values": values.astype(np.float32)}


def _prepare_patching(session: Session, parameters: Parameters) -> PatchingRequest:
    request = parameters.model_input(session.step)
    corrupted_ids = parameters.text_ids("corrupted")
    if len(corrupted_ids) != len(request.ids):
        raise UserError(
            f"the clean text has {pluralize(len(request.ids), 'token')}, the corrupted one "
            f"{len(corrupted_ids)}: choose texts with equal numbers of tokens"
        )
    position = parameters.integer("i", len(request.ids) - 1)
    answer = Contrast(position, parameters.token_id("answer"), parameters.token_id("wrong"))
    direction = parameters.choice("direction", ("denoising", "noising"))
    kept = _kept_patches(parameters, len(request.ids))

    passes = [
        session.read(request).forward,
        session.read(request._replace(ids=corrupted_ids), "corrupted").forward,
    ]
    clean, corrupted = (
        measure_logit_difference(session.model, forward.residuals[-1, 0, position], answer).item()
        for forward in passes
    )
    source, base = passes if direction == "denoising" else reversed(passes)
    interventions = request.first_tokens(position + 1).interventions
    patching = Patching(session.model, source, base, answer, kept, interventions)
    return PatchingRequest(clean, corrupted, patching)


def _kept_patches(parameters: Parameters, length: int) -> list[Patch]:
    config = parameters.config
    counts = {"residual": length, "head": config.n_head, "mlp": int(config.mlp != "none")}
    patches: dict[Patch, None] = {}
    for name in parameters.names("patched"):
        patch = parse_patch(name)
        if patch is None:
            raise UserError(
                f"patched contains {describe(name)}, which is not a patch such as L3T5, L2H1 or "
                "L2MLP"
            )
        if patch.layer >= config.n_layer or patch.index >= counts[patch.kind]:
            raise UserError(
                f"patched contains {name}, but the model has {pluralize(config.n_layer, 'layer')} "
                f"with {pluralize(config.n_head, 'head')} and the text {pluralize(length, 'token')}"
            )
        patches[patch] = None
    return list(patches)
