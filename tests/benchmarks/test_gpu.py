"""The command for a GPU, on a CPU: all its parts run for real, at their smallest."""

import time

import pytest

from benchmarks import gpu

SMALL = [
    "device=cpu",
    "max_steps=2",
    "model.n_layer=1",
    "model.n_embd=16",
    "model.n_head=1",
    "model.n_kv_head=1",
    "model.block_size=16",
    "compile=false",
    "seeds=1",
]


@pytest.fixture
def settings(test_data, tmp_path) -> list[str]:
    return [
        *SMALL,
        f"data.path={test_data / 'data' / 'tinyshakespeare.txt'}",
        f"json={tmp_path / 'out.json'}",
    ]


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
