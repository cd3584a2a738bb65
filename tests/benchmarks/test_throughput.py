import json

import pytest

from benchmarks import throughput

pytestmark = pytest.mark.slow


@pytest.mark.soak
def test_the_throughput_benchmark_compares_all_at_its_smallest_size_and_writes_json(
        tmp_path, capsys):
    pytest.importorskip("transformers")
    result = throughput.main(["sizes=4x128", "seconds=0.1", "rounds=1", "device=cpu",
                              f"json={tmp_path / 'out.json'}"])
    assert json.loads((tmp_path / "out.json").read_text()) == result
    rows = result["sizes"]["4x128"]
    assert set(rows) == set(throughput.RUNNERS) and rows["transformers"]["ratio"] == 1.0
    assert len({row["parameters"] for row in rows.values()}) == 1, "the architectures differ"
    for row in rows.values():
        assert row["ratio"] == pytest.approx(rows["transformers"]["seconds"] / row["seconds"])
        assert row["tokens_per_second"] == pytest.approx(12 * 64 / row["seconds"])
        assert row["share_of_matmul"] == pytest.approx(
            row["flops_per_second"] / result["matmul"][row["precision"]])
        assert row["memory"] > 1e7
    assert "4 layers of 128" in capsys.readouterr().out


@pytest.mark.parametrize("size", throughput.ALL_SIZES)
def test_the_figures_of_every_size_follow_from_its_step(size):
    *_, context, sequences, _ = throughput.ALL_SIZES[size]
    step = {"seconds": 0.5, "flops": 1e9, "parameters": 10 ** 6, "memory": 2 ** 20,
            "precision": "bf16", "compiled": True}
    rows = throughput.summed_up(size, {"one": [step], "other": [step | {"seconds": 0.25}]},
                                {"bf16": 1e10})
    assert rows["other"]["tokens_per_second"] == context * sequences / 0.25
    assert rows["other"]["ratio"] == 2 and rows["other"]["share_of_matmul"] == 0.4
    columns = [list(column.cells) for column in throughput.table(size, rows, "cpu").columns]
    assert columns[1][1] == f"{context * sequences * 4:,}" and columns[2] == ["1.00x", "2.00x"]
