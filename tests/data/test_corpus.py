"""Reading a corpus: .jsonl and .gz files, and text that cannot be read."""

import gzip
import json

import pytest
from corpora import documents, text_corpus

from common.errors import UserError
from config import DataConfig
from data.corpus import open_corpus
from data.splits import count_corpus


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
    "field, line",
    [
        *(
            (field, json.dumps(RECORD))
            for field in ("messages", "messages.role.x", "meta.n", "none")
        ),
        ("text", "{"),
        ("text", "[1]"),
        ("text", "null"),
        ("text", '{"text": ' + "[" * 9999 + '"x"' + "]" * 9999 + "}"),
    ],
)
def test_a_line_without_text_is_refused_with_its_number_its_field_and_its_beginning(
    tmp_path, field, line
):
    file = tmp_path / "a.jsonl"
    file.write_text("\n" + line + "\n")
    with pytest.raises(UserError) as error:
        documents(text_corpus(file, field=field))
    for named in ("line 2 ", str(file), f"data.field={field}", line[:80]):
        assert named in str(error.value)


def test_lines_whose_text_is_null_are_skipped(tmp_path):
    file = tmp_path / "a.ndjson"
    rows = [{"talk": talk} for talk in ([{"text": "one"}], None, [], [{"text": None}], [{}])]
    file.write_text("\n".join(json.dumps(row) for row in [*rows, {"talk": {"text": ""}}]))
    assert documents(text_corpus(file, field="talk.text")) == ["one", ""]
    file.write_text('{"text": null}\n' * 3)
    with pytest.raises(UserError, match="no text"):
        count_corpus(text_corpus(file))


def test_a_field_is_refused_if_no_file_has_fields(tmp_path):
    (tmp_path / "a.txt").write_text("a text")
    settings = DataConfig("text", path=str(tmp_path), field="body")
    with pytest.raises(UserError, match=r"data\.field=body"):
        open_corpus(settings)
    (tmp_path / "b.jsonl").write_text('{"body": "a text"}\n')
    assert [path.name for path in open_corpus(settings).files] == ["a.txt", "b.jsonl"]
