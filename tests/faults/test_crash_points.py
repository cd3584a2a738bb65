"""A run resumes after a kill, a failing write or a power loss: a sample of tests/soak."""

import os

import pytest
from crash_points import check_interruptions, check_power_losses, needs_strace


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch):
    monkeypatch.setenv("GLASSGPT_CACHE", os.environ["GLASSGPT_CACHE"])  # restored afterwards


@needs_strace
@pytest.mark.slow
def test_a_run_resumes_after_a_kill_or_an_error(tmp_path, text_file):
    check_interruptions(tmp_path, text_file, "run", sample=2)


@pytest.mark.slow
def test_a_run_resumes_after_a_power_loss(tmp_path, text_file):
    check_power_losses(tmp_path, text_file, sample=2)
