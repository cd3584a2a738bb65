"""Verdicts on the claims of a study, from runs whose metrics are known."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from itertools import product
from math import sqrt
from pathlib import Path

import pytest
import yaml
from conftest import ROOT
from PIL import Image
from run_folders import write_fingerprint

import train
from cli.job import Job, compose_job
from common.errors import UserError
from config import Config
from run.config_file import config_yaml
from studies.study import (
    END,
    NOT_REPRODUCED,
    REPRODUCED,
    START,
    STEP,
    UNDECIDED,
    Claim,
    Event,
    Quantity,
    Results,
    Study,
    read_runs,
    report,
)

SWEEPS = sorted(path.stem for path in ROOT.glob("configs/sweep/paper_*.yaml"))
STEPS = range(0, 110, 10)
NEVER = 1000
FALL, HEAD = Event("task/loss", "below", 1.0), Event("task/head", "above", 0.5)
VARIANTS = {"a": {"model.n_layer": 1}, "b": {"model.n_layer": 2}}
EXCESS = Quantity("task/loss", "a").minus(variant="b", at_least=0.5)
COST = Quantity("task/loss", "a").minus(variant="b", at_most=0.5)

Curve = Callable[[int], float]


def rows_of(**curves: Curve) -> list[dict]:
    return [{"step": t} | {f"task/{name}": f(t) for name, f in curves.items()} for t in STEPS]


def write_run(
    folder: Path, variant: str, seed: int, rows: Sequence[dict], max_steps: int = 100
) -> None:
    run = folder / f"{variant}{seed}"
    run.mkdir(parents=True)
    config = Config(seed=seed, max_steps=max_steps)
    layers = replace(config.model, n_layer=VARIANTS[variant]["model.n_layer"])
    (run / "config.yaml").write_text(config_yaml(replace(config, model=layers)))
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_fingerprint(run, max_steps, f"text-{seed}")


def make_study(*claims: Claim) -> Study:
    return Study("A study", "A paper", VARIANTS, {"fall": FALL, "head": HEAD}, claims)


def judge(comparison, first: Sequence[float], second: Sequence[float]) -> str:
    runs: dict[str, dict[int, list[dict]]] = {"a": {}, "b": {}}
    for quantity, values in ((comparison.first, first), (comparison.second, second)):
        for seed, value in enumerate(values):
            runs[quantity.variant].setdefault(seed, [{}])[0][quantity.metric] = value
    return Results(make_study(), runs).judge_comparison(comparison)[0]


def test_a_verdict_needs_five_seeds():
    assert judge(EXCESS, [2.0, 2.1, 1.9, 2.0, 2.0], [1.0] * 5) == REPRODUCED
    assert judge(EXCESS, [2.0, 2.1, 1.9, 2.0], [1.0] * 5) == UNDECIDED
    assert judge(EXCESS, [], [1.0] * 5) == UNDECIDED


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
    assert (judge(EXCESS, higher, [1.0] * 5), judge(COST, higher, [1.0] * 5)) == (excess, cost)


def test_quantities_of_the_same_runs_are_compared_seed_by_seed():
    """The seeds differ by far more than the quantities of each."""
    lower = [0.0, 10.0, 20.0, 30.0, 40.0]
    comparison = Quantity("x", "a").minus(metric="y", at_least=0.5)
    assert judge(comparison, [value + 1 for value in lower], lower) == REPRODUCED


def test_a_claim_cannot_be_tested_if_what_it_needs_has_not_happened():
    losses = [0.9] * 3 + [1.1] * 3
    runs = {
        "a": {seed: rows_of(loss=lambda t: 2.0) for seed in range(6)},
        "b": {seed: rows_of(loss=lambda t, x=x: x) for seed, x in enumerate(losses)},
    }

    def verdict(*needs: tuple[str, str]) -> str:
        claim = Claim("It is so.", [EXCESS], needs)
        return Results(make_study(claim), runs).judge(claim)[0]

    assert verdict() == REPRODUCED
    assert verdict(("fall", "a")) == UNDECIDED  # in no seed
    assert verdict(("fall", "b")) == UNDECIDED  # in half of them


@pytest.mark.parametrize(
    ("head_steps", "within_20", "after_20", "count"),
    [
        ([50, 50, 50, 60, 50], REPRODUCED, NOT_REPRODUCED, 5),
        ([90, 90, 80, 90, 90], NOT_REPRODUCED, REPRODUCED, 0),
        ([50, 50, 50, 50, NEVER], UNDECIDED, UNDECIDED, None),  # four seeds have both events
        ([50] * 18 + [NEVER, 90], REPRODUCED, NOT_REPRODUCED, 18),
        ([50] * 5 + [NEVER] * 5, UNDECIDED, UNDECIDED, None),  # the event is not in most seeds
    ],
)
def test_two_events_are_compared_by_the_steps_between_them(head_steps, within_20, after_20, count):
    runs = {
        seed: rows_of(loss=lambda t: 2.0 * (t < 50), head=lambda t, step=step: float(t >= step))
        for seed, step in enumerate(head_steps)
    }
    steps = Quantity(STEP, "a", "head")
    together = Claim("Together.", [steps.minus(at="fall", at_least=-20, at_most=20)])
    later = Claim("Later.", [steps.minus(at="fall", at_least=20)])
    results = Results(make_study(together, later), {"a": runs})
    verdict, [reason] = results.judge(together)
    assert (verdict, results.judge(later)[0]) == (within_20, after_20)
    assert count is None or f"{count} of {len(head_steps)} seeds" in reason


@pytest.mark.parametrize(("at", "share"), [(START, 0.0), ("fall", 0.3), ("head", 0.5), (END, 1.0)])
def test_a_metric_is_read_at_the_start_at_events_and_at_the_end(at, share):
    loss, head = (lambda t: 2.0 - t / 20), (lambda t: float(t >= 50))
    rows = rows_of(loss=loss, head=head, share=lambda t: t / 100)
    results = Results(make_study(), {"a": {1: rows}})
    assert results.values(Quantity("task/share", "a", at)) == {1: share}


def test_an_event_may_be_that_a_metric_passes_another():
    rows = rows_of(x=lambda t: t / 10, y=lambda t: 5.5)
    assert Event("task/x", "above", "task/y").find(rows)["step"] == 60
    assert Event("task/y", "below", "task/x").find(rows)["step"] == 60


def test_an_event_is_confirmed_by_the_next_evaluation():
    def step(heights: dict[int, float]) -> int | None:
        return HEAD.find(rows_of(head=lambda t: heights.get(t, 0.0))).get("step")

    assert step({30: 0.9}) is None and step({100: 0.9}) is None
    assert step({30: 0.9, 50: 0.9, 60: 0.9}) == 50
    assert step({30: 0.5, 40: 0.5}) is None  # at the threshold, not past it


def test_the_report_has_every_seed_the_error_over_seeds_and_that_within_a_run(tmp_path, capsys):
    for seed, loss in enumerate((2.0, 4.0), 1):
        rows = rows_of(loss=lambda t, loss=loss: loss, loss_se=lambda t: 0.02)
        write_run(tmp_path, "a", seed, rows)
    write_run(tmp_path, "a", 3, rows_of())
    write_run(tmp_path, "b", 1, rows_of(), max_steps=200)  # has not finished
    report(make_study(Claim("It is so.", [EXCESS])), tmp_path)
    output = " ".join(capsys.readouterr().out.split())
    assert "2.000 4.000 – 3 ± 1 (0.02)" in output
    assert "never – (0 of 3)" in output
    assert "undecided" in output
    assert Image.open(tmp_path / "study.png").width > 1000


def test_runs_that_cannot_be_compared_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="empty"):
        read_runs(make_study(), tmp_path / "empty")
    write_run(tmp_path, "a", 1, rows_of())
    (tmp_path / "a1").rename(tmp_path / "other")
    write_run(tmp_path, "a", 1, rows_of())
    with pytest.raises(UserError, match="seed 1"):
        read_runs(make_study(), tmp_path)
    shutil.rmtree(tmp_path / "a1")
    write_run(tmp_path, "b", 1, rows_of())
    assert read_runs(make_study(), tmp_path)
    write_fingerprint(tmp_path / "b1", 100, "another text-1")
    with pytest.raises(UserError, match="2 texts"):
        read_runs(make_study(), tmp_path)


@pytest.mark.slow
def test_a_sweep_ends_with_the_verdicts_of_the_study_that_it_names(
    tmp_path, monkeypatch, run_hydra, capsys
):
    def record_run(job: Job) -> float:
        folder = Path(job.config.run_dir)
        (folder / "config.yaml").write_text(config_yaml(job.config))
        (folder / "metrics.jsonl").write_text(json.dumps({"step": job.config.max_steps}) + "\n")
        write_fingerprint(folder, job.config.max_steps)
        return 1.0

    monkeypatch.setattr(train, "run", record_run)
    settings = ["sweep=paper_markov", "seed=1", f"hydra.sweep.dir={tmp_path / 'sweep'}"]
    assert run_hydra("-m", *settings) == 0
    assert capsys.readouterr().out.count("undecided") == 4


def study_of(sweep: str) -> Study:
    return import_module(f"studies.{sweep.removeprefix('paper_')}").STUDY


@pytest.mark.parametrize("sweep", SWEEPS)
def test_a_study_names_its_own_variants_and_events(sweep):
    study = study_of(sweep)
    needs = [need for claim in study.claims for need in claim.needs]
    named = {variant for _, variant in needs} | {each.variant for each in study.quantities}
    assert named <= {*study.variants}
    assert {event for event, _ in needs} <= {*study.events}
    assert {each.at for each in study.quantities} <= {START, END, *study.events}


@pytest.mark.slow
@pytest.mark.parametrize("sweep", SWEEPS)
def test_each_job_of_a_studys_preset_belongs_to_one_variant(sweep):
    study = study_of(sweep)
    preset = yaml.safe_load((ROOT / "configs" / "sweep" / f"{sweep}.yaml").read_text())
    params = preset["hydra"]["sweeper"]["params"] | {"seed": 301}
    axes = [[f"{key}={value}" for value in str(params[key]).split(",")] for key in params]
    variants = [study.variants_of(compose_job([*settings]).config) for settings in product(*axes)]
    assert sorted(variants) == sorted([variant] for variant in study.variants)
