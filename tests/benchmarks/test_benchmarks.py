"""Each benchmark runs at its smallest."""

import numpy as np
import pytest

from benchmarks import gpu, limits, preparing, sampling, scaling, speedrun, throughput
from benchmarks.counting import kneser_ney


def test_counting_models_give_probabilities_that_sum_to_one():
    train = np.random.default_rng(0).integers(0, 4, 200)
    for order in (1, 2, 3):
        losses = [
            kneser_ney(train, np.array([token]), vocab_size=4, max_order=order)[-1]
            for token in range(4)
        ]
        assert np.exp(-np.array(losses)).sum() == pytest.approx(1)


@pytest.mark.soak
def test_preparing_measures_each_size():
    small, large = preparing.main(["megabytes=0.1,1", "vocab_size=300"])
    assert 1e5 < small["bytes"] < 1e6 <= large["bytes"]
    assert all(result["seconds"] > 0 and result["memory"] > 1e7 for result in (small, large))


@pytest.mark.soak
def test_sampling_compares_with_transformers_and_decodes_with_fewer_key_value_heads():
    result = sampling.main(
        [
            "sizes=0.8M",
            "batches=1,2",
            "tokens=4",
            "rounds=1",
            "context=64",
            "seconds=0.05",
            "device=cpu",
        ]
    )
    assert [(row["size"], row["batch"]) for row in result["decoding"]] == [("0.8M", 1), ("0.8M", 2)]
    assert [row["n_kv_head"] for row in result["grouped"]] == [16, 8, 4, 2, 1]


@pytest.mark.soak
def test_throughput_compares_models_of_the_same_architecture():
    result = throughput.main(["sizes=4x128", "seconds=0.1", "rounds=1", "device=cpu"])
    rows = result["sizes"]["4x128"]
    assert set(rows) == set(throughput.EAGER_RUNNERS) and rows["transformers"]["ratio"] == 1.0
    assert len({row["parameters"] for row in rows.values()}) == 1, "the architectures differ"
    for row in rows.values():
        assert row["seconds"] > 0 and row["memory"] > 1e7


@pytest.mark.soak
def test_scaling_compares_with_ddp():
    result = scaling.main(
        [
            "sizes=4x128",
            "processes=1,2",
            "optim=adamw",
            "steps=2",
            "rounds=2",
            "device=cpu",
        ]
    )
    assert list(result) == [
        "4x128 adamw 1 DDP",
        "4x128 adamw 1 shard=1",
        "4x128 adamw 2 DDP",
        "4x128 adamw 2 shard=1",
        "4x128 adamw 2 shard=all",
    ]
    assert result["4x128 adamw 2 DDP"]["of_ddp"] == 1.0
    assert all(row["seconds"] > 0 and row["memory"] > 1e6 for row in result.values())


@pytest.mark.soak
def test_speedrun_reports_when_a_run_reached_a_loss(test_data):
    result = speedrun.main(
        [
            "max_steps=2",
            "runs=speedrun",
            "targets=9.9,0.1",
            f"data.path={test_data / 'data' / 'tinyshakespeare.txt'}",
            "eval.every=2",
            "data.val_max_tokens=4000",
        ]
    )
    assert list(result) == ["nanogpt_cpu", "speedrun"]
    for run in (run for runs in result.values() for run in runs):
        assert run["steps"] == 2 and run["seconds"] > 0 and 2 < run["loss"] < 5
        assert 0 <= run["seconds_to"]["9.9"] < run["seconds"] and run["seconds_to"]["0.1"] is None


@pytest.mark.soak
def test_the_gpu_benchmark_runs_on_a_cpu(test_data, capsys):
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


def test_the_page_on_limits_predicts_published_speeds_within_15_percent():
    errors = [abs(speed / published.speed - 1) for published, speed in limits.predict_published()]
    assert sum(error < 1e-9 for error in errors) == 2  # one of each program is fitted
    assert max(errors) < 0.15
