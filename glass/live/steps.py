"""The steps of a series, and the scores of their heads, which are measured on the same probes."""

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from cli.explore_config import ExploreConfig
from common.errors import UserError
from common.files import atomic_write, read_json_object, seal
from common.paths import writable_folder
from common.terminal import tolerate_errors
from data.cache import cache_root
from data.tokenizer import decode_characters, encode_prompt
from glass.heads.measure.analysis import ProbeRun, encode_end, make_expected_probes
from glass.heads.measure.capture import in_float32
from glass.heads.measure.emergence import date_rows
from glass.heads.measure.text_pass import max_tokens
from glass.heads.say.findings import announce_emergence
from glass.live.session import Session, load_session, name_source, place
from glass.page.describe import describe_run_scores
from interop import Series, find_series
from interop.series import hash_tensors, name_repeats
from run.row import Row

SCORES_FOLDER = "scores"  # of the cache
FORMAT = 1  # of what is kept there; another one is measured anew


class Steps:
    """The steps of a series that differ in their weights.

    The random tokens of the probes are those that the last step expects in the text that the page
    shows first. What is measured is kept by the hash of the weights and of the probes.
    """

    def __init__(
        self,
        settings: ExploreConfig,
        series: Series,
        groups: dict[int, list[int]],
        last: Session,
        log: Callable[[str], None],
    ) -> None:
        """Make the probes with the model of the last step, and read what is kept."""
        self.settings = settings
        self.series = series
        self.numbers = [*groups]
        self.repeats = name_repeats(groups)
        self.log = log
        model = in_float32(last.model)
        prompt = last.prompt_ids or encode_prompt(last.tokenizer, last.prompt)
        ids = encode_end(model, last.tokenizer, prompt, max_tokens(model.config))
        self.text = decode_characters(last.tokenizer, ids)
        self.probes = make_expected_probes(model, last.tokenizer, ids)
        self.rows: dict[int, Row] = {}
        for step in self.numbers:
            with suppress(OSError, ValueError):
                row = read_json_object(self._kept_file(step), must_be_sealed=True)
                del row["sha256"]
                self.rows[step] = Row(row, step=step)

    def load(self, session: Session, step: int) -> Session:
        """Load the model of another step, unless the request for it is canceled meanwhile."""
        model, _ = self.series.open(step).load(session.check_canceled)
        place(model, self.settings)
        return replace(session, model=model, step=step)

    @property
    def unmeasured(self) -> list[int]:
        """The steps whose scores are not known."""
        return [step for step in self.numbers if step not in self.rows]

    def measure(self, session: Session) -> Iterator[str]:
        """Measure all heads at a step, and keep the scores; yield the name of each stage."""
        row = Row()
        yield from ProbeRun(in_float32(session.model), self.probes).measure_in_stages(row)
        # Heads emerge when other steps are known.
        row = Row({key: row[key] for key in row if not key.startswith("emerged/")})
        self.rows[session.step] = Row(row, step=session.step)
        with tolerate_errors("keeping the scores", self.log):
            file = self._kept_file(session.step, writable_folder(cache_root()))
            file.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(file) as part:
                part.write_text(seal(json.dumps(row, indent=0)))
        if not self.unmeasured:
            rows = self._dated_rows()
            for count in range(2, len(rows) + 1):
                for finding in announce_emergence(*rows[:count]):
                    self.log(f"finding  {finding.text}")

    def _kept_file(self, step: int, cache: Path | None = None) -> Path:
        arrays = {name: getattr(self.probes, name) for name in ("text", "random", "windows")}
        tensors = [(name, torch.from_numpy(array)) for name, array in arrays.items()]
        parts = [FORMAT, self.settings.precision, self.series.hash(step), hash_tensors(tensors)]
        key = sha256(json.dumps(parts).encode()).hexdigest()
        return (cache or cache_root()) / SCORES_FOLDER / f"{key}.json"

    def _dated_rows(self) -> list[Row]:
        rows = [self.rows[step] for step in sorted(self.rows)]
        return date_rows(rows, self.probes.windows.shape[1])

    def describe(self) -> dict[str, Any]:
        """Describe the steps and their scores for a page."""
        rows = self._dated_rows()
        text = self.text if rows else None
        scores = {**describe_run_scores(rows), "scoredText": text}
        return {"steps": self.numbers, "repeats": self.repeats, **scores}


def open_steps(
    settings: ExploreConfig, log: Callable[[str], None], check_canceled: Callable[[], None]
) -> tuple[Steps, Session]:
    """Find the steps that the settings choose, report equal ones, and load the last one."""
    assert settings.steps is not None
    key, name = name_source(settings)
    series = find_series(name, settings.steps, log, key)
    log(f"comparing the weights of {len(series.steps)} steps …")
    groups = series.group_equal()
    if len(groups) < 2:
        raise UserError(f"steps={settings.steps} is one step: choose several, or leave steps out")
    session = load_session(settings, log, check_canceled, series)
    with torch.no_grad():
        return Steps(settings, series, groups, session, log), session
