"""The parts of the GPU benchmark end in time and report their failures, also on a CPU."""

import time

import pytest

from benchmarks import gpu
from benchmarks.gpu import Part


@pytest.mark.slow
def test_a_part_and_its_child_processes_end_at_the_time_limit(tmp_path):
    child = f"import time; time.sleep(4); open({str(tmp_path / 'alive')!r}, 'w')"
    code = (
        "import subprocess, sys; print(1, flush=True); "
        f"subprocess.run([sys.executable, '-c', {child!r}])"
    )
    output = gpu.run_part(Part("slow", 1, ["-c", code]), "cpu")
    assert output.startswith("1\n") and "1 s" in output  # what was measured until then
    time.sleep(4)
    assert not (tmp_path / "alive").exists()


def test_a_part_that_fails_is_reported_with_its_output():
    code = "print('one'); raise ValueError('two')"
    output = gpu.run_part(Part("failing", 60, ["-c", code]), "cpu")
    assert "one" in output and "ValueError: two" in output and "FAILED" in output


def test_all_parts_together_take_at_most_20_minutes():
    parts = gpu.make_parts(gpu.GPUOptions(), processes=1)
    assert sum(part.time_limit for part in parts) <= 20 * 60


@pytest.mark.soak
def test_the_whole_benchmark_runs_on_a_cpu(test_data, capsys):
    gpu.main(
        [
            "device=cpu",
            "sizes=4x128",
            "peers=eager",
            "variant_size=4x128",
            "process_size=4x128",
            "models=0.8M",
            "experiment=speedrun",
            "max_steps=26",
            f"data.path={test_data / 'data' / 'tinyshakespeare.txt'}",
        ]
    )
    printed = capsys.readouterr().out
    assert "FAILED with" not in printed and "not finished" not in printed
    for text in (" passed", "aten::", "shard=all", *gpu.TIME_LIMITS):
        assert text in printed
