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
        assert row["memory"] > 1e7
    assert "4 layers of 128" in capsys.readouterr().out
