"""The parts of the GPU benchmark end in time and report their failures, also on a CPU."""

import json
import time

import pytest

from benchmarks import gpu
from benchmarks.gpu import Part
from benchmarks.gpu_table import markdown_table


@pytest.mark.slow
@pytest.mark.parametrize("ignored", ["", "signal.signal(signal.SIGINT, signal.SIG_IGN);"])
def test_a_part_and_its_child_processes_end_at_the_time_limit(tmp_path, monkeypatch, ignored):
    monkeypatch.setattr(gpu, "SECONDS_TO_STOP", 0.3)
    child = f"import time; time.sleep(2); open({str(tmp_path / 'alive')!r}, 'w')"
    code = (
        f"import signal, subprocess, sys; {ignored}"
        f"open(sys.argv[1], 'w').write('[1]'); subprocess.run([sys.executable, '-c', {child!r}])"
    )
    outcome = gpu.run_part(Part("slow", 60, ["-c", code, ""]), "cpu", time_limit=1)
    assert "1 s" in outcome["error"] and outcome["seconds"] < 2
    assert outcome["result"] == [1]  # of what was measured until then
    time.sleep(2.5)
    assert not (tmp_path / "alive").exists()


def test_a_part_that_fails_is_reported_by_its_last_line_of_output():
    code = "print('one'); raise ValueError('two')"
    outcome = gpu.run_part(Part("failing", 60, ["-c", code, ""]), "cpu")
    assert outcome["error"] == "ValueError: two"


def test_all_parts_together_take_at_most_20_minutes():
    parts = gpu.make_parts(gpu.GPUOptions(), "cpu")
    assert sum(part.time_limit for part in parts) <= 20 * 60


def test_a_part_that_the_machine_cannot_run_is_skipped(monkeypatch):
    monkeypatch.setattr("training.device.device_memory", lambda device: 2**30)
    tiny, large = gpu.make_parts(gpu.GPUOptions(parts="training", sizes="4x128,350M"), "cpu")
    assert tiny.obstacle is None and "GiB" in large.obstacle
    outcome = gpu.run_part(large, "cpu")
    result = {"machine": "a | b", "torch": "2", "cuda": None, "processes": 1}
    table = markdown_table(result | {"parts": {large.name: outcome}}).splitlines()
    assert table[-1] == f"| training 350M (0 s) | skipped | {large.obstacle} |"


@pytest.mark.soak
def test_the_whole_benchmark_runs_on_a_cpu_and_fills_its_table(test_data, tmp_path, capsys):
    result = gpu.main(
        [
            "device=cpu",
            "sizes=4x128",
            "peers=eager",
            "seconds=0.1",
            "variant_size=4x128",
            "process_size=4x128",
            "models=0.8M",
            "batches=1,2",
            "tokens=4",
            "experiment=speedrun",
            "max_steps=26",
            f"data.path={test_data / 'data' / 'tinyshakespeare.txt'}",
            f"json={tmp_path / 'gpu.json'}",
        ]
    )
    assert json.loads((tmp_path / "gpu.json").read_text()) == result
    parts = result["parts"]
    assert list(parts) == [
        "tests",
        "training 4x128",
        "variants",
        "processes",
        "quality",
        "decoding",
    ]
    assert not any("error" in outcome for outcome in parts.values()), parts
    tests = parts["tests"]["result"]
    assert tests["passed"] > 10 and not tests["failed"]
    variants = parts["variants"]["result"]
    missing = {name for name, row in variants["rows"].items() if "seconds" not in row}
    assert missing == {"fp32 without TF32, eager"}
    assert "aten::" in variants["profile"]

    lines = capsys.readouterr().out.splitlines()
    table = lines[lines.index("| part | measurement | result |") :]
    assert all(line.count(" | ") == 2 for line in table[2:])
    for part in parts:
        assert sum(line.startswith(f"| {part} (") for line in table) == 1
    for row in (
        *variants["rows"],
        "GlassGPT, auto",
        "0.8M, batch 2",
        "4x128, muon, 2 processes: shard=all",
    ):
        assert any(f"| {row} |" in line for line in table)
