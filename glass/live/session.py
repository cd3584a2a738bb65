"""The model that a page explores, and what is cached between two requests."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from data.tokenizer import Tokenizer
from glass.heads.analysis import measure_heads
from glass.heads.capture import capture, in_float32, output_gram
from glass.heads.findings import summarize
from glass.heads.interventions import Interventions
from glass.heads.metrics import flatten
from glass.heads.probes import spell_token
from glass.heads.results import Head
from glass.live.parameters import Input, max_tokens
from glass.live.reading import Reading
from glass.page.write import ExploredModel, measured_scores, render_explore_page
from model import GPT

MAX_READINGS = 3  # cached passes: the one without interventions, and the two used last


class Session:
    """A model and its tokenizer, as the requests of a page use them; see glass/live/requests.py.

    `read` and `measure_heads` are called in one thread, one at a time; the other methods may be
    called in others. `version` increases when a page that was rendered before is out of date.
    """

    def __init__(
        self,
        model: GPT,
        tokenizer: Tokenizer,
        explored: ExploredModel,
        check_canceled: Callable[[], None] = lambda: None,
    ) -> None:
        """Put the model in evaluation mode; `check_canceled` is called before each block."""
        self.model, self.tokenizer = model.eval(), tokenizer
        self.explored = explored
        self.version = 0
        self._readings: dict[tuple[tuple[Head, ...], bool, str], Reading] = {}
        self._gram: Tensor | None = None

        def check(*_: object) -> None:  # a closure is not copied with the model
            check_canceled()

        for module in (*model.blocks, model.head):
            module.register_forward_pre_hook(check)

    @property
    def step(self) -> int:
        """Training step of the weights; 0 for a model outside of a run."""
        return self.explored.step

    def page(self) -> str:
        """Return the HTML of the page."""
        return render_explore_page(self.explored, self.version, max_tokens(self.model.config))

    def replace(self, explored: ExploredModel) -> None:
        """Forget what was computed before: the model has the weights of another step now."""
        self._readings.clear()
        self._gram = None
        self.explored = explored
        self.version += 1

    def read(self, request: Input, role: str = "") -> Reading:
        """Run the model on a text, or on what has changed since a text that is cached.

        The result is valid until the next call with the same role.
        """
        ablated, hidden = request.interventions
        key = ablated, bool(hidden), role
        reading = self._readings.pop(key, None)
        if reading is None:
            changed = [other for other in self._readings if other != ((), False, "")]
            for other in changed[: max(0, len(changed) - (MAX_READINGS - 2))]:
                del self._readings[other]
            if self._gram is None:
                self._gram = output_gram(self.model)
            reading = Reading(self.model, Interventions(ablated), self._gram)
        self._readings[key] = reading  # the last used is the last
        reading.read(request.ids, hidden)
        return reading

    def measure_heads(self, ids: Sequence[int]) -> Generator[str, None, None]:
        """Measure the scores of all heads, and yield a line of progress before each stage."""
        model = in_float32(self.model)
        text = capture(model, np.array([ids]))
        measurements = yield from measure_heads(model, self.tokenizer, text)
        findings = summarize(measurements)
        scores = measured_scores(self.step, flatten(measurements), findings)
        self.explored = replace(self.explored, scores=scores)
        self.version += 1

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without begin-of-text."""
        begins = len(ids) > 0 and ids[0] == self.tokenizer.begin_of_text
        return self.tokenizer.decode(ids[1:] if begins else ids)

    def spell_token(self, id: int) -> str:
        """Return the text of one token."""
        return spell_token(self.tokenizer, id)

    def spell_tokens(self, ids: Sequence[int]) -> dict[int, str]:
        """Return the text of each of some tokens, by id."""
        return {id: self.spell_token(id) for id in ids}
