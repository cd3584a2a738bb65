"""Every setting of a run, with its unit and its bounds. Does not import torch.

The defaults are those of a plain GPT with every extra off. The presets in `configs/` are
short diffs from them, and `python train.py --help` is printed from this page.
"""

import dataclasses
from dataclasses import MISSING, dataclass

from common.errors import UserError
from common.settings import LARGEST_SEED, GreaterThan, check_settings, setting

# Tensor cores multiply 16-bit matrices whose sizes are multiples of 64 in full tiles.
GPU_VOCAB_MULTIPLE = 64

# Other settings, with the values beside which alone some settings have an effect.
TASK = {"data.source": ("synthetic",)}
PASSAGES = TASK | {"data.task": ("passages",)}
DATASET = {"data.source": ("hf",)}
BPE = {"tokenizer.name": ("bpe",)}
MLPS = ("gelu", "gelu_exact", "swiglu", "relu2")
WITH_MLP = {"model.mlp": MLPS}
ROPE = {"model.position": ("rope",)}
NGRAMS = {"model.ngrams": GreaterThan(1)}
MUON = {"optim.name": ("muon",)}
DECAYING = ("cosine", "wsd")  # schedules
LOGGED = {"wandb.mode": ("auto", "online", "offline")}  # with which W&B logs
SNAPSHOTS = {"attention.every": GreaterThan(0)}
# The tasks of data=synthetic, with the number of different symbols in each.
TASK_SYMBOLS = {"passages": 32, "markov": 3, "modular": 41}


@dataclass
class ModelConfig:
    """Shape of a model; if `vocab_size` is None, it is taken from the tokenizer."""

    vocab_size: int | None = setting(MISSING, "tokens in the vocabulary; null: tokenizer's", ge=1)
    block_size: int = setting(256, "context length T, in tokens", ge=2)
    n_layer: int = setting(4, "number of transformer blocks", ge=1, le=10_000)
    n_head: int = setting(4, "number of query heads H", ge=1)
    n_kv_head: int | None = setting(
        None, "number of key/value heads G, a divisor of n_head; null: n_head", ge=1
    )
    n_embd: int = setting(128, "width C of the residual stream", ge=1)
    head_dim: int | None = setting(None, "size d_k of a query or key; null: n_embd / n_head", ge=1)
    value_head_dim: int | None = setting(None, "size d_v of a value; null: head_dim", ge=1)
    mlp: str = setting(
        "gelu",
        "type of MLP; none: blocks of attention only",
        choices=(*MLPS, "none"),
    )
    mlp_ratio: float | None = setting(
        None,
        "hidden width of the MLP as a multiple of n_embd; null: 4, or 8/3 for swiglu",
        gt=0,
        le=1000,
        only_with=WITH_MLP | {"model.mlp_hidden": (None,)},
    )
    mlp_hidden: int | None = setting(
        None, "hidden width of the MLP; null: mlp_ratio * n_embd", ge=1, only_with=WITH_MLP
    )
    parallel_mlp: bool = setting(
        False, "let the MLP read the input of attention, without its output", only_with=WITH_MLP
    )
    attention_sink: bool = setting(
        False, "learn a logit per head beside its scores, so that it need not attend to any token"
    )
    attention_gate: str = setting(
        "none",
        "multiply the heads' outputs by gates: none, one per head, or one per channel",
        choices=("none", "head", "channel"),
    )
    smear_keys: bool = setting(
        False, "mix each key with the key of the token before; the share is learned"
    )
    norm: str = setting("layernorm", "type of normalization", choices=("layernorm", "rmsnorm"))
    norm_eps: float = setting(1e-5, "epsilon added to the variance in normalization layers", gt=0)
    norm_embedding: bool = setting(False, "apply RMSNorm to the embeddings before the first block")
    position: str = setting(
        "learned",
        "position encoding: learned embeddings or rotary (RoPE)",
        choices=("learned", "rope"),
    )
    rope_theta: float = setting(10000.0, "base of the rotary wavelengths", gt=0, only_with=ROPE)
    rope_factor: float = setting(
        1.0, "stretches the rotary wavelengths for a longer context", ge=1, only_with=ROPE
    )
    rope_trained: int | None = setting(
        None,
        "context length before stretching, which Llama 3's scaling by wavelength needs; "
        "null: stretch all wavelengths equally",
        ge=1,
        only_with=ROPE | {"model.rope_factor": GreaterThan(1)},
    )
    rope_share: float = setting(
        1.0, "share of the channels of queries and keys that rotate", gt=0, le=1, only_with=ROPE
    )
    qk_norm: bool | str = setting(
        False,
        "apply RMSNorm to queries and keys; gains: with trained gains",
        choices=(True, False, "gains"),
    )
    bias: bool | str = setting(
        False,
        "bias terms: in all layers, in attention, on queries, keys and values, or in MLPs",
        choices=(True, False, "attention", "qkv", "mlp"),
    )
    dropout: float = setting(
        0.0, "probability of dropping an activation or attention weight in training", ge=0, lt=1
    )
    tie_embeddings: bool = setting(True, "use the token embedding as the output layer's weight")
    vocab_multiple: int | None = setting(
        None,
        "pad the logits to a multiple of this while they are computed, which is faster on a GPU; "
        f"null: {GPU_VOCAB_MULTIPLE} with CUDA, else 1",
        ge=1,
        le=65_536,
    )
    ngrams: int = setting(
        0,
        "add embeddings of the last 2 to n tokens to each token's embedding; 0: none",
        ge=0,
        le=64,
    )
    ngram_size: int | None = setting(
        None, "channels of the n-gram embeddings; null: n_embd", ge=1, only_with=NGRAMS
    )
    ngram_count: int = setting(
        2,
        "n-grams seen at least this often in the training split have their own row of the n-gram "
        "table; rarer ones share one",
        ge=1,
        only_with=NGRAMS,
    )
    ngram_rows: int | None = setting(
        None, "rows of the n-gram table; null: set by the text", ge=1, only_with=NGRAMS
    )

    @property
    def is_rotary(self) -> bool:
        """True if positions rotate queries and keys."""
        return {"learned": False, "rope": True}[self.position]

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads G."""
        return self.n_kv_head or self.n_head

    @property
    def key_dim(self) -> int:
        """Size d_k of a query or key."""
        return self.head_dim or self.n_embd // self.n_head

    @property
    def rotary_dim(self) -> int:
        """Number of channels of a query or key that rotate, if positions are rotary."""
        return int(self.rope_share * self.key_dim)

    @property
    def value_dim(self) -> int:
        """Size d_v of a value."""
        return self.value_head_dim or self.key_dim

    @property
    def gate_dim(self) -> int:
        """Number of gates of an attention layer."""
        gates_per_head = {"none": 0, "head": 1, "channel": self.value_dim}
        return self.n_head * gates_per_head[self.attention_gate]

    @property
    def vocab_padding(self) -> int:
        """Number of columns of zeros by which the output layer's matrix product is padded."""
        return -(self.vocab_size or 0) % (self.vocab_multiple or 1)

    @property
    def has_variant_attention(self) -> bool:
        """True if the attention layers are those of `variants`."""
        return self.attention_sink or self.smear_keys or self.gate_dim > 0

    @property
    def ngram_dim(self) -> int:
        """Number of channels of the n-gram embeddings."""
        return self.ngram_size or self.n_embd

    @property
    def hidden_dim(self) -> int:
        """Hidden width of the MLP, 0 without one."""
        if self.mlp == "none":
            return 0
        if self.mlp_hidden:
            return self.mlp_hidden
        if self.mlp_ratio:
            return max(1, round(self.mlp_ratio * self.n_embd))
        if self.mlp == "swiglu":
            return -(-self.n_embd // 3) * 8  # a multiple of 8
        return 4 * self.n_embd

    def has_bias(self, part: str) -> bool:
        """Return whether a part has biases: `qkv`, `output` (of attention), `mlp` or `norm`."""
        if isinstance(self.bias, bool):
            return self.bias
        parts = {"attention": ("qkv", "output"), "qkv": ("qkv",), "mlp": ("mlp",)}
        return part in parts[self.bias]

    def check(self) -> None:
        """Raise `UserError` if a value is out of bounds or settings contradict each other."""
        check_settings(self, "model.")
        if self.head_dim is None and self.n_embd % self.n_head:
            raise UserError(
                f"model.n_embd={self.n_embd} is not divisible by model.n_head={self.n_head}: "
                "change one of them, or set model.head_dim"
            )
        if self.n_head % self.kv_heads:
            divisors = [str(d) for d in range(1, self.n_head + 1) if self.n_head % d == 0]
            raise UserError(
                f"model.n_head={self.n_head} is not divisible by model.n_kv_head="
                f"{self.n_kv_head}: set model.n_kv_head to one of {', '.join(divisors)}"
            )
        if self.ngrams > 1 and self.ngram_dim > self.n_embd:
            raise UserError(
                f"model.ngram_size={self.ngram_size} exceeds model.n_embd={self.n_embd}: lower it"
            )
        if self.is_rotary and (self.key_dim % 2 or self.rotary_dim % 2 or not self.rotary_dim):
            raise UserError(
                f"model.position=rope rotates pairs of channels, but model.rope_share="
                f"{self.rope_share} of a head size of {self.key_dim} is {self.rotary_dim}: make "
                "both even by model.rope_share, model.n_embd, model.n_head or model.head_dim"
            )


@dataclass
class GPTConfig(ModelConfig):
    """Shape of a model whose vocabulary is known."""

    vocab_size: int = setting(MISSING, "number of tokens in the vocabulary", ge=1)

    @classmethod
    def from_settings(cls, settings: ModelConfig) -> "GPTConfig":
        """Build a `GPTConfig` from settings with a known vocabulary size."""
        if settings.vocab_size is None:
            raise UserError("model.vocab_size is not set: set it to the tokenizer's vocabulary")
        return cls(**dataclasses.asdict(settings))


def cached_number_bytes(device: str, weight_bytes: int) -> int:
    """Return the bytes of a number in a KV cache; on a CPU 4, as bf16 is much slower (LOG.md)."""
    return max(4, weight_bytes) if device == "cpu" else weight_bytes


@dataclass
class DataConfig:
    """The text to train on."""

    source: str = setting(
        "stdlib",
        "Python's standard library, tiny Shakespeare, your text files, a Hugging Face dataset, or "
        "sequences generated for a task",
        choices=("stdlib", "shakespeare", "text", "hf", "synthetic"),
    )
    path: str | None = setting(
        None,
        "file, folder or glob, which implies data=text; shakespeare: local copy",
        only_with={"data.source": ("text", "shakespeare")},
    )
    exclude: str | None = setting(
        None,
        "what to leave out below data.path: comma-separated patterns of .gitignore",
        only_with={"data.source": ("text",)},
    )
    name: str | None = setting(
        None, "name of a hub dataset, or a folder of its files", only_with=DATASET
    )
    subset: str | None = setting(None, "dataset's configuration, if several", only_with=DATASET)
    split: str = setting("train", "the split for training and validation", only_with=DATASET)
    val_max_tokens: int = setting(200_000, "maximum of validation tokens, spread evenly", ge=2)
    field: str = setting(
        "text",
        "field with the text in .jsonl, .parquet and data=hf, such as messages.content",
        only_with={"data.source": ("text", "hf")},
    )
    task: str = setting(
        "passages",
        "passages that repeat, Markov chains, modular addition",
        choices=tuple(TASK_SYMBOLS),
        only_with=TASK,
    )
    symbols: int | None = setting(
        None,
        "number of different symbols, with data.task=modular the modulus; null: "
        f"{', '.join(f'{n} for {task}' for task, n in TASK_SYMBOLS.items())}",
        ge=2,
        le=512,
        only_with=TASK,
    )
    begin: bool = setting(False, "begin each sequence with the symbol ^", only_with=TASK)
    min_period: int = setting(8, "length of the shortest passage", ge=1, only_with=PASSAGES)
    max_period: int = setting(24, "length of the longest passage", ge=1, only_with=PASSAGES)
    concentration: float = setting(
        1.0,
        "concentration of the Dirichlet distribution of transitions",
        gt=0,
        only_with=TASK | {"data.task": ("markov",)},
    )
    train_share: float = setting(
        0.6,
        "share of the unordered pairs that are trained on",
        gt=0,
        lt=1,
        only_with=TASK | {"data.task": ("modular",)},
    )

    @property
    def num_symbols(self) -> int:
        """Number of different symbols of the task, without the begin symbol."""
        return self.symbols or TASK_SYMBOLS[self.task]


@dataclass
class TokenizerConfig:
    """Settings of the tokenizer."""

    name: str = setting(
        "bpe",
        "characters, byte-pair encoding trained on the text, an encoding of tiktoken, a file of "
        "Hugging Face's format, or the tokenizer of init_from "
        "(char | bpe | gpt2 | cl100k_base | … | PATH/tokenizer.json | hf)",
    )
    vocab_size: int | None = setting(
        None,
        "vocabulary size of bpe, including the end-of-text token; null: 1024",
        ge=257,
        le=1_000_000,
        only_with=BPE,
    )
    pattern: str = setting(
        "code",
        "how bpe pre-tokenizes: code keeps snake_case and indentation together, gpt2 splits as "
        "GPT-2 does",
        choices=("code", "gpt2"),
        only_with=BPE,
    )

    @property
    def is_file(self) -> bool:
        """True if the name is the path of a tokenizer.json."""
        return self.name.endswith(".json")


@dataclass
class OptimConfig:
    """The optimizer and its learning-rate schedule."""

    name: str = setting(
        "adamw",
        "AdamW for all weights, or Muon for the blocks' matrices and AdamW for the others",
        choices=("adamw", "muon"),
    )
    lr: float = setting(1e-3, "peak learning rate of AdamW", gt=0)
    muon_lr_multiple: float = setting(
        5.0, "peak learning rate of Muon as a multiple of optim.lr", gt=0, only_with=MUON
    )
    schedule: str = setting(
        "cosine",
        "learning rate after the warm-up: cosine decay, warmup-stable-decay, or constant",
        choices=(*DECAYING, "constant"),
    )
    warmup_share: float = setting(
        0.05, "the fraction of all steps in which the rate rises to its peak", ge=0, lt=1
    )
    decay_share: float = setting(
        0.2,
        "the fraction of all steps in which the rate decays",
        gt=0,
        le=1,
        only_with={"optim.schedule": ("wsd",)},
    )
    min_lr_ratio: float = setting(
        0.1,
        "final learning rate as a fraction of the peak",
        ge=0,
        le=1,
        only_with={"optim.schedule": DECAYING},
    )
    weight_decay: float = setting(0.1, "decoupled weight decay of matrices and embeddings", ge=0)
    beta1: float = setting(0.9, "AdamW's decay rate of the first moment", ge=0, lt=1)
    beta2: float = setting(0.95, "AdamW's decay rate of the second moment", ge=0, lt=1)
    momentum: float = setting(0.95, "Muon's Nesterov momentum", ge=0, lt=1, only_with=MUON)
    grad_clip: float = setting(1.0, "maximum norm of the gradient; 0: no clipping", ge=0)


@dataclass
class LogConfig:
    """Settings of logging the training loss."""

    every: int = setting(10, "steps between logged training losses; 0: only at the end", ge=0)


@dataclass
class EvalConfig:
    """Settings of measuring the validation loss."""

    every: int = setting(100, "steps between evaluations; 0: only at the end", ge=0)
    first: int = setting(
        0,
        "further evaluations at this step, or after one epoch if that is earlier, and at each "
        "doubling of it below eval.every; 0: after one epoch if that is before eval.every",
        ge=0,
        only_with={"eval.every": GreaterThan(0)},
    )


@dataclass
class CheckpointConfig:
    """Settings of saving checkpoints."""

    every: int = setting(100, "steps between checkpoints; 0: at the end and each new best", ge=0)
    keep: int = setting(2, "number of newest checkpoints to keep besides the best", ge=1)


@dataclass
class AttentionConfig:
    """Settings of recording attention."""

    every: int = setting(
        100, "steps between snapshots of attention patterns and scores; 0: only at the end", ge=0
    )
    first: int = setting(
        0,
        "further snapshots at this step and each doubling of it below attention.every; 0: none",
        ge=0,
        only_with=SNAPSHOTS,
    )
    check_every: int = setting(
        0,
        "steps between checks that take an extra snapshot if the highest prefix-matching score has "
        "changed by 0.05; 0: never",
        ge=0,
        only_with=SNAPSHOTS,
    )
    picture_every: int = setting(
        0,
        "steps between attention grids and text samples; 0: at the first and last snapshot and at "
        "each doubling",
        ge=0,
        only_with=SNAPSHOTS,
    )
    tokens: int = setting(
        48, "length of the text probe, in tokens; of the repeated probe at most 64", ge=8
    )


@dataclass
class WandbConfig:
    """Logging to Weights & Biases."""

    mode: str = setting(
        "auto",
        "auto: as WANDB_MODE or `wandb offline` say, else online with an API key, else offline",
        choices=(*LOGGED["wandb.mode"], "disabled"),
    )
    project: str | None = setting(
        None,
        "W&B project, of WANDB_ENTITY; null: WANDB_PROJECT, else glassgpt",
        only_with=LOGGED,
    )
    name: str | None = setting(
        None, "name of the run; null: WANDB_NAME, else that of its folder", only_with=LOGGED
    )
    group: str | None = setting(
        None, "group of the run; null: WANDB_RUN_GROUP, else its sweep", only_with=LOGGED
    )
    tags: str | None = setting(
        None, "tags of the run, separated by commas; null: WANDB_TAGS", only_with=LOGGED
    )
    notes: str | None = setting(None, "notes on the run; null: WANDB_NOTES", only_with=LOGGED)
    log_model: bool = setting(
        False, "upload the best checkpoint as an artifact at the end", only_with=LOGGED
    )


@dataclass
class ModelSource:
    """The run or the model that a command is about."""

    run_dir: str | None = setting(
        None,
        "folder of the run; null: train.py makes runs/<date>_<time>_<experiment>, other commands "
        "read the newest run in runs/",
    )
    init_from: str | None = setting(
        None,
        "a run, a Hugging Face folder or model name, a .gguf file or nanoGPT's ckpt.pt: train.py "
        "starts from its weights, other commands read it instead of run_dir",
    )


@dataclass
class Hardware:
    """The device of a command, and the floating-point format of its arithmetic."""

    device: str = setting("auto", "auto, cpu, cuda, cuda:N or mps")
    precision: str = setting(
        "auto",
        "floating-point format of matrix products, or of the weights in sample.py and explore.py; "
        "auto: the fastest here, in explore.py fp32; training in fp32 uses TF32 on NVIDIA GPUs "
        "from compute capability 8",
        choices=("auto", "fp32", "bf16", "fp16"),
    )


@dataclass
class Config(Hardware, ModelSource):
    """One training run."""

    experiment: str | None = setting(None, "preset of the whole run, which a resumed run keeps")
    resume: bool | str = setting(
        False,
        "true: resume the run in run_dir; auto: resume it if there is one, else start it",
        choices=(True, False, "auto"),
    )
    prepare_only: bool = setting(False, "prepare the text, then exit")
    eval_only: bool = setting(
        False, "print the validation loss of the best model of run_dir, or of init_from, then exit"
    )
    dry_run: bool = setting(
        False, "take three steps, print the time of the whole run and the peak memory, then exit"
    )
    seed: int = setting(1337, "seed of weights, data order and dropout", ge=0, le=LARGEST_SEED)
    compile: bool | str = setting(
        "auto",
        "use torch.compile; auto: if it saves time in a run of this length",
        choices=(True, False, "auto"),
    )
    threads: int | str = setting(
        "auto",
        "threads of a run of one process; auto: all it may use; 1 is faster on a busy machine",
        ge=1,
        le=1024,
    )
    deterministic: bool = setting(
        False, "on a GPU use deterministic algorithms, which are slower: equal bits in every run"
    )
    distributed: str = setting(
        "auto",
        "auto: processes that were started together share one run; none: this process trains alone",
        choices=("auto", "none"),
    )
    shard: int = setting(1, "number of processes that split each copy of the model", ge=1)
    checkpoint_activations: bool = setting(
        False,
        "compute each block again in the backward pass instead of keeping its activations: less "
        "memory, a third more operations in the blocks",
    )
    profile: int = setting(
        0,
        "number of training steps to profile after three of warm-up, for a table and trace.json.gz",
        ge=0,
        le=100,
    )
    max_steps: int = setting(1000, "number of optimizer steps", ge=1, le=10**12)
    batch_size: int = setting(
        32, "sequences per optimizer step, over all processes and micro-steps", ge=1, le=1_000_000
    )
    accumulate: int = setting(1, "micro-steps per optimizer step; more need less memory", ge=1)
    model: ModelConfig = dataclasses.field(default_factory=lambda: ModelConfig(vocab_size=None))
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = dataclasses.field(default_factory=TokenizerConfig)
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    log: LogConfig = dataclasses.field(default_factory=LogConfig)
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    attention: AttentionConfig = dataclasses.field(default_factory=AttentionConfig)
    wandb: WandbConfig = dataclasses.field(default_factory=WandbConfig)


@dataclass(kw_only=True)
class ResolvedConfig(Config):
    """A run's configuration on its text and machine, without any `auto`; see `training.plan`."""

    model: GPTConfig
    compile: bool = setting(False, "torch.compile")
    threads: int = setting(1, "threads of each process", ge=1)
