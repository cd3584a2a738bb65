"""A look at a run: its maps, scores, births and, where they are due, its picture and each head's importance."""

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np

from attention_maps import ablation, capture, picture, scores
from attention_maps.probe import make_probes
from config import Config
from data.tokens import Tokens
from model import GPT
from training.evaluate import Validation, sample_text

ABLATION_TOKENS = 4096  # of validation, on which each head's importance is measured at the end

SAMPLE_TOKENS = 100  # of the text that the model writes where a picture is due

Images = dict[str, Path | np.ndarray]


class Snapshots:
    """What a run's attention is looked at with: the probes, the windows, and where it is written.

    Within `may_fail()` a file that cannot be written is no reason to stop.
    """

    def __init__(self, config: Config, run_dir: Path, tokens: Tokens, validation: Validation,
                 may_fail: Callable[[], AbstractContextManager]):
        self.config, self.folder = config, run_dir / "attention"
        self.validation, self.may_fail = validation, may_fail
        self.tokenizer = tokens.tokenizer
        length = min(config.attention.tokens, config.model.block_size)
        self.probes = make_probes(tokens.train, tokens.val, tokens.tokenizer, length, config.seed)
        self.folder.mkdir(exist_ok=True)

    def take(self, model: GPT, step: int, rows: list[dict],
             between: Callable[[], None] = lambda: None
             ) -> tuple[dict[str, float], Images, str | None]:
        """Capture and score every head after `step` updates, and write it down.

        Returns the metrics, and where a picture is due images and a text by the model.

        rows: the run's metrics so far, from which births are told. `between` is called between the
        parts, which can take minutes each of a large model, and may raise: all can be done again.
        """
        seen, losses = capture.capture(model, self.probes, step), {}
        between()
        readings = scores.readings(seen.text, seen.repeat, seen.control, self.probes.periods)
        tables = {name: scores.mean_and_error(values) for name, values in readings.items()}
        if step == self.config.max_steps:
            windows = self.validation.excerpt(ABLATION_TOKENS)
            whole, without = ablation.losses_without_heads(model, *windows, between)
            losses = {"importance_loss": whole, "importance_loss_without": without}
            tables["importance"] = ablation.importance(whole, without)
        metrics = scores.named({name: mean for name, (mean, _) in tables.items()} | {
            f"{name}_se": error for name, (_, error) in tables.items()
            if not name.endswith(scores.ASIDE)})
        before = next((row for row in reversed(rows) if any(key.startswith("heads/") for key in row)), {})
        metrics |= scores.births(before, metrics, len(self.probes.text))
        path = self.folder / f"step_{step:08d}.npz"
        with self.may_fail():
            seen.save(path, **losses)
        between()
        if not self.picture_due(step):
            return metrics, {}, None
        images = self.draw(seen, tables, path)
        between()
        text = sample_text(model, self.tokenizer, SAMPLE_TOKENS, self.config.seed, between=between)
        return metrics, images, text

    def picture_due(self, step: int) -> bool:
        """Whether the snapshot of this step is drawn: every `picture_every` steps; or the first, the last and each doubling."""
        every, picture_every = self.config.attention.every, self.config.attention.picture_every
        if step in (0, self.config.max_steps):
            return True
        number = step // every
        return step % picture_every == 0 if picture_every else number & (number - 1) == 0

    def draw(self, seen: capture.Snapshot, tables: dict[str, tuple[np.ndarray, np.ndarray]], path: Path) -> Images:
        """Draw the maps beside `path`, and each table of scores; a map that could not be written is left out."""
        images: Images = {f"heads/{name}": picture.table_image(mean) for name, (mean, _) in tables.items()
                          if not name.endswith(scores.ASIDE)}
        title, groups = f"Attention after {seen.step:,} steps", self.config.model.kv_heads
        with self.may_fail():
            picture.draw(seen, path.with_suffix(".png"), groups, title)
            images["attention/map"] = path.with_suffix(".png")
        gc.collect()  # a figure's parts refer to each other: ten, of 5 to 10 MB each, would wait
        return images
