"""Import and export models: GPT-2, Llama, Mistral, Qwen 2, Qwen 3, nanoGPT's ckpt.pt and .gguf.

Weights are read from safetensors, a .gguf file or nanoGPT's ckpt.pt, and written as safetensors.
Neither needs transformers, and no pickled code runs.
"""

from interop.export import save_hf
from interop.external import ExternalCheckpoint
from interop.loading import load, load_hf, open_starting_weights, read_starting_model

__all__ = [
    "ExternalCheckpoint",
    "load",
    "load_hf",
    "open_starting_weights",
    "read_starting_model",
    "save_hf",
]
