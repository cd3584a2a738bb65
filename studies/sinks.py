"""Does a sink logit, or a gate, keep heads from attending to the first token?"""

from studies.study import Claim, Event, Quantity, Study, main

SOFTMAX, SINK_LOGIT, GATE = "softmax", "sink logit", "gate"
NOTHING, SOMETHING = "task/sink_nothing_to_find", "task/sink_something_to_find"
INDUCTION_HEAD = "induction head"

STUDY = Study(
    title="A head that finds nothing attends to the first token",
    papers="Xiao et al. 2023; Gu et al. 2024; gpt-oss 2025; Qiu et al. 2025",
    variants={
        SOFTMAX: {"model.attention_sink": False, "model.attention_gate": "none"},
        SINK_LOGIT: {"model.attention_sink": True, "model.attention_gate": "none"},
        GATE: {"model.attention_sink": False, "model.attention_gate": "channel"},
        "both": {"model.attention_sink": True, "model.attention_gate": "channel"},
    },
    events={INDUCTION_HEAD: Event("task/induction", "above", 0.2)},
    claims=[
        Claim(
            "The strongest induction head attends to the first token if there is nothing to find, "
            "and not if there is something.",
            [Quantity(NOTHING, SOFTMAX).minus(metric=SOMETHING, at_least=0.3)],
            needs=[(INDUCTION_HEAD, SOFTMAX)],
        ),
        Claim(
            "A learned sink logit removes this attention sink.",
            [Quantity(NOTHING, SOFTMAX).minus(variant=SINK_LOGIT, at_least=0.3)],
            needs=[(INDUCTION_HEAD, SOFTMAX), (INDUCTION_HEAD, SINK_LOGIT)],
        ),
        Claim(
            "A gate on the heads' outputs removes this attention sink.",
            [Quantity(NOTHING, SOFTMAX).minus(variant=GATE, at_least=0.3)],
            needs=[(INDUCTION_HEAD, SOFTMAX), (INDUCTION_HEAD, GATE)],
        ),
    ],
)

if __name__ == "__main__":
    main(STUDY)
