import json
import subprocess
import sys

import pytest
from conftest import ROOT

pytestmark = pytest.mark.slow


def test_the_speedrun_benchmark_compares_both_runs_and_writes_json(test_data, tmp_path):
    settings = [f"data.path={test_data / 'data' / 'tinyshakespeare.txt'}", "max_steps=2", f"json={tmp_path / 'out.json'}"]
    done = subprocess.run([sys.executable, "-m", "benchmarks.speedrun", *settings], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pair, = json.loads((tmp_path / "out.json").read_text())["pairs"]
    assert pair["ratio"] == pair["nanogpt_cpu"]["train_seconds"] / pair["speedrun"]["train_seconds"]
    assert "Time to quality" in done.stdout and all(pair[name]["step"] == 2 for name in ("nanogpt_cpu", "speedrun"))
