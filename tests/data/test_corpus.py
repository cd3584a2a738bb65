"""Reading a corpus: .jsonl and .gz files, and text that cannot be read."""

import gzip
import json
import sys

import pyarrow.parquet
import pytest
from corpora import documents, text_corpus

import data.text_files
from cli.sample_config import SampleConfig
from common.errors import UserError
from config import DataConfig
from data.corpus import open_corpus
from data.splits import count_corpus
from data.text_files import has_records
from sample import read_text


@pytest.mark.parametrize(
    "content, byte, before",
    [
        ("漢".encode()[:2], 0xE6, ""),
        (b"\xef\xbb\xbfcaf\xe9 au lait", 0xE9, "caf"),
        ("aé漢\n".encode() * 400_000 + b"\xff", 0xFF, "aé漢\\n"),
    ],
    ids=["cut", "marked", "long"],
)
def test_text_that_is_not_utf8_is_refused_with_the_wrong_byte_and_the_text_before_it(
    tmp_path, content, byte, before
):
    file = tmp_path / "a.txt"
    file.write_bytes(content)
    with pytest.raises(UserError) as error:
        documents(text_corpus(file))
    for named in (str(file), f"{byte:#04x}", f"{before}'"):
        assert named in str(error.value)


# --- compressed files and lines of JSON -----------------------------------------------------------


def test_compressed_files_plain_files_and_lines_of_json_are_documents_of_one_corpus(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress("\ufeffone é\n".encode()))
    (tmp_path / "b.jsonl").write_text(
        '{"text": "two", "id": 1}\n\n{"id": 2, "text": "thr\\nee '
        '\\u00e9 \\ud83d \\ud83d\\ude00"}\n{"text": ""}\n'
    )
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b'{"text": "four"}'))
    assert documents(text_corpus(tmp_path)) == [
        "one é\n",
        "two",
        "thr\nee é \ufffd 😀",  # half a surrogate pair is replaced
        "",
        "four",
    ]


RECORD = {
    "messages": [
        {"role": "user", "content": "Why?"},
        {"role": "tool", "content": None},
        {"role": "tool"},
        {"role": "model", "content": "Well."},
    ],
    "meta": {"title": "A talk", "n": 2},
    "tags": ["a", "b"],
    "body": "one",
    "meta.body": "two",
    "empty": None,
}


@pytest.mark.parametrize(
    "field, text",
    [
        ("body", "one"),
        ("meta.body", "two"),
        ("messages.content", "Why?\n\nWell."),
        ("meta.title", "A talk"),
        ("tags", "a\n\nb"),
    ],
)
def test_dots_lead_into_objects_and_the_texts_of_a_list_are_joined(tmp_path, field, text):
    (tmp_path / "a.jsonl").write_text(json.dumps(RECORD) + "\n")
    assert documents(text_corpus(tmp_path / "a.jsonl", field=field)) == [text]


@pytest.mark.parametrize(
    ("field", "texts"),
    [("text", ["one\r\ntwo é", "three"]), ("talk.content", ["Why?"]), ("meta.body", ["two"])],
)
def test_each_row_of_a_parquet_file_is_a_document(tmp_path, field, texts):
    columns = {"text": texts + [None], "talk": [[{"content": "Why?"}]], "meta.body": ["two"]}
    rows = len(texts) + 1 if field == "text" else 1
    table = pyarrow.table({name: (column * rows)[:rows] for name, column in columns.items()})
    pyarrow.parquet.write_table(table, tmp_path / "a.Parquet")
    (tmp_path / "b.txt").write_text("plain")
    corpus, notes = text_corpus(tmp_path, field=field), []
    assert documents(corpus) == [*texts, "plain"]
    assert count_corpus(corpus, notes.append).documents == len(texts) + 1
    assert [("row 3" in note, "1 row " in note) for note in notes] == [(True, True)] * (
        rows - 1 > 1
    )


def test_a_parquet_file_that_cannot_be_read_is_refused_by_name(tmp_path, monkeypatch):
    file = tmp_path / "a.parquet"
    table = pyarrow.table({"title": ["one"], "number": [1]})
    pyarrow.parquet.write_table(table, file)
    with pytest.raises(UserError, match=r"data\.field=text.*row 1.*title, number"):
        documents(text_corpus(file))
    with monkeypatch.context() as without_library:
        without_library.setitem(sys.modules, "pyarrow.parquet", None)
        with pytest.raises(UserError, match=r"a\.parquet.*pip install pyarrow"):
            documents(text_corpus(tmp_path))
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(UserError, match=r"a\.parquet"):
        documents(text_corpus(file))


NO_TEXT = [{"text": 7}, {"text": None}, {"title": "a"}, {"text": [None, 1]}, [1], "text"]


@pytest.mark.parametrize("row", [*NO_TEXT, {"text": {"text": "a"}}])
def test_a_line_without_text_is_skipped_with_a_note(tmp_path, row):
    file = tmp_path / "a.ndjson"
    rows = [{"text": "one"}, row, row, {"text": ""}, {"text": "two"}]
    file.write_text("\n\n".join(map(json.dumps, rows)))
    notes = []
    assert documents(text_corpus(file)) == ["one", "", "two"]
    assert count_corpus(text_corpus(file), notes.append).documents == 3
    (note,) = notes
    for named in (str(file), "2 lines", "line 3", "data.field=text"):
        assert named in note


@pytest.mark.parametrize("row", NO_TEXT)
def test_a_file_without_any_text_in_the_field_is_refused_with_its_fields(tmp_path, row):
    file = tmp_path / "a.jsonl"
    file.write_text(f"\n{json.dumps(row)}\n" * 2)
    with pytest.raises(UserError) as error:
        documents(text_corpus(file))
    fields = [*row] if isinstance(row, dict) else []
    for named in (str(file), "line 2", "data.field=text", json.dumps(row), *fields):
        assert named in str(error.value)


@pytest.mark.parametrize("line", ["{", "no", '{"text": ' + "[" * 9999 + '"x"' + "]" * 9999 + "}"])
def test_a_line_that_is_not_json_is_refused_with_its_number_and_its_beginning(tmp_path, line):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a"}\n' + line + "\n")
    with pytest.raises(UserError) as error:
        documents(text_corpus(file))
    for named in ("line 2 ", str(file), line[:80]):
        assert named in str(error.value)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.txt", "a.txt.gz"])
def test_a_line_or_text_that_is_too_long_to_read_at_once_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.setattr(data.text_files, "MAX_CHARS", 100)
    content = b'{"text": "b"}\n' + b"a" * 101
    file = tmp_path / name
    file.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    with pytest.raises(UserError, match="100") as error:
        if has_records(file):
            documents(text_corpus(file))
        else:
            read_text(SampleConfig(score=str(file)))
    assert str(file) in str(error.value) and ("line 2" in str(error.value)) == has_records(file)


def test_a_field_is_refused_if_no_file_has_fields(tmp_path):
    (tmp_path / "a.txt").write_text("a text")
    settings = DataConfig("text", path=str(tmp_path), field="body")
    with pytest.raises(UserError, match=r"data\.field=body"):
        open_corpus(settings)
    (tmp_path / "b.jsonl").write_text('{"body": "a text"}\n')
    assert [path.name for path in open_corpus(settings).files] == ["a.txt", "b.jsonl"]
