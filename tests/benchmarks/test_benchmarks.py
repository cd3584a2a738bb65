"""Each benchmark runs at its smallest."""

import numpy as np
import pytest

from benchmarks import gpu, limits, preparing, throughput, train_step
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
    assert 1e5 < small.bytes < 1e6 <= large.bytes
    assert all(result.seconds > 0 and result.memory > 1e7 for result in (small, large))


@pytest.mark.soak
def test_throughput_compares_models_of_the_same_architecture():
    rows = throughput.main(["sizes=4x128", "seconds=0.1", "rounds=1", "device=cpu"])["4x128"]
    assert set(rows) == set(throughput.EAGER_RUNNERS)
    assert len({row.measurement.parameters for row in rows.values()}) == 1
    assert all(row.seconds > 0 and row.memory > 1e7 for row in rows.values())


@pytest.mark.soak
def test_a_step_of_each_preset_is_compared_with_matrix_products(test_data):
    text = f"data.path={test_data / 'data' / 'tinyshakespeare.txt'}"
    shares = train_step.main(["experiments=speedrun,default", "seconds=1", "rounds=2", text])
    assert shares["default"].flops > 5 * shares["speedrun"].flops
    assert all(0.001 < share.share < 1 for share in shares.values())


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
