"""A .gguf file that is written here computes the same when it is read, here and elsewhere."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from hf_models import (
    SENTENCE,
    TEXT,
    make_gpt2_tokenizer,
    transformers,
    write_model,
    write_model_and_tokenizer,
)
from hypothesis import strategies as st
from models import lively, random_tokens

from common.errors import UserError
from config import GPTConfig
from data.tokenizer import (
    PATTERNS,
    CharTokenizer,
    Tokenizer,
    load_tiktoken,
    load_tokenizer,
    save_tokenizer,
    train_bpe,
)
from interop import load, save_gguf, save_hf
from model import GPT
from variants import build_model

gguf = pytest.importorskip("gguf")

LLAMA = {"norm": "rmsnorm", "position": "rope", "mlp": "swiglu"}
QWEN3 = {**LLAMA, "qk_norm": "gains", "n_kv_head": 2}
MODELS = {
    "gpt2": {"bias": True},
    "gpt2 without biases": {"tie_embeddings": False},
    "llama": {**LLAMA, "n_kv_head": 2, "tie_embeddings": False},
    "llama with biases": {**LLAMA, "bias": True, "head_dim": 24},
    "llama with biases in its MLPs": {**LLAMA, "bias": "mlp"},
    "llama with linear rotary factor": {**LLAMA, "rope_factor": 3.0},
    "llama 3": {**LLAMA, "rope_factor": 8.0, "rope_trained": 32, "rope_theta": 500.0},
    "qwen2": {**LLAMA, "bias": "qkv"},
    "qwen3": QWEN3,
    "qwen3 with padding": {**QWEN3, "vocab_size": 320},
}


def make_bpe() -> Tokenizer:
    return train_bpe([TEXT], 300, PATTERNS["gpt2"])


def make_model(tokenizer: Tokenizer, changes: dict, seed: int = 0) -> GPT:
    shape = {"block_size": 64, "n_layer": 2, "n_head": 4, "n_embd": 64}
    shape["vocab_size"] = tokenizer.vocab_size
    return lively(build_model(GPTConfig(**(shape | changes))), seed)


@pytest.fixture(scope="module")
def tokenizer():
    return make_bpe()


@pytest.mark.parametrize("name", MODELS)
def test_a_written_model_is_read_back_with_equal_logits_and_tokens(name, tokenizer, tmp_path):
    model = make_model(tokenizer, MODELS[name])
    save_gguf(model, tmp_path / "new" / "m.gguf", tokenizer)
    restored, restored_tokenizer = load(tmp_path / "new" / "m.gguf")
    tokens = random_tokens(2, 40) % tokenizer.vocab_size
    assert torch.equal(restored(tokens)[0], model(tokens)[0])
    assert restored_tokenizer.encode(SENTENCE) == tokenizer.encode(SENTENCE)
    assert restored_tokenizer.vocab_size == tokenizer.vocab_size
    assert restored_tokenizer.end_of_text == tokenizer.end_of_text


def test_every_format_keeps_the_chat_template_and_begin_of_text(tmp_path):
    template = "{{ raise_exception('é') }}{% for message in messages %}"  # it cannot be rendered
    original = make_gpt2_tokenizer()
    original.add_special_tokens({"bos_token": "<s>"})  # which it does not put before a text
    original.chat_template = template
    original.save_pretrained(tmp_path / "hf")
    write_model("llama", tmp_path / "hf")
    model, tokenizer = load(tmp_path / "hf")
    save_tokenizer(tokenizer, tmp_path / "saved.json")
    save_gguf(model, tmp_path / "m.gguf", load_tokenizer(tmp_path / "saved.json"))
    save_hf(model, tmp_path / "back", load(tmp_path / "m.gguf")[1])

    metadata = gguf.GGUFReader(tmp_path / "m.gguf").fields
    assert metadata["tokenizer.chat_template"].contents() == template
    assert metadata["tokenizer.ggml.bos_token_id"].contents() == original.bos_token_id
    exported = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    assert (exported.chat_template, exported.bos_token) == (template, "<s>")
    assert exported(SENTENCE).input_ids == original(SENTENCE).input_ids
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["bos_token_id"] == original.bos_token_id

    # Older folders have templates by their names
    file = tmp_path / "back" / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    settings["chat_template"] = ["none", {}, {"name": "default", "template": template}]
    file.write_text(json.dumps(settings))
    restored = load(tmp_path / "back")[1]
    assert (restored.chat_template, restored.bos_token_id) == (template, original.bos_token_id)

    # A tokenizer that says that it has none, whatever config.json says
    file.write_text(json.dumps(settings | {"bos_token": None}))
    model, tokenizer = load(tmp_path / "back")
    assert tokenizer.bos_token_id is None
    save_hf(model, tmp_path / "without", tokenizer)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "without").bos_token is None


@pytest.mark.parametrize(
    "in_config, in_generation_config, ends",
    [
        ([2, 1], None, (0, 2, 1)),
        (0, [1, 0, 2], (0, 1, 2)),
        ([1], [2, -1, 420], (0, 1, 2)),  # of which the vocabulary lacks two
    ],
)
def test_every_format_keeps_the_tokens_that_end_a_text(
    in_config, in_generation_config, ends, tmp_path
):
    write_model_and_tokenizer("gpt2", tmp_path / "hf")
    files = {"config": in_config, "generation_config": in_generation_config}
    for name, value in files.items():
        file = tmp_path / "hf" / f"{name}.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": value}))
    model, tokenizer = load(tmp_path / "hf")
    assert tokenizer.end_of_text_ids == ends and tokenizer.end_of_text == 0
    save_tokenizer(tokenizer, tmp_path / "saved.json")
    save_gguf(model, tmp_path / "m.gguf", load_tokenizer(tmp_path / "saved.json"))
    save_hf(model, tmp_path / "back", load(tmp_path / "m.gguf")[1])
    assert load(tmp_path / "back")[1].end_of_text_ids == ends
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert tuple(exported.generation_config.eos_token_id) == ends

    tokenizer.end_of_text_ids = (0, 1, 2, 3)  # more than a .gguf file can name
    with pytest.raises(UserError, match="end"):
        save_gguf(model, tmp_path / "more.gguf", tokenizer)


def test_weights_keep_half_precision(tokenizer, tmp_path):
    model = make_model(tokenizer, QWEN3).bfloat16()
    save_gguf(model, tmp_path / "m.gguf", tokenizer)
    types = {
        tensor.name: tensor.tensor_type for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors
    }
    assert types["token_embd.weight"] == gguf.GGMLQuantizationType.BF16
    assert types["output_norm.weight"] == gguf.GGMLQuantizationType.F32
    restored = load(tmp_path / "m.gguf")[0]
    for name, parameter in model.named_parameters():
        assert torch.equal(restored.get_parameter(name), parameter.float())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"mlp": "relu2"}, "model.mlp=relu2"),
        ({"mlp": "gelu_exact"}, "model.mlp=gelu_exact"),
        ({"attention_sink": True}, "model.attention_sink=true"),
        ({"ngrams": 2, "ngram_rows": 600}, "model.ngrams=2"),
        ({**QWEN3, "rope_factor": 8.0, "rope_trained": 32}, "model.rope_trained=32"),
    ],
)
def test_a_model_that_llama_cpp_lacks_is_refused_before_anything_is_written(
    changes, named, tokenizer, tmp_path
):
    with pytest.raises(UserError) as error:
        save_gguf(make_model(tokenizer, changes), tmp_path / "m.gguf", tokenizer)
    assert named in str(error.value) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("tokenizer", [train_bpe([TEXT], 300), CharTokenizer("abc")])
def test_a_tokenizer_that_llama_cpp_lacks_is_refused_with_what_to_do(tokenizer, tmp_path):
    with pytest.raises(UserError) as error:
        save_gguf(make_model(tokenizer, QWEN3), tmp_path / "m.gguf", tokenizer)
    assert "tokenizer.pattern=gpt2" in str(error.value) and not list(tmp_path.iterdir())


def test_only_a_new_file_is_written_and_completely_or_not_at_all(tokenizer, disk, tmp_path):
    model = make_model(tokenizer, {**QWEN3, "n_embd": 256})
    (tmp_path / "mine.gguf").write_text("mine")
    with pytest.raises(UserError, match="to="):
        save_gguf(model, tmp_path / "mine.gguf", tokenizer)
    assert (tmp_path / "mine.gguf").read_text() == "mine"
    with pytest.raises(UserError, match="to="):
        save_gguf(model, disk / "m.gguf", tokenizer)  # a disk without enough space
    assert not list(disk.iterdir())


@pytest.fixture(scope="module")
def llama_cpp() -> Path:
    """A folder with llama.cpp's binaries, as the npm package node-llama-cpp ships them."""
    folder = Path(os.environ["GLASSGPT_CACHE"]).parent / "llama_cpp"
    packages = ["node-llama-cpp@3.22.1", "@node-llama-cpp/linux-x64@3.22.1"]
    install = ["npm", "install", "--omit=optional", "--ignore-scripts", "--no-save", *packages]
    if not (folder / "node_modules").is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        has_npm = shutil.which("npm") and shutil.which("node")
        if not has_npm or subprocess.run(install, cwd=folder, check=False).returncode:
            shutil.rmtree(folder)
            pytest.skip("node-llama-cpp cannot be installed here")
    return folder


@pytest.mark.soak
@pytest.mark.parametrize("name", [*MODELS, "gpt2 with its own tokens"])
def test_llama_cpp_computes_the_same(name, llama_cpp, tokenizer, tmp_path):
    text = Path(st.__file__).read_text()[:20000] + TEXT
    if name == "gpt2 with its own tokens":
        tokenizer = load_tiktoken("gpt2")
    model = make_model(tokenizer, MODELS.get(name, QWEN3))
    save_gguf(model, tmp_path / "m.gguf", tokenizer)
    texts = [text, "  a\t\tb \n\n\n   c'S \r\n", " " * 700, "\n", "-" * 600, "<|endoftext|>"]
    texts += [
        "é—λ 中文 ไทย ²½Ⅷ \u00a0\u3000\u2028 😀👩‍👧 e\u0301 ١٢ 𝟙",
        "12345 1,234.5e-10 x1y22 __init__",
    ]
    prompt = tokenizer.encode(text[:60])
    job = {"model": str(tmp_path / "m.gguf"), "texts": texts, "prompt": prompt, "context": 64}
    job["newTokens"] = 4
    (tmp_path / "job.json").write_text(json.dumps(job))
    script = Path(__file__).with_name("llama_cpp.mjs").resolve()
    command = ["node", str(script), str(tmp_path / "job.json"), str(tmp_path / "answer.json")]
    subprocess.run(command, cwd=llama_cpp, check=True)
    answer = json.loads((tmp_path / "answer.json").read_text())

    assert answer["tokens"] == [tokenizer.encode(text) for text in texts]
    tokens = torch.tensor([prompt])
    assert answer["greedy"] == model.generate(tokens, 4, temperature=0)[0, -4:].tolist()
    with torch.no_grad():
        ours = model(tokens)[0][0, -1].log_softmax(-1)
    theirs = torch.tensor([answer["probabilities"].get(str(id), 0.0) for id in range(len(ours))])
    assert np.allclose(theirs, ours.exp(), rtol=5e-3, atol=1e-6)  # it rounds GPT-2's GELU to fp16
