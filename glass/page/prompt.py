"""Write the page of a prompt, or of a scored text: a model's attention over it."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from data.tokenizer import Tokenizer, decode_characters
from glass.heads.measure.analysis import analyze
from glass.heads.measure.snapshot_files import float16_weights
from glass.heads.say.findings import Finding, summarize
from glass.page.describe import describe_model, describe_scores
from glass.page.embedded_model import EmbeddedModel
from glass.page.fitting import write_with_attention
from glass.page.pack import pack_weights
from glass.page.snapshots import Snapshot
from glass.page.values import clip_title
from model import GPT


def write_analysis(
    path: Path,
    facts: Mapping[str, Any],
    model: GPT,
    tokenizer: Tokenizer,
    ids: list[int],
    log: Callable[[str], None],
) -> list[Finding]:
    """Measure every attention head on a text, and write a page about it; return its findings.

    `facts` are those of `write_prompt_page`.
    """
    analysis = analyze(model, tokenizer, ids, log)
    findings = summarize(analysis.row)
    weights = {0: lambda: pack_weights(float16_weights(model))}
    embedded = EmbeddedModel(model.config, tokenizer.to_json(), weights)
    text = decode_characters(tokenizer, analysis.arrays["text_ids"].tolist())
    facts = {**facts, "scoredText": text}
    write_prompt_page(path, facts, analysis.arrays, embedded, analysis.row, findings)
    return findings


def write_prompt_page(
    path: Path,
    facts: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray],
    model: EmbeddedModel,
    metrics: Mapping[str, float],
    findings: Sequence[Finding],
) -> Path:
    """Write the page of the attention over one text, and return its path.

    The page runs the model if it is small enough. The `facts` are the `title`, and either the
    number of `promptTokens`, after which the model generated the text, and the `tokenCount` of the
    whole text, or the `losses` of a scored text; `scoredText` is what the model has read of it. The
    arrays and metrics are those of an `Analysis`.
    """
    content = {
        "kind": "prompt",
        **describe_model(model.config),
        **describe_scores(0, metrics, findings),
        **facts,
        "title": clip_title(facts["title"]),
    }
    snapshot = Snapshot(0, lambda: nullcontext(arrays))
    return write_with_attention(path, content, [snapshot], model)
