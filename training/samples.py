"""Sample texts of a run, which show what its model has learned so far."""

from data.tokenizer import encode_prompt
from data.tokens import Tokens
from generation.decoder import Decoder
from generation.sampling import Sampling, draw_batch, stream_text
from model import GPT
from training.device import exact_float32

SAMPLE_TOKENS = 100  # length of each sample text
SAMPLE_TEMPERATURE = 0.8


def sample_text(model: GPT, text: Tokens, seed: int) -> str:
    """Generate a text, or one sequence of a task; equal weights and seed give equal texts."""
    tokenizer, task = text.tokenizer, text.task
    prompt: list[int] = task.prompt if task else []
    start = prompt or encode_prompt(tokenizer, "")
    count = task.block_size + 1 - len(prompt) if task else SAMPLE_TOKENS
    sampling = Sampling(temperature=SAMPLE_TEMPERATURE, vocab_size=tokenizer.vocab_size)
    with exact_float32():
        decoder = Decoder(model, 1, len(start) + count)
        (ids,) = draw_batch(decoder, start, count, sampling, [seed])
        pieces = stream_text(tokenizer, ids, has_prompt=bool(prompt))
        return tokenizer.decode(prompt) + "".join(pieces)
