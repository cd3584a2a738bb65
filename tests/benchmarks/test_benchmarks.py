"""Each benchmark at its smallest, for real: what it compares, and its JSON."""

import json

import pytest

from benchmarks import sampling, speedrun, throughput

pytestmark = pytest.mark.soak


def result_of(benchmark, tmp_path, *settings: str):
    path = tmp_path / "out.json"
    result = benchmark.main([*settings, f"json={path}"])
    assert json.loads(path.read_text()) == result
    return result


def test_sampling_compares_with_transformers_and_groups_with_each_other(tmp_path):
    result = result_of(
        sampling,
        tmp_path,
        "sizes=0.8M",
        "batches=1,2",
        "tokens=4",
        "rounds=1",
        "context=64",
        "seconds=0.05",
        "device=cpu",
    )
    assert [(row["size"], row["batch"]) for row in result["decoding"]] == [("0.8M", 1), ("0.8M", 2)]
    assert all(
        row["ratio"] == pytest.approx(row["glassgpt"] / row["transformers"])
        for row in result["decoding"]
    )
    assert [row["n_kv_head"] for row in result["grouped"]] == [16, 8, 4, 2, 1]
    assert result["grouped"][0]["cache_bytes"] == 16 * result["grouped"][-1]["cache_bytes"]


def test_throughput_compares_the_same_architecture(tmp_path):
    result = result_of(throughput, tmp_path, "sizes=4x128", "seconds=0.1", "rounds=1", "device=cpu")
    rows = result["sizes"]["4x128"]
    assert set(rows) == set(throughput.RUNNERS) and rows["transformers"]["ratio"] == 1.0
    assert len({row["parameters"] for row in rows.values()}) == 1, "the architectures differ"
    for row in rows.values():
        assert row["ratio"] == pytest.approx(rows["transformers"]["seconds"] / row["seconds"])
        assert row["tokens_per_second"] == pytest.approx(12 * 64 / row["seconds"])
        assert row["memory"] > 1e7


def test_speedrun_tells_when_a_run_reached_a_loss(test_data, tmp_path):
    result = result_of(
        speedrun,
        tmp_path,
        "max_steps=2",
        "runs=speedrun",
        "targets=9.9,0.1",
        f"data.path={test_data / 'data' / 'tinyshakespeare.txt'}",
        "eval.every=2",
        "data.val_max_tokens=4000",
    )
    assert list(result) == ["nanogpt_cpu", "speedrun"]
    for run in (run for runs in result.values() for run in runs):
        assert run["steps"] == 2 and run["seconds"] > 0 and 2 < run["loss"] < 5
        assert 0 <= run["seconds_to"]["9.9"] < run["seconds"] and run["seconds_to"]["0.1"] is None
