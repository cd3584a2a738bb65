"""A changed text is refused, an unusable text gives a one-line error, and an odd text is read."""

import gzip
import json
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


@pytest.mark.slow
def test_a_run_trains_on_a_messy_folder_and_is_sampled_from(tmp_path, command):
    """Mixed formats and line ends; empty, hidden and compressed files; an image; a link cycle."""
    folder = tmp_path / "my notes (1), it's"
    (folder / "deep" / ".hidden").mkdir(parents=True)
    entries = "".join(json.dumps({"text": f"entry {n}", "id": n}) + "\n" for n in range(120))
    for name, content in {
        "a.md": "# Glass\n\nÀ propos: 漢字 and 👩‍👩‍👧.\n".encode() * 60,
        "empty": b"",
        "deep/b.TXT": b"one\r\ntwo\r\n" * 80,
        "deep/.hidden/c": b"never read",
        "d.jsonl": entries.encode(),
        "no newline": b"x" * 3000,
        "photo.jpg": b"\xff\xd8\0",
        "old.txt.gz": gzip.compress("packed — text\n".encode() * 90),
    }.items():
        (folder / name).write_bytes(content)
    (folder / "deep" / "again").symlink_to(folder)
    done = command(
        "train.py",
        "data=text",
        f"data.path={folder}",
        "run_dir=run",
        "max_steps=2",
        "model.n_layer=1",
        "model.n_embd=16",
        "model.block_size=16",
        "batch_size=2",
    )
    assert done.returncode == 0, done.stderr
    assert "125" in done.stdout and "photo.jpg" in done.stdout  # documents; skipped files
    sample = command("sample.py", "run_dir=run", "prompt=À propos", "max_new_tokens=8")
    assert sample.returncode == 0 and sample.stdout, sample.stderr
