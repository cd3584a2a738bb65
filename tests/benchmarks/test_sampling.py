import json

import pytest

from benchmarks import sampling

pytestmark = pytest.mark.slow


@pytest.mark.soak
def test_the_sampling_benchmark_compares_both_at_its_smallest_size_and_writes_json(
        tmp_path, capsys):
    pytest.importorskip("transformers")
    result = sampling.main(["sizes=0.8M", "batches=1,2", "tokens=4", "rounds=1", "context=64",
                            "seconds=0.05", "device=cpu",
                            f"json={tmp_path / 'out.json'}"])
    assert json.loads((tmp_path / "out.json").read_text()) == result
    assert [(row["size"], row["batch"]) for row in result["decoding"]] == [("0.8M", 1), ("0.8M", 2)]
    assert all(row["ratio"] == pytest.approx(row["glassgpt"] / row["transformers"])
               for row in result["decoding"])
    assert [row["n_kv_head"] for row in result["grouped"]] == [16, 8, 4, 2, 1]
    assert result["grouped"][0]["cache_bytes"] == 16 * result["grouped"][-1]["cache_bytes"]
    assert "key/value heads" in capsys.readouterr().out
