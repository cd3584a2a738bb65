"""Checkpoints of Hugging Face's format, in and out, with transformers as the oracle."""

import json
import os
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import lively, random_tokens, seeds
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers, processors, trainers
from tokenizers import models as kinds

from config import GPTConfig, UserError
from data.hf_tokenizer import read_tokenizer
from data.tokenizer import CharTokenizer, first_token, gpt2, load_tokenizer, prompt_ids, save_tokenizer, train_bpe
from decoding import stream
from interop import Checkpoint, load_hf, save_hf
from model import GPT

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

few = settings(deadline=None, max_examples=15)
WORDS = "the glass model attends to every token before it and writes what follows, it's 1234 é—λ\n"
TEXT = WORDS * 30


# --- the oracle's models -------------------------------------------------------------------------------------------


@st.composite
def gpt2_settings(draw):
    heads = draw(st.integers(1, 4))  # a LayerNorm over few numbers makes much of the last bits: no width below 8
    return transformers.GPT2Config(
        vocab_size=draw(st.integers(5, 40)), n_positions=draw(st.integers(16, 24)), n_embd=heads * draw(st.integers(8, 12)),
        n_layer=draw(st.integers(1, 3)), n_head=heads, n_inner=draw(st.none() | st.integers(1, 40)),
        activation_function=draw(st.sampled_from(["gelu_new", "gelu_pytorch_tanh"])),
        layer_norm_epsilon=draw(st.sampled_from([1e-5, 1e-3])), tie_word_embeddings=draw(st.booleans()), bos_token_id=0, eos_token_id=0)


def llama3(theta, factor, low, high, trained):
    return {"rope_type": "llama3", "rope_theta": theta, "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
            "original_max_position_embeddings": trained}


ROPE = st.sampled_from([{"rope_type": "default", "rope_theta": 10000.0}, {"rope_type": "default", "rope_theta": 500000.0},
                        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
                        llama3(500.0, 8.0, 1.0, 4.0, 12), llama3(10000.0, 5.0, 0.5, 2.0, 10)])


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
    return kind(vocab_size=draw(st.integers(5, 40)), hidden_size=heads * head_dim, intermediate_size=draw(st.integers(1, 40)),
                num_hidden_layers=draw(st.integers(1, 3)), num_attention_heads=heads, num_key_value_heads=groups, max_position_embeddings=32,
                rms_norm_eps=draw(st.sampled_from([1e-5, 1e-3])), tie_word_embeddings=draw(st.booleans()), rope_parameters=dict(draw(ROPE)),
                bos_token_id=0, eos_token_id=0, pad_token_id=None, **more)


FAMILIES = {"gpt2": gpt2_settings(), "llama": llama_settings(), "qwen2": llama_settings(transformers.Qwen2Config)}


def theirs(config, seed=0):
    """A model of transformers', with weights as large as trained ones."""
    return lively(transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager"), seed)


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
        greedy = model.generate(tokens, max_new_tokens=4, do_sample=False, eos_token_id=None, attention_mask=torch.ones_like(tokens))
        assert torch.equal(torch.stack(list(stream(ours, tokens, 4, temperature=0)), dim=1), greedy[:, 12:])
        # and back: the same bits under the same names
        save_hf(ours, folder / "again")
        again = transformers.AutoModelForCausalLM.from_pretrained(folder / "again")
        assert type(again) is type(model)
        state = model.state_dict()
        assert again.state_dict().keys() == state.keys() and all(torch.equal(t, state[name]) for name, t in again.state_dict().items())

    check()


def test_far_tokens_turn_as_theirs_do(tmp_path):
    config = transformers.LlamaConfig(vocab_size=100, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                                      max_position_embeddings=4096, rope_parameters=llama3(500000.0, 32.0, 1.0, 4.0, 1024))
    model = theirs(config)
    ours = load_hf(folder_of(model, tmp_path / "hf"))
    tokens = torch.randint(100, (1, 2048), generator=torch.Generator().manual_seed(0))
    assert difference(model, ours, tokens) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_kept_in_half_precision_are_read_exactly(dtype, tmp_path):
    model = theirs(transformers.GPT2Config(vocab_size=30, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)).to(dtype)
    folder = folder_of(model, tmp_path / "hf")
    assert load_file(folder / "model.safetensors")["transformer.wte.weight"].dtype == dtype
    assert difference(model.float(), load_hf(folder), random_tokens(1, 16)) < 1e-5


def test_the_names_of_the_first_gpt2_files_are_read(tmp_path):
    model = theirs(transformers.GPT2Config(vocab_size=30, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0))
    folder = folder_of(model, tmp_path / "hf")
    tensors = {name.removeprefix("transformer."): t for name, t in load_file(folder / "model.safetensors").items()}
    tensors |= {"h.0.attn.bias": torch.ones(1, 1, 16, 16), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    tensors["lm_head.weight"] = tensors["wte.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    assert difference(model, load_hf(folder), random_tokens(1, 16)) < 1e-5


# --- our models ----------------------------------------------------------------------------------------------------


def ours_like(**more):
    return st.builds(GPTConfig, vocab_size=st.just(23), block_size=st.just(16), n_layer=st.integers(1, 3), n_head=st.just(4), n_embd=st.just(32),
                     mlp_hidden=st.sampled_from([None, 20]), norm_eps=st.sampled_from([1e-5, 1e-3]), tie_embeddings=st.booleans(), **more)


gpt2_like = ours_like(bias=st.booleans())
llama_like = ours_like(norm=st.just("rmsnorm"), position=st.just("rope"), mlp=st.just("swiglu"), n_kv_head=st.sampled_from([None, 1, 2]),
                       head_dim=st.sampled_from([None, 6]), bias=st.sampled_from([False, True, "attention", "qkv"]), rope_theta=st.just(500.0),
                       rope_factor=st.sampled_from([1.0, 4.0]), rope_trained=st.sampled_from([None, 10]))


@pytest.mark.parametrize("shapes", [gpt2_like, llama_like], ids=["gpt2", "llama"])
def test_a_model_of_ours_gives_the_same_logits_there_and_the_same_bits_back(shapes, tmp_path_factory):
    @few
    @given(shapes, seeds)
    def check(config, seed):
        ours, folder = lively(GPT(config), seed), tmp_path_factory.mktemp("ours") / "hf"
        save_hf(ours, folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        assert difference(model, ours, random_tokens(2, 16, seed=seed)) < 1e-5
        back = load_hf(folder)
        want, got = dict(ours.named_parameters()), dict(back.named_parameters())
        assert all(torch.equal(p, got[name]) for name, p in want.items())
        assert all(not got[name].any() for name in got.keys() - want.keys())  # GPT-2 has biases where ours may have none
        unscaled = {} if config.rope_factor != 1 else {"rope_trained": None}  # what is not in use is not kept
        assert back.config == replace(config, **unscaled, **({"bias": True} if config.position == "learned" else {}))

    check()


LLAMA = {"norm": "rmsnorm", "position": "rope", "mlp": "swiglu"}


@pytest.mark.parametrize("changes, named", [
    ({"mlp": "relu2"}, "model.mlp=relu2"), ({"qk_norm": True}, "model.qk_norm=true"), ({"norm": "rmsnorm"}, "model.norm=rmsnorm"),
    ({"n_kv_head": 1}, "model.n_kv_head=1"), ({"head_dim": 6}, "model.head_dim=6"), ({"bias": "qkv"}, "model.bias=qkv"),
    (LLAMA | {"mlp": "relu2", "qk_norm": True}, "model.mlp=relu2, model.qk_norm=true"), (LLAMA | {"value_head_dim": 3}, "model.value_head_dim=3"),
    (LLAMA | {"norm_embedding": True}, "model.norm_embedding=true"), (LLAMA | {"n_embd": 18, "head_dim": 4}, "model.n_embd=18"),
    ({"mlp": "swiglu"}, "model.mlp=swiglu")])
def test_what_has_no_counterpart_is_refused_with_the_settings_named(changes, named, tmp_path):
    model = GPT(GPTConfig(**{"vocab_size": 23, "block_size": 16, "n_layer": 1, "n_head": 4, "n_embd": 16} | changes))
    with pytest.raises(UserError, match="no counterpart") as error:
        save_hf(model, tmp_path / "hf")
    assert named in str(error.value) and not list(tmp_path.iterdir())


def test_a_setting_that_export_has_never_heard_of_stands_in_the_way():
    """Each setting of a model either stays as it is, is translated, or refuses: none is dropped in silence."""
    from interop import hf_settings

    neutral = {"dropout", "n_kv_head", "head_dim", "value_head_dim", "rope_trained", "rope_low", "rope_high"}
    config = GPTConfig(vocab_size=23, n_embd=16, n_head=4, **LLAMA)
    plain = hf_settings(config)[1]
    for f in fields(GPTConfig):
        if f.name in neutral:
            continue
        value = getattr(config, f.name)
        other = not value if isinstance(value, bool) else next((c for c in f.metadata.get("choices") or () if c != value), None) or (value or 32) * 2
        with suppress(UserError):
            assert hf_settings(replace(config, **{f.name: other}))[1] != plain, f.name


# --- tokenizers ----------------------------------------------------------------------------------------------------


LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def learned(model, before, specials):
    """Vocabulary and merges learned from TEXT by the library, as transformers' own classes take them."""
    library = Tokenizer(model)
    library.pre_tokenizer = before
    library.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=400, special_tokens=specials, show_progress=False,
                                                            initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if len(specials) < 9 else []))
    kept = json.loads(library.to_str())["model"]
    return {"vocab": kept["vocab"], "merges": [tuple(pair) for pair in kept["merges"]]}


@pytest.fixture(scope="module")
def tokenizers_of_theirs(tmp_path_factory) -> dict[str, Path]:
    """Folders with the files of a tokenizer of each kind, as transformers writes them, and GPT-2's two files alone."""
    root, made = tmp_path_factory.mktemp("tokenizers"), {}
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made["gpt2"] = transformers.GPT2Tokenizer(**learned(kinds.BPE(), byte_level, ["<|endoftext|>"]))
    made["qwen2"] = transformers.Qwen2Tokenizer(**learned(kinds.BPE(), byte_level, ["<|endoftext|>"]))
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    spelled = learned(kinds.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"), pre_tokenizers.Metaspace(), pieces)
    made["llama"] = transformers.LlamaTokenizer(**spelled, add_bos_token=True)
    library = Tokenizer(kinds.BPE(**learned(kinds.BPE(), byte_level, []), ignore_merges=True))
    library.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
                                                     pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(name, special=True) for name in ("<|begin_of_text|>", "<|end_of_text|>")])
    library.post_processor = processors.TemplateProcessing(single="<|begin_of_text|> $A", special_tokens=[
        ("<|begin_of_text|>", library.token_to_id("<|begin_of_text|>"))])
    made["llama3"] = transformers.PreTrainedTokenizerFast(tokenizer_object=library, bos_token="<|begin_of_text|>", eos_token="<|end_of_text|>")
    for name, tokenizer in made.items():
        tokenizer.save_pretrained(root / name)
    (root / "gpt2_files").mkdir()
    saved = json.loads((root / "gpt2" / "tokenizer.json").read_text())["model"]
    (root / "gpt2_files" / "vocab.json").write_text(json.dumps(saved["vocab"]))
    (root / "gpt2_files" / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{' '.join(pair)}\n" for pair in saved["merges"]))
    return {path.name: path for path in root.iterdir()}


texts = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from(list("the glas'123 \n\t\r_é—λ")), max_size=40) | st.sampled_from(
    [WORDS, "", " ", "\n\n x", "<s> </s> <|endoftext|> <|begin_of_text|>", "1234567", "👩‍👩‍👧 日本", "it's  the\r\nglass"])


@pytest.mark.parametrize("name", ["gpt2", "gpt2_files", "qwen2", "llama", "llama3"])
def test_a_tokenizer_of_theirs_gives_their_ids_and_texts(name, tokenizers_of_theirs, tmp_path):
    folder = tokenizers_of_theirs[name]
    ours = read_tokenizer(folder, {"model_type": "gpt2"})
    oracle = transformers.AutoTokenizer.from_pretrained(folder.with_name(name.removesuffix("_files")))
    save_tokenizer(ours, tmp_path / "kept.json")
    again = load_tokenizer(tmp_path / "kept.json")
    assert ours.end_of_text == oracle.eos_token_id and ours.begin_of_text == (oracle.bos_token_id if "llama" in name else None)
    assert prompt_ids(ours, WORDS) == oracle(WORDS).input_ids and prompt_ids(ours, "") == [first_token(ours)]

    @few
    @given(texts)
    def check(text):
        ids = ours.encode(text)
        assert ids == oracle(text, add_special_tokens=False, split_special_tokens=True).input_ids
        assert ids == again.encode(text) == ours.encode_array(text).tolist() and not set(ids) & ours.special.keys()
        assert ours.decode(ids) == oracle.decode(ids, skip_special_tokens=True)
        spelled = b"".join(map(ours.token_bytes, ids)).decode()
        assert spelled == ours.decode(ids) or (name == "llama" and spelled == " " + ours.decode(ids))

    check()
    assert again.to_json() == ours.to_json()


@pytest.fixture(scope="module")
def small_model():
    return lively(GPT(GPTConfig(vocab_size=400, block_size=16, n_layer=1, n_head=2, n_embd=16)))


def exported(tokenizer, folder, model):
    save_hf(model, folder, tokenizer)
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("position", ["learned", "rope"])
def test_a_bpe_tokenizer_of_ours_gives_the_same_ids_there(position, tmp_path):
    ours = train_bpe([TEXT], 400)
    shape = {"vocab_size": ours.vocab_size, "block_size": 16, "n_layer": 1, "n_head": 2, "n_embd": 16}
    oracle = exported(ours, tmp_path / "hf", GPT(GPTConfig(**shape, **(LLAMA if position == "rope" else {}))))
    back = Checkpoint(tmp_path / "hf").tokenizer()
    assert oracle.eos_token_id == ours.end_of_text == back.end_of_text and len(oracle) == ours.vocab_size == back.vocab_size

    @settings(few, max_examples=100)
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
        assert oracle(text).input_ids == ids == back.encode(text) and oracle.decode(ids) == text == back.decode(ids)
        assert b"".join(map(back.token_bytes, ids)).decode() == text
        assert first_token(back) == first_token(ours) and back.end_of_text is None and len(oracle) == ours.vocab_size
        unknown = next(c for c in "xyz" * 10 + "".join(map(chr, range(64, 200))) if c not in ours.alphabet)
        with pytest.raises(Exception, match="WordLevel"):  # there is no token that could stand for it
            oracle(unknown)
        with pytest.raises(UserError, match="cannot encode"):
            back.encode(unknown)

    check()


def test_gpt2s_own_vocabulary_comes_out_with_its_own_merges(test_data, monkeypatch, tmp_path):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(test_data / "tiktoken_cache"))
    ours = gpt2()
    oracle = exported(ours, tmp_path / "hf", GPT(GPTConfig(vocab_size=50304, block_size=16, n_layer=1, n_head=1, n_embd=8)))
    merges = json.loads((tmp_path / "hf" / "tokenizer.json").read_text())["model"]["merges"]
    assert len(merges) == 50_000 and merges[0] == ["Ġ", "t"]
    text = (test_data / "data" / "tinyshakespeare.txt").read_text()[:100_000]
    assert oracle(text).input_ids == ours.encode(text) == Checkpoint(tmp_path / "hf").tokenizer().encode(text)

    @few
    @given(texts)
    def check(text):
        assert oracle(text, split_special_tokens=True).input_ids == ours.encode(text)

    check()
