"""Load the model that a page explores, and follow the checkpoints of the run that trains it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from cli.config_file import read_config
from cli.explore_config import ExploreConfig
from common.checkpoints import (
    CONFIG_FILE,
    MODEL_FILE,
    TOKENIZER_FILE,
    find_newest_run,
    saved_steps,
    step_folder,
    verify_checkpoint,
)
from common.errors import UserError
from common.files import exists
from common.metrics import METRICS, read_rows
from common.paths import expand_model_name
from common.terminal import error_sentence, tolerate_errors
from common.text import REPLACEMENT
from config import GPTConfig
from data.tokenizer import Tokenizer, load_tokenizer
from glass.page.snapshots import list_snapshots
from glass.page.write import ExploredModel, HeadScores, read_scores
from interop.loading import load_model
from model import GPT
from training.checkpoint import load_weights

PROMPT_TOKENS = 32  # of a run's text that are shown first
# Shown first if there is no text of a run. A likely next token is one of two names.
EXAMPLE_PROMPT = "When Mary and John went to the store, John gave a drink to"
FOLLOWED_FILES = (CONFIG_FILE, MODEL_FILE, TOKENIZER_FILE)  # all but the optimizer's state

Log = Callable[[str], None]


class Exploration(NamedTuple):
    """A model on the CPU, its tokenizer, and what the page shows of it."""

    model: GPT
    tokenizer: Tokenizer
    explored: ExploredModel
    followed_run: Path | None  # whose newer checkpoints are shown; None: none are


def load_exploration(settings: ExploreConfig, log: Log) -> Exploration:
    """Load the model that the settings name, or that of the newest run in runs/."""
    key = "run_dir" if settings.init_from is None else "init_from"
    name = settings.run_dir if settings.init_from is None else settings.init_from
    if name is None:
        name = str(find_newest_run(Path("runs")))
    log(f"loading {name} …")
    model, tokenizer, run = load_model(name, settings.checkpoint, "last", log, key)

    explored = ExploredModel(_find_title(key, name), model.config)
    run_dir = followed_run = None
    if run is not None:
        run_dir = None if run.path.is_copy else run.path.folder
        if settings.checkpoint == "last" and run.path.which in (None, "last"):
            followed_run = run_dir
        explored = replace(
            explored,
            title=run.path.folder.resolve().name,
            step=run.step,
            max_steps=run.config.max_steps,
            is_following=followed_run is not None and run.step < run.config.max_steps,
            scores=None if run_dir is None else read_run_scores(run_dir, run.step, log),
        )

    prompt = settings.prompt
    if prompt is None:
        prompt = find_prompt(tokenizer, run_dir)
    tokenizer.encode(prompt)  # raises UserError for an unknown character
    return Exploration(model, tokenizer, replace(explored, prompt=prompt), followed_run)


def _find_title(key: str, name: str) -> str:
    path = Path(expand_model_name(key, name))
    return path.resolve().name if exists(path) else name


def find_prompt(tokenizer: Tokenizer, run_dir: Path | None) -> str:
    """Return the start of the text that a run's newest snapshot is about, or an example."""
    snapshots = [] if run_dir is None else list_snapshots(run_dir)
    text = snapshots[-1].probes.get("text") if snapshots else None
    if text is not None and text.ids:
        return tokenizer.decode(text.ids[:PROMPT_TOKENS]).rstrip(REPLACEMENT)  # half a character
    try:
        tokenizer.encode(EXAMPLE_PROMPT)
    except UserError:  # the model lacks one of its characters
        return ""
    return EXAMPLE_PROMPT


def read_run_scores(run_dir: Path, step: int, log: Log) -> HeadScores | None:
    """Return the head scores of a run's latest snapshot at or before a step, or None."""
    with tolerate_errors(f"reading the scores in {run_dir / METRICS}", log):
        return read_scores([row for row in read_rows(run_dir / METRICS) if row["step"] <= step])
    return None


class RunFollower:
    """Copies newer checkpoints of a run into the model, as training saves them."""

    def __init__(self, run_dir: Path, tokenizer: Tokenizer, log: Log) -> None:
        self.run_dir = run_dir
        self.tokenizer = tokenizer
        self.log = log
        self._last_problem = ""

    def load_newer(self, model: GPT, explored: ExploredModel) -> ExploredModel | None:
        """Load the newest checkpoint and return what is shown; None if the weights do not change.

        A checkpoint that cannot be read is reported once.
        """
        try:
            steps = saved_steps(self.run_dir)
            if not steps:
                raise UserError(f"{self.run_dir} no longer has a checkpoint")
            if steps[-1] <= explored.step:
                return None
            return self._load(steps[-1], model, explored)
        except (OSError, ValueError, UserError) as e:
            problem = error_sentence(e)
            if problem != self._last_problem:
                self.log(f"note: {problem}; the page still shows step {explored.step:,}")
            self._last_problem = problem
            return None

    def _load(self, step: int, model: GPT, explored: ExploredModel) -> ExploredModel:
        folder = step_folder(self.run_dir, step)
        try:
            verify_checkpoint(folder, FOLLOWED_FILES)
        except ValueError as e:
            raise UserError(f"checkpoint {folder} is damaged or cannot be read ({e})") from None
        config = read_config(folder / CONFIG_FILE)
        tokenizer = load_tokenizer(folder / TOKENIZER_FILE)
        is_same_run = tokenizer.to_json() == self.tokenizer.to_json()
        if not is_same_run or GPTConfig.from_settings(config.model) != model.config:
            raise UserError(
                f"{folder} now contains a different model: start explore.py again to show it"
            )
        load_weights(model, folder / MODEL_FILE)
        return replace(
            explored,
            step=step,
            max_steps=config.max_steps,
            is_following=step < config.max_steps,
            scores=read_run_scores(self.run_dir, step, self.log),
        )
