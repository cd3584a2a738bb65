"""The choice of how torch's threads wait, made before torch is imported."""

import os
import re
import subprocess
import sys
from contextlib import ExitStack

import pytest
from conftest import ROOT

from common import wait_policy
from common.wait_policy import VARIABLES, processors, read_usage

UNSET: dict[str, str | None] = dict.fromkeys(VARIABLES)
CHOOSE = """
import time
from common import wait_policy
time.sleep(0.5)
wait_policy.choose_wait_policy(print)
print(wait_policy.os.environ)
"""


def choose(**variables: str) -> str:
    """Return what the choice prints, and the variables after it, in a process of its own."""
    environment = {key: value for key, value in os.environ.items() if key not in VARIABLES}
    return subprocess.run(
        [sys.executable, "-c", CHOOSE],
        cwd=ROOT,
        env=environment | variables,
        capture_output=True,
        text=True,
        check=True,
    ).stdout


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


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="only Linux says what others use")
def test_threads_sleep_beside_other_programs():
    loop = [sys.executable, "-c", "while True: pass"]
    with ExitStack() as stack:
        for _ in processors():
            stack.callback(stack.enter_context(subprocess.Popen(loop)).kill)
        printed = choose()
    assert "note: other programs use" in printed and "'OMP_WAIT_POLICY': 'PASSIVE'" in printed


@pytest.mark.parametrize("name", VARIABLES)
def test_a_users_choice_stays(name):
    printed = choose(**{name: "1"})
    assert "note" not in printed
    assert [other for other in VARIABLES if f"'{other}'" in printed] == [name]


@pytest.mark.slow
@pytest.mark.parametrize("script", ["train.py", "sample.py", "explore.py"])
def test_a_command_chooses_before_torch_is_imported(new_command, finished_run, script):
    run_dir = "new" if script == "train.py" else finished_run
    environment = {**UNSET, "OMP_DISPLAY_ENV": "verbose"}  # printed by GNU's OpenMP as it starts
    done = new_command(script, f"run_dir={run_dir}", "device=cuda:99", env=environment)
    assert done.returncode == 1 and "cuda:99" in done.stderr
    if "GOMP_SPINCOUNT" not in done.stderr:
        pytest.skip("torch uses another OpenMP here")
    (rounds,) = re.findall(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr)
    assert int(rounds) in (0, wait_policy.SPIN_COUNT)
