"""A model and its tokenizer as one GGUF file, for llama.cpp and what is built on it.

The names are those of llama.cpp's own converter, by the `gguf` package, which is optional.
"""

import json
from pathlib import Path

import torch
from torch import Tensor

from config import GPTConfig, UserError
from data.hf_tokenizer import FILE
from data.tokenizer import PATTERNS, Tokenizer, hf_files
from files import atomic_write
from interop import hf_tensors
from interop.settings import family_of, hf_settings
from model import GPT, rotary_frequencies

LARGEST_F16 = 65504
# How llama.cpp names ways to split text before byte-pair encoding, by their pattern.
SPLITS = {
    PATTERNS["gpt2"]: "gpt-2",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+": "qwen2",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+": "llama-bpe"}


def save_gguf(model: GPT, path: Path, tokenizer: Tokenizer, dtype: str = "f16") -> None:
    """Write a .gguf file, whole or not at all. Matrices are in `dtype`, f16 or q8_0, or in f16
    where their rows are no multiple of q8_0's 32 numbers; norms and biases in float32."""
    try:
        import gguf
    except ImportError:
        raise UserError("a .gguf file is written by a package that is not installed: "
                        "pip install gguf") from None
    kind, settings = family_of(model.config), hf_settings(model.config, tokenizer)
    if kind != "llama" and model.config.rope_trained and model.config.rope_factor != 1:
        raise UserError(f"llama.cpp stretches no rotary wavelengths of a {kind} as "
                        "model.rope_trained does: export a folder")
    vocabulary, split = tokens_of(tokenizer)
    try:
        with atomic_write(path) as part:
            writer = gguf.GGUFWriter(part, kind)
            describe(writer, model.config, gguf)
            add_tokenizer(writer, vocabulary, split, settings, tokenizer, gguf)
            add_tensors(writer, model, kind, dtype, gguf)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
    except OSError as e:
        if e.errno is None:  # numpy's has no reason where the disk is full
            raise UserError(f"to={path} could not be written: {e}; is the disk full?") from None
        raise


def tokens_of(tokenizer: Tokenizer) -> tuple[dict, str]:
    """The vocabulary as a tokenizer.json has it, and llama.cpp's name for how text is split."""
    described = json.loads(hf_files(tokenizer, 1)[FILE])
    before = described["pre_tokenizer"] or {}
    steps = before.get("pretokenizers", [before])
    patterns = [step["pattern"].get("Regex") for step in steps if step.get("type") == "Split"]
    if not patterns and steps[0].get("use_regex"):  # the library's own, which is GPT-2's
        patterns = [PATTERNS["gpt2"]]
    split = SPLITS.get(patterns[0]) if len(patterns) == 1 else None
    normalised = described["normalizer"] not in (None, {"type": "NFC"})  # which is left to callers
    if described["model"]["type"] != "BPE" or split is None or normalised:
        raise UserError("llama.cpp does not split text as this model's tokenizer does: train one "
                        "with tokenizer=bpe tokenizer.pattern=gpt2, or export a folder")
    return described, split


def describe(writer, config: GPTConfig, gguf) -> None:
    """Write the shape of the model."""
    c = config
    writer.add_name("glassgpt")
    writer.add_vocab_size(c.vocab_size)
    writer.add_context_length(c.block_size)
    writer.add_embedding_length(c.n_embd)
    writer.add_block_count(c.n_layer)
    writer.add_feed_forward_length(c.hidden_dim)
    writer.add_head_count(c.n_head)
    if c.position == "learned":
        writer.add_layer_norm_eps(c.norm_eps)
        return
    writer.add_head_count_kv(c.kv_heads)
    writer.add_key_length(c.key_dim)
    writer.add_value_length(c.value_dim)
    writer.add_rope_dimension_count(c.key_dim)
    writer.add_layer_norm_rms_eps(c.norm_eps)
    writer.add_rope_freq_base(c.rope_theta)
    if c.rope_factor != 1 and c.rope_trained is None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(c.rope_factor)


def add_tokenizer(writer, described: dict, split: str, settings: dict, tokenizer: Tokenizer,
                  gguf) -> None:
    """Write the vocabulary, the merges in their order, and which tokens begin and end a text."""
    added = {token["content"]: token["id"] for token in described["added_tokens"]}
    token_of = {id: token for token, id in (described["model"]["vocab"] | added).items()}
    kinds, size = gguf.TokenType, settings["vocab_size"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list([token_of.get(id, f"[PAD{id}]") for id in range(size)])
    ours = set(added.values())  # not made by merges: llama.cpp looks for them first
    writer.add_token_types([kinds.CONTROL if id in tokenizer.special else
                            kinds.USER_DEFINED if id in ours else
                            kinds.NORMAL if id in token_of else kinds.UNUSED
                            for id in range(size)])
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair)
                             for pair in described["model"]["merges"]])
    begin, end = settings["bos_token_id"], settings["eos_token_id"]
    if begin is not None:  # llama.cpp would take token 11 for what is not named
        writer.add_bos_token_id(begin)
        writer.add_eos_token_id(begin if end is None else end)
    writer.add_add_bos_token(tokenizer.begin_of_text is not None)


def add_tensors(writer, model: GPT, kind: str, dtype: str, gguf) -> None:
    c, types = model.config, gguf.GGMLQuantizationType
    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
    names = gguf.get_tensor_name_map(architecture, c.n_layer)
    for theirs, tensor, _ in hf_tensors(model):
        name = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
        heads = {"q_proj": c.n_head, "k_proj": c.kv_heads}.get(theirs.split(".")[-2])
        if kind == "llama" and heads:
            tensor = interleaved(tensor, heads)
        numbers = tensor.float().numpy()
        stored = types.F32
        if tensor.dim() == 2 and "position" not in name:
            stored = types.Q8_0 if dtype == "q8_0" and tensor.shape[1] % 32 == 0 else types.F16
            if abs(numbers).max() > LARGEST_F16:  # of the scales of q8_0 too
                stored = types.F32
        writer.add_tensor(name, gguf.quantize(numbers, stored), raw_dtype=stored)
    if c.rope_factor != 1 and c.rope_trained is not None:
        plain = c.rope_theta ** -(torch.arange(0, c.key_dim, 2) / c.key_dim)
        writer.add_tensor("rope_freqs.weight", (plain / rotary_frequencies(c)).numpy())
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0 if dtype == "q8_0"
                         else gguf.LlamaFileType.MOSTLY_F16)


def interleaved(rows: Tensor, heads: int) -> Tensor:
    """The rows of queries or keys as llama.cpp's Llama has them: those of a pair side by side."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()
