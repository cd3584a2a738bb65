"""Import and export models: GPT-2, GPT-NeoX, Llama, Mistral, Qwen 2, Qwen 3, nanoGPT and .gguf.

GPT-NeoX and nanoGPT are only imported. None of them needs transformers, and no pickled code runs.
"""

from interop.export import save_hf
from interop.gguf_export import save_gguf
from interop.loading import find_model, load, load_hf, open_pinned, read_starting_model
from interop.series import Series, find_series
