"""Format the page of a prompt, or of a scored text: a model's attention over it."""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

from data.tokenizer import Tokenizer, decode_characters
from glass.heads.measure.analysis import Analysis
from glass.heads.measure.snapshot_files import float16_weights
from glass.page.describe import describe_scores
from glass.page.embedded_model import EmbeddedModel
from glass.page.fitting import format_with_attention
from glass.page.pack import pack_weights
from glass.page.snapshots import Snapshot
from model import GPT

MAX_TITLE_LENGTH = 200  # characters


def format_analysis(
    facts: Mapping[str, Any], model: GPT, tokenizer: Tokenizer, analysis: Analysis
) -> Iterator[str]:
    """Return the parts of a page about the attention over one text, which `analyze` has measured.

    The page runs the model if it is small enough. The `facts` are the `title`, and either the
    number of `promptTokens`, after which the model generated the text, and the `tokenCount` of the
    whole text, or the `losses` of a scored text.
    """
    text = decode_characters(tokenizer, analysis.arrays["text_ids"].tolist())
    title = facts["title"]
    if len(title) > MAX_TITLE_LENGTH:
        title = f"{title[: MAX_TITLE_LENGTH - 1]}…"
    content = {
        "kind": "prompt",
        "modelConfig": asdict(model.config),
        **describe_scores(0, [analysis.row], text),
        **facts,
        "title": title,
    }
    weights = {0: lambda: pack_weights(float16_weights(model))}
    embedded = EmbeddedModel(model.config, tokenizer.to_json(), weights)
    snapshot = Snapshot(0, lambda: nullcontext(analysis.arrays))
    return format_with_attention(content, [snapshot], embedded)
