"""Sample texts of a run, which show what its model has learned so far."""

from data.tasks.task import Task
from data.tokenizer import Tokenizer, encode_prompt
from generation.decoder import Decoder
from generation.sampling import Sampling, draw_batch, stream_text
from model import GPT
from training.device import exact_float32

SAMPLE_TOKENS = 100  # length of each sample text
SAMPLE_TEMPERATURE = 0.8


def sample_text(model: GPT, tokenizer: Tokenizer, task: Task | None, seed: int) -> str:
    """Generate a text, or one sequence of a task; equal weights and seed give equal texts."""
    if task:
        prompt = task.prompt
        start, count = prompt, task.block_size + 1 - len(prompt)
    else:
        prompt, start, count = [], encode_prompt(tokenizer, ""), SAMPLE_TOKENS
    sampling = Sampling(temperature=SAMPLE_TEMPERATURE, vocab_size=tokenizer.vocab_size)
    with exact_float32():
        decoder = Decoder(model, 1, len(start) + count)
        (ids,) = draw_batch(decoder, start, count, sampling, [seed])
        text = stream_text(tokenizer, ids, has_prompt=bool(prompt))
        return tokenizer.decode(prompt) + "".join(text)
