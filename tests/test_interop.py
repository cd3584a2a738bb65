"""Checkpoints of Hugging Face's format, in and out, with transformers as the oracle."""

import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path

import hydra
import pytest
import torch
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st
from models import few, lively, random_tokens, seeds, streamed
from omegaconf import OmegaConf
from processes import finished
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers, processors, trainers
from tokenizers import models as kinds

import cli
from config import GPTConfig, UserError
from data.hf_tokenizer import read_tokenizer
from data.tokenizer import (
    BPETokenizer,
    CharTokenizer,
    first_token,
    load_tokenizer,
    of_tiktoken,
    prompt_ids,
    save_tokenizer,
    train_bpe,
)
from interop import Checkpoint, load_hf, save_hf
from interop.__main__ import ExportConfig, export
from model import GPT
from training.checkpoint import load_run, load_weights
from training.runtime import memory_here

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

WORDS = "the glass model attends to every token before it and writes what follows, it's 1234 é—λ\n"
TEXT = WORDS * 30


# --- the oracle's models --------------------------------------------------------------------------


@st.composite
def gpt2_settings(draw):
    # a LayerNorm over few numbers makes much of the last bits: no width below 8
    heads = draw(st.integers(1, 4))
    return transformers.GPT2Config(
        vocab_size=draw(st.integers(5, 40)), n_positions=draw(st.integers(16, 24)),
        n_embd=heads * draw(st.integers(8, 12)),
        n_layer=draw(st.integers(1, 3)), n_head=heads, n_inner=draw(st.none() | st.integers(1, 40)),
        activation_function=draw(st.sampled_from(["gelu_new", "gelu_pytorch_tanh"])),
        layer_norm_epsilon=draw(st.sampled_from([1e-5, 1e-3])),
        tie_word_embeddings=draw(st.booleans()), bos_token_id=0, eos_token_id=0)


def llama3(theta, factor, low, high, trained):
    return {"rope_type": "llama3", "rope_theta": theta, "factor": factor, "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": trained}


ROPE = st.sampled_from([{"rope_type": "default", "rope_theta": 10000.0},
                        {"rope_type": "default", "rope_theta": 500000.0},
                        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
                        llama3(500.0, 8.0, 1.0, 4.0, 12), llama3(10000.0, 5.0, 1.0, 4.0, 10)])


@st.composite
def llama_settings(draw, kind=transformers.LlamaConfig):
    groups = draw(st.integers(1, 3))
    heads, head_dim = groups * draw(st.integers(1, 3)), 2 * draw(st.integers(4, 6))
    more = {}
    if kind is transformers.LlamaConfig:
        attention = draw(st.booleans())
        more = {"attention_bias": attention, "mlp_bias": attention and draw(st.booleans())}
        if draw(st.booleans()):
            more["head_dim"] = 2 * draw(st.integers(1, 6))
    if kind is transformers.Qwen3Config:
        # a norm of two or four numbers makes much of the last bits
        more = {"attention_bias": draw(st.booleans()), "head_dim": 2 * draw(st.integers(4, 8))}
    return kind(vocab_size=draw(st.integers(5, 40)), hidden_size=heads * head_dim,
                intermediate_size=draw(st.integers(1, 40)),
                num_hidden_layers=draw(st.integers(1, 3)), num_attention_heads=heads,
                num_key_value_heads=groups, max_position_embeddings=32,
                rms_norm_eps=draw(st.sampled_from([1e-5, 1e-3])),
                tie_word_embeddings=draw(st.booleans()), rope_parameters=dict(draw(ROPE)),
                bos_token_id=0, eos_token_id=0, pad_token_id=None, **more)


FAMILIES = {"gpt2": gpt2_settings(), "llama": llama_settings(),
            "qwen2": llama_settings(transformers.Qwen2Config),
            "qwen3": llama_settings(transformers.Qwen3Config)}


def theirs(config, seed=0):
    """A model of transformers', with weights as large as trained ones."""
    return lively(
        transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager"), seed)


@torch.no_grad()
def difference(their_model, our_model, tokens) -> float:
    return (their_model(tokens).logits - our_model(tokens)[0]).abs().max().item()


def folder_of(model, path: Path, **how) -> Path:
    model.save_pretrained(path, **how)
    return path


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_of_theirs_gives_their_logits_and_greedy_tokens(family, tmp_path_factory):
    @few
    @given(FAMILIES[family], seeds, st.sampled_from(["1GB", "4KB"]))
    def check(config, seed, shard):
        model = theirs(config, seed)
        folder = folder_of(model, tmp_path_factory.mktemp("hf"), max_shard_size=shard)
        ours = load_hf(folder)
        assert not ours.training
        tokens = random_tokens(2, 12, seed=seed) % config.vocab_size
        assert difference(model, ours, tokens) < 1e-5
        greedy = model.generate(tokens, max_new_tokens=4, do_sample=False, eos_token_id=None,
                                attention_mask=torch.ones_like(tokens))
        assert torch.equal(torch.stack(list(streamed(ours, tokens, 4, temperature=0)), dim=1),
                           greedy[:, 12:])
        # and back: the same bits under the same names
        save_hf(ours, folder / "again")
        again = transformers.AutoModelForCausalLM.from_pretrained(folder / "again")
        assert type(again) is type(model)
        state = model.state_dict()
        assert again.state_dict().keys() == state.keys()
        assert all(torch.equal(t, state[name]) for name, t in again.state_dict().items())

    check()


def test_far_tokens_turn_as_theirs_do(tmp_path):
    config = transformers.LlamaConfig(vocab_size=100, hidden_size=64, intermediate_size=64,
                                      num_hidden_layers=2, num_attention_heads=2,
                                      max_position_embeddings=4096,
                                      rope_parameters=llama3(500000.0, 32.0, 1.0, 4.0, 1024))
    model = theirs(config)
    ours = load_hf(folder_of(model, tmp_path / "hf"))
    tokens = torch.randint(100, (1, 2048), generator=torch.Generator().manual_seed(0))
    assert difference(model, ours, tokens) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_kept_in_half_precision_are_read_exactly(dtype, tmp_path):
    model = theirs(transformers.GPT2Config(vocab_size=30, n_positions=16, n_embd=16, n_layer=2,
                                           n_head=2, bos_token_id=0, eos_token_id=0)).to(dtype)
    folder = folder_of(model, tmp_path / "hf")
    assert load_file(folder / "model.safetensors")["transformer.wte.weight"].dtype == dtype
    assert difference(model.float(), load_hf(folder), random_tokens(1, 16)) < 1e-5


def anonymous() -> int:
    """Bytes of memory of this process that no file holds."""
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("only Linux says it")
    return int(re.search(r"RssAnon:\s+(\d+)", status.read_text())[1]) * 1024


def test_weights_to_sample_from_stay_in_their_file(tmp_path):
    save_hf(GPT(GPTConfig(vocab_size=40_000, block_size=16, n_layer=1, n_head=2, n_embd=512,
                          **LLAMA)).bfloat16(), tmp_path / "hf")
    kept, before = (tmp_path / "hf" / "model.safetensors").read_bytes(), anonymous()
    model = Checkpoint(tmp_path / "hf").load()
    assert model(torch.tensor([[1, 2, 3]]))[0].isfinite().all()
    assert model.head.weight.dtype == torch.bfloat16 and anonymous() - before < len(kept) / 3
    with torch.no_grad():
        model.head.weight.zero_()  # a copy of what is written to
    assert (tmp_path / "hf" / "model.safetensors").read_bytes() == kept


def test_the_names_of_the_first_gpt2_files_are_read(tmp_path):
    model = theirs(transformers.GPT2Config(vocab_size=30, n_positions=16, n_embd=16, n_layer=1,
                                           n_head=2, bos_token_id=0, eos_token_id=0))
    folder = folder_of(model, tmp_path / "hf")
    tensors = {name.removeprefix("transformer."): t for name,
               t in load_file(folder / "model.safetensors").items()}
    tensors |= {"h.0.attn.bias": torch.ones(1, 1, 16, 16),
                "h.0.attn.masked_bias": torch.tensor(-1e4)}
    tensors["lm_head.weight"] = tensors["wte.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    assert difference(model, load_hf(folder), random_tokens(1, 16)) < 1e-5


def test_a_shorter_context_takes_the_first_positions(tmp_path):
    config = transformers.GPT2Config(vocab_size=30, n_positions=16, n_embd=16, n_layer=1, n_head=2,
                                     bos_token_id=0, eos_token_id=0)
    model = theirs(config)
    folder = folder_of(model, tmp_path / "hf")
    tokens = random_tokens(1, 6)
    short = GPT(replace(load_hf(folder).config, block_size=6)).eval()
    Checkpoint(folder).copy_to(short)
    assert difference(model, short, tokens) < 1e-5
    # as a run keeps them
    save_file({name: p.detach() for name, p in load_hf(folder).named_parameters()},
              tmp_path / "run.safetensors")
    again = GPT(short.config).eval()
    load_weights(again, tmp_path / "run.safetensors")
    assert torch.equal(again(tokens)[0], short(tokens)[0])


# --- our models -----------------------------------------------------------------------------------


def ours_like(**more):
    return st.builds(GPTConfig, vocab_size=st.just(23), block_size=st.just(16),
                     n_layer=st.integers(1, 3), n_head=st.just(4), n_embd=st.just(32),
                     mlp_hidden=st.sampled_from([None, 20]), norm_eps=st.sampled_from([1e-5, 1e-3]),
                     tie_embeddings=st.booleans(), **more)


gpt2_like = ours_like(bias=st.booleans())
llama_like = ours_like(norm=st.just("rmsnorm"), position=st.just("rope"), mlp=st.just("swiglu"),
                       n_kv_head=st.sampled_from([None, 1, 2]),
                       head_dim=st.sampled_from([None, 6]), bias=st.sampled_from(
                           [False, True, "attention", "qkv"]), rope_theta=st.just(500.0),
                       rope_factor=st.sampled_from([1.0, 4.0]),
                       rope_trained=st.sampled_from([None, 10]))


qwen3_like = ours_like(norm=st.just("rmsnorm"), position=st.just("rope"), mlp=st.just("swiglu"),
                       n_kv_head=st.sampled_from([None, 1, 2]), head_dim=st.sampled_from([None, 6]),
                       bias=st.sampled_from([False, "attention"]), qk_norm=st.just("gains"))


@pytest.mark.parametrize("shapes", [gpt2_like, llama_like, qwen3_like],
                         ids=["gpt2", "llama", "qwen3"])
def test_a_model_of_ours_gives_the_same_logits_there_and_the_same_bits_back(
        shapes, tmp_path_factory):
    @few
    @given(shapes, seeds)
    def check(config, seed):
        ours, folder = lively(GPT(config), seed), tmp_path_factory.mktemp("ours") / "hf"
        save_hf(ours, folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager")
        assert difference(model, ours, random_tokens(2, 16, seed=seed)) < 1e-5
        back = load_hf(folder)
        want, got = dict(ours.named_parameters()), dict(back.named_parameters())
        assert all(torch.equal(p, got[name]) for name, p in want.items())
        # GPT-2 has biases where ours may have none
        assert all(not got[name].any() for name in got.keys() - want.keys())
        # what is not in use is not kept
        unscaled = {} if config.rope_factor != 1 else {"rope_trained": None}
        assert back.config == replace(config, **unscaled,
                                      **({"bias": True} if config.position == "learned" else {}))

    check()


LLAMA = {"norm": "rmsnorm", "position": "rope", "mlp": "swiglu"}


@pytest.mark.parametrize("changes", [
    {"mlp": "swiglu"}, {"mlp": "swiglu", "bias": "attention"},
    {"norm_embedding": True}, {"norm_embedding": True, "tie_embeddings": False},
    {"mlp": "relu2", "norm_embedding": True},
    {"mlp": "relu2", "norm_embedding": True, "tie_embeddings": False, "head_dim": 8}],
    ids=str)
def test_qk_norm_without_gains_gives_the_same_logits_there(changes, tmp_path):
    """By Qwen 3 with gains of 1, or NanoChat, which has no gains at all."""
    ours = lively(GPT(GPTConfig(**{"vocab_size": 23, "block_size": 16, "n_layer": 2, "n_head": 4,
                                   "n_kv_head": 2, "n_embd": 32, "qk_norm": True}
                                | LLAMA | changes)))
    save_hf(ours, tmp_path / "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert type(model).__name__ == ("NanoChatForCausalLM" if ours.config.mlp == "relu2"
                                    else "Qwen3ForCausalLM")
    assert difference(model, ours, random_tokens(2, 16)) < 1e-5


@pytest.mark.parametrize("changes, named", [
    ({"mlp": "relu2"}, "model.mlp=relu2"), ({"qk_norm": True}, "model.qk_norm=true"),
    ({"norm": "rmsnorm"}, "model.norm=rmsnorm"),
    ({"n_kv_head": 1}, "model.n_kv_head=1"), ({"head_dim": 6}, "model.head_dim=6"),
    ({"bias": "qkv"}, "model.bias=qkv"),
    (LLAMA | {"mlp": "relu2"}, "model.norm_embedding=false, model.qk_norm=false"),
    (LLAMA | {"qk_norm": "gains", "bias": "qkv"}, "model.bias=qkv"),
    (LLAMA | {"value_head_dim": 3}, "model.value_head_dim=3"),
    ({"norm_embedding": True}, "model.norm_embedding=true"),
    (LLAMA | {"n_embd": 18, "head_dim": 4}, "model.n_embd=18"),
    ({"mlp": "swiglu"}, "model.mlp=swiglu")])
def test_what_has_no_counterpart_is_refused_with_the_settings_named(changes, named, tmp_path):
    model = GPT(GPTConfig(**{"vocab_size": 23, "block_size": 16, "n_layer": 1, "n_head": 4,
                             "n_embd": 16} | changes))
    with pytest.raises(UserError, match="no counterpart") as error:
        save_hf(model, tmp_path / "hf")
    assert named in str(error.value) and not list(tmp_path.iterdir())


def test_a_setting_that_export_has_never_heard_of_stands_in_the_way():
    """Each setting of a model stays as it is, is translated, or refuses: none is dropped."""
    from interop import hf_settings

    neutral = {"dropout", "n_kv_head", "head_dim", "value_head_dim", "rope_trained"}
    config = GPTConfig(vocab_size=23, n_embd=16, n_head=4, **LLAMA)
    plain = hf_settings(config)
    for f in fields(GPTConfig):
        if f.name in neutral:
            continue
        value = getattr(config, f.name)
        other = not value if isinstance(value, bool) else next(
            (c for c in f.metadata.get("choices") or () if c != value), None) or (value or 32) * 2
        with suppress(UserError):
            assert hf_settings(replace(config, **{f.name: other})) != plain, f.name


# --- tokenizers -----------------------------------------------------------------------------------


LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
          r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def learned(model, before, specials):
    """Vocabulary and merges learned from TEXT by the library, for transformers' classes."""
    library = Tokenizer(model)
    library.pre_tokenizer = before
    alphabet = pre_tokenizers.ByteLevel.alphabet() if len(specials) < 9 else []
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=specials, show_progress=False,
                                  initial_alphabet=alphabet)
    library.train_from_iterator([TEXT], trainer)
    kept = json.loads(library.to_str())["model"]
    return {"vocab": kept["vocab"], "merges": [tuple(pair) for pair in kept["merges"]]}


@pytest.fixture(scope="module")
def tokenizers_of_theirs(tmp_path_factory) -> dict[str, Path]:
    """Folders with the files of a tokenizer of each kind, as transformers writes them, and GPT-2's
    two files alone."""
    root, made = tmp_path_factory.mktemp("tokenizers"), {}
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made["gpt2"] = transformers.GPT2Tokenizer(**learned(kinds.BPE(), byte_level, ["<|endoftext|>"]))
    made["qwen2"] = transformers.Qwen2Tokenizer(
        **learned(kinds.BPE(), byte_level, ["<|endoftext|>"]))
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    spelled = learned(kinds.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"),
                      pre_tokenizers.Metaspace(), pieces)
    made["llama"] = transformers.LlamaTokenizer(**spelled, add_bos_token=True)
    library = Tokenizer(kinds.BPE(**learned(kinds.BPE(), byte_level, []), ignore_merges=True))
    library.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(name, special=True)
                                for name in ("<|begin_of_text|>", "<|end_of_text|>")])
    begin = "<|begin_of_text|>"
    library.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, library.token_to_id(begin))])
    made["llama3"] = transformers.PreTrainedTokenizerFast(
        tokenizer_object=library, bos_token="<|begin_of_text|>", eos_token="<|end_of_text|>")
    for name, tokenizer in made.items():
        tokenizer.save_pretrained(root / name)
    (root / "gpt2_files").mkdir()
    saved = json.loads((root / "gpt2" / "tokenizer.json").read_text())["model"]
    (root / "gpt2_files" / "vocab.json").write_text(json.dumps(saved["vocab"]))
    (root / "gpt2_files" / "merges.txt").write_text(
        "#version: 0.2\n" + "".join(f"{' '.join(pair)}\n" for pair in saved["merges"]))
    return {path.name: path for path in root.iterdir()}


letters = st.sampled_from(list("the glas'123 \n\t\r_é—λ"))
texts = st.text(st.characters(exclude_categories=["Cs"]) | letters, max_size=40) | st.sampled_from(
    [WORDS, "", " ", "\n\n x", "<s> </s> <|endoftext|> <|begin_of_text|>", "1234567",
     "👩‍👩‍👧 日本", "it's  the\r\nglass"])


@pytest.mark.parametrize("name", ["gpt2", "gpt2_files", "qwen2", "llama", "llama3"])
def test_a_tokenizer_of_theirs_gives_their_ids_and_texts(name, tokenizers_of_theirs, tmp_path):
    folder = tokenizers_of_theirs[name]
    ours = read_tokenizer(folder, {"model_type": "gpt2"})
    oracle = transformers.AutoTokenizer.from_pretrained(
        folder.with_name(name.removesuffix("_files")))
    save_tokenizer(ours, tmp_path / "kept.json")
    again = load_tokenizer(tmp_path / "kept.json")
    assert ours.end_of_text == oracle.eos_token_id
    assert ours.begin_of_text == (oracle.bos_token_id if "llama" in name else None)
    assert prompt_ids(ours, WORDS) == oracle(WORDS).input_ids
    assert prompt_ids(ours, "") == [first_token(ours)]

    @few
    @given(texts)
    def check(text):
        ids = ours.encode(text)
        assert ids == oracle(text, add_special_tokens=False, split_special_tokens=True).input_ids
        assert ids == again.encode(text) == ours.encode_array(text).tolist() and not set(
            ids) & ours.special.keys()
        assert ours.decode(ids) == oracle.decode(ids, skip_special_tokens=True)
        spelled = b"".join(map(ours.token_bytes, ids)).decode()
        assert spelled == ours.decode(ids) or (name == "llama"
                                               and spelled == " " + ours.decode(ids))

    check()
    assert again.to_json() == ours.to_json()


@pytest.fixture(scope="module")
def small_model():
    return lively(GPT(GPTConfig(vocab_size=400, block_size=16, n_layer=1, n_head=2, n_embd=16)))


# $ is the end of a line there; (?s:) is nothing
@pytest.mark.parametrize("pattern", [r"[\s\S]+?$", r"(?s:.)+"])
def test_a_pattern_that_means_something_else_there_is_refused(pattern, small_model, tmp_path):
    tokens = [bytes([byte]) for byte in range(256)] + [b"\n\n"]
    with pytest.raises(UserError, match="splitting pattern"):
        save_hf(small_model, tmp_path / "hf", BPETokenizer(pattern, tokens))
    assert not list(tmp_path.iterdir())


def exported(tokenizer, folder, model):
    save_hf(model, folder, tokenizer)
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("position, pattern", [("learned", None), (
    "rope", r"\p{N}{1,3}+|\s++$| ?\p{L}++| ?[^\s\p{L}\p{N}]++|\s+(?!\S)|\s")])
def test_a_bpe_tokenizer_of_ours_gives_the_same_ids_there(position, pattern, tmp_path):
    ours = train_bpe([TEXT], 400)
    if pattern:
        ours = BPETokenizer(pattern, [ours.token_bytes(id) for id in range(ours.end_of_text)])
    shape = {"vocab_size": ours.vocab_size, "block_size": 16, "n_layer": 1, "n_head": 2,
             "n_embd": 16}
    oracle = exported(ours, tmp_path / "hf",
                      GPT(GPTConfig(**shape, **(LLAMA if position == "rope" else {}))))
    back = Checkpoint(tmp_path / "hf").tokenizer()
    assert oracle.eos_token_id == ours.end_of_text == back.end_of_text
    assert len(oracle) == ours.vocab_size == back.vocab_size

    @given(texts)
    def check(text):
        ids = ours.encode(text)
        assert oracle(text, split_special_tokens=True).input_ids == ids == back.encode(text)
        assert oracle.decode(ids) == text == back.decode(ids)

    check()


def test_a_tokenizer_by_characters_gives_the_same_ids_there(tmp_path_factory, small_model):
    @few
    @given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30), st.data())
    def check(alphabet, data):
        ours = CharTokenizer(alphabet)
        folder = tmp_path_factory.mktemp("char") / "hf"
        oracle = exported(ours, folder, small_model)
        text = data.draw(st.text(st.sampled_from(ours.alphabet), max_size=20))
        back = Checkpoint(folder).tokenizer()
        ids = ours.encode(text)
        assert oracle(text).input_ids == ids == back.encode(text)
        assert oracle.decode(ids) == text == back.decode(ids)
        assert b"".join(map(back.token_bytes, ids)).decode() == text
        assert first_token(back) == first_token(ours) and back.end_of_text is None
        assert len(oracle) == ours.vocab_size
        unknown = next(c for c in "xyz" * 10 + "".join(map(chr, range(64, 200)))
                       if c not in ours.alphabet)
        # there is no token that could stand for it
        with pytest.raises(Exception, match="WordLevel"):
            oracle(unknown)
        with pytest.raises(UserError, match="cannot encode"):
            back.encode(unknown)

    check()


@pytest.mark.slow
def test_gpt2s_own_vocabulary_comes_out_with_its_own_merges(test_data, monkeypatch, tmp_path):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(test_data / "tiktoken_cache"))
    ours = of_tiktoken("gpt2")
    oracle = exported(ours, tmp_path / "hf", GPT(
        GPTConfig(vocab_size=50304, block_size=16, n_layer=1, n_head=1, n_embd=8)))
    merges = json.loads((tmp_path / "hf" / "tokenizer.json").read_text())["model"]["merges"]
    assert len(merges) == 50_000 and merges[0] == ["Ġ", "t"]
    text = (test_data / "data" / "tinyshakespeare.txt").read_text()[:100_000]
    assert oracle(text).input_ids == ours.encode(text) == Checkpoint(tmp_path / "hf").tokenizer(
        ).encode(text)

    @few
    @given(texts)
    def check(text):
        assert oracle(text, split_special_tokens=True).input_ids == ours.encode(text)

    check()


def test_what_ends_a_text_is_special_whatever_the_file_calls_it(tokenizers_of_theirs, tmp_path):
    folder = shutil.copytree(tokenizers_of_theirs["llama"], tmp_path / "hf")
    kept = json.loads((folder / "tokenizer.json").read_text())
    for token in kept["added_tokens"]:
        token["special"] = False
    (folder / "tokenizer.json").write_text(json.dumps(kept))
    ours = read_tokenizer(folder, {})
    assert ours.end_of_text not in ours.encode(
        "a </s> b") and ours.special[ours.end_of_text] == "</s>" and ours.token_bytes(
            ours.end_of_text) == b""


# --- what is not as it should be ------------------------------------------------------------------


@pytest.fixture(scope="module")
def good(tmp_path_factory, tokenizers_of_theirs) -> dict[str, Path]:
    """A folder of each family with its weights and its tokenizer; `shards`: a llama's weights in
    several files."""
    root, made = tmp_path_factory.mktemp("good"), {}
    shape = {"vocab_size": 420, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    made["gpt2"] = theirs(transformers.GPT2Config(n_positions=64, n_embd=32, n_layer=2, n_head=2,
                                                  **shape))
    made["llama"] = theirs(transformers.LlamaConfig(hidden_size=32, intermediate_size=48,
                                                    num_hidden_layers=2, num_attention_heads=4,
                                                    num_key_value_heads=2,
                                                    max_position_embeddings=64, **shape))
    for name, model in made.items():
        shutil.copytree(tokenizers_of_theirs[name], root / name)
        folder_of(model, root / name)
    folder_of(made["llama"], root / "shards", max_shard_size="10KB")
    return {path.name: path for path in root.iterdir()}


def settings_changed(**changes):
    def change(folder):
        kept = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps({key: value for key, value in kept.items()
                                                        if value != "absent"}))

    return change


def tensors_changed(change):
    def changed(folder):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return changed


def index_changed(change):
    def changed(folder):
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        index["weight_map"] = change(index["weight_map"])
        path.write_text(json.dumps(index))

    return changed


def replaced(name, do):
    def replace_it(folder):
        (folder / name).unlink()
        do(folder / name)

    return replace_it


WTE, DOWN = "transformer.wte.weight", "model.layers.1.mlp.down_proj.weight"
SAFE = "model.safetensors"


@pytest.mark.parametrize("family, damage, why", [
    ("gpt2", settings_changed(n_layer=9999), "too few for the 9999 layers"),
    ("gpt2", settings_changed(n_layer=10**40), "n_layer is 1000"),
    ("gpt2", settings_changed(vocab_size=10**9), "vocab_size=1000000000|\\[1000000000, 32\\]"),
    ("gpt2", settings_changed(n_head="2"), 'n_head is "2"'),
    ("gpt2", settings_changed(n_head=True), "n_head is true"),
    ("gpt2", settings_changed(n_embd="absent"), "n_embd is missing"),
    ("gpt2", settings_changed(n_embd=-32), "n_embd is -32"),
    ("gpt2", settings_changed(n_head=3), "not a multiple"),
    ("gpt2", settings_changed(layer_norm_epsilon=float("nan")), "layer_norm_epsilon is NaN"),
    ("gpt2", settings_changed(n_positions=10**15), "n_positions is 1000000000000000"),
    ("gpt2", settings_changed(model_type="bert"), "is \"bert\""),
    ("gpt2", settings_changed(model_type=["gpt2"]), "model_type"),
    ("gpt2", settings_changed(activation_function="gelu"), "\"gelu\""),
    ("gpt2", settings_changed(scale_attn_by_inverse_layer_idx=True), "inverse"),
    ("gpt2", settings_changed(tie_word_embeddings="yes"), "true or false"),
    ("gpt2", settings_changed(quantization_config={"bits": 4}), "quantised"),
    ("gpt2", settings_changed(n_embd=16), "does not hold the model"),
    ("llama", settings_changed(rope_parameters={"rope_type": "yarn", "factor": 2.0}), "\"yarn\""),
    ("llama", settings_changed(rope_parameters=llama3(500000.0, 8.0, 2.0, 4.0, 12)),
     "low_freq_factor is 2.0; what our model has is 1.0"),
    ("llama", settings_changed(rope_parameters=[1]), "not an object"),
    ("llama", settings_changed(rope_parameters={"rope_type": "twist"}), "\"twist\""),
    ("llama", settings_changed(model_type="qwen3"), "q_norm.weight: missing"),
    ("llama", settings_changed(layer_types=["sliding_attention"]), "layer_types is"),
    ("llama", settings_changed(num_hidden_layers=10**9), "n_layer=1000000000 must be at most"),
    ("llama", settings_changed(vocab_size=10**12), "vocab_size is 1000000000000, not a whole"),
    ("llama", settings_changed(rope_parameters={"rope_type": "linear"}), "factor is missing"),
    ("llama", settings_changed(rope_parameters={"rope_type": "linear", "factor": 10**400}),
     "factor is 1000"),
    ("llama", settings_changed(rope_parameters={"rope_type": ["linear"]}), "rope_type"),
    ("llama", settings_changed(mlp_bias=True), "mlp_bias"),
    ("llama", settings_changed(num_key_value_heads=3), "does not divide"),
    ("llama", settings_changed(head_dim=7), "even head size"),
    ("llama", settings_changed(max_position_embeddings=10**9), "max_position_embeddings"),
    ("llama", settings_changed(hidden_act="gelu"), "hidden_act"),
    ("gpt2", replaced("config.json", lambda p: p.write_text("[" * 100_000)),
     "cannot be read as JSON"),
    ("gpt2", replaced("config.json", lambda p: p.write_text("[1]")), "holds no object"),
    ("gpt2", replaced("config.json", os.mkfifo), "there is no such file"),
    ("shards", lambda folder: replaced(next(folder.glob("*1-of*")).name, os.mkfifo)(folder),
     "there is no such file"),
    ("shards", replaced("model.safetensors.index.json", os.mkfifo), "holds no model.safetensors"),
    ("gpt2", replaced("config.json", lambda p: p.write_bytes(b"\xff\xfe")),
     "cannot be read as JSON"),
    ("gpt2", replaced("config.json", lambda p: p.write_text('{"n_embd": ' + "9" * 5000 + "}")),
     "cannot be read as JSON"),
    ("gpt2", tensors_changed(lambda t: t.pop(WTE)), "missing"),
    ("gpt2", tensors_changed(lambda t: t.update(extra=torch.zeros(2))), "absent by config.json"),
    ("gpt2", tensors_changed(lambda t: t.update({WTE: t[WTE].T.contiguous()})),
     "\\[32, 420\\] in the file"),
    ("gpt2", tensors_changed(lambda t: t.update({WTE: t[WTE].to(torch.int8)})), "in I8"),
    ("gpt2", tensors_changed(lambda t: t.update({"wte.weight": t[WTE].clone()})), "twice"),
    ("gpt2", tensors_changed(lambda t: t.update({"a\nb": torch.zeros(2)})), "named 'a"),
    ("gpt2", tensors_changed(lambda t: t.update({"lm_head.weight": t[WTE] + 1})),
     "differs from the embedding"),
    ("llama", settings_changed(tie_word_embeddings=True), "differs from the embedding"),
    ("llama", tensors_changed(lambda t: t.update({DOWN: t[DOWN][:, 1:].contiguous()})),
     "down_proj.weight: \\[32, 47\\]"),
    ("gpt2", replaced(SAFE, lambda p: p.write_bytes(b"")), "cannot be read as safetensors"),
    ("gpt2", replaced(SAFE, lambda p: p.write_bytes((1 << 62).to_bytes(8, "little") + b"{}")),
     "cannot be read as safetensors"),
    ("gpt2", replaced(SAFE, lambda p: p.symlink_to("nowhere")), "holds no model.safetensors"),
    ("gpt2", replaced(SAFE, lambda p: p.with_name("pytorch_model.bin").write_bytes(b"\x80\x04.")),
     "a pickle, which may run code .*save_pretrained"),
    ("gpt2", replaced(SAFE, lambda p: os.mkfifo(p)), "holds no model.safetensors"),
    ("shards", index_changed(lambda m: m | {DOWN: "../../secret.safetensors"}),
     "names '../../secret.safetensors'"),
    ("shards", index_changed(lambda m: m | {DOWN: "/etc/passwd"}), "names '/etc/passwd'"),
    ("shards", index_changed(lambda m: [1]), "names no file"),
    ("shards", index_changed(lambda m: {DOWN: 3}), "names '3'"),
    ("shards", index_changed(lambda m: {}), "names no file"),
    ("shards", index_changed(lambda m: m | {DOWN: "model-9.safetensors"}), "there is no such file"),
    ("shards", lambda folder: next(folder.glob("*1-of*")).write_bytes(b"cut"),
     "cannot be read as safetensors"),
    ("shards", lambda folder: os.truncate(next(folder.glob("*1-of*")), 4000),
     "1-of-.*cannot be read as safetensors")])
def test_damage_and_malice_are_a_sentence(family, damage, why, good, tmp_path):
    folder = shutil.copytree(good[family], tmp_path / "hf")
    damage(folder)
    with pytest.raises(UserError, match=why) as error:
        load_hf(folder)
    assert "\n" not in str(error.value) and len(str(error.value)) < 600


@pytest.mark.parametrize("damage, why", [
    (lambda path: path.unlink(), "has no tokenizer.json.*save_pretrained"),
    (lambda path: path.write_text("{}"), "no tokenizer that can be read"),
    (lambda path: path.write_text("["), "cannot be read as JSON"),
    (lambda path: (path.unlink(), os.mkfifo(path)), "has no tokenizer.json"),
    (lambda path: path.write_text(path.read_text().replace("0", "-1")), "no tokenizer|JSON"),
    (lambda path: path.write_text(json.dumps({"model": {"type": "BPE", "vocab": {},
                                                        "merges": []}})), "vocabulary is empty"),
    (lambda path: path.write_text(path.read_text().replace(
        '"vocab": {', '"vocab": {"zz": 99999,', 1)), "100,000 tokens, more than its model's 420")])
def test_a_tokenizer_that_is_none_is_a_sentence(damage, why, good, tmp_path):
    folder = shutil.copytree(good["gpt2"], tmp_path / "hf")
    damage(folder / "tokenizer.json")
    with pytest.raises(UserError, match=why) as error:
        Checkpoint(folder).tokenizer()
    assert "\n" not in str(error.value)


def test_a_model_larger_than_the_memory_is_a_sentence_before_any_of_it_is_made(good, tmp_path):
    folder, total = shutil.copytree(good["gpt2"], tmp_path / "hf"), memory_here("cpu")
    vocab_size = total * 3 // 4 // 64  # in bf16 3/4 of the memory, in float32 more than all of it
    settings_changed(vocab_size=vocab_size)(folder)
    tensors = {name: t.to(torch.bfloat16) for name, t in load_file(folder / SAFE).items()}
    header, end = {}, 0
    for name, t in tensors.items():
        shape = [vocab_size if n == 420 else n for n in t.shape]
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / SAFE).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)  # holes, which take no disk
    with pytest.raises(UserError, match=r"needs [\d.]+ GB of memory in float32, and this machine"):
        load_hf(folder)


def test_links_as_the_hub_keeps_them_are_followed(good, tmp_path):
    (tmp_path / "snapshot").mkdir()
    for path in good["gpt2"].iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(path)
    assert load_hf(tmp_path / "snapshot").config == load_hf(good["gpt2"]).config
    assert Checkpoint(tmp_path / "snapshot").tokenizer().encode(WORDS)


def test_only_a_new_or_empty_folder_is_written_and_whole_or_not_at_all(
        small_model, tmp_path, monkeypatch):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name, why in (("full", "not an empty folder"), ("full/mine.txt", "not a folder"),
                      ("link", "not a folder"), ("no/such", "does not exist")):
        with pytest.raises(UserError, match=why):
            save_hf(small_model, tmp_path / name)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["full", "link", "mine.txt"]
    monkeypatch.setattr(Path, "rename",
                        lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(UserError, match="No space left"):
        save_hf(small_model, tmp_path / "new")
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["full", "link", "mine.txt"]
    monkeypatch.undo()
    (tmp_path / "empty").mkdir()
    save_hf(small_model, tmp_path / "empty")
    assert sorted(p.name
                  for p in (tmp_path / "empty").iterdir()) == ["config.json", "model.safetensors"]


def test_an_export_to_a_full_disk_is_a_sentence_and_leaves_nothing(small_model, disk):
    with pytest.raises(UserError, match=r"could not be written: .*No space left on device"):
        save_hf(small_model, disk / "hf", train_bpe([TEXT], 400))
    assert not list(disk.iterdir())


# --- as a user runs it ----------------------------------------------------------------------------


EXPORT = "interop/__main__.py"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_model_of_others_writes_text_and_shows_its_attention(family, good, tmp_path):
    finished(tmp_path, f"init_from={good[family]}", "prompt=the glass", "max_new_tokens=8",
             "temperature=0", "precision=fp32", "attention=page.html",
             script="sample.py")
    tokenizer = transformers.AutoTokenizer.from_pretrained(good[family])
    model = transformers.AutoModelForCausalLM.from_pretrained(good[family])
    ids = tokenizer("the glass", return_tensors="pt")
    greedy = model.generate(**ids, max_new_tokens=8, do_sample=False,
                            eos_token_id=tokenizer.eos_token_id,
                            pad_token_id=0)[0, ids.input_ids.shape[1]:]
    ours = read_tokenizer(good[family], {})
    assert (tmp_path / "out.txt").read_text() == b"".join(
        ours.token_bytes(int(id)) for id in greedy).decode(errors="replace") + "\n"
    page = (tmp_path / "page.html").read_text()
    assert "<html" in page and "http://" not in page.replace("http://www.w3.org", "")
    assert ("&lt;s&gt;" in page or "<s>" in page or "\\u003cs" in page) == (family == "llama")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_model_of_others_is_fine_tuned_resumed_and_exported(family, good, text_file, tmp_path):
    shutil.copytree(good[family], tmp_path / "hf")
    settings = ["data=text", f"data.path={text_file}", "run_dir=run", "max_steps=4", "eval.every=2",
                "checkpoint.every=2", "attention.every=0",
                "batch_size=4", "model.block_size=32", "optim.warmup_steps=0", "compile=false",
                "precision=fp32", "optim=adamw"]
    finished(tmp_path, "init_from=hf", *settings[:2], script="data/prepare.py")
    assert "preparing" not in finished(tmp_path, "init_from=hf", *settings)  # its tokens are there
    for shapes, why in ((["model.n_layer=3"], "model.n_layer=3 does not go with init_from=hf"),
                        (["model.block_size=65"], "more than the 64")):
        said = finished(tmp_path, "init_from=hf", *settings, "run_dir=other", *shapes, status=1)
        assert why in said and said.count("\n") == 1 and not (tmp_path / "other").exists()
    shutil.rmtree(tmp_path / "hf")  # the run has all that it needs
    finished(tmp_path, "run_dir=run", "resume=true", "max_steps=6")
    rows = [json.loads(line)
            for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == 6 and rows[-1]["val/loss"] < rows[0]["val/loss"]

    ours, tokenizer, config = load_run(tmp_path / "run", "best")
    assert config.tokenizer.name == "hf" and config.model.block_size == 32
    assert config.model.vocab_size == 420 > tokenizer.vocab_size
    finished(tmp_path, "run_dir=run", "to=out", script=EXPORT)
    model, oracle = (kind.from_pretrained(tmp_path / "out")
                     for kind in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer))
    ids = oracle(WORDS, return_tensors="pt").input_ids
    assert ids[0].tolist() == prompt_ids(tokenizer, WORDS) and difference(model, ours, ids) < 1e-5
    assert oracle.eos_token_id == tokenizer.end_of_text == model.config.eos_token_id


@pytest.mark.slow
@pytest.mark.parametrize("more",
                         [["tokenizer=char", "model=nanogpt_cpu"],
                          ["tokenizer=bpe", "tokenizer.vocab_size=300", "model=llama_small"],
                          ["tokenizer=bpe", "tokenizer.vocab_size=300"]],
                         ids=["gpt2", "llama", "default"])
def test_a_run_of_ours_is_exported_with_its_card(more, text_file, tmp_path):
    finished(tmp_path, *more, "model.n_layer=1", "model.block_size=32", "data=text",
             f"data.path={text_file}", "run_dir=run", "max_steps=2",
             "batch_size=4", "attention.every=0", "compile=false", "precision=fp32")
    finished(tmp_path, "run_dir=run", "to=out", script=EXPORT)
    ours, tokenizer, config = load_run(tmp_path / "run", "best")
    model, oracle = (kind.from_pretrained(tmp_path / "out")
                     for kind in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer))
    text = text_file.read_text(encoding="utf-8")[:200]
    ids = oracle(text, return_tensors="pt").input_ids[:, :32]
    assert ids[0].tolist() == tokenizer.encode(text)[:32] and difference(model, ours, ids) < 1e-5

    card = (tmp_path / "out" / "README.md").read_text()
    row = [json.loads(line)
           for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()][-1]
    assert f"| {row['val/loss']:.4f} |" in card and "fingerprint" in card
    assert str(tmp_path) not in card and str(text_file.parent) not in card
    drawn = (tmp_path / "run" / "attention" / "step_00000002.png").read_bytes()
    assert "(attention.png)" in card and (tmp_path / "out" / "attention.png").read_bytes() == drawn
    line = next(line for line in card.splitlines() if "python train.py" in line)
    with hydra.initialize_config_dir(str(cli.CONFIGS), version_base="1.3"):
        again = OmegaConf.to_object(
            hydra.compose("config", overrides=cli.check_arguments(shlex.split(line)[2:])))
    again.run_dir, again.model.vocab_size = config.run_dir, config.model.vocab_size
    assert again.data.path == text_file.name  # whose folder is not the reader's
    again.data.path = config.data.path
    assert again == config

    said = finished(tmp_path, "run_dir=run", "to=out", script=EXPORT, status=1)
    assert "not an empty folder" in said and said.count("\n") == 1


@pytest.mark.slow
def test_what_export_cannot_do_is_a_sentence(whole, tmp_path):
    for args, why in ((["to=out"], "run_dir= is missing"), ([f"run_dir={whole}"], "to= is missing"),
                      (["dir=x"], "dir is not a setting"),
                      (["run_dir=a", "to=b", "dtype=q8_0"], "is for a .gguf file"),
                      (["run_dir=a", "to=b.gguf", "dtype=f8"], "not one of f16, q8_0")):
        with pytest.raises(UserError, match=why):
            cli.read_settings(args, ExportConfig, "python -m interop")
    with pytest.raises(UserError, match="nowhere does not exist"):
        export(ExportConfig("nowhere", str(tmp_path / "out")))
    done = subprocess.run([sys.executable, "-m", "interop", f"run_dir={whole}",
                           f"to={tmp_path / 'no' / 'out'}"], cwd=ROOT, capture_output=True,
                          text=True)
    assert done.returncode == 1 and "does not exist" in done.stderr and done.stderr.count(
        "\n") == 1, done.stderr
    assert not list(tmp_path.glob("no*")) and "to=" in finished(tmp_path, "--help", script=EXPORT)
    with pytest.raises(UserError, match="both given"):
        cli.sample_config(["init_from=a", "run_dir=b"])
