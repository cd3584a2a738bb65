"""Tokenizers of Hugging Face's format give the same ids here and in transformers."""

import functools
import json
import shutil

import pytest
from conftest import TINY
from hf_models import SENTENCE, TEXT, transformers, write_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from models import few, lively

from common.errors import UserError
from config import GPTConfig
from data.hf_tokenizer import read_tokenizer
from data.tokenizer import (
    CharTokenizer,
    encode_prompt,
    load_tiktoken,
    load_tokenizer,
    save_tokenizer,
    start_token,
    train_bpe,
)
from interop import find_model, load, read_starting_model, save_hf
from train import train_from
from variants import build_model

letters = st.sampled_from(list("the glas'123 \n\t\r_é—λ"))
texts = st.text(st.characters(exclude_categories=["Cs"]) | letters, max_size=40) | st.sampled_from(
    [
        SENTENCE,
        "",
        " ",
        "\n\n x",
        "<s> </s> <|endoftext|> <|begin_of_text|>",
        "1234567",
        "👩‍👩‍👧 日本",
        "it's  the\r\nglass",
    ]
)


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "llama"])
def test_an_imported_tokenizer_gives_the_ids_and_texts_of_transformers(family, tmp_path):
    folder = tmp_path / "hf"
    write_tokenizer(family, folder)
    ours = read_tokenizer(folder / "tokenizer.json", {"model_type": "gpt2"})
    oracle = transformers.AutoTokenizer.from_pretrained(folder)
    save_tokenizer(ours, tmp_path / "saved.json")
    restored = load_tokenizer(tmp_path / "saved.json")
    assert ours.end_of_text == oracle.eos_token_id
    assert ours.begin_of_text == (oracle.bos_token_id if family == "llama" else None)
    assert encode_prompt(ours, SENTENCE) == oracle(SENTENCE).input_ids
    assert encode_prompt(ours, "") == [start_token(ours)]

    @few
    @given(texts)
    def check(text):
        ids = ours.encode(text)
        assert ids == oracle(text, add_special_tokens=False, split_special_tokens=True).input_ids
        assert ids == restored.encode(text) == ours.encode_array(text).tolist()
        assert not set(ids) & ours.special.keys()
        decoded = ours.decode(ids)
        assert decoded == oracle.decode(ids, skip_special_tokens=True)
        joined = b"".join(map(ours.token_bytes, ids)).decode()
        assert joined == decoded or (family == "llama" and joined == " " + decoded)

    check()
    assert restored.to_json() == ours.to_json()


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_run_is_trained_with_a_tokenizer_file_and_keeps_it(family, tmp_path, text_file):
    write_tokenizer(family, tmp_path / "own")
    shutil.copytree(tmp_path / "own", tmp_path / "copy")
    common = f"data.path={text_file}", "attention.every=0", "compile=false", "batch_size=4"
    tiny = [each for each in TINY if each.startswith("model.")]
    train_tiny = functools.partial(train_from, *common, *tiny)

    run, other = tmp_path / "run", tmp_path / "other"
    loss = train_tiny(f"tokenizer={tmp_path}/own/tokenizer.json", f"run_dir={run}", "max_steps=2")
    train_tiny(f"tokenizer={tmp_path}/copy/tokenizer.json", f"run_dir={other}", "max_steps=2")
    shutil.rmtree(tmp_path / "own")
    assert train_from(f"run_dir={run}", "eval_only=true") == loss
    train_from(f"run_dir={run}", "resume=true", "max_steps=3")
    train_from(f"init_from={run}", *common, f"run_dir={tmp_path}/more", "max_steps=1")

    model, tokenizer = load(run)
    assert tokenizer.to_json() == load(tmp_path / "more")[1].to_json() == load(other)[1].to_json()
    oracle = export(tokenizer, tmp_path / "hf", model)
    original = transformers.AutoTokenizer.from_pretrained(tmp_path / "copy")
    for text in (SENTENCE, TEXT):
        assert original(text).input_ids == encode_prompt(tokenizer, text) == oracle(text).input_ids
    assert original.eos_token_id == tokenizer.end_of_text
    (tmp_path / "copy" / "tokenizer_config.json").unlink()  # which names the end of a text
    train_tiny(
        f"tokenizer={tmp_path}/copy/tokenizer.json", f"run_dir={tmp_path}/changed", "max_steps=1"
    )
    assert load(tmp_path / "changed")[1].to_json() != tokenizer.to_json()  # nor that of the cache


def test_a_file_that_is_no_tokenizer_is_refused_by_name(tmp_path, text_file):
    (tmp_path / "a.json").write_text('{"model": {}}')
    with pytest.raises(UserError, match=r"a\.json"):
        train_from(
            f"tokenizer={tmp_path}/a.json", f"data.path={text_file}", f"run_dir={tmp_path}/run"
        )
    assert not (tmp_path / "run" / "config.yaml").exists()


@pytest.fixture(scope="module")
def small_model():
    return lively(
        build_model(GPTConfig(vocab_size=400, block_size=16, n_layer=1, n_head=2, n_embd=16))
    )


def export(tokenizer, folder, model):
    """Export a tokenizer and load it with transformers."""
    save_hf(model, folder, tokenizer)
    return transformers.AutoTokenizer.from_pretrained(folder)


def test_an_exported_bpe_tokenizer_gives_the_same_ids(small_model, tmp_path):
    ours = train_bpe([TEXT], 400)
    oracle = export(ours, tmp_path / "hf", small_model)
    imported = find_model(tmp_path / "hf").read_tokenizer()
    assert oracle.eos_token_id == ours.end_of_text == imported.end_of_text
    assert len(oracle) == ours.vocab_size == imported.vocab_size

    @given(texts)
    def check(text):
        ids = ours.encode(text)
        assert oracle(text, split_special_tokens=True).input_ids == ids == imported.encode(text)
        assert oracle.decode(ids) == text == imported.decode(ids)

    check()


def test_an_exported_character_tokenizer_gives_the_same_ids(tmp_path_factory, small_model):
    @few
    @given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30), st.data())
    def check(alphabet, data):
        ours = CharTokenizer(alphabet)
        folder = tmp_path_factory.mktemp("char") / "hf"
        oracle = export(ours, folder, small_model)
        text = data.draw(st.text(st.sampled_from(ours.alphabet), max_size=20))
        imported = find_model(folder).read_tokenizer()
        ids = ours.encode(text)
        assert oracle(text).input_ids == ids == imported.encode(text)
        assert oracle.decode(ids) == text == imported.decode(ids)
        assert b"".join(map(imported.token_bytes, ids)).decode() == text
        assert start_token(imported) == start_token(ours) and imported.end_of_text is None
        assert len(oracle) == ours.vocab_size
        assert len(oracle("\ue000" + text).input_ids) == len(ids) + 1  # an unknown character

    check()


@pytest.mark.soak
def test_the_gpt2_vocabulary_is_exported_with_its_own_merges(test_data, monkeypatch, tmp_path):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(test_data / "tiktoken_cache"))
    ours = load_tiktoken("gpt2")
    config = GPTConfig(vocab_size=50304, block_size=16, n_layer=1, n_head=1, n_embd=8)
    oracle = export(ours, tmp_path / "hf", build_model(config))
    merges = json.loads((tmp_path / "hf" / "tokenizer.json").read_text())["model"]["merges"]
    assert len(merges) == 50_000 and merges[0] == ["Ġ", "t"]
    text = (test_data / "data" / "tinyshakespeare.txt").read_text()[:100_000] + SENTENCE
    imported = find_model(tmp_path / "hf").read_tokenizer()
    assert oracle(text).input_ids == ours.encode(text) == imported.encode(text)


@pytest.mark.slow
@pytest.mark.parametrize("vocab_size", [50257, 50304])
def test_a_gpt2_folder_without_tokenizer_files_has_the_tokenizer_of_gpt2(
    vocab_size, test_data, monkeypatch, tmp_path, capsys
):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(test_data / "tiktoken_cache"))
    shape = {"vocab_size": vocab_size, "n_positions": 16, "n_layer": 1, "n_head": 1, "n_embd": 8}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape)).save_pretrained(tmp_path)
    model, tokenizer = load(tmp_path)
    assert model.config.vocab_size == vocab_size and model.token_count == 50257
    assert tokenizer.encode("Hello world") == [15496, 995] and tokenizer.end_of_text == 50256
    assert str(tmp_path) in capsys.readouterr().err
    assert read_starting_model(str(tmp_path)).tokenizer.name == "gpt2"
