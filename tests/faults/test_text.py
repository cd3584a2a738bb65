"""Text: what changed is refused with both fingerprints; bad text is told in a sentence, odd text is
read."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import few
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
    (sentence,) = (tmp_path / "err.txt").read_text().splitlines()
    assert f"fingerprint {then[:16]} then, {now[:16]} now" in sentence


@pytest.mark.parametrize(
    "content, sentence",
    [
        (b"", "holds no text"),
        (b"a" * 5000, "holds no character but 'a'"),
        (b"too short", "too few for model.block_size=32"),
        (b"a few words more than that\n" * 6, "the validation split has"),
        (bytes(range(256)) * 20, "is not utf-8 text: byte 0x80 at offset 128"),
        (None, "does not exist"),
    ],
)
def test_a_text_that_cannot_be_trained_on_is_one_sentence(
    tmp_path, tiny, train_in_process, content, sentence
):
    if content is not None:
        (tmp_path / "bad.txt").write_bytes(content)
    with pytest.raises(UserError, match=sentence):
        train_in_process(
            replace(tiny, data=DataConfig(source="text", path=str(tmp_path / "bad.txt")))
        )
    assert not (tmp_path / "run").exists()


@few
@given(
    content=st.binary(max_size=300) | st.text(max_size=200).map(str.encode),
    tokenizer=st.sampled_from([CHAR, TokenizerConfig(vocab_size=270)]),
)
def test_any_bytes_are_a_text_or_a_sentence(content, tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("any") / "a.txt"
    path.write_bytes(content)
    try:
        tokens = read(path, tokenizer=tokenizer)
    except UserError as e:
        assert str(path) in str(e) and "\n" not in str(e)
    else:
        assert "".join(
            tokens.tokenizer.decode(ids.tolist()) for ids in (tokens.train, tokens.val)
        ).encode() == content.removeprefix(b"\xef\xbb\xbf")


@pytest.mark.slow
def test_a_strangers_folder_goes_from_its_path_to_a_sample(tmp_path, command):
    """Mixed kinds, line ends, an empty, a hidden and a packed file, a picture, a link in a circle,
    a name to trip over."""
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
    assert "125 documents" in done.stdout and "photo.jpg" in done.stdout
    sample = command("sample.py", "run_dir=run", "prompt=À propos", "max_new_tokens=8")
    assert sample.returncode == 0 and sample.stdout, sample.stderr
