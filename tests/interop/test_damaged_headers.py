"""Headers with values of any type, sign and size give a working model or one sentence."""

import json
import math
import re
import shutil
import signal
import struct
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hf_models import WEIGHTS, write_model_and_tokenizer
from hypothesis import example, given
from hypothesis import strategies as st
from models import lively
from safetensors.torch import load_file, save_file
from test_gguf import make_model, write_gguf
from test_nanogpt import nanogpt_tensors

from common.errors import UserError
from config import GPTConfig
from interop import ExternalCheckpoint
from interop.gguf_header import SCALAR_FORMATS
from interop.names import GGUF_SETTINGS, HF_SETTINGS
from training.nonfinite import check_finite_weights
from variants import build_model

gguf = pytest.importorskip("gguf")

MAX_SENTENCE = 700
FLOAT_SETTING = re.compile("eps|freq_base|theta|factor")
MAX_SECONDS = 20
TEXT = "the glass model"
numbers = st.sampled_from(
    [0, 1, -1, 2, 3, 4, 5, 7, 64, 65, 10**4, 400_000_000, 2**31, 2**63, 2**64 - 1]
    + [0.0, -0.0, 1.5, 4.0, -1.0, 1e-30, 1e30, 1e300, math.nan, math.inf, -math.inf]
)
scalars = numbers | st.booleans() | st.sampled_from(["", "x", "linear", "llama", "12", "é" * 200])
lists = st.lists(st.integers(-1, 300), max_size=3) | st.lists(st.just("x y"), max_size=3)
shapes = st.lists(st.integers(1, 6), min_size=1, max_size=3)


@contextmanager
def time_limit():
    def stop(*_):
        raise AssertionError(f"no answer in {MAX_SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(MAX_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@torch.no_grad()
def use(path: Path) -> str | None:
    """Load a model as `interop.load` does, and run it on a text.

    Return the message of the error if it is refused.
    """
    with time_limit():
        try:
            checkpoint = ExternalCheckpoint(path)
            tokenizer = checkpoint.read_tokenizer()
            model = checkpoint.load(torch.float32)
            check_finite_weights(model, str(path))
        except UserError as e:
            message = str(e)
            assert str(path) in message and "\n" not in message and len(message) < MAX_SENTENCE
            return message
        ids = tokenizer.encode(TEXT) if tokenizer else [0]
        tokens = torch.tensor([ids[: model.config.block_size]])
        assert model(tokens)[0].shape == (*tokens.shape, model.config.vocab_size)
        generate = model.generate(tokens[:, :1], 2, temperature=0)
        assert generate.shape[1] >= 2
    return None


# --- .gguf ----------------------------------------------------------------------------------------


class GGUFParts:
    """The parts of a .gguf file: metadata by key, and tensors (shape, type, bytes) by name."""

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        self.metadata = {
            key: field.contents()
            for key, field in reader.fields.items()
            if not key.startswith("GGUF.")
        }
        self.tensors = {
            tensor.name: (
                [int(n) for n in tensor.shape],
                int(tensor.tensor_type),
                bytes(tensor.data),
            )
            for tensor in reader.tensors
        }

    def write(self, path: Path) -> None:
        offset, entries, data = 0, b"", b""
        for name, (shape, type_number, content) in self.tensors.items():
            padding = bytes(-len(data) % 32)
            data += padding + content
            offset = len(data) - len(content)
            entries += pack_text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
            entries += struct.pack("<IQ", type_number, offset)
        header = b"GGUF" + struct.pack("<IQQ", 3, len(self.tensors), len(self.metadata))
        for key, value in self.metadata.items():
            header += pack_text(key) + pack_value(value)
        header += entries
        path.write_bytes(header + bytes(-len(header) % 32) + data)


def pack_text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def number_type(value) -> int:
    """Return the number of a type of .gguf that holds a value."""
    if isinstance(value, bool):
        return 7
    if isinstance(value, float):
        return 12
    return 4 if 0 <= value < 2**32 else 11 if value < 2**63 else 10


def pack_value(value) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + pack_text(value)
    if isinstance(value, list):
        texts = bool(value) and isinstance(value[0], str)
        item_type = 8 if texts else number_type(min(value, default=0))
        items = [pack_text(item) for item in value] if texts else []
        if not texts:
            items = [struct.pack("<" + SCALAR_FORMATS[item_type], item) for item in value]
        return struct.pack("<IIQ", 9, item_type, len(value)) + b"".join(items)
    type_number = number_type(value)
    return struct.pack("<I", type_number) + struct.pack("<" + SCALAR_FORMATS[type_number], value)


def float_tensor(shape: list[int], value: float = 1.0):
    numbers = np.full(math.prod(shape), value, np.float32)
    return shape, int(gguf.GGMLQuantizationType.F32), numbers.tobytes()


@pytest.fixture(scope="module", params=["llama", "gpt2", "qwen3"])
def gguf_file(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    return write_gguf(folder / "m.gguf", make_model(request.param, n_layer=1, n_embd=32))


def test_the_parts_of_a_gguf_file_are_written_as_they_were(gguf_file, tmp_path):
    parts = GGUFParts(gguf_file)
    parts.write(tmp_path / "m.gguf")
    assert use(tmp_path / "m.gguf") is None


def test_any_header_of_a_gguf_file_gives_a_model_or_one_sentence(gguf_file, tmp_path):
    intact, path = GGUFParts(gguf_file), tmp_path / "m.gguf"
    arch = intact.metadata["general.architecture"]
    optional = ["attention.head_count_kv", "attention.key_length", "rope.freq_base"]
    optional += ["rope.dimension_count", "rope.scaling.type", "rope.scaling.factor", "expert_count"]
    keys = sorted({*intact.metadata, *(f"{arch}.{name}" for name in optional)})
    keys += ["tokenizer.ggml.add_bos_token", "general.alignment", "general.type", "split.count"]
    names = [*sorted(intact.tensors), "rope_freqs.weight", "extra", "output.weight"]
    tensors = st.builds(float_tensor, shapes, st.sampled_from([0.5, 1.0, 8.0, math.nan]))
    quantized = shapes.map(lambda shape: ([32, *shape], 8, bytes(34 * math.prod(shape))))
    integers = shapes.map(lambda shape: (shape, 26, bytes(4 * math.prod(shape))))

    @given(
        st.dictionaries(st.sampled_from(keys), scalars | lists | st.none(), max_size=2),
        st.dictionaries(
            st.sampled_from(names), tensors | quantized | integers | st.none(), max_size=1
        ),
    )
    @example({}, {"rope_freqs.weight": float_tensor([3, 2])})
    @example({}, {"rope_freqs.weight": float_tensor([3])})
    @example({}, {"rope_freqs.weight": float_tensor([4], math.nan)})
    @example({"tokenizer.ggml.merges": ["x"]}, {})
    @example({f"{arch}.context_length": 400_000_000}, {})
    @example({"tokenizer.ggml.bos_token_id": 2**31, "tokenizer.ggml.add_bos_token": True}, {})
    def check(metadata, tensors):
        parts = GGUFParts.__new__(GGUFParts)
        parts.metadata = {**intact.metadata, **metadata}
        parts.metadata = {key: value for key, value in parts.metadata.items() if value is not None}
        parts.tensors = {**intact.tensors, **tensors}
        parts.tensors = {name: tensor for name, tensor in parts.tensors.items() if tensor}
        parts.write(path)
        use(path)

    check()


def test_a_setting_of_a_wrong_type_or_size_is_named_as_in_the_gguf_file(gguf_file, tmp_path):
    parts, path = GGUFParts(gguf_file), tmp_path / "m.gguf"
    arch, intact = parts.metadata["general.architecture"], dict(parts.metadata)
    names = GGUF_SETTINGS["gpt2" if arch == "gpt2" else "llama"]
    for name in names:
        for value in (-1, 2**63, math.nan, math.inf, True, "x", [], [1, 2], ["x"]):
            if value == 2**63 and FLOAT_SETTING.search(name):
                continue
            parts.metadata = intact | {f"{arch}.{name}": value}
            parts.write(path)
            message = use(path)
            assert message and f"{arch}.{name}" in message, (name, value, message)


# --- config.json and safetensors ------------------------------------------------------------------


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def hf_folder(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hf") / request.param
    write_model_and_tokenizer(request.param, folder)
    return folder


def test_a_setting_of_a_wrong_type_or_size_is_named_as_in_config_json(hf_folder, tmp_path):
    folder = shutil.copytree(hf_folder, tmp_path / "hf")
    settings = json.loads((folder / "config.json").read_text())
    for name in HF_SETTINGS[settings["model_type"]]:
        for value in (-1, 2**70, 10**400, math.nan, math.inf, "x", "1,5", [], [4], {}, {"a": 1}):
            if value == 2**70 and FLOAT_SETTING.search(name):
                continue
            changed = settings | {"rope_parameters": None, name: value}
            (folder / "config.json").write_text(json.dumps(changed))
            message = use(folder)
            assert message and name in message, (name, value, message)


def test_any_tensor_of_a_folder_gives_a_model_or_one_sentence(hf_folder, tmp_path):
    folder = shutil.copytree(hf_folder, tmp_path / "hf")
    intact = load_file(hf_folder / WEIGHTS)
    dtypes = [torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64]
    dtypes += [torch.float8_e4m3fn, torch.int64]
    names = [*sorted(intact), "extra", "lm_head.weight", "wte.weight", "x" * 5000]

    @given(
        st.dictionaries(
            st.sampled_from(names),
            st.tuples(st.just([]) | shapes | st.none(), st.sampled_from(dtypes)) | st.none(),
            min_size=1,
            max_size=2,
        )
    )
    def check(changes):
        tensors = dict(intact)
        for name, change in changes.items():
            if change is None:
                tensors.pop(name, None)
                continue
            shape, dtype = change
            shape = tensors[name].shape if shape is None and name in tensors else shape or []
            tensors[name] = torch.ones(shape).to(dtype)
        save_file(tensors, folder / WEIGHTS)
        use(folder)

    check()


# --- nanoGPT --------------------------------------------------------------------------------------

NANOGPT_BIAS = "transformer.h.0.attn.c_attn.bias"
NANOGPT_SHAPE = {"vocab_size": 9, "block_size": 16, "n_layer": 1, "n_head": 2, "n_embd": 16}


def nanogpt_checkpoint() -> dict[str, dict]:
    config = GPTConfig(**NANOGPT_SHAPE, bias=True)
    names = [*NANOGPT_SHAPE, "bias", "dropout"]
    state = nanogpt_tensors(lively(build_model(config)))
    return {"model": state, "model_args": {name: asdict(config)[name] for name in names}}


def test_any_checkpoint_of_nanogpt_gives_a_model_or_one_sentence(tmp_path):
    path, intact = tmp_path / "ckpt.pt", nanogpt_checkpoint()
    fill_with_nan = partial(torch.full, fill_value=math.nan)
    makers: list[Callable] = [
        lambda shape: torch.ones(shape, dtype=torch.int8),
        lambda shape: torch.ones(1).expand(shape),
        lambda shape: torch.ones(shape).to_sparse(),
        lambda shape: torch.ones(shape, device="meta"),
        lambda shape: torch.ones(shape, dtype=torch.complex64),
        fill_with_nan,
        lambda shape: "not a tensor",
        lambda shape: torch.nn.Parameter(torch.ones(shape)),
    ]
    values = scalars | lists | st.none() | st.just(torch.tensor(2)) | st.just(10**5000)

    @given(
        st.dictionaries(st.sampled_from(sorted(intact["model_args"])), values, max_size=2),
        st.dictionaries(
            st.sampled_from(sorted(intact["model"])),
            st.tuples(st.sampled_from(makers), shapes | st.none()),
            max_size=1,
        ),
        st.sampled_from([None, "model", "model_args"]),
    )
    @example({"n_layer": 10**9}, {}, None)
    @example({"block_size": 10**5000}, {}, None)
    @example({}, {NANOGPT_BIAS: (fill_with_nan, None)}, None)
    def check(settings, tensors, removed):
        state = dict(intact["model"])
        for name, (make, shape) in tensors.items():
            state[name] = make(tuple(shape or state[name].shape))
        saved = {"model": state, "model_args": intact["model_args"] | settings}
        saved.pop(removed, None)
        torch.save(saved, path)
        use(path)

    check()
    for content in ([], {}, None, {"model": [], "model_args": 3}, torch.ones(3)):
        torch.save(content, path)
        assert use(path)
