"""A changed text is refused, and an unusable text gives a one-line error."""

from dataclasses import replace
from pathlib import Path

import pytest
from processes import copy_after_8_steps, run_to_end

from common.errors import UserError
from config import DataConfig, TokenizerConfig
from data.tokens import prepare

CHAR = TokenizerConfig(name="char")


def read(path: Path, tokenizer=CHAR):
    return prepare(DataConfig(source="text", path=str(path)), tokenizer, lambda line: None)


@pytest.mark.slow
def test_a_text_changed_by_one_byte_is_refused_with_both_fingerprints(
    tmp_path, text_file, finished_run
):
    copy_after_8_steps(finished_run, tmp_path / "run")
    (tmp_path / "mine.txt").write_bytes(text_file.read_bytes().replace(b"glass", b"glaas", 1))
    then, now = (read(path).fingerprint for path in (text_file, tmp_path / "mine.txt"))
    run_to_end(tmp_path, "run_dir=run", "resume=true", "data.path=mine.txt", status=1)
    (message,) = (tmp_path / "err.txt").read_text().splitlines()
    assert then[:16] in message and now[:16] in message


@pytest.mark.parametrize(
    "content, named",
    [
        pytest.param(b"", "bad.txt", id="empty"),
        pytest.param(b"too short", "model.block_size=32", id="short"),
        pytest.param(b"a few words more than that\n" * 6, "validation", id="short-validation"),
        pytest.param(bytes(range(1, 256)) * 20, "0x80", id="not-utf-8"),
        pytest.param(None, "bad.txt", id="missing"),
    ],
)
def test_a_text_that_cannot_be_trained_on_is_a_one_line_error(
    tmp_path, tiny, train_in_process, content, named
):
    if content is not None:
        (tmp_path / "bad.txt").write_bytes(content)
    with pytest.raises(UserError) as error:
        train_in_process(
            replace(tiny, data=DataConfig(source="text", path=str(tmp_path / "bad.txt")))
        )
    assert named in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()
