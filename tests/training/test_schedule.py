from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import rows

from config import Config, ModelConfig, OptimConfig
from training.run_folder import describe_rate_change
from training.schedule import is_due, lr_factor
from training.time_left import count_due


def factors(steps: int, **optim) -> list[float]:
    return [lr_factor(step, OptimConfig(**optim), steps) for step in range(steps)]


def test_the_cosine_schedule_rises_linearly_and_ends_at_its_minimum():
    cosine = factors(2000, warmup_steps=100, min_lr_ratio=0.1)
    assert cosine[:3] == pytest.approx([1 / 101, 2 / 101, 3 / 101])
    assert cosine[100] == 1.0
    assert cosine[1050] == pytest.approx(0.55)
    assert cosine[-1] == pytest.approx(0.1, abs=1e-4)


def test_the_wsd_schedule_is_flat_and_then_falls_linearly():
    wsd = factors(100, schedule="wsd", warmup_steps=5, decay_share=0.4, min_lr_ratio=0.0)
    assert set(wsd[5:61]) == {1.0}
    assert wsd[80] == pytest.approx(0.5)
    assert wsd[99] == pytest.approx(1 / 40)


def test_the_constant_schedule_stays_at_its_peak():
    assert set(factors(50, schedule="constant", warmup_steps=0)) == {1.0}


def test_after_the_last_step_the_rate_stays_at_its_minimum():
    assert lr_factor(60, OptimConfig(min_lr_ratio=0.2), max_steps=50) == 0.2


schedules = st.builds(
    OptimConfig,
    name=st.sampled_from(["adamw", "muon"]),
    lr=st.sampled_from([1e-3, 6e-3]),
    schedule=st.sampled_from(["cosine", "wsd", "constant"]),
    min_lr_ratio=st.sampled_from([0.0, 0.1, 1.0]),
    decay_share=st.sampled_from([0.2, 1.0]),
)
lengths = st.integers(1, 200)


@given(schedules, lengths, lengths, lengths)
def test_a_changed_length_names_both_rates(optim, steps, now, done):
    before = Config(model=ModelConfig(vocab_size=9), optim=optim, max_steps=steps)
    after = replace(before, max_steps=now)
    step = min(done, steps)
    old, new = (optim.lr * lr_factor(step, optim, length) for length in (steps, now))
    note = describe_rate_change(before, after, step)
    assert describe_rate_change(before, before, step) is None
    if step >= now or old == pytest.approx(new, rel=1e-9):
        assert note is None
        return
    assert f"{new:.3g}" in note and f"{old:.3g}" in note and f"max_steps={now}" in note


@pytest.mark.slow
def test_extending_a_finished_run_says_what_its_learning_rate_becomes(
    tiny, train_in_process, capsys
):
    config = replace(tiny, max_steps=2)
    train_in_process(config)
    assert "learning rate" not in capsys.readouterr().out
    train_in_process(config, resume=True)
    assert "schedule" in capsys.readouterr().out
    train_in_process(config, resume=True, max_steps=4)
    note = capsys.readouterr().out
    assert f"{rows(config.run_dir)[3]['train/lr']:.3g}" in note and "0.0001" in note


@given(every=st.integers(0, 9), max_steps=st.integers(1, 30), after=st.integers(-1, 35))
def test_what_is_due_after_a_step_is_counted(every, max_steps, after):
    config = Config(max_steps=max_steps)
    expected = sum(is_due(every, step, config) for step in range(after + 1, max_steps + 1))
    assert count_due(every, after, config) == expected
