"""How surprised a model is by a text: its loss, its bits per byte, and the text coloured by it."""

import codecs
import json
import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.text import Text
from torch import Tensor

from data.tokenizer import Tokenizer, first_token
from decoding import printable
from model import GPT

TOKENS, LOGITS = 8192, 1 << 24  # that go through the model at once, and 64 MB made at once, at most
# From so many bits on, a token has this colour; below the first it has none.
LEVELS = ((1, "black on #ffffaf"), (3, "black on #ffd75f"), (6, "black on #ff875f"), (10, "#ffffff on #d70000"))


@torch.inference_mode()
def surprise(model: GPT, tokens: Tensor) -> Iterator[Tensor]:
    """Yield, some at a time, -ln p of every one of tokens (N + 1,) but the first: N numbers, in nats.

    Each is predicted from what `decoding.stream` would see, the tokens since its `window_start`: windows of block_size that
    start a quarter of it apart, of which the first predicts all its tokens and the others the last quarter.
    """
    N, block = len(tokens) - 1, model.config.block_size
    stride, width = max(1, block // 4), min(block, N)
    windows = 1 + math.ceil((N - width) / stride)
    padded = F.pad(tokens, (0, (windows - 1) * stride + width - N))
    inputs, targets = padded[:-1].unfold(0, width, stride), padded[1:].unfold(0, width, stride)  # (windows, width)
    most = max(1, LOGITS // model.config.vocab_size)  # positions
    rows = max(1, TOKENS // width)
    pieces = [(inputs[:1], targets[:1])]
    pieces += [(inputs[row:row + rows], targets[row:row + rows, -stride:]) for row in range(1, windows, rows)]
    for x, y in pieces:
        hidden = model.norm(model.hidden(x)[:, -y.shape[1]:]).flatten(0, 1)  # (predicted, C)
        for h, target in zip(hidden.split(most), y.flatten().split(most)):
            nats = F.cross_entropy(model.head(h).float(), target, reduction="none")[:N]
            N -= len(nats)
            yield nats


def show_score(model: GPT, tokenizer: Tokenizer, text: str, as_json: bool = False) -> None:
    """Write the score of a text to stdout: in a terminal under the text, coloured by surprise; as JSON under a line for each token.

    The text is scored as one that the model begins, so that its first token is predicted too.

    Raises:
        UserError: the text cannot be encoded.
    """
    ids = tokenizer.encode(text)
    tokens = torch.tensor([first_token(tokenizer), *ids], device=model.head.weight.device)
    console = Console(highlight=False, soft_wrap=True)
    coloured = not as_json and console.is_terminal and not console.no_color and console.color_system is not None
    characters, waiting = codecs.getincrementaldecoder("utf-8")(errors="replace"), 0.0
    scored, total = iter(ids), 0.0
    for piece in surprise(model, tokens):
        view = Text()
        for nats, id in zip(piece.tolist(), scored):  # in this order, so that the end of a piece takes no token
            total += nats
            spelling = tokenizer.token_bytes(id)
            if as_json:
                print(json.dumps({"token": spelling.decode(errors="replace"), "id": id, "nats": round(nats, 6)}, ensure_ascii=False))
            elif coloured:
                waiting += nats  # tokens that end within a character are shown with those that end it, as surprising as all of them
                whole = characters.decode(spelling)
                if whole and not characters.getstate()[0]:
                    add_coloured(view, printable(whole), waiting / math.log(2))
                    waiting = 0.0
        if coloured:
            console.print(view, end="")
    if coloured:
        legend = Text("\nbits per token  ")
        for (low, style), (high, _) in zip(LEVELS, [*LEVELS[1:], (None, "")]):
            legend.append(f" {low} to {high} " if high else f" {low} and more ", style).append("  ")
        console.print(legend)
    size = len(text.encode())
    loss, bits_per_byte = total / len(ids), total / math.log(2) / size
    if as_json:
        print(json.dumps({"tokens": len(ids), "bytes": size, "loss": loss, "bits_per_byte": bits_per_byte}))
    else:
        print(f"{len(ids):,} tokens, {size:,} bytes: loss {loss:.4f} nats per token, {bits_per_byte:.4f} bits per byte")


def add_coloured(view: Text, text: str, bits: float) -> None:
    """Append a token's text in the colour of its bits. A line end that was not expected shows as ↵."""
    style = next((style for low, style in reversed(LEVELS) if bits >= low), "")
    for n, line in enumerate(text.split("\n")):
        if n:
            view.append("↵" if style else "", style).append("\n")
        view.append(line, style)
