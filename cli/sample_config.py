"""The settings of sample.py. Does not import torch."""

from dataclasses import dataclass

from cli.command_line import LoadConfig
from common.errors import UserError
from common.settings import LARGEST_SEED, GreaterThan, setting
from config import Hardware

ONE_TEXT = {"interactive": (False,)}
GENERATED = {"score": (None,)}  # a text is generated, not scored
DRAWN = GENERATED | {"temperature": GreaterThan(0)}  # its tokens are drawn at random


@dataclass
class SampleConfig(Hardware, LoadConfig):
    """Settings of `sample.py`."""

    prompt: str | None = setting(
        None,
        "text to continue; -: read it from stdin; null: begin a new text",
        literal=True,
        only_with=ONE_TEXT,
    )
    prompt_file: str | None = setting(
        None, "continue the text of this file", only_with=ONE_TEXT | {"prompt": (None,)}
    )
    interactive: bool = setting(
        False, "continue one typed prompt after the other; Ctrl-C stops a text, Ctrl-D quits"
    )
    score: str | None = setting(
        None,
        "score this file instead (loss, bits per byte; attention=PATH.html shows the loss of each "
        "token); -: read it from stdin",
        only_with=ONE_TEXT | {"prompt": (None,), "prompt_file": (None,)},
    )
    max_new_tokens: int = setting(
        500, "maximum number of tokens to generate", ge=1, le=10**9, only_with=GENERATED
    )
    stop: tuple[str, ...] = setting(
        (),
        "end the generated text before this one (\\n: a line end); may be given several times",
        only_with=GENERATED,
    )
    temperature: float = setting(
        0.8,
        "divisor of the logits; 0: always take the most likely token",
        ge=0,
        only_with=GENERATED,
    )
    top_k: int | None = setting(None, "sample from the k most likely tokens", ge=1, only_with=DRAWN)
    top_p: float | None = setting(
        None,
        "sample from the fewest tokens whose probabilities sum to p",
        gt=0,
        le=1,
        only_with=DRAWN,
    )
    min_p: float | None = setting(
        None,
        "sample from tokens at least min_p times as likely as the likeliest",
        ge=0,
        le=1,
        only_with=DRAWN,
    )
    num_samples: int = setting(
        1,
        "number of texts, generated with seed, seed + 1, …",
        ge=1,
        le=100_000,
        only_with=GENERATED,
    )
    attention: str | None = setting(
        None,
        "PATH.html: write, or replace, a page of the first text's attention",
        only_with=ONE_TEXT,
    )
    seed: int = setting(
        1337, "random seed; equal seeds give equal texts", ge=0, le=LARGEST_SEED, only_with=DRAWN
    )

    def check(self) -> None:
        """Raise `UserError` if a value is out of bounds or settings contradict each other."""
        super().check()
        if self.attention is not None and not self.attention.endswith(".html"):
            raise UserError(f"attention={self.attention} must end in .html")
        if self.attention is not None and self.precision != "auto":
            raise UserError(
                f"precision={self.precision} has no effect with attention={self.attention}, which "
                "shows the weights as they are: leave it out"
            )
