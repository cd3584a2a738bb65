"""Every setting of GlassGPT on one page, with its unit and its bounds. Does not import torch.

The defaults are neutral: a plain GPT with every extra off. The presets in `configs/` are
short diffs from them, and `python train.py --help` is printed from this page."""

import dataclasses
import re
from dataclasses import MISSING, dataclass

from common.errors import UserError, not_one_of
from common.settings import LARGEST_SEED, check_settings, setting

BF16_DECODES_FROM = 384  # width of a model that decodes faster in bf16 on a CPU that multiplies it
HUB_MODEL = re.compile(r"(\w[\w.-]*/[\w.-]+)@([0-9a-f]{40})")  # a model of the hub, with its commit


@dataclass
class GPTConfig:
    """Shape of a model; `vocab_size` comes from the tokenizer when a run is configured."""

    vocab_size: int | None = setting(
        MISSING, "tokens in the vocabulary; null: the tokenizer's", ge=1
    )
    block_size: int = setting(256, "context length T, in tokens", ge=2)
    n_layer: int = setting(4, "blocks, each an attention and an MLP", ge=1, le=10_000)
    n_head: int = setting(4, "query heads H", ge=1)
    n_kv_head: int | None = setting(None, "key/value heads G, dividing n_head; null: n_head", ge=1)
    n_embd: int = setting(128, "width C of the residual stream", ge=1)
    head_dim: int | None = setting(None, "d_k, size of a query or key; null: n_embd / n_head", ge=1)
    value_head_dim: int | None = setting(None, "d_v, size of a value; null: head_dim", ge=1)
    mlp: str = setting("gelu", "MLP of a block", choices=("gelu", "swiglu", "relu2"))
    mlp_hidden: int | None = setting(None, "width of the MLP; null: 4 n_embd, of swiglu 8/3", ge=1)
    norm: str = setting("layernorm", "normalisation", choices=("layernorm", "rmsnorm"))
    norm_eps: float = setting(1e-5, "added to the variance in the normalisation", gt=0)
    norm_embedding: bool = setting(False, "RMS-normalise the embeddings before the first block")
    position: str = setting("learned", "an embedding, or rotary", choices=("learned", "rope"))
    rope_theta: float = setting(10000.0, "base of the rotary wavelengths", gt=0)
    rope_factor: float = setting(1.0, "stretches the wavelengths, for a longer context", ge=1)
    rope_trained: int | None = setting(
        None, "context length before they were stretched, as Llama 3 does; null: all alike", ge=1
    )
    qk_norm: bool | str = setting(
        False,
        "RMS-normalise queries and keys; gains: with trained gains",
        choices=(True, False, "gains"),
    )
    bias: bool | str = setting(
        False,
        "biases: everywhere, in attention, or on queries, keys, values",
        choices=(True, False, "attention", "qkv"),
    )
    dropout: float = setting(
        0.0, "share of activations and weights dropped in training", ge=0, lt=1
    )
    tie_embeddings: bool = setting(True, "the output layer is the token embedding, transposed")
    ngrams: int = setting(
        0, "adds rows of the last 2 … n tokens to embeddings; 0: none", ge=0, le=64
    )
    ngram_size: int | None = setting(None, "channels that n-grams add to; null: n_embd", ge=1)
    ngram_count: int = setting(2, "times that the training text has an n-gram, at least", ge=1)
    ngram_rows: int | None = setting(None, "n-grams that are so many; null: as the text has", ge=1)

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
        check_settings(self, "model.")
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
    source: str = setting(
        "stdlib",
        "Python's library, tiny Shakespeare, your files, Hugging Face",
        choices=("stdlib", "shakespeare", "text", "hf"),
    )
    path: str | None = setting(None, "data=text: a file, folder or glob; shakespeare: a local copy")
    exclude: str | None = setting(None, "for data=text files to leave out: globs, commas between")
    name: str | None = setting(None, "for data=hf the dataset on the hub, or a folder of its files")
    subset: str | None = setting(
        None, "for data=hf the configuration of a dataset that has several"
    )
    split: str = setting("train", "for data=hf the split to take, of which a part validates")
    val_max_tokens: int = setting(200_000, "validation tokens used at most, spread evenly", ge=2)
    lines: str = setting(
        "kept",
        "lines as they are, each once in all, in another order, or twice",
        choices=("kept", "once", "shuffled", "doubled"),
    )
    field: str = setting("text", "of .jsonl and data=hf: field with the text, as messages.content")

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
    name: str = setting(
        "bpe",
        "characters, byte pairs learned from the text, one of tiktoken's, or "
        "what init_from brings (char | bpe | gpt2 | cl100k_base | … | hf)",
    )
    vocab_size: int | None = setting(
        None, "vocabulary of bpe, the end-of-text token included; null: 1024", ge=257, le=1_000_000
    )
    pattern: str = setting(
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
    name: str = setting(
        "adamw", "muon: the blocks' matrices by Muon, the rest by AdamW", choices=("adamw", "muon")
    )
    lr: float = setting(1e-3, "peak learning rate: AdamW's, and Muon's by its multiple", gt=0)
    muon_lr: float | None = setting(None, "peak learning rate of Muon; null: 5 × optim.lr", gt=0)
    schedule: str = setting(
        "cosine",
        "after the warm-up: cosine, warm-up-stable-decay, or constant",
        choices=("cosine", "wsd", "constant"),
    )
    warmup_steps: int | None = setting(None, "in which the rate rises; null: max_steps / 20", ge=0)
    decay_share: float = setting(0.2, "wsd: share of the steps in which the rate falls", gt=0, le=1)
    min_lr_ratio: float = setting(
        0.1, "rate at the end of the decay over the peak rate", ge=0, le=1
    )
    weight_decay: float = setting(0.1, "decoupled, on matrices and embeddings alone", ge=0)
    beta1: float = setting(0.9, "AdamW's decay of the mean gradient", ge=0, lt=1)
    beta2: float = setting(0.95, "AdamW's decay of the mean squared gradient", ge=0, lt=1)
    momentum: float = setting(0.95, "Muon's (Nesterov) momentum", ge=0, lt=1)
    grad_clip: float = setting(1.0, "largest norm of the whole gradient; 0: no clipping", ge=0)

    @property
    def muon_rate(self) -> float:
        return self.muon_lr or MUON_MULTIPLE * self.lr

    def warmup(self, max_steps: int) -> int:
        """Steps of the warm-up in a run of so many steps."""
        return max_steps // 20 if self.warmup_steps is None else self.warmup_steps


@dataclass
class LogConfig:
    every: int = setting(10, "steps between logged training losses; 0: only at the end", ge=0)


@dataclass
class EvalConfig:
    every: int = setting(100, "steps between evaluations; 0: only at the end", ge=0)


@dataclass
class CheckpointConfig:
    every: int = setting(100, "steps between checkpoints; 0: at the end and at each new best", ge=0)
    keep: int = setting(2, "newest checkpoints kept besides the best", ge=1)


@dataclass
class AttentionConfig:
    every: int = setting(
        100, "steps between snapshots, of maps and scores; 0: only at the end", ge=0
    )
    picture_every: int = setting(
        0, "steps between pictures and samples; 0: at the ends and each doubling", ge=0
    )
    tokens: int = setting(48, "tokens of the text looked at; of repeats at most 64", ge=8)

    def check(self) -> None:
        """Refuse pictures of no snapshot."""
        if self.picture_every and (self.every == 0 or self.picture_every % self.every):
            raise UserError(
                f"attention.picture_every={self.picture_every} is not a multiple of "
                f"attention.every={self.every}: a picture is of a snapshot"
            )


@dataclass
class WandbConfig:
    mode: str = setting(
        "auto",
        "auto: WANDB_MODE, else online where a key is set, else offline",
        choices=("auto", "online", "offline", "disabled"),
    )
    project: str | None = setting(None, "project of the run; null: WANDB_PROJECT, else glassgpt")


@dataclass
class Config:
    """One training run."""

    run_dir: str | None = setting(None, "folder of the run; null: runs/<date>_<time>_<experiment>")
    resume: bool | str = setting(
        False,
        "true: continue the run in run_dir; auto: continue or start",
        choices=(True, False, "auto"),
    )
    init_from: str | None = setting(None, "start from a run, or from Hugging Face weights by name")
    prepare_only: bool = setting(False, "prepare the text and end")
    seed: int = setting(
        1337, "random seed of weights, data order and dropout", ge=0, le=LARGEST_SEED
    )
    device: str = setting("auto", "auto, cpu, cuda, cuda:N or mps")
    precision: str = setting(
        "auto",
        "auto: bf16 where the hardware multiplies it faster",
        choices=("auto", "fp32", "bf16"),
    )
    compile: bool | str = setting(
        "auto",
        "torch.compile; auto: where it pays for a run this long",
        choices=(True, False, "auto"),
    )
    deterministic: bool = setting(False, "on a GPU: equal bits in every run, by slower algorithms")
    distributed: str = setting(
        "auto",
        "one run by all that torchrun started; none: by this process",
        choices=("auto", "none"),
    )
    shard: int | str = setting("auto", "processes that divide the model; auto: as few as can", ge=1)
    max_steps: int = setting(1000, "optimizer steps", ge=1, le=10**12)
    batch_size: int = setting(
        32, "sequences per step, over all processes and micro-steps", ge=1, le=1_000_000
    )
    accumulate: int = setting(1, "micro-steps of each process in a step, to save memory", ge=1)
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
        check_settings(self)
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

    run_dir: str | None = setting(None, "folder of a run; null: the newest in runs/")
    init_from: str | None = setting(None, "instead: Hugging Face weights, a folder or a name")
    checkpoint: str = setting("best", "best, last, or a step's number")
    prompt: str | None = setting(None, "text to continue; - is stdin; null: the start of a text")
    score: str | None = setting(None, "FILE, - is stdin: its loss, as of validation")
    max_new_tokens: int = setting(500, "tokens to generate", ge=1, le=10**9)
    temperature: float = setting(
        0.8, "divides the logits; 0 always takes the likeliest token", ge=0
    )
    top_k: int | None = setting(None, "keep the k likeliest tokens", ge=1)
    top_p: float | None = setting(None, "keep the fewest tokens that together have p", gt=0, le=1)
    min_p: float | None = setting(
        None, "keep tokens min_p times as likely as the first", ge=0, le=1
    )
    num_samples: int = setting(
        1, "texts for each prompt, with seeds seed, seed + 1, …", ge=1, le=100_000
    )
    attention: str | None = setting(None, "PATH.html: a page of the first text's attention")
    seed: int = setting(1337, "same seed, same text", ge=0, le=LARGEST_SEED)
    device: str = setting("auto", "auto, cpu, cuda, cuda:N or mps")
    precision: str = setting(
        "auto",
        "of the weights; auto: bf16 where it decodes faster",
        choices=("auto", "fp32", "bf16"),
    )

    def check(self) -> None:
        """Refuse values out of bounds and settings that contradict each other."""
        check_settings(self)
        for rivals in (("run_dir", "init_from"), ("prompt", "score")):
            given = [f"{name}=" for name in rivals if getattr(self, name) not in (None, False)]
            if len(given) > 1:
                raise UserError(f"{' and '.join(given)} are both given: leave one out")
        if self.attention is not None and not self.attention.endswith(".html"):
            raise UserError(f"attention={self.attention} does not end in .html")
        is_step = self.checkpoint.isascii() and self.checkpoint.isdigit()
        if self.checkpoint not in ("best", "last") and not is_step:
            raise UserError(f"checkpoint={self.checkpoint} is not best, last or a step's number")
