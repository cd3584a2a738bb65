"""Check the configuration of a run before it reads data or imports torch."""

from common.errors import UserError, not_one_of
from common.settings import format_value
from config import AttentionConfig, Config, DataConfig, TokenizerConfig


def check_config(config: Config) -> None:
    """Raise `UserError` if settings, each of which is within its bounds, contradict each other."""
    config.model.check()
    _check_attention(config.attention)
    _check_tokenizer(config.tokenizer)
    _check_data(config.data)
    _check_sequence_length(config)
    _check_batch_and_processes(config)
    _check_mode(config)
    if config.tokenizer.name == "hf" and config.init_from is None:
        raise UserError(
            "tokenizer.name=hf is the tokenizer of a model: use init_from=MODEL instead"
        )
    for path in filter(None, (config.run_dir, config.init_from)):
        if path.encode(errors="ignore").decode() != path:  # safetensors cannot open it
            raise UserError(f"the path {path!a} is not valid UTF-8: choose another one")


def fixed_sequence_length(data: DataConfig) -> int | None:
    """Return the number of input tokens that a task fixes; None if it takes any block_size."""
    if data.source != "synthetic" or data.task != "modular":
        return None
    return 4 + data.begin


def _check_attention(attention: AttentionConfig) -> None:
    if attention.every and attention.picture_every % attention.every:
        raise UserError(
            f"attention.picture_every={attention.picture_every} is not a multiple of "
            f"attention.every={attention.every}: grids are drawn of snapshots, so change one of "
            "them"
        )


def _check_tokenizer(tokenizer: TokenizerConfig) -> None:
    if tokenizer.is_file or tokenizer.name in ("char", "bpe", "gpt2", "hf"):
        return
    from tiktoken import list_encoding_names  # slow to import, and seldom needed

    names = ["char", "bpe", *list_encoding_names(), "PATH/tokenizer.json"]
    if tokenizer.name not in names:
        raise UserError(not_one_of("tokenizer.name", tokenizer.name, names))


def _check_data(data: DataConfig) -> None:
    if data.source == "text" and not data.path:
        raise UserError("data=text needs data.path=FILE_OR_FOLDER_OR_GLOB")
    if data.source == "hf" and not data.name:
        raise UserError("data=hf needs data.name=DATASET, such as roneneldan/TinyStories")
    if data.source == "synthetic" and data.task == "passages" and data.min_period > data.max_period:
        raise UserError(
            f"data.min_period={data.min_period} exceeds data.max_period={data.max_period}: "
            "change one of them"
        )
    if data.source == "synthetic" and data.task == "modular":
        pairs = data.num_symbols * (data.num_symbols + 1) // 2
        if not 1 <= round(data.train_share * pairs) < pairs:
            raise UserError(
                f"data.train_share={data.train_share} of {pairs} unordered pairs leaves "
                "nothing to train on or nothing to hold out: change it or raise data.symbols"
            )


def _check_sequence_length(config: Config) -> None:
    data = config.data
    block_size = config.model.block_size
    length = fixed_sequence_length(data)
    if length and block_size != length:
        raise UserError(
            f"model.block_size={block_size} does not fit data.task={data.task}, whose "
            f"sequences have {length} tokens: leave it out, or set model.block_size={length}"
        )
    longest = block_size - data.begin
    if data.source == "synthetic" and data.task == "passages" and data.max_period > longest:
        raise UserError(
            f"data.max_period={data.max_period} leaves no room for a repeat in "
            f"model.block_size={block_size}: lower it to at most {longest}, or raise "
            "model.block_size"
        )


def _check_batch_and_processes(config: Config) -> None:
    if config.batch_size % config.accumulate:
        raise UserError(
            f"batch_size={config.batch_size} is not divisible by accumulate={config.accumulate}: "
            "change one of them"
        )
    if isinstance(config.threads, str) and config.threads != "auto":
        raise UserError(f"threads={config.threads} must be auto or a number of threads")


def _check_mode(config: Config) -> None:
    if config.prepare_only + config.eval_only + config.dry_run > 1:
        raise UserError("prepare_only, eval_only and dry_run exclude each other: keep one")
    if config.eval_only and not (config.run_dir or config.init_from):
        raise UserError("eval_only=true needs a model: add run_dir=PATH or init_from=MODEL")
    if config.resume and config.run_dir is None:
        resume = format_value(config.resume)
        raise UserError(f"resume={resume} needs the folder of the run: add run_dir=PATH")
