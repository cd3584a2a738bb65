import json
import subprocess
import sys

import pytest
from conftest import ROOT

pytestmark = pytest.mark.soak


def test_the_speedrun_benchmark_compares_the_runs_and_writes_json(test_data, tmp_path):
    settings = [f"data.path={test_data / 'data' / 'tinyshakespeare.txt'}", "max_steps=2",
                "runs=speedrun", "targets=9.9,0.1", "eval.every=2",
                "data.val_max_tokens=4000", f"json={tmp_path / 'out.json'}"]
    done = subprocess.run([sys.executable, "-m", "benchmarks.speedrun", *settings], cwd=ROOT,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    assert list(result) == ["nanogpt_cpu", "speedrun"]
    assert all(run["steps"] == 2 and run["seconds"] > 0 and 2 < run["loss"] < 5
               for runs in result.values() for run in runs)
    for run in (run for runs in result.values() for run in runs):
        assert 0 <= run["seconds_to"]["9.9"] < run["seconds"] and run["seconds_to"]["0.1"] is None
    assert "nanogpt_cpu" in done.stdout and "never" in done.stdout
