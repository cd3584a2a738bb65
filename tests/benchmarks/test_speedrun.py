import json
import subprocess
import sys

import pytest
from conftest import ROOT

pytestmark = pytest.mark.slow


def test_the_speedrun_benchmark_compares_the_runs_and_writes_json(test_data, tmp_path):
    settings = [f"data.path={test_data / 'data' / 'tinyshakespeare.txt'}", "max_steps=2",
                "runs=speedrun", f"json={tmp_path / 'out.json'}"]
    done = subprocess.run([sys.executable, "-m", "benchmarks.speedrun", *settings], cwd=ROOT,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    assert list(result) == ["nanogpt_cpu", "speedrun"]
    assert all(run["steps"] == 2 and run["seconds"] > 0 and 2 < run["loss"] < 5
               for runs in result.values() for run in runs)
    assert "nanogpt_cpu" in done.stdout
