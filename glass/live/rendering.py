"""The page of explore.py, which asks its server instead of holding what it shows."""

from glass.heads.measure.text_pass import max_tokens
from glass.live.session import Session
from glass.page.describe import describe_model, describe_scores
from glass.page.html import format_html
from glass.page.values import MAX_TITLE_LENGTH, clip_text

MAX_SMALL_PARAMETERS = 200_000_000  # whose heads two cores measure in about a minute


def render_page(session: Session) -> str:
    """Return the HTML of the page of a model."""
    config = session.model.config
    content = {
        "kind": "explore",
        "title": clip_text(session.title, MAX_TITLE_LENGTH),
        **describe_model(config),
        "step": session.step,
        "maxSteps": session.max_steps,
        "steps": [session.step],
        "shape": [config.n_layer, config.n_head],
        "snapshotCount": 0,
        "unreadableSnapshots": 0,
        "probes": [],
        "words": {},
        "weights": None,
        **(session.scores or describe_scores(session.step, {}, [])),
        "server": {
            "maxTokens": max_tokens(config),
            "prompt": session.prompt,
            "beginOfText": session.tokenizer.begin_of_text,
            "canMeasure": session.scores is None,
            # Then the page has the heads measured without being asked.
            "isSmall": session.model.num_parameters() < MAX_SMALL_PARAMETERS,
        },
    }
    return "".join(format_html("run.html", content, is_served=True))
