"""The model that a page explores, and the texts that it has read last."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from data.tokenizer import Tokenizer
from glass.heads.measure.interventions import NO_INTERVENTIONS, Interventions
from glass.heads.measure.probes import spell_token
from glass.heads.measure.text_pass import TextPass
from model import GPT
from run.run_dir import RunDir

MAX_PASSES = 3  # cached passes, such as those with and without interventions


@dataclass(eq=False)
class Session:
    """A model and its tokenizer, as the requests of a page use them, and what the page shows.

    Only one thread at a time calls `read`.
    """

    model: GPT  # is put in evaluation mode
    tokenizer: Tokenizer
    title: str
    step: int = 0  # of the checkpoint; 0 for a model outside of a run
    max_steps: int | None = None  # of the run; None for a model outside of a run
    prompt: str = ""  # the text that is shown first
    scores: dict[str, Any] | None = None  # see `describe_scores`; None before heads are measured
    # A run, and which of its checkpoints is shown ("last" or "best"); None if that never changes.
    followed: tuple[RunDir, str] | None = None
    # Called before each block, and whenever composition measures a head.
    check_canceled: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.model.eval()
        # A pass that hides tokens does not replace the one of the same text that hides none.
        self._find_pass = lru_cache(MAX_PASSES)(
            lambda ablated, has_hidden, role: TextPass(self.model, ablated)
        )
        check_canceled = self.check_canceled

        def check(*_: object) -> None:  # a closure is not copied with the model
            check_canceled()

        for module in (*(block.norm_1 for block in self.model.blocks), self.model.head):
            module.register_forward_pre_hook(check)

    @property
    def is_outdated(self) -> bool:
        """True if the checkpoint that is shown is no longer the last or the best one of the run."""
        if self.followed is None:
            return False
        run, which = self.followed
        return run.preferred_steps(which)[0] != self.step

    def read(
        self,
        ids: Sequence[int],
        interventions: Interventions = NO_INTERVENTIONS,
        role: str = "",
    ) -> TextPass:
        """Run the model on a text, or on what has changed since a text that is cached.

        The result is valid until the next call with the same role.
        """
        ablated, hidden = interventions
        text_pass = self._find_pass(ablated, bool(hidden), role)
        text_pass.read(ids, hidden)
        return text_pass

    def spell_tokens(self, ids: Iterable[int]) -> dict[int, str]:
        """Return the text of each of some tokens, by id."""
        return {id: spell_token(self.tokenizer, id) for id in ids}
