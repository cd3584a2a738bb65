"""The steps of a series, as a page shows them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cli.explore_config import ExploreConfig
from glass.live.session import Session, name_source, place
from interop import find_series
from interop.series import name_repeats


class Steps:
    """The steps of the series that the settings choose; of those with equal weights, the last."""

    def __init__(self, settings: ExploreConfig, log: Callable[[str], None]) -> None:
        """Find the steps, compare their weights, and report those that are equal."""
        assert settings.steps is not None
        key, name = name_source(settings)
        self.settings = settings
        self.series = find_series(name, settings.steps, log, key)
        log(f"comparing the weights of {len(self.series.steps)} steps …")
        groups = self.series.group_equal()
        self.numbers = [*groups]
        self.repeats = name_repeats(groups)

    def load(self, session: Session, step: int) -> Session:
        """Load the model of another step, unless the request for it is canceled meanwhile."""
        model, _ = self.series.open(step).load(session.check_canceled)
        place(model, self.settings)
        return replace(session, model=model, step=step)

    def describe(self) -> dict[str, Any]:
        """Describe the steps for a page."""
        return {"steps": self.numbers, "repeats": self.repeats}
