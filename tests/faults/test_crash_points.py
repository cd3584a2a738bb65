"""A run resumes after a kill, a failing write or a power loss: a sample of tests/soak."""

import os
import random

import pytest
from crash_points import (
    check_interruptions,
    check_power_losses,
    find_cases,
    needs_strace,
    run_on_failing_disk,
    run_undisturbed,
    states_of_disk,
)


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch):
    monkeypatch.setenv("GLASSGPT_CACHE", os.environ["GLASSGPT_CACHE"])  # restored afterwards


@needs_strace
@pytest.mark.slow
def test_a_run_resumes_after_a_kill_or_an_error(tmp_path, text_file, shared):
    whole = shared("undisturbed_run", lambda folder: run_undisturbed(folder, "run", text_file))
    sample = random.Random(0).sample(find_cases(whole, "run"), 2)
    check_interruptions(whole, "run", text_file, sample, tmp_path)


@pytest.mark.slow
def test_a_run_resumes_after_a_power_loss(tmp_path, text_file, shared):
    whole = shared("failing_disk", lambda folder: run_on_failing_disk(folder, text_file))
    sample = random.Random(1).sample(states_of_disk(whole), 2)
    check_power_losses(whole, text_file, sample, tmp_path)
