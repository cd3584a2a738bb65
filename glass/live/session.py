"""The model that a page explores, and the texts that it has read last."""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path

from data.tokenizer import Tokenizer
from glass.heads.measure.interventions import NO_INTERVENTIONS, Interventions
from glass.heads.measure.probes import spell_token
from glass.heads.measure.text_pass import TextPass
from glass.page.write import ExploredModel
from model import GPT

MAX_PASSES = 3  # cached passes, such as those with and without interventions


class Session:
    """A model and its tokenizer, as the requests of a page use them.

    Only one thread at a time calls `read`.
    """

    def __init__(
        self,
        model: GPT,
        tokenizer: Tokenizer,
        explored: ExploredModel,
        followed: tuple[Path, str] | None = None,
        check_canceled: Callable[[], None] = lambda: None,
    ) -> None:
        """Put the model in evaluation mode.

        `followed` is a run and which of its checkpoints is shown ("last" or "best"), None if that
        never changes. `check_canceled` is called before each block, and whenever composition
        measures a head.
        """
        self.model, self.tokenizer = model.eval(), tokenizer
        self.explored = explored
        self.followed = followed
        self._find_pass = lru_cache(MAX_PASSES)(
            lambda ablated, has_hidden, role: TextPass(model, ablated)
        )

        def check(*_: object) -> None:  # a closure is not copied with the model
            check_canceled()

        for module in (*(block.norm_1 for block in model.blocks), model.head):
            module.register_forward_pre_hook(check)

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
