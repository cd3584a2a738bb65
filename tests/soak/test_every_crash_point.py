"""Every job resumes after an interruption at every one of its file operations."""

import os

import pytest
from crash_points import check_interruptions, check_power_losses, needs_strace


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch):
    monkeypatch.setenv("GLASSGPT_CACHE", os.environ["GLASSGPT_CACHE"])  # restored afterwards


@needs_strace
@pytest.mark.parametrize(
    "job, sample",
    [*(("run", slice(n, None, 4)) for n in range(4)), ("prepare", slice(None)), ("sweep", 150)],
)
def test_a_job_resumes_after_a_kill_or_an_error(tmp_path, text_file, job, sample):
    check_interruptions(tmp_path, text_file, job, sample)


def test_a_run_resumes_after_a_power_loss_at_any_moment(tmp_path, text_file):
    check_power_losses(tmp_path, text_file, sample=None)
