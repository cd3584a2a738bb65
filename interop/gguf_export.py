"""Write a model and its tokenizer as one .gguf file, the format of llama.cpp."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.errors import UserError
from common.files import atomic_write, exists
from common.paths import require_output_file
from config import GPTConfig
from data.tokenizer import Tokenizer
from interop.export import export_tensors
from interop.gguf_file import require_gguf
from interop.gguf_tokenizer import describe_tokenizer
from interop.names import GGUF_SETTINGS, ROPE_TENSOR
from interop.settings import HFSettings, config_to_hf
from model import GPT, rotary_frequencies

# Types of matrices in the file; vectors are always in float32, as llama.cpp expects them.
STORED_TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def save_gguf(model: GPT, path: Path, tokenizer: Tokenizer) -> None:
    """Write a model and its tokenizer to a new .gguf file, completely or not at all.

    Raises:
        UserError: llama.cpp has no such model or tokenizer, or the file cannot be written.
    """
    require_new_file(path)
    settings = config_to_hf(model.config, tokenizer)
    family = settings["model_type"]
    _require_known_to_llama_cpp(model.config, family)
    metadata = _describe_model(model.config, settings)
    metadata |= describe_tokenizer(tokenizer, model.config.vocab_size)
    tensors = export_tensors(model, "gguf_gpt2" if family == "gpt2" else "gguf")
    if family == "llama":
        tensors = {name: _interleave_rows(name, t, model.config) for name, t in tensors.items()}
    if model.config.rope_trained is not None and model.config.rope_factor != 1:
        plain = replace(model.config, rope_factor=1.0)
        tensors[ROPE_TENSOR] = rotary_frequencies(plain) / rotary_frequencies(model.config)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_file(path, family, metadata, tensors)
    except OSError as e:
        raise UserError(
            f"to={path} could not be written ({e.strerror or 'no space left'}): free some space "
            "there, or name another file"
        ) from None


def require_new_file(path: Path) -> None:
    """Raise `UserError` unless a .gguf file can be written to a path at which there is nothing."""
    require_gguf(f"to={path}")
    require_output_file(f"to={path}", path)
    if exists(path):
        raise UserError(f"to={path} exists already: name a new file")


def _require_known_to_llama_cpp(config: GPTConfig, family: str) -> None:
    """Raise `UserError` if llama.cpp lacks a part of the model that transformers has."""
    unsupported = []
    if config.mlp == "gelu_exact":
        unsupported.append(f"model.mlp={config.mlp}")
    if family == "qwen3" and config.bias:
        unsupported.append(f"model.bias={config.bias}")
    if family != "llama" and config.rope_factor != 1 and config.rope_trained is not None:
        unsupported.append(f"model.rope_trained={config.rope_trained}")
    if unsupported:
        raise UserError(
            f"llama.cpp's {family} has no {' and no '.join(unsupported)}, so this model cannot be "
            "written as .gguf: export it to a folder, which transformers loads"
        )


def _describe_model(config: GPTConfig, settings: HFSettings) -> dict[str, Any]:
    family = settings["model_type"]
    rope = settings.get("rope_scaling", {})
    if rope.get("rope_type") == "llama3":  # its factors are a tensor
        name = "original_max_position_embeddings"
        rope = {name: rope[name]}
    settings = settings | rope
    values = {name: settings.get(theirs) for name, theirs in GGUF_SETTINGS[family].items()}
    if config.is_rotary:
        values["attention.value_length"] = values["rope.dimension_count"] = settings["head_dim"]
    return {f"{family}.{name}": value for name, value in values.items() if value is not None}


def _interleave_rows(name: str, tensor: Tensor, config: GPTConfig) -> Tensor:
    """Make the rows of W_Q and W_K that rotate together adjacent, as in llama.cpp's Llama."""
    heads = {"attn_q": config.n_head, "attn_k": config.kv_heads}.get(name.split(".")[-2])
    if heads is None:
        return tensor
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def _write_file(
    path: Path, architecture: str, metadata: dict[str, Any], tensors: dict[str, Tensor]
) -> None:
    import gguf

    with atomic_write(path) as part, closing(gguf.GGUFWriter(part, architecture)) as writer:
        for key, value in metadata.items():
            kind = gguf.GGUFValueType.get_type(value)
            is_size = kind == gguf.GGUFValueType.INT32
            writer.add_key_value(key, value, gguf.GGUFValueType.UINT32 if is_size else kind)
        for name, tensor in tensors.items():
            stored_type = STORED_TYPES[tensor.dtype if tensor.dim() == 2 else torch.float32]
            stored_type = gguf.GGMLQuantizationType[stored_type]
            content = gguf.quants.quantize(tensor.float().numpy(), stored_type)
            writer.add_tensor(name, content, raw_dtype=stored_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
