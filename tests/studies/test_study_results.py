"""Verdicts on the claims of a study, from runs whose metrics are known."""

from collections.abc import Callable, Sequence
from itertools import product
from math import inf, sqrt

import pytest
from conftest import ROOT
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from cli.job import compose_job
from config import Config, EvalConfig
from studies.claims import (
    END,
    START,
    STEP,
    STUDIES,
    Arm,
    Claim,
    Comparison,
    Emergence,
    Quantity,
    Study,
)
from studies.verdicts import (
    NOT_REPRODUCED,
    REPRODUCED,
    UNDECIDED,
    Run,
    StudyResults,
    Verdict,
    find_step,
    is_in,
)

STEPS = range(0, 110, 10)
LOSS_FALLS = Emergence("fall", "task/loss", 1.0, is_rise=False)
HEAD_EMERGES = Emergence("head", "task/head", 0.5)


def make_run(arm: str, seed: int, metrics: dict[str, Callable[[int], float]]) -> Run:
    rows = [{"step": step} | {key: curve(step) for key, curve in metrics.items()} for step in STEPS]
    config = Config(seed=seed, max_steps=STEPS[-1], eval=EvalConfig(every=10))
    return Run(arm, config, rows)


def runs_with(values: dict[str, Sequence[float]], metric: str = "task/loss") -> list[Run]:
    """Return runs of arms whose metric has these values, one for each seed, at every step."""
    return [
        make_run(arm, seed, {metric: lambda _, value=value: value})
        for arm, of_seeds in values.items()
        for seed, value in enumerate(of_seeds, 1)
    ]


def verdict_on(test: Comparison, runs: list[Run], needs=()) -> str:
    return judge(test, runs, needs).verdict


def judge(test: Comparison, runs: list[Run], needs=()) -> Verdict:
    claim = Claim("It is so.", (test,), needs)
    arms = (Arm("a", {}), Arm("b", {}))
    study = Study("A study", "A paper", arms, (LOSS_FALLS, HEAD_EMERGES), (claim,), ())
    return StudyResults(study, by_arm(runs)).verdict(claim)


def by_arm(runs: list[Run]) -> dict[str, list[Run]]:
    return {arm: [run for run in runs if run.name == arm] for arm in ("a", "b")}


EXCESS = Comparison(Quantity("task/loss", "a"), Quantity("task/loss", "b"), at_least=0.5)
COST = EXCESS._replace(at_least=-inf, at_most=0.5)


@pytest.mark.parametrize(
    ("higher", "excess", "cost"),
    [
        ([2.0, 2.1, 1.9, 2.0, 2.0], REPRODUCED, NOT_REPRODUCED),
        ([1.2, 1.1, 1.3, 1.2, 1.2], NOT_REPRODUCED, REPRODUCED),  # significant, but too small
        ([0.0, 0.1, 0.1, 0.0, 0.0], NOT_REPRODUCED, REPRODUCED),  # the opposite
        ([2.0, 1.0, 3.0, 1.2, 1.3], UNDECIDED, UNDECIDED),  # the error is too large
        ([2.0, 2.1, 1.9], UNDECIDED, UNDECIDED),  # too few seeds
        ([], UNDECIDED, UNDECIDED),
    ],
)
def test_a_difference_has_a_verdict_by_its_margin_and_its_error(higher, excess, cost):
    runs = runs_with({"a": higher, "b": [1.0, 1.1, 0.9, 1.0, 1.0]})
    assert verdict_on(EXCESS, runs) == excess and verdict_on(COST, runs) == cost


@pytest.mark.parametrize(
    ("distance", "in_errors", "excess", "cost"),
    [
        (0.3, 5.2, REPRODUCED, NOT_REPRODUCED),
        (0.3, 4.8, UNDECIDED, NOT_REPRODUCED),
        (0.3, 3.2, UNDECIDED, NOT_REPRODUCED),
        (0.3, 2.8, UNDECIDED, UNDECIDED),
        (-0.3, 2.8, UNDECIDED, UNDECIDED),
        (-0.3, 3.2, NOT_REPRODUCED, UNDECIDED),
        (-0.3, 4.8, NOT_REPRODUCED, UNDECIDED),
        (-0.3, 5.2, NOT_REPRODUCED, REPRODUCED),
    ],
)
def test_a_verdict_needs_five_standard_errors_from_the_bound_and_its_opposite_three(
    distance, in_errors, excess, cost
):
    half_range = sqrt(10) * abs(distance) / in_errors  # of five values, for this standard error
    higher = [1.5 + distance + half_range * place for place in (-1, 0, 0, 0, 1)]
    runs = runs_with({"a": higher, "b": [1.0] * 5})
    assert verdict_on(EXCESS, runs) == excess and verdict_on(COST, runs) == cost


def test_a_claim_cannot_be_tested_if_what_it_needs_has_not_emerged():
    runs = runs_with({"a": [2.0] * 5, "b": [0.1] * 5})
    assert verdict_on(EXCESS, runs, needs=(("fall", "b"),)) == REPRODUCED
    assert verdict_on(EXCESS, runs, needs=(("fall", "a"),)) == UNDECIDED
    half = runs_with({"a": [2.0] * 5, "b": [0.9] * 3 + [1.1] * 3})
    assert verdict_on(EXCESS, half, needs=(("fall", "b"),)) == UNDECIDED


def test_metrics_of_the_same_runs_are_compared_seed_by_seed():
    """The seeds differ by far more than the metrics of each."""
    curves = [{"x": lambda _, k=k: 10.0 * k + 1, "y": lambda _, k=k: 10.0 * k} for k in range(5)]
    runs = [make_run("a", seed, metrics) for seed, metrics in enumerate(curves)]
    assert verdict_on(Comparison(Quantity("x", "a"), Quantity("y", "a"), 0.5), runs) == REPRODUCED


NEVER = 1000


@pytest.mark.parametrize(
    ("head_steps", "within_20", "after_20", "count"),
    [
        ([50, 50, 50, 60, 50], REPRODUCED, NOT_REPRODUCED, 5),
        ([30, 50, 70, 50, 50], UNDECIDED, NOT_REPRODUCED, 5),
        ([90, 90, 80, 90, 90], NOT_REPRODUCED, REPRODUCED, 0),
        ([20, 10, 10, 10, 10], NOT_REPRODUCED, NOT_REPRODUCED, 0),
        ([50, 50, 50, 50, NEVER], UNDECIDED, UNDECIDED, 4),  # four seeds have both events
        ([50] * 18 + [NEVER, 90], REPRODUCED, NOT_REPRODUCED, 18),
        ([50] * 5 + [NEVER] * 5, UNDECIDED, UNDECIDED, 5),  # the event is not in most seeds
    ],
)
def test_two_events_are_compared_by_the_steps_between_them(head_steps, within_20, after_20, count):
    runs = [
        make_run(
            "a",
            seed,
            {"task/loss": lambda t: float(t < 50) * 2, "task/head": lambda t, s=s: float(t >= s)},
        )
        for seed, s in enumerate(head_steps)
    ]
    head, fall = Quantity(STEP, "a", "head"), Quantity(STEP, "a", "fall")
    together = Comparison(head, fall, at_least=-20, at_most=20)
    assert verdict_on(together, runs) == within_20
    assert verdict_on(Comparison(head, fall, at_least=20), runs) == after_20
    if within_20 != UNDECIDED:
        reason = judge(together, runs).reason
        assert f"{count} of {len(runs)} seeds" in reason
        assert ("before" in reason) == (min(head_steps) < 50)


@pytest.mark.parametrize(
    ("first", "second", "difference"),
    [("head", START, 0.5), (END, "head", 0.5), (END, START, 1.0), ("head", "fall", 0.2)],
)
def test_a_metric_is_compared_at_the_start_at_events_and_at_the_end(first, second, difference):
    curves = {
        "task/loss": lambda t: 2.0 - t / 20,  # falls below 1 after step 20
        "task/head": lambda t: float(t >= 50),
        "task/share": lambda t: t / 100,
    }
    runs = [make_run("a", seed, curves) for seed in range(5)]
    sides = Quantity("task/share", "a", first), Quantity("task/share", "a", second)
    above, below = difference - 0.01, difference + 0.01
    assert verdict_on(Comparison(*sides, at_least=above, at_most=below), runs) == REPRODUCED
    assert verdict_on(Comparison(*sides, at_least=below), runs) == NOT_REPRODUCED


def test_an_event_may_be_that_a_metric_passes_another():
    curves = {"x": lambda t: t / 10, "y": lambda t: 5.5}
    run = make_run("a", 1, curves)
    assert find_step(run, Emergence("", "x", "y")) == 60
    assert find_step(run, Emergence("", "y", "x", is_rise=False)) == 60


def test_an_event_is_confirmed_by_the_next_evaluation_and_then_stays():
    def step(values: dict[int, float]) -> int | None:
        return find_step(
            make_run("a", 1, {"task/head": lambda t: values.get(t, 0.0)}), HEAD_EMERGES
        )

    assert step({30: 0.9}) is None
    assert step({30: 0.9, 50: 0.9, 60: 0.9}) == 50
    assert step({100: 0.9}) is None
    assert step({30: 0.5, 40: 0.5}) is None  # at the threshold, not past it
    assert find_step(make_run("a", 1, {"task/loss": lambda _: 1.0}), LOSS_FALLS) is None


def test_the_tables_have_every_seed_the_error_over_seeds_and_that_within_a_run():
    metrics = [{"task/loss": lambda _, v=v: v, "task/loss_se": lambda _: 0.02} for v in (2.0, 4.0)]
    runs = [make_run("a", seed, of_seed) for seed, of_seed in enumerate([*metrics, {}])]
    claim = Claim("It is so.", (EXCESS,))
    study = Study("", "", (Arm("a", {}), Arm("b", {})), (LOSS_FALLS,), (claim,), ())
    values, emergence = StudyResults(study, by_arm(runs)).tables()
    assert values.rows == [["a", "2.000 4.000 –", "3 ± 1", "0.02"]]
    assert "by seed" in values.columns  # of the two arms, one has no runs
    assert emergence.rows[0] == ["fall", "a", "– – –", "–", "0 of 3"]


def test_every_study_names_its_own_arms_and_events():
    for study in STUDIES.values():
        arms = {arm.name for arm in study.arms}
        events = {emergence.name for emergence in study.emergences}
        for claim in study.claims:
            assert {arm for _, arm in claim.needs} <= arms
            assert {event for event, _ in claim.needs} <= events
            for quantity in claim.quantities:
                assert quantity.arm in arms and quantity.at in {START, END, *events}


def arms_of_jobs(name: str) -> list[str]:
    """Return the arm of each job of a sweep preset with one seed; "" for a job without one."""
    params = OmegaConf.load(ROOT / "configs" / "sweep" / f"{name}.yaml").hydra.sweeper.params
    overrides = OverridesParser.create().parse_overrides(
        [f"{key}={value}" for key, value in params.items() if key != "seed"]
    )
    choices = [
        [f"{o.key_or_group}={value}" for value in o.sweep_string_iterator()]
        if o.is_sweep_override()
        else [str(o.input_line)]
        for o in overrides
    ]
    arms = []
    for settings in product(*choices):
        config = compose_job([*settings]).config
        arms.append(" ".join(arm.name for arm in STUDIES[name].arms if is_in(arm, config)))
    return arms


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(p.stem for p in ROOT.glob("configs/sweep/paper_*.yaml")))
def test_each_job_of_a_studys_preset_belongs_to_one_arm(name):
    assert sorted(arms_of_jobs(name)) == sorted(arm.name for arm in STUDIES[name].arms)
