"""The studies: published claims about attention, and what reproduces each of them.

A study is the sweep preset configs/sweep/<name>.yaml with the claims of its papers as tests on the
metrics of its runs. studies/verdicts.py carries the tests out; docs/papers.md has the results.
"""

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

START, END = "start", "end"
STEP = "step"


class Arm(NamedTuple):
    """One condition of a study: the runs whose resolved settings have these values."""

    name: str
    settings: dict[str, str]  # as typed: {"model.n_layer": "2"}


class Emergence(NamedTuple):
    """An event: the first evaluation at which a metric is past a threshold, and at the next too."""

    name: str
    metric: str
    threshold: float | str  # the name of a metric is its value at the same evaluation
    is_rise: bool = True  # if false, the event is that it falls below


class Quantity(NamedTuple):
    """The value of a metric in the runs of an arm: at their end, at the start or at an event.

    `STEP` at an event is the step at which it happened.
    """

    metric: str
    arm: str
    at: str = END


class Comparison(NamedTuple):
    """The claim that the first quantity minus the second is within these bounds."""

    first: Quantity
    second: Quantity
    at_least: float = -inf
    at_most: float = inf


class Claim(NamedTuple):
    """A claim that gets a verdict: it is reproduced if all tests say so."""

    text: str
    tests: Sequence[Comparison]
    needs: Sequence[tuple[str, str]] = ()  # (emergence, arm): most seeds must have these events

    @property
    def quantities(self) -> list[Quantity]:
        """Both quantities of each test."""
        return [quantity for test in self.tests for quantity in (test.first, test.second)]


class Study(NamedTuple):
    """Claims of papers, and the arms, events and metrics that test them."""

    title: str
    papers: str
    arms: Sequence[Arm]
    emergences: Sequence[Emergence]
    claims: Sequence[Claim]
    plot: Sequence[str]  # metrics whose curves the page shows
    has_log_steps: bool = False  # whether the steps of these curves are on a logarithmic axis


def _between_arms(
    metric: str, first: str, second: str, at_least: float = -inf, at_most: float = inf
) -> Comparison:
    return Comparison(Quantity(metric, first), Quantity(metric, second), at_least, at_most)


def _within_arm(arm: str, first: str, second: str, at_least: float, at: str = END) -> Comparison:
    return Comparison(Quantity(first, arm, at), Quantity(second, arm, at), at_least)


def _rises(metric: str, arm: str, since: str, until: str, at_least: float) -> Comparison:
    """Return the claim that a metric is higher at one time than at an earlier one."""
    return Comparison(Quantity(metric, arm, until), Quantity(metric, arm, since), at_least)


def _follows(event: str, other: str, arm: str, at_least: float, at_most: float = inf) -> Comparison:
    """Return the claim that an event comes within these bounds, in steps, after another."""
    return Comparison(Quantity(STEP, arm, event), Quantity(STEP, arm, other), at_least, at_most)


# Names of the studies' metrics in tables and charts.
METRIC_NAMES = {
    "val/in_context_score": "In-context learning score (nats)",
    "task/repeated_loss": "Loss of repeated tokens (nats/token)",
    "task/repeated_accuracy": "Accuracy on repeated tokens",
    "task/induction": "Induction score",
    "task/previous_token": "Previous-token score",
    "task/sink_nothing_to_find": "Weight on the first token, nothing to find",
    "task/sink_something_to_find": "Weight on the first token, something to find",
    "task/attention_sum_nothing_to_find": "Sum of the weights, nothing to find",
    "task/kl_uniform": "KL to uniform (nats)",
    "task/kl_unigram": "KL to in-context unigrams (nats)",
    "task/kl_bigram": "KL to in-context bigrams (nats)",
    "task/same_state": "Weight on tokens after the same state",
    "task/train_accuracy": "Training accuracy",
    "task/accuracy": "Test accuracy",
    "task/loss": "Test loss (nats)",
    "task/fourier_share": "Share of the strongest frequencies",
}

INDUCTION_HEAD, PREVIOUS_HEAD = "induction head", "previous-token head"
LOSS_FALL, LEARNING = "fall of the repeated loss", "in-context learning"
TWO_LAYERS, ONE_LAYER, SMEARED = "two layers", "one layer", "one smeared layer"
INDUCTION = Study(
    title="Induction needs two layers, or keys that contain the previous token",
    papers="Elhage et al. 2021; Olsson et al. 2022",
    arms=[
        Arm(TWO_LAYERS, {"model.n_layer": "2", "model.smear_keys": "false"}),
        Arm(ONE_LAYER, {"model.n_layer": "1", "model.smear_keys": "false"}),
        Arm(SMEARED, {"model.n_layer": "1", "model.smear_keys": "true"}),
        Arm("two smeared layers", {"model.n_layer": "2", "model.smear_keys": "true"}),
    ],
    emergences=[
        Emergence(LOSS_FALL, "task/repeated_loss", 1.4, is_rise=False),
        Emergence(INDUCTION_HEAD, "task/induction", 0.2),
        Emergence(PREVIOUS_HEAD, "task/previous_token", 0.12),
        Emergence(LEARNING, "val/in_context_score", 1.5),
    ],
    claims=[
        Claim(
            "Two layers learn to predict repeated tokens; one layer does not.",
            [_between_arms("task/repeated_loss", ONE_LAYER, TWO_LAYERS, at_least=0.5)],
            needs=[(LOSS_FALL, TWO_LAYERS)],
        ),
        Claim(
            "One layer learns to predict repeated tokens if its keys contain the previous token.",
            [_between_arms("task/repeated_loss", ONE_LAYER, SMEARED, at_least=0.5)],
        ),
        Claim(
            "The induction head, the previous-token head and in-context learning emerge when the "
            "loss of repeated tokens falls.",
            [
                _follows(event, LOSS_FALL, TWO_LAYERS, at_least=-100, at_most=100)
                for event in (INDUCTION_HEAD, PREVIOUS_HEAD, LEARNING)
            ],
        ),
    ],
    plot=["task/repeated_loss", "task/induction", "task/previous_token", "val/in_context_score"],
)

UNIGRAMS, BIGRAMS = "unigram phase", "bigram phase"
MARKOV = Study(
    title="In-context Markov chains are learned in phases",
    papers="Edelman et al. 2024",
    arms=[Arm(TWO_LAYERS, {"model.n_layer": "2"}), Arm(ONE_LAYER, {"model.n_layer": "1"})],
    emergences=[
        Emergence(UNIGRAMS, "task/kl_unigram", "task/kl_uniform", is_rise=False),
        Emergence(BIGRAMS, "task/kl_bigram", "task/kl_unigram", is_rise=False),
        Emergence(PREVIOUS_HEAD, "task/previous_token", 0.5),
        Emergence("statistical induction head", "task/same_state", 0.6),
    ],
    claims=[
        Claim(
            "The predictions are uniform at first, then those of in-context unigrams, then those "
            "of in-context bigrams.",
            [
                _within_arm(TWO_LAYERS, "task/kl_unigram", "task/kl_uniform", 0.05, at=START),
                _follows(BIGRAMS, UNIGRAMS, TWO_LAYERS, at_least=30),
            ],
        ),
        Claim(
            "One layer stays at unigrams.",
            [
                _between_arms("task/kl_bigram", ONE_LAYER, TWO_LAYERS, at_least=0.03),
                _within_arm(ONE_LAYER, "task/kl_bigram", "task/kl_unigram", at_least=0.03),
            ],
        ),
        Claim(
            "The second layer learns to attend to what followed the current state.",
            [_rises("task/same_state", TWO_LAYERS, START, END, at_least=0.1)],
        ),
        Claim(
            "The first layer learns to attend to the previous token.",
            [_rises("task/previous_token", TWO_LAYERS, START, END, at_least=0.4)],
        ),
    ],
    plot=[
        "task/kl_uniform",
        "task/kl_unigram",
        "task/kl_bigram",
        "task/previous_token",
        "task/same_state",
    ],
)

SOFTMAX, SINK_LOGIT, GATE = "softmax", "sink logit", "gate"
SINKS = Study(
    title="A head that finds nothing attends to the first token",
    papers="Xiao et al. 2023; Gu et al. 2024; gpt-oss 2025; Qiu et al. 2025",
    arms=[
        Arm(SOFTMAX, {"model.attention_sink": "false", "model.attention_gate": "none"}),
        Arm(SINK_LOGIT, {"model.attention_sink": "true", "model.attention_gate": "none"}),
        Arm(GATE, {"model.attention_sink": "false", "model.attention_gate": "channel"}),
        Arm("both", {"model.attention_sink": "true", "model.attention_gate": "channel"}),
    ],
    emergences=[Emergence(INDUCTION_HEAD, "task/induction", 0.2)],
    claims=[
        Claim(
            "The strongest induction head attends to the first token if there is nothing to find, "
            "and not if there is something.",
            [
                _within_arm(
                    SOFTMAX,
                    "task/sink_nothing_to_find",
                    "task/sink_something_to_find",
                    at_least=0.3,
                )
            ],
            needs=[(INDUCTION_HEAD, SOFTMAX)],
        ),
        Claim(
            "A learned sink logit removes this attention sink.",
            [_between_arms("task/sink_nothing_to_find", SOFTMAX, SINK_LOGIT, at_least=0.3)],
            needs=[(INDUCTION_HEAD, SOFTMAX), (INDUCTION_HEAD, SINK_LOGIT)],
        ),
        Claim(
            "A gate on the heads' outputs removes this attention sink.",
            [_between_arms("task/sink_nothing_to_find", SOFTMAX, GATE, at_least=0.3)],
            needs=[(INDUCTION_HEAD, SOFTMAX), (INDUCTION_HEAD, GATE)],
        ),
    ],
    plot=[
        "task/repeated_loss",
        "task/induction",
        "task/sink_nothing_to_find",
        "task/sink_something_to_find",
        "task/attention_sum_nothing_to_find",
    ],
)

DECAY, NO_DECAY = "weight decay", "no weight decay"
MEMORIZATION, GENERALIZATION, RISE = "memorization", "generalization", "15% test accuracy"
GROKKING = Study(
    title="Modular addition generalizes long after it is memorized",
    papers="Power et al. 2022; Nanda et al. 2023",
    arms=[
        Arm(DECAY, {"optim.weight_decay": "1.0"}),
        Arm(NO_DECAY, {"optim.weight_decay": "0.0"}),
    ],
    emergences=[
        Emergence(MEMORIZATION, "task/train_accuracy", 0.99),
        Emergence(RISE, "task/accuracy", 0.15),
        Emergence(GENERALIZATION, "task/accuracy", 0.9),
    ],
    claims=[
        Claim(
            "Test accuracy rises long after training accuracy.",
            [_follows(GENERALIZATION, MEMORIZATION, DECAY, at_least=300)],
        ),
        Claim(
            "Fourier structure grows before test accuracy rises.",
            [_rises("task/fourier_share", DECAY, START, RISE, at_least=0.1)],
        ),
        Claim(
            "Fourier structure grows between memorization and the rise of test accuracy.",
            [_rises("task/fourier_share", DECAY, MEMORIZATION, RISE, at_least=0)],
        ),
        Claim(
            "Fourier structure goes on growing while test accuracy rises.",
            [_rises("task/fourier_share", DECAY, RISE, END, at_least=0.1)],
        ),
        Claim(
            "Fourier structure ends stronger with weight decay than without.",
            [_between_arms("task/fourier_share", DECAY, NO_DECAY, at_least=0.1)],
            needs=[(GENERALIZATION, DECAY)],
        ),
        Claim(
            "Without weight decay the model does not generalize within the same number of steps.",
            [_between_arms("task/accuracy", DECAY, NO_DECAY, at_least=0.3)],
            needs=[(MEMORIZATION, NO_DECAY), (GENERALIZATION, DECAY)],
        ),
    ],
    plot=["task/train_accuracy", "task/accuracy", "task/loss", "task/fourier_share"],
    has_log_steps=True,
)

FOUR_LARGE, ONE_LARGE = "4 key/value heads of 32", "1 key/value head of 32"
FOUR_SMALL, ONE_SMALL = "4 key/value heads of 8", "1 key/value head of 8"
SHARING = Study(
    title="Fewer key/value heads save cache at little loss",
    papers="Shazeer 2019; Ainslie et al. 2023",
    arms=[
        Arm(FOUR_LARGE, {"model.n_kv_head": "4", "model.head_dim": "32"}),
        Arm(ONE_LARGE, {"model.n_kv_head": "1", "model.head_dim": "32"}),
        Arm(FOUR_SMALL, {"model.n_kv_head": "4", "model.head_dim": "8"}),
        Arm(ONE_SMALL, {"model.n_kv_head": "1", "model.head_dim": "8"}),
    ],
    emergences=[Emergence("recall", "task/repeated_loss", 0.5, is_rise=False)],
    claims=[
        Claim(
            "With 32 channels per head, one key/value head instead of four costs little recall.",
            [_between_arms("task/repeated_loss", ONE_LARGE, FOUR_LARGE, at_most=0.02)],
            needs=[("recall", FOUR_LARGE)],
        ),
        Claim(
            "With 8 channels per head, one key/value head instead of four costs little recall.",
            [_between_arms("task/repeated_loss", ONE_SMALL, FOUR_SMALL, at_most=0.02)],
            needs=[("recall", FOUR_SMALL)],
        ),
        Claim(
            "With the same cache, one large key/value head recalls more than four small ones.",
            [_between_arms("task/repeated_loss", FOUR_SMALL, ONE_LARGE, at_least=0.02)],
            needs=[("recall", ONE_LARGE)],
        ),
    ],
    plot=["task/repeated_loss", "task/repeated_accuracy", "task/induction"],
)

# The studies by the names of their sweep presets.
STUDIES = {
    "paper_induction": INDUCTION,
    "paper_markov": MARKOV,
    "paper_sinks": SINKS,
    "paper_grokking": GROKKING,
    "paper_sharing": SHARING,
}
