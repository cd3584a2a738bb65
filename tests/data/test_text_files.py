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


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32-le"])
def test_text_of_wide_characters_is_refused_by_name(tmp_path, encoding):
    file = tmp_path / "a.txt"
    file.write_bytes("Быть или не быть — вот в чём вопрос\n".encode(encoding))
    for read in (
        lambda: documents(text_corpus(file)),
        lambda: read_text(SampleConfig(score=str(file))),
    ):
        with pytest.raises(UserError) as error:
            read()
        assert str(file) in str(error.value)
