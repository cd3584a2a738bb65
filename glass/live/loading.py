"""Load the model that a page explores, and what the page shows of it first."""

from collections.abc import Callable
from pathlib import Path

import torch

from cli.explore_config import ExploreConfig
from common.errors import UserError
from common.files import exists
from common.paths import expand_model_name
from common.terminal import tolerate_errors
from common.text import REPLACEMENT
from data.tokenizer import Tokenizer, normal_form_note
from glass.live.session import Session
from glass.page.describe import read_scores
from glass.page.snapshots import list_snapshots
from interop import find_model
from interop.stored import RunCheckpoint
from kernels import DTYPES
from run.run_dir import RunDir
from training.device import pick_device, pick_threads

PROMPT_TOKENS = 32  # of a run's text that are shown first
# Shown first if there is no text of a run. A likely next token is one of two names, and a name of
# several tokens occurs again, which induction heads complete.
EXAMPLE_PROMPT = "When Tolvan Brask and Mary went to the store, Tolvan Brask gave a drink to"


def load_session(
    settings: ExploreConfig,
    log: Callable[[str], None],
    check_canceled: Callable[[], None] = lambda: None,
) -> Session:
    """Load the model that the settings name; the model calls `check_canceled` before each block."""
    key = "run_dir" if settings.init_from is None else "init_from"
    name = getattr(settings, key)
    log(f"loading {name} …")
    device = pick_device(settings.device)
    torch.set_num_threads(pick_threads("auto", processes=1))
    stored = find_model(name, settings.checkpoint, log)
    model, tokenizer = stored.load()
    precision = "fp32" if settings.precision == "auto" else settings.precision
    model.to(device, DTYPES[precision])

    path = Path(expand_model_name(key, name))
    title = path.resolve().name if exists(path) else name
    session = Session(model, tokenizer, title, check_canceled=check_canceled)
    run = None
    if isinstance(stored, RunCheckpoint):
        run = stored.run
        show_checkpoint(session, stored, log)
    prompt = find_prompt(tokenizer, run) if settings.prompt is None else settings.prompt
    tokenizer.encode(prompt)  # raises UserError for an unknown character
    if note := normal_form_note(tokenizer, prompt):
        log(note)
    session.prompt = prompt
    return session


def show_checkpoint(session: Session, stored: RunCheckpoint, log: Callable[[str], None]) -> None:
    """Add to a session what is known of its model because it is a run's."""
    run = stored.run
    session.title = (run.path if run else stored.path).resolve().name
    session.step = stored.step
    session.max_steps = stored.settings.max_steps
    if run is None:
        return
    if stored.which in ("last", "best"):
        session.followed = run, stored.which
    with tolerate_errors(f"reading the scores in {run.metrics_file}", log):
        rows = [row for row in run.rows() if row["step"] <= stored.step]
        session.scores = read_scores(rows)


def find_prompt(tokenizer: Tokenizer, run: RunDir | None) -> str:
    """Return the start of the text that a run's newest snapshot is about, or an example."""
    snapshots = [] if run is None else list_snapshots(run)
    text = snapshots[-1].probes.get("text") if snapshots else None
    if text is not None and text.ids:
        return tokenizer.decode(text.ids[:PROMPT_TOKENS]).rstrip(REPLACEMENT)  # half a character
    try:
        tokenizer.encode(EXAMPLE_PROMPT)
    except UserError:  # the model lacks one of its characters
        return ""
    return EXAMPLE_PROMPT
