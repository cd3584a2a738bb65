"""Are in-context Markov chains learned in phases, and by two layers only?"""

from studies.study import START, STEP, Claim, Event, Quantity, Study, main

TWO_LAYERS, ONE_LAYER = "two layers", "one layer"
UNIFORM, UNIGRAM, BIGRAM = "task/kl_uniform", "task/kl_unigram", "task/kl_bigram"
UNIGRAM_PHASE, BIGRAM_PHASE = "unigram phase", "bigram phase"

STUDY = Study(
    title="In-context Markov chains are learned in phases",
    papers="Edelman et al. 2024",
    variants={TWO_LAYERS: {"model.n_layer": 2}, ONE_LAYER: {"model.n_layer": 1}},
    events={
        UNIGRAM_PHASE: Event(UNIGRAM, "below", UNIFORM),
        BIGRAM_PHASE: Event(BIGRAM, "below", UNIGRAM),
        "previous-token head": Event("task/previous_token", "above", 0.5),
        "statistical induction head": Event("task/same_state", "above", 0.6),
    },
    claims=[
        Claim(
            "The predictions are uniform at first, then those of in-context unigrams, then those "
            "of in-context bigrams.",
            [
                Quantity(UNIGRAM, TWO_LAYERS, START).minus(metric=UNIFORM, at_least=0.05),
                Quantity(STEP, TWO_LAYERS, BIGRAM_PHASE).minus(at=UNIGRAM_PHASE, at_least=30),
            ],
        ),
        Claim(
            "One layer stays at unigrams.",
            [
                Quantity(BIGRAM, ONE_LAYER).minus(variant=TWO_LAYERS, at_least=0.03),
                Quantity(BIGRAM, ONE_LAYER).minus(metric=UNIGRAM, at_least=0.03),
            ],
        ),
        Claim(
            "The second layer learns to attend to what followed the current state.",
            [Quantity("task/same_state", TWO_LAYERS).minus(at=START, at_least=0.1)],
        ),
        Claim(
            "The first layer learns to attend to the previous token.",
            [Quantity("task/previous_token", TWO_LAYERS).minus(at=START, at_least=0.4)],
        ),
    ],
)

if __name__ == "__main__":
    main(STUDY)
