"""Does modular addition generalize long after it is memorized, and does it need weight decay?"""

from studies.study import START, STEP, Claim, Event, Quantity, Study, main

DECAY, NO_DECAY = "weight decay", "no weight decay"
ACCURACY, FOURIER = "task/accuracy", "task/fourier_share"
MEMORIZATION, GENERALIZATION, RISE = "memorization", "generalization", "15% test accuracy"

STUDY = Study(
    title="Modular addition generalizes long after it is memorized",
    papers="Power et al. 2022; Nanda et al. 2023",
    variants={DECAY: {"optim.weight_decay": 1.0}, NO_DECAY: {"optim.weight_decay": 0.0}},
    events={
        MEMORIZATION: Event("task/train_accuracy", "above", 0.99),
        RISE: Event(ACCURACY, "above", 0.15),
        GENERALIZATION: Event(ACCURACY, "above", 0.9),
    },
    claims=[
        Claim(
            "Test accuracy rises long after training accuracy.",
            [Quantity(STEP, DECAY, GENERALIZATION).minus(at=MEMORIZATION, at_least=300)],
        ),
        Claim(
            "Fourier structure grows before test accuracy rises.",
            [Quantity(FOURIER, DECAY, RISE).minus(at=START, at_least=0.1)],
        ),
        Claim(
            "Fourier structure grows between memorization and the rise of test accuracy.",
            [Quantity(FOURIER, DECAY, RISE).minus(at=MEMORIZATION, at_least=0)],
        ),
        Claim(
            "Fourier structure goes on growing while test accuracy rises.",
            [Quantity(FOURIER, DECAY).minus(at=RISE, at_least=0.1)],
        ),
        Claim(
            "Fourier structure ends stronger with weight decay than without.",
            [Quantity(FOURIER, DECAY).minus(variant=NO_DECAY, at_least=0.1)],
            needs=[(GENERALIZATION, DECAY)],
        ),
        Claim(
            "Without weight decay the model does not generalize within the same number of steps.",
            [Quantity(ACCURACY, DECAY).minus(variant=NO_DECAY, at_least=0.3)],
            needs=[(MEMORIZATION, NO_DECAY), (GENERALIZATION, DECAY)],
        ),
    ],
)

if __name__ == "__main__":
    main(STUDY)
