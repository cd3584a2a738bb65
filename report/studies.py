"""The studies: published claims about attention, and what reproduces each of them.

A study is the sweep preset configs/sweep/<name>.yaml with the claims of its papers as tests on the
metrics of its runs. report/study_results.py carries the tests out; docs/papers.md has the results.
"""

from typing import NamedTuple


class Arm(NamedTuple):
    """One condition of a study: the runs whose resolved settings have these values."""

    name: str
    settings: dict[str, str]  # as typed: {"model.n_layer": "2"}


class Emergence(NamedTuple):
    """An event: the first evaluation at which a metric is past a threshold, and at the next too."""

    name: str
    metric: str
    threshold: float
    is_rise: bool = True  # past means above; if false, below


class Quantity(NamedTuple):
    """The value of a metric at the end of the runs of an arm.

    `step of <emergence>` is a metric too: the step of the event, or the last step if it has not
    happened.
    """

    metric: str
    arm: str


class Exceeds(NamedTuple):
    """The claim that one quantity exceeds another by at least `margin`."""

    larger: Quantity
    smaller: Quantity
    margin: float  # the least difference that would bear out the claim


class CostsAtMost(NamedTuple):
    """The claim that one quantity exceeds another by at most `margin`."""

    larger: Quantity
    smaller: Quantity
    margin: float


class Order(NamedTuple):
    """The claim that each metric in turn is the lowest of these, and that each takes its turn."""

    arm: str
    metrics: tuple[str, ...]


class Coincidence(NamedTuple):
    """The claim that events of an arm happen together: in each seed, within some evaluations."""

    arm: str
    emergences: tuple[str, ...]
    evaluations: int


class Claim(NamedTuple):
    """A claim that gets a verdict. Its tests need some events: (emergence, arm)."""

    text: str
    tests: tuple[Exceeds | CostsAtMost | Order | Coincidence, ...]
    needs: tuple[tuple[str, str], ...] = ()


class Study(NamedTuple):
    """Claims of papers, and the arms, events and metrics that test them."""

    title: str
    papers: str
    arms: tuple[Arm, ...]
    emergences: tuple[Emergence, ...]
    claims: tuple[Claim, ...]
    plot: tuple[str, ...]  # metrics whose curves the page shows


# Names of metrics in tables and charts.
METRIC_NAMES = {
    "val/loss": "Validation loss (nats/token)",
    "val/in_context_score": "In-context-learning score (nats)",
    "task/first_loss": "Loss of first occurrences (nats/token)",
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
    "task/kl_text_unigram": "KL to unigrams of the training text (nats)",
    "task/kl_text_bigram": "KL to bigrams of the training text (nats)",
    "task/same_state": "Weight on tokens after the same state",
    "task/train_accuracy": "Training accuracy",
    "task/accuracy": "Test accuracy",
    "task/train_loss": "Training loss (nats)",
    "task/loss": "Test loss (nats)",
    "task/fourier_share": "Share of the strongest frequencies",
    "task/recall_loss": "Loss of recalled values (nats)",
    "task/recall_accuracy": "Accuracy of recalled values",
}

TWO_LAYERS, ONE_LAYER, SMEARED = "two layers", "one layer", "one layer, smeared"
INDUCTION = Study(
    title="Induction needs two layers, or keys that contain the previous token",
    papers="Elhage et al. 2021; Olsson et al. 2022",
    arms=(
        Arm(TWO_LAYERS, {"model.n_layer": "2", "model.smear_keys": "false"}),
        Arm(ONE_LAYER, {"model.n_layer": "1", "model.smear_keys": "false"}),
        Arm(SMEARED, {"model.n_layer": "1", "model.smear_keys": "true"}),
        Arm("two layers, smeared", {"model.n_layer": "2", "model.smear_keys": "true"}),
    ),
    emergences=(
        Emergence("fall of the repeated loss", "task/repeated_loss", 1.4, is_rise=False),
        Emergence("induction head", "task/induction", 0.2),
        Emergence("previous-token head", "task/previous_token", 0.12),
        Emergence("in-context learning", "val/in_context_score", 1.5),
    ),
    claims=(
        Claim(
            "Two layers learn to predict repeated tokens; one layer does not.",
            (
                Exceeds(
                    Quantity("task/repeated_loss", ONE_LAYER),
                    Quantity("task/repeated_loss", TWO_LAYERS),
                    margin=0.5,
                ),
            ),
            needs=(("fall of the repeated loss", TWO_LAYERS),),
        ),
        Claim(
            "One layer learns it if its keys contain the previous token.",
            (
                Exceeds(
                    Quantity("task/repeated_loss", ONE_LAYER),
                    Quantity("task/repeated_loss", SMEARED),
                    margin=0.5,
                ),
            ),
        ),
        Claim(
            "It is a phase change: the loss of repeated tokens falls when the induction head, the "
            "previous-token head and in-context learning emerge.",
            (
                Coincidence(
                    TWO_LAYERS,
                    (
                        "fall of the repeated loss",
                        "induction head",
                        "previous-token head",
                        "in-context learning",
                    ),
                    evaluations=2,
                ),
            ),
            needs=(("fall of the repeated loss", TWO_LAYERS),),
        ),
    ),
    plot=(
        "task/repeated_loss",
        "task/induction",
        "task/previous_token",
        "val/in_context_score",
    ),
)

MARKOV = Study(
    title="In-context Markov chains are learned in phases",
    papers="Edelman et al. 2024",
    arms=(
        Arm(TWO_LAYERS, {"model.n_layer": "2"}),
        Arm(ONE_LAYER, {"model.n_layer": "1"}),
    ),
    emergences=(
        Emergence("previous-token head", "task/previous_token", 0.5),
        Emergence("statistical induction head", "task/same_state", 0.6),
    ),
    claims=(
        Claim(
            "Two layers are closest to the uniform prediction first, then to in-context unigrams, "
            "then to in-context bigrams.",
            (Order(TWO_LAYERS, ("task/kl_uniform", "task/kl_unigram", "task/kl_bigram")),),
        ),
        Claim(
            "One layer stays at unigrams.",
            (
                Exceeds(
                    Quantity("task/kl_bigram", ONE_LAYER),
                    Quantity("task/kl_bigram", TWO_LAYERS),
                    margin=0.03,
                ),
                Exceeds(
                    Quantity("task/kl_bigram", ONE_LAYER),
                    Quantity("task/kl_unigram", ONE_LAYER),
                    margin=0.03,
                ),
            ),
        ),
    ),
    plot=(
        "task/kl_uniform",
        "task/kl_unigram",
        "task/kl_bigram",
        "task/previous_token",
        "task/same_state",
    ),
)

SOFTMAX, SINK_LOGIT, GATE = "softmax", "sink logit", "gate"
SINKS = Study(
    title="A head that finds nothing attends to the first token",
    papers="Xiao et al. 2023; Gu et al. 2024; gpt-oss 2025; Qiu et al. 2025",
    arms=(
        Arm(SOFTMAX, {"model.attention_sink": "false", "model.attention_gate": "none"}),
        Arm(SINK_LOGIT, {"model.attention_sink": "true", "model.attention_gate": "none"}),
        Arm(GATE, {"model.attention_sink": "false", "model.attention_gate": "channel"}),
        Arm("both", {"model.attention_sink": "true", "model.attention_gate": "channel"}),
    ),
    emergences=(Emergence("induction head", "task/induction", 0.2),),
    claims=(
        Claim(
            "The strongest induction head attends to the first token if there is nothing to find, "
            "and not if there is something.",
            (
                Exceeds(
                    Quantity("task/sink_nothing_to_find", SOFTMAX),
                    Quantity("task/sink_something_to_find", SOFTMAX),
                    margin=0.3,
                ),
            ),
            needs=(("induction head", SOFTMAX),),
        ),
        Claim(
            "A learned sink logit removes this.",
            (
                Exceeds(
                    Quantity("task/sink_nothing_to_find", SOFTMAX),
                    Quantity("task/sink_nothing_to_find", SINK_LOGIT),
                    margin=0.3,
                ),
            ),
            needs=(("induction head", SOFTMAX), ("induction head", SINK_LOGIT)),
        ),
        Claim(
            "A gate on the heads' outputs removes this.",
            (
                Exceeds(
                    Quantity("task/sink_nothing_to_find", SOFTMAX),
                    Quantity("task/sink_nothing_to_find", GATE),
                    margin=0.3,
                ),
            ),
            needs=(("induction head", SOFTMAX), ("induction head", GATE)),
        ),
    ),
    plot=(
        "task/repeated_loss",
        "task/induction",
        "task/sink_nothing_to_find",
        "task/sink_something_to_find",
        "task/attention_sum_nothing_to_find",
    ),
)

DECAY, NO_DECAY = "weight decay", "no weight decay"
GROKKING = Study(
    title="Modular addition generalizes long after it is memorized",
    papers="Power et al. 2022; Nanda et al. 2023",
    arms=(
        Arm(DECAY, {"optim.weight_decay": "1.0"}),
        Arm(NO_DECAY, {"optim.weight_decay": "0.0"}),
    ),
    emergences=(
        Emergence("memorization", "task/train_accuracy", 0.99),
        Emergence("half of the test sums", "task/accuracy", 0.5),
        Emergence("generalization", "task/accuracy", 0.9),
        Emergence("Fourier structure", "task/fourier_share", 0.75),
    ),
    claims=(
        Claim(
            "Test accuracy rises long after training accuracy.",
            (
                Exceeds(
                    Quantity("step of generalization", DECAY),
                    Quantity("step of memorization", DECAY),
                    margin=500,
                ),
            ),
            needs=(("memorization", DECAY), ("generalization", DECAY)),
        ),
        Claim(
            "Fourier structure appears with it.",
            (
                Exceeds(
                    Quantity("task/fourier_share", DECAY),
                    Quantity("task/fourier_share", NO_DECAY),
                    margin=0.1,
                ),
                Coincidence(DECAY, ("half of the test sums", "Fourier structure"), evaluations=6),
            ),
            needs=(("half of the test sums", DECAY),),
        ),
        Claim(
            "Without weight decay it does not generalize within the same number of steps.",
            (
                Exceeds(
                    Quantity("task/accuracy", DECAY),
                    Quantity("task/accuracy", NO_DECAY),
                    margin=0.3,
                ),
            ),
            needs=(("memorization", NO_DECAY), ("generalization", DECAY)),
        ),
    ),
    plot=("task/train_accuracy", "task/accuracy", "task/loss", "task/fourier_share"),
)

FOUR_LARGE, ONE_LARGE = "4 key/value heads of 32", "1 key/value head of 32"
FOUR_SMALL, ONE_SMALL = "4 key/value heads of 8", "1 key/value head of 8"
SHARING = Study(
    title="Fewer key/value heads save cache at little loss",
    papers="Ainslie et al. 2023",
    arms=(
        Arm(FOUR_LARGE, {"model.n_kv_head": "4", "model.head_dim": "32"}),
        Arm(ONE_LARGE, {"model.n_kv_head": "1", "model.head_dim": "32"}),
        Arm(FOUR_SMALL, {"model.n_kv_head": "4", "model.head_dim": "8"}),
        Arm(ONE_SMALL, {"model.n_kv_head": "1", "model.head_dim": "8"}),
    ),
    emergences=(Emergence("recall", "task/repeated_loss", 0.5, is_rise=False),),
    claims=(
        Claim(
            "One key/value head instead of four of the same size, a quarter of the cache, costs "
            "little recall.",
            (
                CostsAtMost(
                    Quantity("task/repeated_loss", ONE_LARGE),
                    Quantity("task/repeated_loss", FOUR_LARGE),
                    margin=0.1,
                ),
            ),
            needs=(("recall", FOUR_LARGE),),
        ),
        Claim(
            "With the same cache, one large key/value head recalls more than four small ones.",
            (
                Exceeds(
                    Quantity("task/repeated_loss", FOUR_SMALL),
                    Quantity("task/repeated_loss", ONE_LARGE),
                    margin=0.1,
                ),
            ),
            needs=(("recall", ONE_LARGE),),
        ),
    ),
    plot=("task/repeated_loss", "task/repeated_accuracy", "task/induction"),
)

# The studies by the names of their sweep presets.
STUDIES = {
    "paper_induction": INDUCTION,
    "paper_markov": MARKOV,
    "paper_sinks": SINKS,
    "paper_grokking": GROKKING,
    "paper_sharing": SHARING,
}
