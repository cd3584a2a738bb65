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


TEXTS = [
    "To be, or not to be.\n",
    "Быть или не быть — вот в чём вопрос\n",
    "生存還是毀滅，這是個問題。\n" * 3,
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("size", [16, 32])
@pytest.mark.parametrize("order", ["le", "be", "marked"])
def test_text_of_wide_characters_is_refused_with_its_encoding(tmp_path, text, size, order):
    file = tmp_path / "a.txt"
    file.write_bytes(text.encode(f"utf-{size}" if order == "marked" else f"utf-{size}-{order}"))
    for read in (
        lambda: documents(text_corpus(file)),
        lambda: read_text(SampleConfig(score=str(file))),
    ):
        with pytest.raises(UserError) as error:
            read()
        assert str(file) in str(error.value)


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
