"""Models as .gguf files: read back by the gguf package, and run by llama.cpp where it is here
(pip install llama-cpp-python, ten minutes of compiling)."""

import json
import random
import sys

import pytest
import torch
from models import lively

from config import GPTConfig, UserError
from data.hf_tokenizer import HFTokenizer
from data.tokenizer import PATTERNS, CharTokenizer, hf_files, train_bpe
from interop.to_gguf import interleaved, save_gguf
from model import GPT

gguf = pytest.importorskip("gguf", reason="pip install gguf")

LLAMA = {"norm": "rmsnorm", "position": "rope", "mlp": "swiglu", "n_kv_head": 2}
SHAPES = {"gpt2": {"bias": True}, "gpt2 without biases": {},
          "llama": LLAMA, "llama with biases": LLAMA | {"bias": True},
          "llama stretched": LLAMA | {"rope_factor": 4.0},
          "llama3": LLAMA | {"rope_factor": 4.0, "rope_trained": 16},
          "qwen2": LLAMA | {"bias": "qkv"},
          "qwen3": LLAMA | {"qk_norm": "gains", "head_dim": 24, "mlp_hidden": 352},
          "qwen3 without gains": LLAMA | {"qk_norm": True, "tie_embeddings": False}}
WORDS = ["glass", "attention", "it's", "12345", "é—λ", "日本", "👩‍👩‍👧", "snake_case", "def", "#!",
         "\t", "\n\n", "    ", "\r\n", "(x)", "won't", "CamelCase", "a", "…", "<|endoftext|>"]


def drawn(seed: int, words: int) -> str:
    rng = random.Random(seed)
    return "".join(rng.choice(WORDS) + rng.choice(["", " ", " ", "\n"]) for _ in range(words))


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe([drawn(seed, 50) for seed in range(40)], 400, PATTERNS["gpt2"])


def model_of(tokenizer, **more) -> GPT:
    """A model whose matrices a file in f16 holds exactly."""
    model = lively(GPT(GPTConfig(**{"vocab_size": tokenizer.vocab_size, "block_size": 64,
                                    "n_layer": 2, "n_head": 4, "n_embd": 64} | more)))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.half())
    return model


def test_the_file_has_the_weights_the_shape_and_the_tokenizer(tokenizer, tmp_path):
    model = model_of(tokenizer, **SHAPES["qwen3"], vocab_size=tokenizer.vocab_size + 3)
    save_gguf(model, tmp_path / "m.gguf", tokenizer)
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    said = {name: field.contents() for name, field in reader.fields.items()}
    end = tokenizer.end_of_text
    assert said["general.architecture"] == "qwen3" and said["tokenizer.ggml.pre"] == "gpt-2"
    assert said["qwen3.attention.head_count_kv"] == 2 and said["qwen3.attention.key_length"] == 24
    assert said["tokenizer.ggml.eos_token_id"] == end
    assert said["tokenizer.ggml.tokens"][end:] == [
        "<|endoftext|>", *(f"[PAD{id}]" for id in range(end + 1, end + 4))]
    assert said["tokenizer.ggml.token_type"][end - 1:] == [1, 3, 5, 5, 5]
    tensors = {t.name: torch.from_numpy(t.data.copy()) for t in reader.tensors}
    block = model.blocks[1]
    assert torch.equal(tensors["blk.1.attn_q.weight"], block.attention.W_Q.weight.half())
    assert torch.equal(tensors["blk.1.attn_k_norm.weight"], block.attention.norm_k.weight)
    assert torch.equal(tensors["blk.1.ffn_gate.weight"], block.mlp.W_gate.weight.half())
    assert "output.weight" not in tensors
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


def test_what_f16_cannot_hold_is_float32_and_every_kind_of_token_is_named(tokenizer, tmp_path):
    described = json.loads(hf_files(tokenizer, 64)["tokenizer.json"])
    end, new = tokenizer.end_of_text, tokenizer.vocab_size
    described["added_tokens"].append({**described["added_tokens"][0], "id": new, "content": "<x>",
                                      "special": False})
    begun = HFTokenizer(json.dumps(described))
    begun.begin_of_text, begun.end_of_text = end, None
    model = model_of(begun, **SHAPES["llama"])
    with torch.no_grad():
        model.blocks[0].mlp.W_in.weight[0, 0] = 1e5
    save_gguf(model, tmp_path / "m.gguf", begun)
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    said = {name: field.contents() for name, field in reader.fields.items()}
    assert said["tokenizer.ggml.bos_token_id"] == said["tokenizer.ggml.eos_token_id"] == end
    assert said["tokenizer.ggml.token_type"][end:] == [3, 4]
    tensors = {t.name: t for t in reader.tensors}
    assert tensors["blk.0.ffn_up.weight"].data[0, 0] == 1e5
    assert tensors["blk.1.ffn_up.weight"].data.dtype == "float16"


def test_q8_0_is_for_rows_of_whole_blocks(tokenizer, tmp_path):
    model = model_of(tokenizer, **LLAMA, mlp_hidden=40)
    save_gguf(model, tmp_path / "m.gguf", tokenizer, "q8_0")
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert (kinds["blk.0.ffn_up.weight"], kinds["blk.0.ffn_down.weight"],
            kinds["blk.0.ffn_norm.weight"]) == ("Q8_0", "F16", "F32")


def test_llamas_pairs_stand_side_by_side():
    rows = torch.arange(12.0)[:, None]  # two heads of 6: pairs (0, 3), (1, 4), …
    assert interleaved(rows, 2)[:, 0].tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]


@pytest.mark.parametrize("more, tokens, why", [
    (LLAMA | {"value_head_dim": 3}, None, "value_head_dim=3"),
    (LLAMA | {"qk_norm": True, "rope_factor": 2.0, "rope_trained": 9}, None, "rope_trained"),
    (LLAMA, CharTokenizer("abc"), "tokenizer=bpe tokenizer.pattern=gpt2"),
    (LLAMA, train_bpe([drawn(1, 50)], 300, PATTERNS["code"]), "tokenizer.pattern=gpt2")])
def test_what_llama_cpp_has_not_is_a_sentence(more, tokens, why, tokenizer, tmp_path):
    with pytest.raises(UserError, match=why) as error:
        save_gguf(model_of(tokens or tokenizer, **more), tmp_path / "m.gguf", tokens or tokenizer)
    assert "\n" not in str(error.value) and not list(tmp_path.iterdir())


def test_a_full_disk_or_a_missing_package_is_a_sentence(tokenizer, disk, monkeypatch):
    model = model_of(tokenizer, **LLAMA)
    with pytest.raises((UserError, OSError), match=r"disk full|No space"):
        save_gguf(model, disk / "m.gguf", tokenizer)
    assert not list(disk.iterdir())
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match="pip install gguf"):
        save_gguf(model, disk / "m.gguf", tokenizer)


@pytest.fixture(scope="module")
def llama_cpp():
    return pytest.importorskip("llama_cpp", reason="pip install llama-cpp-python")


def opened(llama_cpp, path):
    return llama_cpp.Llama(str(path), n_ctx=256, logits_all=True, verbose=False, n_threads=1,
                           type_k=0, type_v=0)  # keys and values in float32


@pytest.mark.soak
@pytest.mark.parametrize("shape", SHAPES)
def test_llama_cpp_has_our_logits_and_greedy_texts(shape, tokenizer, llama_cpp, tmp_path):
    model = model_of(tokenizer, **SHAPES[shape])
    save_gguf(model, tmp_path / "m.gguf", tokenizer)
    theirs = opened(llama_cpp, tmp_path / "m.gguf")
    for seed in range(10):
        ids = tokenizer.encode(drawn(seed, 30))[:20]
        greedy = model.generate(torch.tensor([ids]), 30, temperature=0)[0]
        with torch.no_grad():
            logits = model(greedy[None])[0][0]  # (T, V)
        theirs.reset()
        theirs.eval(greedy.tolist())
        found = torch.tensor(theirs.scores[:len(greedy)])
        assert (found - logits).abs().max() < 1e-2
        best = logits.topk(2).values
        sure = best[:, 0] - best[:, 1] > 2e-2  # else the two may come in another order
        assert torch.equal(found.argmax(dim=-1)[sure], logits.argmax(dim=-1)[sure])
