"""The command for a GPU, on a CPU: all its parts run for real, at their smallest."""

import json
import time

import pytest

from benchmarks import gpu

SMALL = ["device=cpu", "max_steps=2", "model.n_layer=1", "model.n_embd=16", "model.n_head=1",
         "model.n_kv_head=1", "model.block_size=16", "compile=false", "seeds=1"]


@pytest.fixture
def settings(test_data, tmp_path) -> list[str]:
    return [*SMALL, f"data.path={test_data / 'data' / 'tinyshakespeare.txt'}",
            f"json={tmp_path / 'out.json'}"]


@pytest.mark.soak
def test_a_part_that_fails_is_named_and_the_rest_goes_on(settings, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PYTEST_ADDOPTS", "-k captured")  # one of the tests
    result = gpu.main([*settings, "parts=tests,training,quality", "sizes=9x9"])
    assert json.loads((tmp_path / "out.json").read_text()) == result
    assert result["parts"]["tests"]["result"] == {"passed": 1, "skipped": 0, "failed": {}}
    assert result["parts"]["training 9x9"]["error"].startswith("error: 9x9 is not one of")
    run, = result["parts"]["quality"]["result"]["shakespeare_gpu"]
    assert run["steps"] == 2 and run["seconds_to"] == {"1.4697": None, "1.44": None}
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.slow
def test_a_part_ends_with_its_time_and_so_do_the_processes_that_it_started(tmp_path):
    child = f"import time; time.sleep(2); open({str(tmp_path / 'alive')!r}, 'w')"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    done = gpu.run_part(0.5, ["-c", code, ""], "cpu")
    assert done["error"] == "not done within 0.5 s" and done["seconds"] < 2
    time.sleep(2.5)
    assert not (tmp_path / "alive").exists()


def test_a_part_that_ends_without_results_is_named_by_its_last_line():
    done = gpu.run_part(60, ["-c", "print('one'); raise ValueError('two')", ""], "cpu")
    assert done["error"] == "ValueError: two"
