"""Every job resumes after an interruption at every one of its file operations.

The cases are in `PARTS` parts, of which each day takes another one. GLASSGPT_CRASH_PARTS=all takes
all of them, and the number of a part repeats it. Run with -v to see the progress.
"""

import os
from datetime import date

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

PARTS = 20
TODAY = date.today().toordinal() % PARTS
CHOSEN = os.environ.get("GLASSGPT_CRASH_PARTS", str(TODAY))
IN_PARTS = pytest.mark.parametrize("part", range(PARTS) if CHOSEN == "all" else [int(CHOSEN)])


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch):
    monkeypatch.setenv("GLASSGPT_CACHE", os.environ["GLASSGPT_CACHE"])  # restored afterwards


@needs_strace
@IN_PARTS
@pytest.mark.parametrize("job", ["sweep", "run", "prepare"])
def test_a_job_resumes_after_a_kill_or_an_error(tmp_path, text_file, shared, job, part):
    whole = shared(f"undisturbed_{job}", lambda folder: run_undisturbed(folder, job, text_file))
    check_interruptions(whole, job, text_file, find_cases(whole, job)[part::PARTS], tmp_path)


@IN_PARTS
def test_a_run_resumes_after_a_power_loss_at_any_moment(tmp_path, text_file, shared, part):
    whole = shared("failing_disk", lambda folder: run_on_failing_disk(folder, text_file))
    states = states_of_disk(whole)
    assert len(states) > PARTS
    check_power_losses(whole, text_file, states[part::PARTS], tmp_path)
