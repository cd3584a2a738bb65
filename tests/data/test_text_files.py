"""Training data, prompts and texts to score are read alike; other files are refused with advice."""

import gzip
import io

import pytest
from corpora import documents, text_corpus
from hypothesis import given
from hypothesis import strategies as st

from cli.sample_config import SampleConfig
from common.errors import UserError
from sample import read_text

plain_texts = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0\r\ufeff"), min_size=1
)


@given(
    text=plain_texts,
    line_end=st.sampled_from(["\n", "\r\n", "\r"]),
    mark=st.sampled_from(["", "\ufeff"]),
    is_compressed=st.booleans(),
)
def test_a_text_is_the_same_wherever_it_is_read(
    text, line_end, mark, is_compressed, tmp_path_factory
):
    typed = mark + text.replace("\n", line_end)
    content = gzip.compress(typed.encode()) if is_compressed else typed.encode()
    file = tmp_path_factory.mktemp("any") / "a.txt"
    file.write_bytes(content)
    assert "".join(documents(text_corpus(file))) == text
    assert read_text(SampleConfig(score=str(file))) == text
    assert read_text(SampleConfig(prompt=typed)) == text
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
        assert read_text(SampleConfig(prompt="-")) == text.removesuffix("\n")


def zipped() -> bytes:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("a.txt", "text")
    return archive.getvalue()


@pytest.mark.parametrize(
    ("content", "encoding"),
    [
        ("Le château à côté d'une forêt où dort l'évêque.\n".encode("cp1252"), "cp1252"),
        ("これはテキスト\n".encode("shift-jis"), "cp932"),
        ("Быть или не быть — вот в чём вопрос\n".encode("cp1251"), "cp1251"),
        ("Glass".encode("utf-16-le"), "utf_16_le"),
        ("Быть или не быть\n".encode("utf-16"), "utf_16"),
        ("生存還是毀滅，這是個問題。\n".encode("utf-32-be"), "utf_32_be"),
        (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", None),
        (b"a long text with one null byte\0" * 2, None),
        (zipped(), None),
        (b"abc\0def", None),
    ],
    ids=lambda value: "content" if isinstance(value, bytes) else value,  # an archive has the time
)
def test_a_conversion_is_advised_for_text_and_not_for_binary_files(content, encoding):
    with pytest.raises(UserError) as error, open_text(content, "mine") as file:
        file.read()
    message = str(error.value)
    assert "mine" in message and ("iconv" in message) == bool(encoding)
    assert f" {encoding}:" in message or not encoding


def test_a_device_that_does_not_end_is_refused():
    with pytest.raises(UserError, match="score=/dev/zero"):
        read_text(SampleConfig(score="/dev/zero"))


@pytest.mark.parametrize(
    "content",
    [gzip.compress(b"text " * 99)[:20], b"\x1f\x8b", None],
    ids=["cut", "header", "missing"],
)
def test_damaged_compressed_files_and_missing_files_are_refused_by_name(tmp_path, content):
    file = tmp_path / "a.txt"
    if content:
        file.write_bytes(content)
    with pytest.raises(UserError, match=r"score=.*a\.txt"):
        read_text(SampleConfig(score=str(file)))
