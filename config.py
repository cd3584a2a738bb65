"""Every setting of GlassGPT on one page, with its unit and its bounds. Does not import torch.

The defaults are neutral: a plain GPT with every extra off. The presets in `configs/` are
short diffs from them, and `python train.py --help` is printed from this page."""

import dataclasses
import difflib
import glob
import math
import os
import re
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass, replace
from operator import ge, gt, le, lt
from pathlib import Path

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

LARGEST = 1 << 20  # bytes of a config.yaml that is read
GONE = ("eval_only", "dry_run")  # of older versions: what a command did, no settings of its run
LARGEST_SEED = 2**63 - 1  # of torch's generators
LARGEST_NUMBER = {bool: 1, int: LARGEST_SEED, float: 1e30}  # of a setting; float32 has to hold it
BF16_DECODES_FROM = 384  # width of a model that decodes faster in bf16 on a CPU that multiplies it
FETCHED = re.compile(r"(\w[\w.-]*/[\w.-]+)@([0-9a-f]{40})")  # a model of the hub, with its commit


class UserError(Exception):
    """A mistake that the user can mend: one sentence with what was wrong, its value, what to do."""


def field(default, help, **limits):
    """A setting: its default (or what makes it), one line of help, and the values that it takes.
    `choices` are all of them; `ge`, `gt`, `le`, `lt` bound a number (at least, above, at most,
    below). None is always allowed where the type is optional."""
    kind = "default_factory" if callable(default) else "default"
    return dataclasses.field(**{kind: default}, metadata={"help": help, **limits})


@dataclass
class GPTConfig:
    """Shape of a model; `vocab_size` comes from the tokenizer when a run is configured."""

    vocab_size: int | None = field(MISSING, "tokens in the vocabulary; null: the tokenizer's", ge=1)
    block_size: int = field(256, "context length T, in tokens", ge=2)
    n_layer: int = field(4, "blocks, each an attention and an MLP", ge=1, le=10_000)
    n_head: int = field(4, "query heads H", ge=1)
    n_kv_head: int | None = field(None, "key/value heads G, dividing n_head; null: n_head", ge=1)
    n_embd: int = field(128, "width C of the residual stream", ge=1)
    head_dim: int | None = field(None, "d_k, size of a query or key; null: n_embd / n_head", ge=1)
    value_head_dim: int | None = field(None, "d_v, size of a value; null: head_dim", ge=1)
    mlp: str = field("gelu", "MLP of a block", choices=("gelu", "swiglu", "relu2"))
    mlp_hidden: int | None = field(None, "width of the MLP; null: 4 n_embd, of swiglu 8/3", ge=1)
    norm: str = field("layernorm", "normalisation", choices=("layernorm", "rmsnorm"))
    norm_eps: float = field(1e-5, "added to the variance in the normalisation", gt=0)
    norm_embedding: bool = field(False, "RMS-normalise the embeddings before the first block")
    position: str = field("learned", "an embedding, or rotary", choices=("learned", "rope"))
    rope_theta: float = field(10000.0, "base of the rotary wavelengths", gt=0)
    rope_factor: float = field(1.0, "stretches the wavelengths, for a longer context", ge=1)
    rope_trained: int | None = field(
        None, "context length before they were stretched, as Llama 3 does; null: all alike", ge=1
    )
    qk_norm: bool | str = field(
        False,
        "RMS-normalise queries and keys; gains: with trained gains",
        choices=(True, False, "gains"),
    )
    bias: bool | str = field(
        False,
        "biases: everywhere, in attention, or on queries, keys, values",
        choices=(True, False, "attention", "qkv"),
    )
    dropout: float = field(0.0, "share of activations and weights dropped in training", ge=0, lt=1)
    tie_embeddings: bool = field(True, "the output layer is the token embedding, transposed")
    ngrams: int = field(0, "adds rows of the last 2 … n tokens to embeddings; 0: none", ge=0, le=64)
    ngram_size: int | None = field(None, "channels that n-grams add to; null: n_embd", ge=1)
    ngram_count: int = field(2, "times that the training text has an n-gram, at least", ge=1)
    ngram_rows: int | None = field(None, "n-grams that are so many; null: as the text has", ge=1)

    @property
    def kv_heads(self) -> int:
        return self.n_kv_head or self.n_head

    @property
    def key_dim(self) -> int:
        return self.head_dim or self.n_embd // self.n_head

    @property
    def value_dim(self) -> int:
        return self.value_head_dim or self.key_dim

    @property
    def ngram_dim(self) -> int:
        return self.ngram_size or self.n_embd

    @property
    def hidden_dim(self) -> int:
        usual = -(-self.n_embd // 3) * 8 if self.mlp == "swiglu" else 4 * self.n_embd
        return self.mlp_hidden or usual

    def biased(self, part: str) -> bool:
        """Whether a part has biases: qkv, output (of attention), mlp or norm."""
        parts = {"attention": ("qkv", "output"), "qkv": ("qkv",)}
        return self.bias is True or part in parts.get(self.bias, ())

    def check(self) -> None:
        """Refuse values out of bounds and settings that contradict each other."""
        check_fields(self, "model.")
        if self.head_dim is None and self.n_embd % self.n_head:
            raise UserError(
                f"model.n_embd={self.n_embd} is not a multiple of model.n_head="
                f"{self.n_head}: change one, or set model.head_dim"
            )
        if self.n_head % self.kv_heads:
            divisors = [str(d) for d in range(1, self.n_head + 1) if self.n_head % d == 0]
            raise UserError(
                f"model.n_kv_head={self.n_kv_head} does not divide model.n_head="
                f"{self.n_head}: choose one of {', '.join(divisors)}"
            )
        if self.ngrams > 1 and self.ngram_dim > self.n_embd:
            raise UserError(
                f"model.ngram_size={self.ngram_size} is more than model.n_embd="
                f"{self.n_embd}: lower it"
            )
        if self.position == "rope" and self.key_dim % 2:
            raise UserError(
                f"model.position=rope needs an even head size, not {self.key_dim}: "
                "change model.n_embd, model.n_head or model.head_dim"
            )


@dataclass
class DataConfig:
    source: str = field(
        "stdlib",
        "Python's library, tiny Shakespeare, your files, Hugging Face",
        choices=("stdlib", "shakespeare", "text", "hf"),
    )
    path: str | None = field(None, "data=text: a file, folder or glob; shakespeare: a local copy")
    exclude: str | None = field(None, "for data=text files to leave out: globs, commas between")
    name: str | None = field(None, "for data=hf the dataset on the hub, or a folder of its files")
    subset: str | None = field(None, "for data=hf the configuration of a dataset that has several")
    split: str = field("train", "for data=hf the split to take, of which a part validates")
    val_max_tokens: int = field(200_000, "validation tokens used at most, spread evenly", ge=2)
    lines: str = field(
        "kept",
        "lines as they are, each once in all, in another order, or twice",
        choices=("kept", "once", "shuffled", "doubled"),
    )
    # The last one: below it, `field` is this setting.
    field: str = field("text", "of .jsonl and data=hf: field with the text, as messages.content")

    def check(self) -> None:
        """Refuse settings of another source, or of none."""
        if self.source in ("stdlib", "hf") and self.path is not None:
            raise UserError(
                f"data.path={self.path} needs a source that takes a path: add data=text"
            )
        if self.source == "text" and not self.path:
            raise UserError("data=text needs data.path=FILE_OR_FOLDER_OR_GLOB")
        if self.source == "hf" and not self.name:
            raise UserError("data=hf needs data.name=DATASET, such as roneneldan/TinyStories")
        for key, source in (("name", "hf"), ("subset", "hf"), ("exclude", "text")):
            if (value := getattr(self, key)) and self.source != source:
                raise UserError(f"data.{key}={value} is for data={source}: add that")


@dataclass
class TokenizerConfig:
    name: str = field(
        "bpe",
        "characters, byte pairs learned from the text, one of tiktoken's, or "
        "what init_from brings (char | bpe | gpt2 | cl100k_base | … | hf)",
    )
    vocab_size: int | None = field(
        None, "vocabulary of bpe, the end-of-text token included; null: 1024", ge=257, le=1_000_000
    )
    pattern: str = field(
        "code",
        "where bpe splits text: ours keeps snake_case and indentation "
        "whole, GPT-2's is what others know",
        choices=("code", "gpt2"),
    )

    def check(self) -> None:
        """Refuse a vocabulary that is not known, and settings that it lacks."""
        if self.name not in ("char", "bpe", "gpt2", "hf"):
            from tiktoken import list_encoding_names  # it takes a while, and is seldom needed

            known = ["char", "bpe", *list_encoding_names()]
            if self.name not in known:
                raise UserError(not_one_of("tokenizer.name", self.name, known))
        for key, default in (("vocab_size", None), ("pattern", "code")):
            if (value := getattr(self, key)) != default and self.name != "bpe":
                raise UserError(
                    f"tokenizer.{key}={value} is for tokenizer=bpe; tokenizer="
                    f"{self.name} has its own vocabulary: leave it out"
                )


MUON_MULTIPLE = 5  # of AdamW's rate


@dataclass
class OptimConfig:
    name: str = field(
        "adamw", "muon: the blocks' matrices by Muon, the rest by AdamW", choices=("adamw", "muon")
    )
    lr: float = field(1e-3, "peak learning rate: AdamW's, and Muon's by its multiple", gt=0)
    muon_lr: float | None = field(None, "peak learning rate of Muon; null: 5 × optim.lr", gt=0)
    schedule: str = field(
        "cosine",
        "after the warm-up: cosine, warm-up-stable-decay, or constant",
        choices=("cosine", "wsd", "constant"),
    )
    warmup_steps: int | None = field(None, "in which the rate rises; null: max_steps / 20", ge=0)
    decay_share: float = field(0.2, "wsd: share of the steps in which the rate falls", gt=0, le=1)
    min_lr_ratio: float = field(0.1, "rate at the end of the decay over the peak rate", ge=0, le=1)
    weight_decay: float = field(0.1, "decoupled, on matrices and embeddings alone", ge=0)
    beta1: float = field(0.9, "AdamW's decay of the mean gradient", ge=0, lt=1)
    beta2: float = field(0.95, "AdamW's decay of the mean squared gradient", ge=0, lt=1)
    momentum: float = field(0.95, "Muon's (Nesterov) momentum", ge=0, lt=1)
    grad_clip: float = field(1.0, "largest norm of the whole gradient; 0: no clipping", ge=0)

    @property
    def muon_rate(self) -> float:
        return self.muon_lr or MUON_MULTIPLE * self.lr

    def warmup(self, max_steps: int) -> int:
        """Steps of the warm-up in a run of so many steps."""
        return max_steps // 20 if self.warmup_steps is None else self.warmup_steps


@dataclass
class LogConfig:
    every: int = field(10, "steps between logged training losses; 0: only at the end", ge=0)


@dataclass
class EvalConfig:
    every: int = field(100, "steps between evaluations; 0: only at the end", ge=0)


@dataclass
class CheckpointConfig:
    every: int = field(100, "steps between checkpoints; 0: at the end and at each new best", ge=0)
    keep: int = field(2, "newest checkpoints kept besides the best", ge=1)


@dataclass
class AttentionConfig:
    every: int = field(100, "steps between snapshots, of maps and scores; 0: only at the end", ge=0)
    picture_every: int = field(
        0, "steps between pictures and samples; 0: at the ends and each doubling", ge=0
    )
    tokens: int = field(48, "tokens of the text looked at; of repeats at most 64", ge=8)

    def check(self) -> None:
        """Refuse pictures of no snapshot."""
        if self.picture_every and (self.every == 0 or self.picture_every % self.every):
            raise UserError(
                f"attention.picture_every={self.picture_every} is not a multiple of "
                f"attention.every={self.every}: a picture is of a snapshot"
            )


@dataclass
class WandbConfig:
    mode: str = field(
        "auto",
        "auto: WANDB_MODE, else online where a key is set, else offline",
        choices=("auto", "online", "offline", "disabled"),
    )
    project: str | None = field(None, "project of the run; null: WANDB_PROJECT, else glassgpt")


@dataclass
class Config:
    """One training run."""

    run_dir: str | None = field(None, "folder of the run; null: runs/<date>_<time>_<experiment>")
    resume: bool | str = field(
        False,
        "true: continue the run in run_dir; auto: continue or start",
        choices=(True, False, "auto"),
    )
    init_from: str | None = field(None, "start from a run, or from Hugging Face weights by name")
    prepare_only: bool = field(False, "prepare the text and end")
    seed: int = field(1337, "random seed of weights, data order and dropout", ge=0, le=LARGEST_SEED)
    device: str = field("auto", "auto, cpu, cuda, cuda:N or mps")
    precision: str = field(
        "auto",
        "auto: bf16 where the hardware multiplies it faster",
        choices=("auto", "fp32", "bf16"),
    )
    compile: bool | str = field(
        "auto",
        "torch.compile; auto: where it pays for a run this long",
        choices=(True, False, "auto"),
    )
    deterministic: bool = field(False, "on a GPU: equal bits in every run, by slower algorithms")
    distributed: str = field(
        "auto",
        "one run by all that torchrun started; none: by this process",
        choices=("auto", "none"),
    )
    shard: int | str = field("auto", "processes that divide the model; auto: as few as can", ge=1)
    max_steps: int = field(1000, "optimizer steps", ge=1, le=10**12)
    batch_size: int = field(
        32, "sequences per step, over all processes and micro-steps", ge=1, le=1_000_000
    )
    accumulate: int = field(1, "micro-steps of each process in a step, to save memory", ge=1)
    model: GPTConfig = dataclasses.field(default_factory=lambda: GPTConfig(vocab_size=None))
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = dataclasses.field(default_factory=TokenizerConfig)
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    log: LogConfig = dataclasses.field(default_factory=LogConfig)
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    attention: AttentionConfig = dataclasses.field(default_factory=AttentionConfig)
    wandb: WandbConfig = dataclasses.field(default_factory=WandbConfig)

    def micro_batch(self, processes: int = 1) -> int:
        """Sequences that each of so many processes takes at once."""
        return self.batch_size // (self.accumulate * processes)

    def check(self) -> None:
        """Refuse what can be known to be wrong before data or torch are touched."""
        check_fields(self)
        for section in (self.model, self.attention, self.tokenizer, self.data):
            section.check()
        if self.device.partition(":")[0] not in ("auto", "cpu", "cuda", "mps"):
            raise UserError(f"device={self.device} is not one of auto, cpu, cuda, cuda:N, mps")
        if self.batch_size % self.accumulate:
            raise UserError(
                f"accumulate={self.accumulate} does not divide batch_size="
                f"{self.batch_size}: every micro-step takes as many sequences"
            )
        if isinstance(self.shard, str) and self.shard != "auto":
            raise UserError(f"shard={self.shard} is neither auto nor a number of processes")
        warmup = self.optim.warmup(self.max_steps)
        if warmup >= self.max_steps:
            raise UserError(
                f"optim.warmup_steps={warmup} is not shorter than the run's "
                f"{self.max_steps} steps: lower it, or raise max_steps"
            )
        if self.tokenizer.name == "hf" and self.init_from is None:
            raise UserError("tokenizer=hf comes with a model: add init_from=FOLDER")
        if self.resume is True and self.run_dir is None:
            raise UserError("resume=true needs run_dir=PATH")
        for path in filter(None, (self.run_dir, self.init_from)):
            if path.encode(errors="ignore").decode() != path:  # safetensors would not find it
                raise UserError(f"{path!a} is not a name in UTF-8: choose another one")


@dataclass
class SampleConfig:
    """What `sample.py` takes."""

    run_dir: str | None = field(None, "folder of a run; null: the newest in runs/")
    init_from: str | None = field(None, "instead: Hugging Face weights, a folder or a name")
    checkpoint: str = field("best", "best, last, or a step's number")
    prompt: str | None = field(None, "text to continue; - is stdin; null: the start of a text")
    score: str | None = field(None, "FILE, - is stdin: its loss, as of validation")
    max_new_tokens: int = field(500, "tokens to generate", ge=1, le=10**9)
    temperature: float = field(0.8, "divides the logits; 0 always takes the likeliest token", ge=0)
    top_k: int | None = field(None, "keep the k likeliest tokens", ge=1)
    top_p: float | None = field(None, "keep the fewest tokens that together have p", gt=0, le=1)
    min_p: float | None = field(None, "keep tokens min_p times as likely as the first", ge=0, le=1)
    num_samples: int = field(
        1, "texts for each prompt, with seeds seed, seed + 1, …", ge=1, le=100_000
    )
    attention: str | None = field(None, "PATH.html: a page of the first text's attention")
    seed: int = field(1337, "same seed, same text", ge=0, le=LARGEST_SEED)
    device: str = field("auto", "auto, cpu, cuda, cuda:N or mps")
    precision: str = field(
        "auto",
        "of the weights; auto: bf16 where it decodes faster",
        choices=("auto", "fp32", "bf16"),
    )

    def check(self) -> None:
        """Refuse values out of bounds and settings that contradict each other."""
        check_fields(self)
        for rivals in (("run_dir", "init_from"), ("prompt", "score")):
            given = [f"{name}=" for name in rivals if getattr(self, name) not in (None, False)]
            if len(given) > 1:
                raise UserError(f"{' and '.join(given)} are both given: leave one out")
        if self.attention is not None and not self.attention.endswith(".html"):
            raise UserError(f"attention={self.attention} does not end in .html")
        is_step = self.checkpoint.isascii() and self.checkpoint.isdigit()
        if self.checkpoint not in ("best", "last") and not is_step:
            raise UserError(f"checkpoint={self.checkpoint} is not best, last or a step's number")


# Of a number: what breaks its bound, and the words for it.
BOUNDS = {"ge": (lt, "at least"), "gt": (le, "above"), "le": (gt, "at most"), "lt": (ge, "below")}


def check_fields(node, prefix: str = "") -> None:
    """Refuse a setting of the dataclass `node`, or of its sections, that is out of bounds."""
    for name, f, value in settings(node, prefix):
        choices = f.metadata.get("choices")
        if value is None:
            continue
        if choices and value not in choices:
            raise UserError(not_one_of(name, value, map(shown, choices)))
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{name}={value} is not a finite number")
        for key, (breaks, words) in BOUNDS.items():
            limit = f.metadata.get(key)
            if limit is not None and not isinstance(value, str) and breaks(value, limit):
                raise UserError(f"{name}={value} must be {words} {limit}")
        if isinstance(value, (int, float)) and value > LARGEST_NUMBER[type(value)]:
            raise UserError(f"{name}={value} must be at most {LARGEST_NUMBER[type(value)]}")


def not_one_of(name: str, value, known) -> str:
    known = list(known)
    return f"{name}={value} is not one of {', '.join(known)}{did_you_mean(str(value), known)}"


def did_you_mean(word: str, known) -> str:
    """'; did you mean …?' with the nearest of the known words, or nothing where none is near."""
    last = [name for name in known if name.rpartition(".")[2] == word]  # optim.lr for lr
    near = last or difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


def shown(value) -> str:
    """A value as it is typed."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def settings(node, prefix: str = ""):
    """Yield (dotted name, field, value) of every setting of the dataclass instance `node`."""
    for f in fields(node):
        value = getattr(node, f.name)
        if is_dataclass(value):
            yield from settings(value, f"{prefix}{f.name}.")
        else:
            yield prefix + f.name, f, value


def read_config(path: Path) -> Config:
    """The configuration in a run's config.yaml, within the bounds of this version's settings."""
    try:
        if path.exists() and not (path.is_file() and path.stat().st_size <= LARGEST):
            raise ValueError(f"it is not an ordinary file of at most {LARGEST:,} bytes")
        text = path.read_text(encoding="utf-8")
        if "&" in text and any(isinstance(token, yaml.AnchorToken) for token in yaml.scan(text)):
            raise ValueError("it has YAML anchors, which no run's has")  # they can fill the memory
        saved = {**yaml.safe_load(text)}
        saved.get("data", {}).pop("encoding", None)  # as GONE
        config = config_from({key: saved[key] for key in saved if key not in GONE})
        check_fields(config)
        config.model.check()
        return config
    except OSError as e:
        raise UserError(f"{path} cannot be read: {e.strerror}") from None
    except (
        yaml.YAMLError,
        OmegaConfBaseException,
        TypeError,
        ValueError,
        RecursionError,
        UserError,
    ) as e:
        reason = f"{e}".partition("\n")[0] or type(e).__name__
        raise UserError(f"{path} does not fit this version of GlassGPT: {reason}") from None


def config_from(saved: dict) -> Config:
    """The configuration whose `asdict` was saved."""
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), _escaped_tree(saved)))


def home(key: str, path: str) -> Path:
    """The path that was typed for `key`, from the home that a ~ at its beginning names: shells
    leave it as it is behind an equals sign."""
    whole = os.path.expanduser(path)
    if whole.startswith("~") and not os.path.exists(whole):
        raise UserError(
            f"{key}={path} does not exist: {path.partition('/')[0]} is nobody's home; "
            f"for a name that begins so write ./{path}"
        )
    return Path(whole)


def require_path(path: str) -> None:
    """Raise `UserError` where a path is of nothing, as is known before any text is read."""
    whole = str(home("data.path", path))
    if not os.path.exists(whole) and not glob.has_magic(whole):
        raise UserError(
            f"data.path={path} does not exist: give the path of a text file, of a folder, or a glob"
        )


def absolute_paths(config: Config) -> Config:
    """The configuration with paths that still hold when the run is resumed from elsewhere."""
    data, init_from = config.data, config.init_from
    if data.path is not None:
        path, here = os.path.expanduser(data.path), os.getcwd()
        if glob.has_magic(path) and not os.path.exists(path):
            here = glob.escape(here)
        data = replace(data, path=str(Path(here, path)))
    if data.name is not None and os.path.isdir(folder := os.path.expanduser(data.name)):
        data = replace(data, name=str(Path(folder).absolute()))
    if init_from and not FETCHED.fullmatch(init_from):
        init_from = str(Path(init_from).absolute())
    return replace(config, data=data, init_from=init_from)


def config_yaml(config: Config) -> str:
    """The configuration as `read_config` reads it, from any folder."""
    return yaml.safe_dump(asdict(absolute_paths(config)), sort_keys=False)


def _escaped_tree(node):
    """The same tree with its texts such that OmegaConf sees no interpolation in them."""
    if isinstance(node, dict):
        return {key: _escaped_tree(value) for key, value in node.items()}
    return escaped(node) if isinstance(node, str) else node


def escaped(text: str) -> str:
    """A text that OmegaConf, to which `${…}` means something, gives back as it is here."""
    return re.sub(r"(\\*)(\$\{)", lambda m: m[1] * 2 + r"\${", text)
