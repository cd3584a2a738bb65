"""Compare fewer key/value heads at an equal head size, and at an equal size of the cache."""

from studies.study import Claim, Event, Quantity, Study, main

FOUR_LARGE, ONE_LARGE = "4 key/value heads of 32", "1 key/value head of 32"
FOUR_SMALL, ONE_SMALL = "4 key/value heads of 8", "1 key/value head of 8"
LOSS, RECALL = "task/repeated_loss", "recall"

STUDY = Study(
    title="Fewer key/value heads save cache at little loss",
    papers="Shazeer 2019; Ainslie et al. 2023",
    variants={
        FOUR_LARGE: {"model.n_kv_head": 4, "model.head_dim": 32},
        ONE_LARGE: {"model.n_kv_head": 1, "model.head_dim": 32},
        FOUR_SMALL: {"model.n_kv_head": 4, "model.head_dim": 8},
        ONE_SMALL: {"model.n_kv_head": 1, "model.head_dim": 8},
    },
    events={RECALL: Event(LOSS, "below", 0.5)},
    claims=[
        Claim(
            "With 32 channels per head, one key/value head instead of four costs little recall.",
            [Quantity(LOSS, ONE_LARGE).minus(variant=FOUR_LARGE, at_most=0.02)],
            needs=[(RECALL, FOUR_LARGE)],
        ),
        Claim(
            "With 8 channels per head, one key/value head instead of four costs little recall.",
            [Quantity(LOSS, ONE_SMALL).minus(variant=FOUR_SMALL, at_most=0.02)],
            needs=[(RECALL, FOUR_SMALL)],
        ),
        Claim(
            "With the same cache, one large key/value head recalls more than four small ones.",
            [Quantity(LOSS, FOUR_SMALL).minus(variant=ONE_LARGE, at_least=0.02)],
            needs=[(RECALL, ONE_LARGE)],
        ),
    ],
)

if __name__ == "__main__":
    main(STUDY)
