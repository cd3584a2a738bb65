"""The choice of how torch's threads wait, made before torch is imported."""

import os
import re
import sys

import pytest
from conftest import soak

from common import wait_policy
from common.wait_policy import VARIABLES, Usage, choose_wait_policy, read_usage


def test_only_the_processors_of_this_process_count(monkeypatch, tmp_path):
    monkeypatch.setattr(wait_policy, "processors", lambda: [1, 10])
    ticks = os.sysconf("SC_CLK_TCK")
    lines = [
        f"cpu  0 0 0 {9 * ticks} 0 0",
        f"cpu0 0 0 0 {7 * ticks} 0 0",
        f"cpu1 8 8 8 {2 * ticks} {ticks} 8",
        f"cpu10 0 0 0 {4 * ticks} 0 0",
        "intr 1",
    ]
    (tmp_path / "stat").write_text("\n".join(lines))
    usage = read_usage(tmp_path / "stat")
    assert usage is not None and usage.idle == 2 + 1 + 4
    assert read_usage(tmp_path / "none") is None


@pytest.mark.parametrize(("share", "variable"), [(0.1, "GOMP_SPINCOUNT"), (0.5, "OMP_WAIT_POLICY")])
def test_threads_sleep_beside_other_programs(monkeypatch, share, variable):
    now = Usage(clock=10, idle=20 * (1 - share) - 3, own=3)  # of two processors
    monkeypatch.setattr(wait_policy, "_STARTED", Usage(0, 0, 0))
    monkeypatch.setattr(wait_policy, "read_usage", lambda: now)
    monkeypatch.setattr(wait_policy, "processors", lambda: [0, 1])
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # restored at the end
    notes = []
    choose_wait_policy(notes.append)
    assert [name for name in VARIABLES if os.environ[name]] == [variable]
    assert len(notes) == (variable == "OMP_WAIT_POLICY")
    before = dict(os.environ)
    choose_wait_policy(pytest.fail)  # now they have chosen
    assert dict(os.environ) == before


@pytest.mark.slow
@pytest.mark.parametrize("script", ["train.py", soak("sample.py"), soak("explore.py")])
def test_a_command_starts_in_safe_path_mode_and_chooses_before_torch_is_imported(
    new_command, finished_run, script
):
    run_dir = "new" if script == "train.py" else finished_run
    environment = {**dict.fromkeys(VARIABLES), "PYTHONSAFEPATH": "1"}
    environment["OMP_DISPLAY_ENV"] = "verbose"  # printed by GNU's OpenMP as it starts
    done = new_command(script, f"run_dir={run_dir}", "device=cuda:99", env=environment)
    assert done.returncode == 1 and "cuda:99" in done.stderr
    if "GOMP_SPINCOUNT" not in done.stderr:
        pytest.skip("torch uses another OpenMP here")
    (rounds,) = re.findall(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr)
    assert int(rounds) in (0, wait_policy.SPIN_COUNT)
