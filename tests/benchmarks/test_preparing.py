import json

import pytest

from benchmarks.preparing import main

pytestmark = pytest.mark.slow


@pytest.mark.soak
def test_sizes_are_prepared_and_told(tmp_path, capsys):
    small, large = main(["megabytes=1,3", "vocab_size=300", f"json={tmp_path / 'out.json'}"])
    assert 0.9e6 < small["bytes"] < 2e6 and 2.9e6 < large["bytes"] < 4e6
    assert large["tokens"] > small["tokens"] > 1e5
    assert small["memory"] > 1e7 and large["seconds"] > 0
    assert json.loads((tmp_path / "out.json").read_text()) == [small, large]
    assert "MB a minute" in capsys.readouterr().out
