"""Does induction need two layers, or one whose keys contain the previous token?"""

from studies.study import STEP, Claim, Event, Quantity, Study, main

TWO_LAYERS, ONE_LAYER, SMEARED = "two layers", "one layer", "one smeared layer"
LOSS, LOSS_FALL = "task/repeated_loss", "fall of the repeated loss"
INDUCTION_HEAD, PREVIOUS_HEAD = "induction head", "previous-token head"
LEARNING = "in-context learning"

STUDY = Study(
    title="Induction needs two layers, or keys that contain the previous token",
    papers="Elhage et al. 2021; Olsson et al. 2022",
    variants={
        TWO_LAYERS: {"model.n_layer": 2, "model.smear_keys": False},
        ONE_LAYER: {"model.n_layer": 1, "model.smear_keys": False},
        SMEARED: {"model.n_layer": 1, "model.smear_keys": True},
        "two smeared layers": {"model.n_layer": 2, "model.smear_keys": True},
    },
    events={
        LOSS_FALL: Event(LOSS, "below", 1.4),
        INDUCTION_HEAD: Event("task/induction", "above", 0.2),
        PREVIOUS_HEAD: Event("task/previous_token", "above", 0.12),
        LEARNING: Event("val/in_context_score", "above", 1.5),
    },
    claims=[
        Claim(
            "Two layers learn to predict repeated tokens; one layer does not.",
            [Quantity(LOSS, ONE_LAYER).minus(variant=TWO_LAYERS, at_least=0.5)],
            needs=[(LOSS_FALL, TWO_LAYERS)],
        ),
        Claim(
            "One layer learns to predict repeated tokens if its keys contain the previous token.",
            [Quantity(LOSS, ONE_LAYER).minus(variant=SMEARED, at_least=0.5)],
        ),
        Claim(
            "The induction head, the previous-token head and in-context learning emerge when the "
            "loss of repeated tokens falls.",
            [
                Quantity(STEP, TWO_LAYERS, event).minus(at=LOSS_FALL, at_least=-100, at_most=100)
                for event in (INDUCTION_HEAD, PREVIOUS_HEAD, LEARNING)
            ],
        ),
    ],
)

if __name__ == "__main__":
    main(STUDY)
