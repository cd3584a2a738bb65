"""Checkpoints of Hugging Face's format, in and out, with transformers as the oracle."""

import json
import os
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import lively, random_tokens, seeds, small
from safetensors.torch import load_file, save_file

from config import GPTConfig, UserError
from data.hf_tokenizer import HFTokenizer
from data.tokenizer import BPETokenizer, CharTokenizer, gpt2, load_tokenizer, prompt_ids, save_tokenizer, train_bpe
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
    heads = draw(st.integers(1, 4))
    return transformers.GPT2Config(
        vocab_size=draw(st.integers(5, 40)), n_positions=draw(st.integers(16, 24)), n_embd=heads * draw(st.integers(1, 6)), n_layer=draw(st.integers(1, 3)),
        n_head=heads, n_inner=draw(st.none() | st.integers(1, 40)), activation_function=draw(st.sampled_from(["gelu_new", "gelu_pytorch_tanh"])),
        layer_norm_epsilon=draw(st.sampled_from([1e-5, 1e-3])), tie_word_embeddings=draw(st.booleans()), bos_token_id=0, eos_token_id=0)


ROPE = st.sampled_from([
    {"rope_type": "default", "rope_theta": 10000.0}, {"rope_type": "default", "rope_theta": 500000.0},
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
    {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 12},
    {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 5.0, "low_freq_factor": 0.5, "high_freq_factor": 2.0, "original_max_position_embeddings": 10}])


@st.composite
def llama_settings(draw, kind=transformers.LlamaConfig):
    groups = draw(st.integers(1, 3))
    heads, head_dim = groups * draw(st.integers(1, 3)), 2 * draw(st.integers(1, 5))
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
        assert difference(model, ours, tokens) < 1e-5 * max(1, model(tokens).logits.abs().max().item())
        greedy = model.generate(tokens, max_new_tokens=4, do_sample=False, eos_token_id=None, attention_mask=torch.ones_like(tokens))
        assert torch.equal(torch.stack(list(stream(ours, tokens, 4, temperature=0)), dim=1), greedy[:, 12:])
        # and back: the same bits under the same names
        save_hf(ours, folder / "again")
        again = transformers.AutoModelForCausalLM.from_pretrained(folder / "again")
        assert type(again) is type(model)
        state = model.state_dict()
        assert again.state_dict().keys() == state.keys() and all(torch.equal(t, state[name]) for name, t in again.state_dict().items())

    check()
