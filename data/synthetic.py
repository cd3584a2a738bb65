"""Open the task of data=synthetic.

A new task is a file of data/tasks, an entry in `TASKS`, one in `config.TASK_SYMBOLS`, and its
metrics in training/task_metrics.py.
"""

from pathlib import Path

from config import Config
from data.splits import CorpusSize
from data.tasks.markov import MarkovChains
from data.tasks.modular import ModularAddition
from data.tasks.passages import Passages
from data.tasks.task import Task
from data.tokenizer import Tokenizer
from data.tokens import Tokens

TASKS: dict[str, type[Task]] = {
    "passages": Passages,
    "markov": MarkovChains,
    "modular": ModularAddition,
}


def make_task(config: Config, tokenizer: Tokenizer | None = None) -> Task:
    """Make the task of a run; `tokenizer` is that of a model that was trained before."""
    return TASKS[config.data.task](config, tokenizer)


def generate_tokens(config: Config, tokenizer: Tokenizer | None) -> Tokens:
    """Return a task with samples of its sequences; every process makes the same ones."""
    task = make_task(config, tokenizer)
    # Random probes draw tokens from `train`, so it lacks the begin symbol
    train = task.training.tokens[:, int(config.data.begin) :]
    return Tokens(
        train=train.ravel(),
        val=task.validation.tokens.ravel(),
        tokenizer=task.tokenizer,
        fingerprint=task.fingerprint(),
        name=f"data.task={config.data.task}",
        size=CorpusSize(),
        folder=Path(),
        task=task,
    )
