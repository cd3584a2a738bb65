"""Folders to make pages of, what is packed into pages read back, and what a person does with
them in a browser."""

import base64
import json
import re
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import wait_for_frames
from run_folders import write_fingerprint
from safetensors.numpy import save_file

from cli.folders import name_part
from config import Config, GPTConfig, TokenizerConfig, WandbConfig
from data.tokenizer import CharTokenizer
from glass.heads.measure.analysis import Analysis
from glass.page import pack
from glass.page.html import write_html
from glass.page.prompt import format_analysis
from run.config_file import config_yaml
from run.row import Row
from run.run_dir import SWEEP_FILE, RunDir
from sweeps.runs import JobRecord, write_record
from variants import build_model

HOSTILE = [
    "</script><script>window.hacked=1</script>",
    "<!--",
    "\0x",
    "😀",
    "שלום",
    "\n",
    "\u2028",
    "\ud800",
    "<img src=x onerror=window.hacked=1>",
    "\u202e",
    "",
    "a" * 5000,
    "\t",
    " &lt;b&gt;",
    "]]>",
    "\\u003c",
]
STEPS = (0, 10, 20)
STRONGEST = ("previous_token", "duplicate_token", "induction", "sink")


# A run's folder, made up

# The model of a prompt's page, too large for one.
PROMPTED = GPTConfig(23, n_layer=2, n_head=4, n_kv_head=2, n_embd=4096)


def causal(rng, *shape: int, sharp: float = 2.0) -> np.ndarray:
    """Random causal softmax maps (…, T, T) float16."""
    T = shape[-1]
    A = np.exp(sharp * rng.standard_normal((*shape, T), dtype=np.float32)) * np.tri(
        T, dtype=np.float32
    )
    return (A / A.sum(axis=-1, keepdims=True)).astype(np.float16)


def snapshot(L=2, H=4, T=16, step=0, seed=0, words=None) -> dict:
    rng = np.random.default_rng(seed + step)
    periods = (T // 4, T // 2)
    return {
        "step": step,
        "text": causal(rng, L, H, T),
        "text_tokens": np.array(words or [f" w{i}" for i in range(T)]),
        "text_value_norms": rng.gamma(4, 0.3, (L, H, T)).astype(np.float32),
        "repeated": causal(rng, L, 2, H, T),
        "repeated_tokens": np.array([[f"r{i % p}" for i in range(T)] for p in periods]),
        "repeated_value_norms": rng.gamma(4, 0.3, (L, 2, H, T)).astype(np.float32),
        "repeated_periods": np.array(periods),
    }


def write_snapshot(folder: Path, shot: dict) -> None:
    (folder / "attention").mkdir(parents=True, exist_ok=True)
    np.savez_compressed(folder / "attention" / f"step_{shot['step']:08d}.npz", **shot)


def write_lines(path: Path, rows: Iterable[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def of_heads(scores: Iterable[str], L: int, H: int, value: Callable[[], float]) -> dict:
    """Metrics of all heads; `value` is called for each."""
    heads = [f"L{layer}H{head}" for layer in range(L) for head in range(H)]
    return {f"heads/{score}/{head}": value() for score in scores for head in heads}


def make_run(
    folder: Path, H=4, T=16, steps=STEPS, words=None, samples=None, name="tiny", max_steps=None
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    model = GPTConfig(n_layer=2, n_head=H, n_kv_head=2, n_embd=8 * H, vocab_size=65)
    max_steps = max_steps or steps[-1]
    config = Config(seed=1, max_steps=max_steps, model=model, wandb=WandbConfig(project=name))
    (folder / "config.yaml").write_text(config_yaml(config))
    rng = np.random.default_rng(0)
    rows = []
    for step in range(steps[0], steps[-1] + 1, 2):
        row = {"step": step, "tokens": 100 * step, "train_seconds": step / 2}
        row |= {"train/loss": 3 - step / 20, "train/lr": 0.001, "train/grad_norm": 1.0}
        row |= {"train/tokens_per_second": 1000.0, "train/ms_per_step": 250.0}
        row |= {"train/mfu": 0.4, "memory/peak_gib": 1.5}
        if step in steps:
            row |= {"val/loss": 3.5 - step / 20, "val/bits_per_byte": 2.0}
            row |= {"val/in_context_score": step / 40, "val/in_context_score_se": 0.1}
            row |= {"task/accuracy": step / 100, "task/accuracy_se": 0.03}
            row |= {"seconds/evaluate": 1.0, "seconds/attention": 0.5, "seconds/save": 0.25}
            scores = ("previous_token", "induction", "entropy", "distance")
            row |= of_heads(scores, 2, H, rng.random)
            row |= of_heads(["induction_se"], 2, H, lambda: 0.0234)
            row |= of_heads(["entropy_without_first"], 2, H, lambda: 0.756)
        if step == steps[-1]:
            row |= of_heads(["importance"], 2, H, rng.random)
            row |= {"emerged/induction/L0H0": 10, f"emerged/previous_token/L1H{H - 1}": 4}
        rows.append(row)
    write_lines(folder / "metrics.jsonl", rows)
    texts = samples or [f"sample {step}" for step in steps]
    sampled = [{"step": step, "text": text} for step, text in zip(steps, texts)]
    write_lines(folder / "samples.jsonl", sampled)
    for step in steps:
        write_snapshot(folder, snapshot(H=H, T=T, step=step, words=words))
    return folder


def explain(step=0, prefix="", words=None) -> dict:
    """What `glass.heads.measure.logit_attribution.explain_predictions` gives, made up."""
    L, H, T = 2, 4, 16
    rng = np.random.default_rng(step + len(prefix))
    token_effect = np.tril(rng.normal(size=(T, T)), -1).astype(np.float32)
    head_effect = rng.normal(size=(L, H, T)).astype(np.float32)
    lens = rng.gamma(4, 1, (L + 1, T)).astype(np.float32)
    for values in (token_effect.T, head_effect, lens):
        values[..., -1] = np.nan  # no next token
    explained = {
        "token_effect": token_effect,
        "token_effect_kl": np.tril(rng.gamma(1, 0.2, (T, T)), -1).astype(np.float32),
        "head_effect": head_effect,
        "logit_lens": lens,
        "logit_attribution": rng.normal(size=(2 + L * (H + 1), T, 6)).astype(np.float32),
        "predicted_ids": rng.integers(0, 16, (T, 5)),
        "predicted_probs": np.sort(rng.dirichlet(np.ones(6), T)[:, :5])[:, ::-1].astype("f4"),
        "promoted_and_suppressed_ids": rng.integers(0, 16, (L, H, T, 6)),
        "named_ids": np.arange(16),
        "named_tokens": np.array(words or [f" n{i}" for i in range(16)]),
    }
    return {prefix + name: value for name, value in explained.items()}


def make_explained(folder: Path, words=None, **more) -> Path:
    """A run with predictions, composition and the copying gain."""
    run = make_run(folder, words=words, **more)
    for step in STEPS:
        repeated = explain(step=step, prefix="repeated_", words=words)
        shot = snapshot(step=step, words=words) | explain(step=step, words=words) | repeated
        write_snapshot(run, shot)
    rows = RunDir(run).rows()
    for row in rows:
        row |= {"probe/copying_gain": row["step"] / 10, "probe/copying_gain_se": 0.1}
        row |= {"heads/induction_se/L0H0": 0.01, "heads/induction/L0H0": 0.6}
        measured = [  # the share of L1H1's score, its error
            ("induction{}/L1H1/keys/L0H2", row["step"] / 25, 0.02),
            ("induction_direct{}/L1H1/keys/L0H2", 0.5, 0.04),
            ("induction{}/L1H1/queries/L0H2", 0.09, 0.05),
            ("induction{}/L1H1/queries/L0H1", 0.04, 0.01),
            ("induction{}/L1H1/keys/embedding", 0.6, 0.01),
        ]
        for key, share, error in measured if row["step"] >= 10 else ():
            row["composition/" + key.format("")] = share
            row["composition/" + key.format("_se")] = error
    write_lines(run / "metrics.jsonl", rows)
    return run


def write_prompt(path: Path, facts: dict, arrays: dict, metrics=(), config=PROMPTED) -> Path:
    """The page of a text with made-up arrays."""
    with torch.device("meta"):
        model = build_model(config)
    analysis = Analysis(Row(metrics, step=0), {"text_ids": np.zeros(1, int), **arrays})
    return write_html(path, format_analysis(facts, model, CharTokenizer("a"), analysis))


# A sweep's folder, made up


def fail_job(run: Path, reason: str) -> None:
    RunDir(run).failure_file.write_text(reason)


def make_job(
    folder: Path,
    settings: dict,
    final: float | None = 2.0,
    *,
    L=2,
    H=4,
    groups=2,
    T=16,
    steps=STEPS,
    words=None,
    vocab=65,
    speed=1000,
    size=500,
    maps=True,
) -> Path:
    """A job with these settings whose validation loss falls from 4 to `final`; None: it never had
    one."""
    name = ",".join(f"{key}={value}" for key, value in settings.items())
    run = folder / f"{name_part(name)}_{zlib.crc32(name.encode(errors='replace')):08x}"
    run.mkdir(parents=True)
    settings = {"max_steps": "20", **settings}
    row = str({key: value for key, value in settings.items() if key != "seed"})
    record = JobRecord(run.name, row, {"seed": "1", **settings}, list(settings))
    (folder / SWEEP_FILE).touch()
    if final is None:
        write_record(RunDir(run), record)
        return run
    write_record(RunDir(run), record.continued(0, int(settings["max_steps"])))
    model = GPTConfig(
        vocab_size=vocab, n_layer=L, n_head=H, n_kv_head=groups, block_size=T, n_embd=8 * H
    )
    config = Config(
        model=model,
        max_steps=int(settings["max_steps"]),
        seed=int(settings.get("seed", 1)),
        precision="fp32",
        tokenizer=TokenizerConfig(name="char"),
    )
    (run / "config.yaml").write_text(config_yaml(config))
    (run / "checkpoints" / "step_00000020").mkdir(parents=True)
    save_file(
        {"w": np.zeros(size, np.float32)},
        run / "checkpoints" / "step_00000020" / "model.safetensors",
    )
    write_fingerprint(run, 20)
    rng = np.random.default_rng(len(settings))
    with (run / "metrics.jsonl").open("w") as f:
        for step in range(0, steps[-1] + 1, 5):
            loss = 4 + (final - 4) * step / steps[-1]
            row = {
                "step": step,
                "tokens": 100 * step,
                "train_seconds": 100 * step / speed,
                "train/loss": loss - 0.1,
            }
            if step in steps:
                row |= {"val/loss": loss, "val/bits_per_byte": loss * 1.5}
                row |= of_heads((*STRONGEST, "entropy"), L, H, rng.random)
            if step == 20:
                row |= {"emerged/induction/L0H1": 10, "emerged/induction/L1H0": 20}
            f.write(json.dumps(row) + "\n")
    (run / "report.html").write_text("the run's page")
    for step in steps if maps else ():
        write_snapshot(run, snapshot(L, H, T, step, seed=int(1000 * final), words=words))
    return run


# What is packed, read back


def read_back(path: Path) -> tuple[dict, list[bytes]]:
    text = path.read_text(encoding="utf-8")
    content = json.loads(
        re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[1]
    )
    return content, [
        zlib.decompress(base64.b64decode(blob))
        for blob in re.findall(r'class="blob">(.*?)</script>', text)
    ]


def unpack(data: bytes, L: int, H: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Maps (L, H, n, n) float64, zero above the diagonal, and the largest error that the page
    promises (L, H, n)."""
    lower, A = np.tri(n, dtype=bool), np.zeros((L, H, n, n))
    floats = np.frombuffer(data, "<f4", 2 * L * H * n).reshape(2, L, H, n).astype(float)
    first_weights, largest = floats
    A[:, :, lower] = np.frombuffer(data, np.uint8, offset=8 * L * H * n).reshape(L, H, -1)
    A *= largest[..., None] / pack.LEVELS
    A[..., 0] = first_weights
    return A, largest / pack.LEVELS


def check_maps(found: np.ndarray, captured: np.ndarray) -> None:
    """Rows sum as captured within 1%, each weight is within 1% of its row's largest."""
    captured = captured.astype(float)
    assert np.abs(found.sum(-1) - captured.sum(-1)).max() < 0.01
    assert (np.abs(found - captured) <= 0.01 * captured.max(-1, keepdims=True)).all()


# In a browser


def expect_map(tab, *, kind="attention", heads=None, step=None) -> None:
    """Wait until the map shows this kind of value, of this head and step."""
    attributes = {"map": kind, "heads": heads, "step": step}
    wanted = "".join(f'[data-{k}="{v}"]' for k, v in attributes.items() if v is not None)
    tab.wait_for_selector(f"#large{wanted}", state="attached")


def expect_text(tab, selector: str, text: str) -> None:
    """Wait until an element contains a text."""
    from playwright.sync_api import expect

    expect(tab.locator(selector)).to_contain_text(text)


def value_within_error(text: str):
    """Return the number in a tooltip, equal to everything within its error, if it has one."""
    value, error = re.search(r"([\d.e-]+)(?: ± ([\d.e-]+))?", text).groups()
    return pytest.approx(float(value), abs=float(error or 0), rel=5e-4)


def read_cell_tooltip(tab) -> tuple[int, int, str]:
    """Return the query and key of the tooltip of a cell, and the text of its value."""
    cell = tab.locator("#tip [data-query]")
    query, key = (int(cell.get_attribute(name)) for name in ("data-query", "data-key"))
    return query, key, tab.locator("#tip .value").inner_text()


def move_pointer_away(tab) -> None:
    """Move the pointer where no element reacts to it when the page scrolls."""
    tab.mouse.move(1, 1)
    wait_for_frames(tab)


def focus_map_cell(tab, query: int, key: int, T: int) -> None:
    """Move the map's cursor to a cell with the keyboard, from the lower left corner."""
    move_pointer_away(tab)
    tab.focus("#map canvas")
    tab.keyboard.press("Escape")
    for press in ["ArrowRight"] * key + ["ArrowUp"] * (T - 1 - query):
        tab.keyboard.press(press)
