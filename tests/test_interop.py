"""Checkpoints of Hugging Face's format, in and out, with transformers as the oracle."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from conftest import soak
from hypothesis import given
from hypothesis import strategies as st
from models import few, lively, random_tokens, seeds
from processes import run_to_end
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers, processors, trainers
from tokenizers import models as kinds

from cli.config_file import read_config
from common.errors import UserError
from common.metrics import read_rows
from config import DataConfig, GPTConfig, TokenizerConfig
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
from data.tokens import prepare
from interop import Checkpoint, layout, load, load_hf, save_hf, starting_point
from interop.settings import hf_settings
from model import GPT
from training.checkpoint import load_run, parameter_shapes
from training.evaluate import Windows

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

WTE = "transformer.wte.weight"
SAFE = "model.safetensors"
WORDS = "the glass model attends to every token before it and writes what follows, it's 1234 é—λ\n"
TEXT = WORDS * 30


# --- the oracle's models --------------------------------------------------------------------------


# a norm over few numbers makes much of the last bits: no width below 8
gpt2_settings = st.builds(
    lambda heads, width, **more: transformers.GPT2Config(
        n_head=heads, n_embd=heads * width, bos_token_id=0, eos_token_id=0, **more
    ),
    heads=st.integers(1, 4),
    width=st.integers(8, 12),
    vocab_size=st.integers(5, 40),
    n_positions=st.integers(16, 24),
    n_layer=st.integers(1, 3),
    n_inner=st.none() | st.integers(1, 40),
    activation_function=st.sampled_from(["gelu_new", "gelu_pytorch_tanh"]),
    layer_norm_epsilon=st.sampled_from([1e-5, 1e-3]),
    tie_word_embeddings=st.booleans(),
)


def llama3(theta, factor, low, high, trained):
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": trained,
    }


ROPE = st.sampled_from(
    [
        {"rope_type": "default", "rope_theta": 10000.0},
        {"rope_type": "default", "rope_theta": 500000.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
        llama3(500.0, 8.0, 1.0, 4.0, 12),
        llama3(10000.0, 5.0, 1.0, 4.0, 10),
    ]
)


@st.composite
def llama_settings(draw, kind=transformers.LlamaConfig):
    groups = draw(st.integers(1, 3))
    heads, head_dim = groups * draw(st.integers(1, 3)), 2 * draw(st.integers(4, 6))
    more = {}
    if kind is transformers.MistralConfig:
        more = {"sliding_window": None}
    elif kind is not transformers.Qwen2Config:
        more = {"attention_bias": draw(st.booleans()), "head_dim": 2 * draw(st.integers(4, 8))}
    if kind is transformers.LlamaConfig:
        more["mlp_bias"] = more["attention_bias"] and draw(st.booleans())
    return kind(
        vocab_size=draw(st.integers(5, 40)),
        hidden_size=heads * head_dim,
        intermediate_size=draw(st.integers(1, 40)),
        num_hidden_layers=draw(st.integers(1, 3)),
        num_attention_heads=heads,
        num_key_value_heads=groups,
        max_position_embeddings=32,
        rms_norm_eps=draw(st.sampled_from([1e-5, 1e-3])),
        tie_word_embeddings=draw(st.booleans()),
        rope_parameters=dict(draw(ROPE)),
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=None,
        **more,
    )


FAMILIES = {
    "gpt2": gpt2_settings,
    "llama": llama_settings(),
    "mistral": llama_settings(transformers.MistralConfig),
    "qwen2": llama_settings(transformers.Qwen2Config),
    "qwen3": llama_settings(transformers.Qwen3Config),
}


def theirs(config, seed=0):
    """A model of transformers', with weights as large as trained ones."""
    return lively(
        transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager"), seed
    )


@torch.no_grad()
def difference(their_model, our_model, tokens) -> float:
    return (their_model(tokens).logits - our_model(tokens)[0]).abs().max().item()


def folder_of(model, path: Path, **how) -> Path:
    model.save_pretrained(path, **how)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_of_theirs_gives_their_logits_and_goes_back(family, tmp_path_factory):
    @few
    @given(FAMILIES[family], seeds, st.sampled_from(["1GB", "4KB"]))
    def check(config, seed, shard):
        model = theirs(config, seed)
        folder = folder_of(model, tmp_path_factory.mktemp("hf"), max_shard_size=shard)
        ours = load_hf(folder)
        assert not ours.training
        tokens = random_tokens(2, 12, seed=seed) % config.vocab_size
        assert difference(model, ours, tokens) < 1e-5
        # and back: the same bits under the same names
        save_hf(ours, folder / "again")
        again = transformers.AutoModelForCausalLM.from_pretrained(folder / "again")
        assert type(again) is type(model) or family == "mistral"  # which goes out as a Llama
        state = model.state_dict()
        assert again.state_dict().keys() == state.keys()
        assert all(torch.equal(t, state[name]) for name, t in again.state_dict().items())

    check()


def test_weights_to_sample_from_are_as_they_are_in_the_file_and_never_written_to(tmp_path):
    save_hf(
        GPT(
            GPTConfig(vocab_size=400, block_size=16, n_layer=1, n_head=2, n_embd=16, **LLAMA)
        ).bfloat16(),
        tmp_path / "hf",
    )
    kept = (tmp_path / "hf" / SAFE).read_bytes()
    weight = Checkpoint(tmp_path / "hf").load().head.weight
    with torch.no_grad():
        weight.zero_()
    assert weight.dtype == torch.bfloat16 and (tmp_path / "hf" / SAFE).read_bytes() == kept


GPT2 = {
    "vocab_size": 30,
    "n_positions": 16,
    "n_embd": 16,
    "n_layer": 1,
    "n_head": 2,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


@pytest.mark.parametrize("more", [0, 1], ids=["its embedding", "one of its own"])
def test_a_head_in_the_file_counts_and_so_do_the_names_of_the_first_files(more, tmp_path):
    folder = folder_of(theirs(transformers.GPT2Config(**GPT2)), tmp_path / "hf")
    tensors = load_file(folder / SAFE)
    tensors["lm_head.weight"] = tensors[WTE] + more
    save_file(tensors, folder / SAFE, metadata={"format": "pt"})
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tensors = {name.removeprefix("transformer."): t for name, t in tensors.items()}
    tensors |= {
        "h.0.attn.bias": torch.ones(1, 1, 16, 16),
        "h.0.attn.masked_bias": torch.tensor(-1e4),
    }
    save_file(tensors, folder / SAFE)
    assert difference(model, load_hf(folder), random_tokens(1, 16)) < 1e-5


# --- our models -----------------------------------------------------------------------------------


LLAMA = {"norm": "rmsnorm", "position": "rope", "mlp": "swiglu"}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"bias": True, "mlp_hidden": 20, "tie_embeddings": False},
        LLAMA | {"head_dim": 6},
        LLAMA | {"bias": True, "n_kv_head": 1, "rope_theta": 500.0, "rope_factor": 4.0},
        LLAMA | {"bias": "attention", "rope_factor": 4.0, "rope_trained": 10, "norm_eps": 1e-3},
        LLAMA | {"bias": "qkv", "n_kv_head": 2, "tie_embeddings": False},
        LLAMA | {"qk_norm": "gains", "bias": "attention", "head_dim": 6},
        LLAMA | {"qk_norm": True, "n_kv_head": 2},
        LLAMA | {"qk_norm": True, "norm_embedding": True},
        LLAMA | {"norm_embedding": True, "tie_embeddings": False},
    ],
    ids=str,
)
def test_a_model_of_ours_gives_the_same_logits_there_and_comes_back(changes, tmp_path):
    ours = lively(
        GPT(
            GPTConfig(
                **{"vocab_size": 23, "block_size": 16, "n_layer": 2, "n_head": 4, "n_embd": 32}
                | changes
            )
        )
    )
    save_hf(ours, tmp_path / "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    back, tokens = load_hf(tmp_path / "hf"), random_tokens(2, 16)
    assert difference(model, ours, tokens) < 1e-5 and difference(model, back, tokens) < 1e-5
    assert hf_settings(back.config) == hf_settings(ours.config)
    if "norm_embedding" not in changes and changes.get("qk_norm") is not True:
        got = dict(back.named_parameters())
        assert all(torch.equal(p, got[name]) for name, p in ours.named_parameters())


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"norm": "rmsnorm", "n_kv_head": 1}, "model.n_kv_head=1, model.norm=rmsnorm"),
        ({"head_dim": 6}, "model.head_dim=6"),
        ({"bias": "qkv"}, "model.bias=qkv"),
        (LLAMA | {"mlp": "relu2", "qk_norm": True, "norm_embedding": True}, "model.mlp=relu2"),
        (LLAMA | {"qk_norm": "gains", "bias": True}, "model.bias=true"),
        (LLAMA | {"value_head_dim": 3}, "model.value_head_dim=3"),
        (LLAMA | {"n_embd": 18, "head_dim": 4}, "model.n_embd=18"),
    ],
)
def test_what_has_no_counterpart_is_refused_with_the_settings_named(changes, named, tmp_path):
    model = GPT(
        GPTConfig(
            **{"vocab_size": 23, "block_size": 16, "n_layer": 1, "n_head": 4, "n_embd": 16}
            | changes
        )
    )
    with pytest.raises(UserError, match="no counterpart") as error:
        save_hf(model, tmp_path / "hf")
    assert named in str(error.value) and not list(tmp_path.iterdir())


# --- tokenizers -----------------------------------------------------------------------------------


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def learned(model, before, specials):
    """Vocabulary and merges learned from TEXT by the library, for transformers' classes."""
    library = Tokenizer(model)
    library.pre_tokenizer = before
    alphabet = pre_tokenizers.ByteLevel.alphabet() if len(specials) < 9 else []
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=specials, show_progress=False, initial_alphabet=alphabet
    )
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
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    spelled = learned(
        kinds.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"),
        pre_tokenizers.Metaspace(),
        pieces,
    )
    made["llama"] = transformers.LlamaTokenizer(**spelled, add_bos_token=True)
    library = Tokenizer(kinds.BPE(**learned(kinds.BPE(), byte_level, []), ignore_merges=True))
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(
        [AddedToken(name, special=True) for name in ("<|begin_of_text|>", "<|end_of_text|>")]
    )
    begin = "<|begin_of_text|>"
    library.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, library.token_to_id(begin))]
    )
    made["llama3"] = transformers.PreTrainedTokenizerFast(
        tokenizer_object=library, bos_token="<|begin_of_text|>", eos_token="<|end_of_text|>"
    )
    for name, tokenizer in made.items():
        tokenizer.save_pretrained(root / name)
    return {path.name: path for path in root.iterdir()}


letters = st.sampled_from(list("the glas'123 \n\t\r_é—λ"))
texts = st.text(st.characters(exclude_categories=["Cs"]) | letters, max_size=40) | st.sampled_from(
    [
        WORDS,
        "",
        " ",
        "\n\n x",
        "<s> </s> <|endoftext|> <|begin_of_text|>",
        "1234567",
        "👩‍👩‍👧 日本",
        "it's  the\r\nglass",
    ]
)


@pytest.mark.parametrize("name", ["gpt2", "llama", "llama3"])
def test_a_tokenizer_of_theirs_gives_their_ids_and_texts(name, tokenizers_of_theirs, tmp_path):
    folder = tokenizers_of_theirs[name]
    ours = read_tokenizer(folder, {"model_type": "gpt2"})
    oracle = transformers.AutoTokenizer.from_pretrained(folder)
    save_tokenizer(ours, tmp_path / "kept.json")
    again = load_tokenizer(tmp_path / "kept.json")
    assert ours.end_of_text == oracle.eos_token_id
    assert ours.begin_of_text == (oracle.bos_token_id if "llama" in name else None)
    assert encode_prompt(ours, WORDS) == oracle(WORDS).input_ids
    assert encode_prompt(ours, "") == [start_token(ours)]

    @few
    @given(texts)
    def check(text):
        ids = ours.encode(text)
        assert ids == oracle(text, add_special_tokens=False, split_special_tokens=True).input_ids
        assert (
            ids == again.encode(text) == ours.encode_array(text).tolist()
            and not set(ids) & ours.special.keys()
        )
        assert ours.decode(ids) == oracle.decode(ids, skip_special_tokens=True)
        spelled = b"".join(map(ours.token_bytes, ids)).decode()
        assert spelled == ours.decode(ids) or (
            name == "llama" and spelled == " " + ours.decode(ids)
        )

    check()
    assert again.to_json() == ours.to_json()


@pytest.fixture(scope="module")
def small_model():
    return lively(GPT(GPTConfig(vocab_size=400, block_size=16, n_layer=1, n_head=2, n_embd=16)))


def exported(tokenizer, folder, model):
    save_hf(model, folder, tokenizer)
    return transformers.AutoTokenizer.from_pretrained(folder)


def test_a_bpe_tokenizer_of_ours_gives_the_same_ids_there(small_model, tmp_path):
    ours = train_bpe([TEXT], 400)
    oracle = exported(ours, tmp_path / "hf", small_model)
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
        assert start_token(back) == start_token(ours) and back.end_of_text is None
        assert len(oracle) == ours.vocab_size
        assert len(oracle("\ue000" + text).input_ids) == len(ids) + 1  # a character not known there

    check()


@pytest.mark.soak
def test_gpt2s_own_vocabulary_comes_out_with_its_own_merges(test_data, monkeypatch, tmp_path):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(test_data / "tiktoken_cache"))
    ours = load_tiktoken("gpt2")
    oracle = exported(
        ours,
        tmp_path / "hf",
        GPT(GPTConfig(vocab_size=50304, block_size=16, n_layer=1, n_head=1, n_embd=8)),
    )
    merges = json.loads((tmp_path / "hf" / "tokenizer.json").read_text())["model"]["merges"]
    assert len(merges) == 50_000 and merges[0] == ["Ġ", "t"]
    text = (test_data / "data" / "tinyshakespeare.txt").read_text()[:100_000] + WORDS
    assert (
        oracle(text).input_ids
        == ours.encode(text)
        == Checkpoint(tmp_path / "hf").tokenizer().encode(text)
    )


# --- what is not as it should be ------------------------------------------------------------------


@pytest.fixture(scope="module")
def good(tmp_path_factory, tokenizers_of_theirs) -> dict[str, Path]:
    """A folder of each family with its weights and its tokenizer; `shards`: a llama's weights in
    several files."""
    root, made = tmp_path_factory.mktemp("good"), {}
    shape = {"vocab_size": 420, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    made["gpt2"] = theirs(
        transformers.GPT2Config(n_positions=64, n_embd=32, n_layer=2, n_head=2, **shape)
    )
    made["llama"] = theirs(
        transformers.LlamaConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            **shape,
        )
    )
    for name, model in made.items():
        shutil.copytree(tokenizers_of_theirs[name], root / name)
        folder_of(model, root / name)
    folder_of(made["llama"], root / "shards", max_shard_size="10KB")
    return {path.name: path for path in root.iterdir()}


def damage(folder, settings=None, tensors=None, cut=None):
    """Change the settings, change the tensors, or shorten a file."""
    if settings:
        kept = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(kept | settings))
    if tensors:
        kept = load_file(folder / SAFE)
        tensors(kept)
        save_file(kept, folder / SAFE)
    if cut:
        os.truncate(next(folder.glob(cut)), 4000)


@pytest.mark.parametrize(
    "family, change, why",
    [
        ("gpt2", {"settings": {"n_layer": 9}}, "h.2.attn.c_attn.bias: missing in the file"),
        ("gpt2", {"settings": {"vocab_size": 10**12}}, "\\[1000000000000, 32\\]"),
        ("gpt2", {"settings": {"n_embd": None}}, "n_embd is missing"),
        ("gpt2", {"settings": {"model_type": "bert"}}, "is bert; what can be read is gpt2"),
        (
            "llama",
            {"settings": {"model_type": "mistral", "sliding_window": 9}},
            "sliding_window is 9",
        ),
        ("gpt2", {"settings": {"activation_function": "gelu"}}, "activation_function is gelu"),
        (
            "llama",
            {"settings": {"rope_parameters": {"rope_type": "yarn"}}},
            "rope_type is yarn; what",
        ),
        (
            "llama",
            {"settings": {"rope_parameters": llama3(500000.0, 8.0, 2.0, 4.0, 12)}},
            "low_freq_factor is 2.0; what our model has is 1.0",
        ),
        ("llama", {"settings": {"layer_types": ["sliding_attention"]}}, "layer_types has sliding"),
        ("llama", {"settings": {"mlp_bias": True}}, "bias: missing in the file"),
        ("gpt2", {"tensors": lambda t: t.pop(WTE)}, "wte.weight: missing in the file"),
        ("gpt2", {"tensors": lambda t: t.update(extra=torch.zeros(2))}, "absent in the model"),
        ("gpt2", {"tensors": lambda t: t.update({WTE: t[WTE].to(torch.int8)})}, "in I8"),
        ("gpt2", {"cut": SAFE}, "cannot be read as safetensors"),
        ("shards", {"cut": "*1-of-*"}, "1-of-.*cannot be read as safetensors"),
    ],
)
def test_damage_is_a_sentence(family, change, why, good, tmp_path):
    folder = shutil.copytree(good[family], tmp_path / "hf")
    damage(folder, **change)
    with pytest.raises(UserError, match=why) as error:
        load_hf(folder)
    assert "\n" not in str(error.value) and len(str(error.value)) < 600


def test_a_pickle_is_not_opened_and_other_folders_are_refused(good, tmp_path):
    folder = shutil.copytree(good["gpt2"], tmp_path / "hf")
    (folder / SAFE).rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"a pickle, which may run code .*save_pretrained"):
        load_hf(folder)
    (folder / "pytorch_model.bin").unlink()
    os.mkfifo(folder / SAFE)
    with pytest.raises(UserError, match=r"holds no model.safetensors"):
        load_hf(folder)


junk = st.sampled_from([None, True, 0, -1, 1.5, 10**9, float("inf"), "x", "${n_head}", [], {}, [1]])


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_whatever_config_json_says_there_is_a_model_or_a_sentence(family, good, tmp_path):
    folder = shutil.copytree(good[family], tmp_path / "hf")
    kept = json.loads((folder / "config.json").read_text())

    @given(st.dictionaries(st.sampled_from([*sorted(kept), "rope_scaling"]), junk, max_size=3))
    def check(changes):
        (folder / "config.json").write_text(json.dumps(kept | changes))
        try:
            Checkpoint(folder)
        except UserError as e:
            assert "\n" not in str(e) and len(str(e)) < 600

    check()


@pytest.mark.parametrize(
    "old, new, why",
    [
        ("", "", "has no tokenizer.json.*save_pretrained"),
        ('"vocab": {', '"vocab": [', "cannot be read as JSON"),
        ('"vocab"', '"words"', "no tokenizer that can be read"),
        ('"vocab": {', '"vocab": {"zz": 99999,', "100,000 tokens, more than its model's 420"),
    ],
)
def test_a_tokenizer_that_is_none_is_a_sentence(old, new, why, good, tmp_path):
    folder = shutil.copytree(good["gpt2"], tmp_path / "hf")
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").unlink()
    if old:
        (folder / "tokenizer.json").write_text(text.replace(old, new, 1))
    with pytest.raises(UserError, match=why):
        Checkpoint(folder).tokenizer()


def test_only_a_new_or_empty_folder_is_written_and_whole_or_not_at_all(small_model, disk, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    for name in ("full", "full/mine.txt"):
        with pytest.raises(UserError, match="is there already"):
            save_hf(small_model, tmp_path / name)
    with pytest.raises(UserError, match=r"could not be written: .*No space left on device"):
        save_hf(small_model, disk / "hf")
    assert not list(disk.iterdir())
    (tmp_path / "empty").mkdir()
    save_hf(small_model, tmp_path / "empty")
    names = sorted(p.name for p in (tmp_path / "empty").iterdir())
    assert names == ["config.json", "model.safetensors"]


# --- as a user runs it ----------------------------------------------------------------------------


EXPORT = "interop/__main__.py"


def compared(folder, ours, tokenizer, text):
    """What a run exported to a folder gives the same ids and logits there."""
    model, oracle = (
        kind.from_pretrained(folder)
        for kind in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer)
    )
    ids = oracle(text, return_tensors="pt").input_ids
    assert ids[0].tolist() == encode_prompt(tokenizer, text) and difference(model, ours, ids) < 1e-5
    assert oracle.eos_token_id == tokenizer.end_of_text == model.config.eos_token_id


QUIET = [
    "attention.every=0",
    "batch_size=4",
    "model.block_size=32",
    "compile=false",
    "precision=fp32",
    "run_dir=run",
]


@pytest.mark.slow
@pytest.mark.parametrize("family", [soak("gpt2"), "llama"])
def test_a_model_of_others_is_fine_tuned_resumed_and_exported(family, good, text_file, tmp_path):
    shutil.copytree(good[family], tmp_path / "hf")
    run_to_end(
        tmp_path,
        "init_from=hf",
        "data=text",
        f"data.path={text_file}",
        "max_steps=4",
        "eval.every=2",
        "checkpoint.every=2",
        "optim.warmup_steps=0",
        "optim=adamw",
        *QUIET,
    )
    shutil.rmtree(tmp_path / "hf")  # the run has all that it needs
    run_to_end(tmp_path, "run_dir=run", "resume=true", "max_steps=6")
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert rows[-1]["step"] == 6 and rows[-1]["val/loss"] < rows[0]["val/loss"]
    ours, tokenizer, config = load_run(tmp_path / "run", "best")
    assert config.tokenizer.name == "hf" and config.model.block_size == 32
    assert config.model.vocab_size == 420 > tokenizer.vocab_size
    run_to_end(tmp_path, "run_dir=run", "to=out", script=EXPORT)
    compared(tmp_path / "out", ours, tokenizer, WORDS)


@pytest.mark.soak
@pytest.mark.parametrize(
    "more",
    [["tokenizer=char", "model=nanogpt_cpu"], ["tokenizer=bpe", "tokenizer.vocab_size=300"]],
    ids=["gpt2", "default"],
)
def test_a_run_of_ours_is_exported(more, text_file, tmp_path):
    run_to_end(
        tmp_path,
        *more,
        "model.n_layer=1",
        "data=text",
        f"data.path={text_file}",
        "max_steps=2",
        *QUIET,
    )
    run_to_end(tmp_path, "run_dir=run", "to=out", script=EXPORT)
    compared(tmp_path / "out", *load_run(tmp_path / "run", "best")[:2], "the glass model é—λ\n")
    for to, why in (("out", "is there already"), ("no/out", "No such file")):
        said = run_to_end(tmp_path, "run_dir=run", f"to={to}", script=EXPORT, status=1)
        assert why in said and said.count("\n") == 1


# --- nanoGPT --------------------------------------------------------------------------------------


class Pickled:
    def __reduce__(self):
        return os.mkdir, ("ran",)


@pytest.mark.slow
def test_nanogpts_checkpoint_comes_in_and_nothing_in_it_runs(text_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shape = {
        "vocab_size": len(set(text_file.read_text("utf-8"))),
        "block_size": 32,
        "n_layer": 2,
        "n_head": 2,
        "n_embd": 16,
        "bias": True,
        "dropout": 0.0,
    }
    model = lively(GPT(GPTConfig(**shape)))
    params = dict(model.named_parameters())
    state = {
        f"_orig_mod.{theirs}": torch.cat([params[name] for name in ours])
        for theirs, ours, *_ in layout(parameter_shapes(model.config), "gpt2")
    }
    torch.save({"model": state, "model_args": shape, "iter_num": 9}, "ckpt.pt")
    run_to_end(
        tmp_path,
        "init_from=ckpt.pt",
        "data=text",
        f"data.path={text_file}",
        "max_steps=1",
        "run_dir=run",
        "eval.every=1",
        "optim.warmup_steps=0",
        "precision=fp32",
        "attention.every=0",
        "compile=false",
        "batch_size=2",
    )
    taken, tokenizer, _ = load_run("run")
    assert tokenizer.vocab_size == shape["vocab_size"] and taken.config.mlp == "gelu"
    text = prepare(DataConfig("text", str(text_file)), TokenizerConfig("char"))
    loss = Windows(text.val, text.tokenizer, read_config(Path("run/config.yaml"))).loss(model)
    assert read_rows(Path("run/metrics.jsonl"))[0]["val/loss"] == pytest.approx(loss, rel=1e-6)
    with pytest.raises(UserError, match="a pickle beside it"):
        load(Path("ckpt.pt"))
    other = {"model": state, "model_args": {**shape, "n_embd": 18}}
    for wrong in (other, {"model": Pickled()}, []):
        torch.save(wrong, "ckpt.pt")
        with pytest.raises(UserError, match=r"ckpt\.pt (holds another|is no checkpoint)"):
            starting_point(Path("ckpt.pt"))[1](GPT(GPTConfig(**shape)))
    assert not os.path.exists("ran")
