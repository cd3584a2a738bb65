"""The model that a page explores: loading it, and the texts that it has read last."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from cli.explore_config import ExploreConfig
from common.errors import UserError
from common.files import exists
from common.paths import expand_model_name
from common.terminal import tolerate_errors
from data.tokenizer import Tokenizer, decode_characters, normal_form_note
from glass.heads.measure.interventions import NO_INTERVENTIONS, Interventions
from glass.heads.measure.probes import spell_token
from glass.heads.measure.text_pass import TextPass
from glass.page.describe import describe_scores
from glass.page.snapshots import list_snapshots
from interop import Series, find_model
from interop.stored import StoredRun
from kernels import DTYPES
from model import GPT
from run.row import last_scored_row
from run.run_dir import RunDir
from training.device import pick_device, pick_threads

MAX_PASSES = 3  # cached passes, such as those with and without interventions
PROMPT_TOKENS = 32  # of a run's text that are shown first
# Shown first if there is no text of a run. A likely next token is one of two names, and a name of
# several tokens occurs again, which induction heads complete.
EXAMPLE_PROMPT = "When Tolvan Brask and Mary went to the store, Tolvan Brask gave a drink to"


@dataclass(eq=False)
class Session:
    """A model and its tokenizer, as the requests of a page use them, and what the page shows.

    Only one thread at a time calls `read`.
    """

    model: GPT  # is put in evaluation mode
    tokenizer: Tokenizer
    title: str
    step: int = 0  # of the checkpoint or of a series; 0 for another model
    max_steps: int | None = None  # of the run; None for a model outside of a run
    prompt: str = ""  # the text that is shown first
    prompt_ids: Sequence[int] = ()  # with which it is read; empty if it is encoded
    scores: dict[str, Any] | None = None  # see `describe_scores`; None before heads are measured
    # Whether the checkpoint that is shown is no longer the last or the best one of its run.
    is_outdated: Callable[[], bool] = lambda: False
    # Called before each block, and whenever composition measures a head.
    check_canceled: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        model = self.model.eval()  # not self, whose circle would keep a replaced model in memory
        # A pass that hides tokens does not replace the one of the same text that hides none.
        self._find_pass = lru_cache(MAX_PASSES)(
            lambda ablated, has_hidden, role: TextPass(model, Interventions(ablated))
        )
        check_canceled = self.check_canceled  # a function is not copied with the model
        for module in (*(block.norm_1 for block in self.model.blocks), self.model.head):
            module.register_forward_pre_hook(lambda *_: check_canceled())

    def read(
        self,
        ids: Sequence[int],
        interventions: Interventions = NO_INTERVENTIONS,
        role: str = "",
    ) -> TextPass:
        """Run the model on a text, or on what has changed since a text that is cached.

        The result is valid until the next call with the same role.
        """
        text_pass = self._find_pass(interventions.ablated, bool(interventions.hidden), role)
        text_pass.read(ids, interventions.hidden)
        return text_pass

    def spell_tokens(self, ids: Iterable[int]) -> dict[int, str]:
        """Return the text of each of some tokens, by id."""
        return {id: spell_token(self.tokenizer, id) for id in ids}


def name_source(settings: ExploreConfig) -> tuple[str, str]:
    """Return the setting that names the model, and its value."""
    key = "run_dir" if settings.init_from is None else "init_from"
    return key, getattr(settings, key)


def load_session(
    settings: ExploreConfig,
    log: Callable[[str], None],
    check_canceled: Callable[[], None] = lambda: None,
    series: Series | None = None,
) -> Session:
    """Load the model that the settings name, or the last one of a series.

    The model calls `check_canceled` before each block.
    """
    key, name = name_source(settings)
    log(f"loading {name} …")
    torch.set_num_threads(pick_threads("auto", processes=1))
    if series is None:
        stored = find_model(name, settings.checkpoint, log)
    else:
        stored = series.open(series.steps[-1])
    model, tokenizer = stored.load()
    place(model, settings)

    path = Path(expand_model_name(key, name))
    title = path.resolve().name if exists(path) else name
    session = Session(model, tokenizer, title, check_canceled=check_canceled)
    if series is not None:
        session.step = series.steps[-1]
    elif isinstance(stored, StoredRun):
        show_checkpoint(session, stored, log)
    if settings.prompt is None:
        session.prompt, session.prompt_ids = find_prompt(tokenizer, stored.run_dir)
    else:
        session.prompt = settings.prompt
        tokenizer.encode(session.prompt)  # raises UserError for an unknown character
    if note := normal_form_note(tokenizer, session.prompt):
        log(note)
    return session


def place(model: GPT, settings: ExploreConfig) -> None:
    """Move a model to the device and the precision of the settings."""
    precision = "fp32" if settings.precision == "auto" else settings.precision
    model.to(pick_device(settings.device), DTYPES[precision])


def show_checkpoint(session: Session, stored: StoredRun, log: Callable[[str], None]) -> None:
    """Give a session the title, step and scores of a run's checkpoint."""
    run_dir = stored.run_dir
    session.title = (run_dir.path if run_dir else stored.path).resolve().name
    which, step = stored.which, stored.step
    session.step = step
    session.max_steps = stored.settings.max_steps
    if run_dir is None:
        return
    if which in ("last", "best"):
        session.is_outdated = lambda: run_dir.preferred_steps(which)[0] != step
    with tolerate_errors(f"reading the scores in {run_dir.metrics_file}", log):
        rows = [row for row in run_dir.rows() if row["step"] <= step]
        if latest := last_scored_row(rows):
            session.scores = describe_scores(latest["step"], rows)


def find_prompt(tokenizer: Tokenizer, run_dir: RunDir | None) -> tuple[str, Sequence[int]]:
    """Return the start of the text of a run's newest snapshot and its ids, or an example."""
    snapshots = [] if run_dir is None else list_snapshots(run_dir)
    text = snapshots[-1].probes.get("text") if snapshots else None
    if text is not None and text.ids:
        ids = text.ids[:PROMPT_TOKENS]
        begin = tokenizer.begin_of_text
        if begin not in (None, ids[0]):
            ids = (begin, *ids)
        return decode_characters(tokenizer, ids), ids
    try:
        tokenizer.encode(EXAMPLE_PROMPT)
    except UserError:  # the model lacks one of its characters
        return "", ()
    return EXAMPLE_PROMPT, ()
