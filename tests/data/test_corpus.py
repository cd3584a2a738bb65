"""Reading a corpus: pieces of documents, .jsonl and .gz files, and text that cannot be read."""

import gzip
import json
from dataclasses import replace
from itertools import pairwise

import pytest
from corpora import documents, text_corpus

from common.errors import UserError
from data.splits import count_corpus

# --- pieces of documents --------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7, 64])
def test_the_pieces_of_a_document_make_it_up_and_begin_at_lines_that_begin_with_a_letter(
    tmp_path, size
):
    text = "\ufeffif x:\r\n\n\n    é = 1\n\n\n# note\nélan 漢字\n漢字\n\nafter a gap\n" * 20
    (tmp_path / "a.txt").write_bytes(text.encode())
    (tmp_path / "b.txt").write_bytes(b"")
    corpus = replace(text_corpus(tmp_path), piece_chars=size)
    assert documents(corpus) == [text.removeprefix("\ufeff").replace("\r\n", "\n"), ""]
    pieces = [piece.text for piece in corpus.pieces()]
    assert len(pieces) > 10
    if size > 7:  # else the pieces are so small that lines do not fit into two of them
        for before, after in pairwise(pieces):
            assert before.endswith("\n") and not before[-2].isspace()
            assert not after or after[0].isalnum()


@pytest.mark.parametrize(
    "content, offset",
    [
        (b"caf\xe9 au lait", 3),
        ("漢".encode()[:2], 0),
        (b"\xef\xbb\xbfcaf\xe9 au lait", 6),
        ("aé漢\n".encode() * 400_000 + b"\xff", 2_800_000),
        (b"text with a null byte" * 100_000 + b"\0", 2_100_000),
    ],
    ids=["latin-1", "cut", "marked", "long", "null"],
)
def test_text_that_is_not_utf8_is_refused_with_the_offset_of_the_wrong_byte(
    tmp_path, content, offset
):
    file = tmp_path / "a.txt"
    file.write_bytes(content)
    corpus = replace(text_corpus(file), files=(file, file))
    with pytest.raises(UserError) as error:
        documents(corpus)
    for named in (str(file), f"{content[offset]:#04x}", f" {offset};", "data.exclude"):
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
            for field in ("messages", "messages.role.x", "meta.n", "meta", "none", ".")
        ),
        ("text", "{"),
        ("text", "[1]"),
        ("text", '"text"'),
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


def test_lines_whose_text_is_null_are_skipped_and_counted(tmp_path):
    file = tmp_path / "a.ndjson"
    rows = [{"talk": talk} for talk in ([{"text": "one"}], None, [], [{"text": None}], [{}])]
    file.write_text("\n".join(json.dumps(row) for row in [*rows, {"talk": {"text": ""}}]))
    corpus = text_corpus(file, field="talk.text")
    assert documents(corpus) == ["one", ""]
    size = count_corpus(corpus)
    assert (size.documents, size.skipped) == (2, 4)
    file.write_text('{"text": null}\n' * 3)
    with pytest.raises(UserError) as error:
        count_corpus(text_corpus(file))
    assert "data.field=text" in str(error.value) and "3 lines" in str(error.value)
