"""The parts of the GPU benchmark end in time and report their failures, also on a CPU."""

import time

import pytest

from benchmarks import gpu
from benchmarks.gpu import Part


@pytest.mark.slow
def test_a_part_and_its_child_processes_end_at_the_time_limit(tmp_path):
    child = f"import time; time.sleep(2); open({str(tmp_path / 'alive')!r}, 'w')"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    outcome = gpu.run_part(Part("slow", 0.5, ["-c", code, ""]), "cpu")
    assert "0.5" in outcome["error"] and outcome["seconds"] < 2
    time.sleep(2.5)
    assert not (tmp_path / "alive").exists()


def test_a_part_that_fails_is_reported_by_its_last_line_of_output():
    code = "print('one'); raise ValueError('two')"
    outcome = gpu.run_part(Part("failing", 60, ["-c", code, ""]), "cpu")
    assert outcome["error"] == "ValueError: two"
