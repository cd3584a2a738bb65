"""Models of Hugging Face's format compute the same here and in transformers, in both directions."""

import json

import pytest
import torch
from hf_models import (
    EMBEDDING,
    FAMILIES,
    LLAMA_SHAPE,
    WEIGHTS,
    make_hf_model,
    max_difference,
    transformers,
    write_model,
)
from hypothesis import given
from hypothesis import strategies as st
from models import few, lively, random_tokens, seeds
from safetensors.torch import load_file, save_file

from common.errors import UserError
from config import GPTConfig
from interop import find_model, load_hf, save_hf
from interop.settings import config_to_hf
from model import GPT
from variants import build_model

TOLERANCE = 1e-5


def make_our_model(**changes) -> GPT:
    shape = {"vocab_size": 23, "block_size": 16, "n_layer": 2, "n_head": 4, "n_embd": 32}
    return lively(build_model(GPTConfig(**shape | changes)))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_an_imported_model_gives_the_same_maps_and_logits_and_exports_to_the_same_weights(
    family, tmp_path_factory
):
    @few
    @given(FAMILIES[family], seeds, st.sampled_from(["1GB", "4KB"]))
    def check(config, seed, max_shard_size):
        model = make_hf_model(config, seed)
        folder = tmp_path_factory.mktemp("hf")
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        ours = load_hf(folder)
        assert not ours.training
        tokens = random_tokens(2, 12, seed=seed) % config.vocab_size
        assert max_difference(model, ours, tokens) < TOLERANCE
        with torch.no_grad():
            maps = torch.stack(model(tokens, output_attentions=True).attentions)
        assert torch.allclose(maps, ours.attention_maps(tokens), atol=TOLERANCE)

        if family == "gpt_neox":
            with pytest.raises(UserError, match=r"model\.norm=layernorm"):
                save_hf(ours, folder / "exported")
            return
        save_hf(ours, folder / "exported")
        exported = transformers.AutoModelForCausalLM.from_pretrained(folder / "exported")
        assert type(exported) is type(model) or family == "mistral"  # which is exported as a Llama
        state, exported_state = model.state_dict(), exported.state_dict()
        assert exported_state.keys() == state.keys()
        assert all(torch.equal(exported_state[name], state[name]) for name in state)

    check()


@pytest.mark.parametrize("rotary", [{}, {"rotary_pct": 0.5, "rotary_emb_base": 500}])
def test_older_files_of_gpt_neox_have_other_names_and_buffers(rotary, tmp_path):
    config = transformers.GPTNeoXConfig(**LLAMA, **rotary)
    model = make_hf_model(config)
    model.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    del settings["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(settings | rotary))
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tensors["embed_out.weight"] = tensors.pop("lm_head.weight")
    attention = "gpt_neox.layers.0.attention."
    tensors |= {f"{attention}bias": torch.ones(1, 1, 16, 16, dtype=torch.bool)}
    tensors |= {f"{attention}masked_bias": torch.tensor(-1e9)}
    tensors |= {f"{attention}rotary_emb.inv_freq": torch.ones(2)}
    save_file(tensors, tmp_path / WEIGHTS)
    tokens = random_tokens(2, 16) % config.vocab_size
    assert max_difference(model, load_hf(tmp_path), tokens) < TOLERANCE


LLAMA = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 3, "vocab_size": 20}
LLAMA |= {"max_position_embeddings": 16, "intermediate_size": 8, "num_key_value_heads": 2}
WINDOW = {"use_sliding_window": True, "sliding_window": 15}
ONE_WINDOW = ["full_attention", "sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    "family, window, is_full",
    [
        ("Mistral", {"sliding_window": 16}, True),
        ("Mistral", {"sliding_window": 15}, False),
        ("Mistral", {"sliding_window": 15, "layer_types": ["full_attention"] * 3}, False),
        ("Qwen2", WINDOW | {"max_window_layers": 3}, True),
        ("Qwen2", WINDOW | {"max_window_layers": 2}, False),
        ("Qwen2", WINDOW | {"use_sliding_window": False, "max_window_layers": 2}, True),
        ("Qwen3", WINDOW | {"sliding_window": 16, "max_window_layers": 0}, True),
        ("Qwen3", WINDOW | {"layer_types": ["full_attention"] * 3}, True),
        ("Qwen3", WINDOW | {"layer_types": ONE_WINDOW}, False),
        ("Qwen3", WINDOW | {"sliding_window": 16, "layer_types": ONE_WINDOW}, True),
    ],
)
def test_a_model_is_imported_if_no_sliding_window_is_shorter_than_its_context(
    family, window, is_full, tmp_path
):
    config = getattr(transformers, f"{family}Config")(**LLAMA, **window)
    model = make_hf_model(config)
    model.save_pretrained(tmp_path)
    if not is_full:
        with pytest.raises(UserError, match="sliding_window=15"):
            load_hf(tmp_path)
        return
    tokens = random_tokens(2, 16) % config.vocab_size
    assert max_difference(model, load_hf(tmp_path), tokens) < TOLERANCE


def test_a_mistral_without_a_sliding_window_in_its_settings_has_that_of_transformers(tmp_path):
    make_hf_model(transformers.MistralConfig(**LLAMA)).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    settings = json.loads(file.read_text())
    del settings["sliding_window"]
    file.write_text(json.dumps(settings | {"max_position_embeddings": 4097}))
    with pytest.raises(UserError, match="sliding_window=4096"):
        load_hf(tmp_path)


@pytest.mark.parametrize("offset", [0, 1], ids=["equal to the embedding", "different"])
def test_a_head_in_the_file_is_used(offset, tmp_path):
    write_model("gpt2", tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    tensors["lm_head.weight"] = tensors[EMBEDDING] + offset
    save_file(tensors, tmp_path / WEIGHTS, metadata={"format": "pt"})
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert max_difference(model, find_model(tmp_path).build(), random_tokens(1, 16)) < TOLERANCE


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"bias": True, "mlp_hidden": 20, "tie_embeddings": False, "mlp": "gelu_exact"},
        LLAMA_SHAPE | {"head_dim": 6},
        LLAMA_SHAPE | {"bias": True, "n_kv_head": 1, "rope_theta": 500.0, "rope_factor": 4.0},
        LLAMA_SHAPE
        | {"bias": "attention", "rope_factor": 4.0, "rope_trained": 10, "norm_eps": 1e-3},
        LLAMA_SHAPE | {"bias": "qkv", "n_kv_head": 2, "tie_embeddings": False},
        LLAMA_SHAPE | {"qk_norm": "gains", "bias": "attention", "head_dim": 6},
        LLAMA_SHAPE | {"qk_norm": True, "n_kv_head": 2},
        LLAMA_SHAPE | {"qk_norm": True, "norm_embedding": True},
        LLAMA_SHAPE | {"norm_embedding": True, "tie_embeddings": False},
        LLAMA_SHAPE | {"mlp_ratio": 2.75},
    ],
    ids=str,
)
def test_an_exported_model_gives_the_same_logits_and_can_be_imported_again(changes, tmp_path):
    ours = make_our_model(**changes)
    save_hf(ours, tmp_path / "hf")
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    imported, tokens = load_hf(tmp_path / "hf"), random_tokens(2, 16)
    assert max_difference(exported, ours, tokens) < TOLERANCE
    assert max_difference(exported, imported, tokens) < TOLERANCE
    assert config_to_hf(imported.config) == config_to_hf(ours.config)
    if "norm_embedding" not in changes and changes.get("qk_norm") is not True:
        parameters = dict(imported.named_parameters())
        assert all(torch.equal(p, parameters[name]) for name, p in ours.named_parameters())


@pytest.mark.parametrize(
    "changes, named",
    [
        (
            {"norm": "rmsnorm", "n_kv_head": 1},
            ["model.n_kv_head=1", "model.norm=rmsnorm"],
        ),
        ({"head_dim": 6}, ["model.head_dim=6"]),
        (LLAMA_SHAPE | {"value_head_dim": 3}, ["model.value_head_dim=3"]),
    ],
)
def test_a_model_that_transformers_lacks_is_refused_with_its_settings(changes, named, tmp_path):
    model = make_our_model(**{"n_layer": 1, "n_embd": 16, **changes})
    with pytest.raises(UserError) as error:
        save_hf(model, tmp_path / "hf")
    assert all(setting in str(error.value) for setting in named)
    assert not list(tmp_path.iterdir())
