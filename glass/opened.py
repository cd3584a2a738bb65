"""Measure in Python what a page shows of a text, with heads ablated and tokens hidden."""

from __future__ import annotations  # help() prints the names of the types of arguments

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from reprlib import repr as quote
from typing import NamedTuple, TypeVar

import numpy as np

from common.errors import UserError, not_one_of
from common.text import VISIBLE_SPACES, pluralize
from data.tokenizer import Tokenizer
from glass.heads.measure.ablation import measure_token_effects
from glass.heads.measure.analysis import encode_end, measure_in_stages
from glass.heads.measure.arguments import (
    Heads,
    Positions,
    Text,
    Texts,
    list_texts,
    list_values,
    read_heads,
    read_ids,
    read_positions,
    read_predicted,
)
from glass.heads.measure.capture import capture, in_float32
from glass.heads.measure.patching import Contrast
from glass.heads.measure.probes import spell_tokens
from glass.heads.measure.text_pass import TextPass, max_tokens, to_float32
from glass.labeled import Labeled, average, quote_text
from model import GPT
from run.row import Head, Row
from training.device import default_settings

PATCH_KINDS = ("component", "residual")  # of patches
NOT_PREFERRED = "the clean run does not prefer the answer, or no more than the corrupted run does"
Answer = TypeVar("Answer")


class PatchedPair(NamedTuple):
    """Shares of a logit difference, which has their name, and where it lies in the two runs."""

    shares: Labeled
    lowest: float  # of the corrupted run
    highest: float  # of the clean run

    @property
    def is_meaningful(self) -> bool:
        """True if the clean run prefers the answer, and more than the corrupted run does."""
        return self.highest > max(self.lowest, 0)


class Opened:
    """A model and its tokenizer, with measurements of what they make of a text.

    A text may also be given as token ids, in a list, an array or a tensor (T,) or (1, T), or as
    a tokenizer of transformers returns them. `off` names heads whose output is set to zero, such as
    ["L2H0"], and `hidden` has the numbers of tokens that no later token can attend to. Tokens are
    numbered from 0, with begin-of-text if the tokenizer has it, and T3 labels token 3. Of a text
    longer than the context, or of more than 67 million attention weights, only the end is read.

    `loss`, `head_effects`, `patch` and `measure_heads` also take a list of texts, and return means
    over them: `.errors` are their standard errors, and `.each` has the values of each text.

    Every answer runs the model as it is at that moment, in evaluation mode. Its weights, mode and
    random numbers are left alone.
    """

    def __init__(self, model: GPT, tokenizer: Tokenizer) -> None:
        if not isinstance(model, GPT) or not isinstance(tokenizer, Tokenizer):
            raise UserError(
                f"{type(model).__name__} and {type(tokenizer).__name__} are not a model and a "
                "tokenizer of GlassGPT: use what interop.load(PATH_OR_NAME) returns"
            )
        self.model = model
        self.tokenizer = tokenizer

    def __repr__(self) -> str:
        c = self.model.config
        return (
            f"{self.model.source or 'a model'}: {c.n_layer} layers × {c.n_head} heads, "
            f"{self.model.num_parameters():,} parameters, a vocabulary of {c.vocab_size:,} tokens "
            f"and a context of {c.block_size:,}"
        )

    @default_settings()
    def loss(self, text: Texts, off: Heads = (), hidden: Positions = ()) -> Labeled:
        """Return the loss of each token but the first, (T - 1,) in nats.

        Of several texts, it is the mean of their mean losses per token.
        """
        off, hidden = self._read_changes(off, hidden)
        if (texts := list_texts(text)) is not None:
            return self._average("loss in nats", texts, partial(self._mean_loss, off, hidden))
        text_pass = self._read(text, off, hidden)
        predicted = {"token": self._label_tokens(text_pass)[1:]}
        return Labeled("loss in nats", text_pass.losses()[:-1], predicted)

    @default_settings()
    def logits(self, text: Text, off: Heads = (), hidden: Positions = ()) -> Labeled:
        """Return the logits after each token, (T, V)."""
        text_pass = self._read(text, off, hidden)
        vocabulary = self._spell(range(self.model.head.out_features))
        axes = {"after": self._label_tokens(text_pass), "next token": vocabulary}
        return Labeled("logit", to_float32(text_pass.logits()), axes)

    @default_settings()
    def patterns(self, text: Text, off: Heads = (), hidden: Positions = ()) -> Labeled:
        """Return the attention pattern of every head, (L, H, T, T)."""
        text_pass = self._read(text, off, hidden)
        tokens = self._label_tokens(text_pass)
        axes = {**self._label_heads(), "query": tokens, "key": tokens}
        return Labeled("attention weight", to_float32(text_pass.forward.weights[:, 0]), axes)

    @default_settings()
    def head_effects(
        self,
        text: Texts,
        token: int = -1,
        off: Heads = (),
        hidden: Positions = (),
    ) -> Labeled:
        """Return by how much ablating each head raises the loss of a token, (L, H) in nats."""
        off, hidden = self._read_changes(off, hidden)
        if (texts := list_texts(text)) is not None:
            ask = partial(self.head_effects, token=token, off=off, hidden=hidden)
            which = "the last token" if token == -1 else f"token {token}"
            name = f"increase of the loss of {which} in nats"
            return self._average(name, texts, ask)
        text_pass = self._read(text, off, hidden)
        token = read_predicted(token, text_pass.length)
        effects = np.stack(list(text_pass.head_effects(token - 1)))
        name = f"increase of the loss of {self._label_tokens(text_pass)[token]} in nats"
        return Labeled(name, effects, self._label_heads())

    @default_settings()
    def token_effects(self, text: Text, off: Heads = (), hidden: Positions = ()) -> Labeled:
        """Return by how much hiding each token raises the loss of each later one, in nats.

        The table (T - 1, T - 1) has a row for each predicted token, from the second on, and a
        column for each hidden one, without the last.
        """
        text_pass = self._read(text, off, hidden)
        effects, _ = measure_token_effects(self.model, text_pass.forward, text_pass.interventions)
        tokens = self._label_tokens(text_pass)
        axes = {"token": tokens[1:], "hidden": tokens[:-1]}
        return Labeled("increase of the loss in nats", effects[:-1, :-1], axes)

    @default_settings()
    def patch(
        self,
        clean: Texts,
        corrupted: Texts,
        answer: Text | None = None,
        wrong: Text | None = None,
        kind: str = "component",
        off: Heads = (),
        hidden: Positions = (),
    ) -> Labeled:
        """Return how much of a prediction each activation of a clean text restores.

        Each activation is copied into the run of a corrupted text with as many tokens (denoising).
        The result is a share of the difference of two logits after the last token: 0 is the
        corrupted run, 1 the clean one. The shares mean nothing, and the result says so, if the
        clean run does not prefer the answer, or no more than the corrupted run does. For noising,
        exchange the texts, and the answers if you pass them.

        Of lists, the mean over pairs is returned, without those whose shares mean nothing. What is
        no list belongs to every pair.

        Args:
            clean: The text whose activations are copied.
            corrupted: The text in whose run they replace others.
            answer: The token, or its id, of the first logit. None: the likeliest after `clean`.
            wrong: The token, or its id, of the logit that is subtracted. None: the likeliest other
                token after `corrupted`.
            kind: "component" patches the output of a head or an MLP at all tokens,
                (L, H + 1); "residual" the residual stream before a layer at one token, (L, T).
            off: Ablated heads, in both runs.
            hidden: Hidden tokens, in both runs.
        """
        if kind not in PATCH_KINDS:
            raise UserError(not_one_of("kind", kind, PATCH_KINDS))
        ask = partial(self._patch_pair, kind, *self._read_changes(off, hidden))
        cases = pair_up(clean, corrupted, answer, wrong)
        if cases is None:
            pair = ask(clean, corrupted, answer, wrong)
            end = "" if pair.is_meaningful else f"; it means nothing, because {NOT_PREFERRED}"
            return replace(pair.shares, name=name_shares([pair]) + end)
        pairs = self._ask_each("pair", ask, cases)
        name = name_shares([pair for pair in pairs if pair.is_meaningful] or pairs)
        left_out = [number for number, pair in enumerate(pairs) if not pair.is_meaningful]
        if left_out:
            count, numbers = pluralize(len(left_out), "pair"), ", ".join(map(str, left_out))
            name += f"; without {count} ({numbers}), because {NOT_PREFERRED}"
        shares = [pair.shares for pair in pairs]
        for number in left_out:
            shares[number] = replace(shares[number], values=shares[number].values * np.nan)
        labels = [f"{clean} → {corrupted}" for clean, corrupted, *_ in cases]
        return average(name, shares, "pair", labels)

    @default_settings()
    def measure_heads(self, text: Texts, log: Callable[[str], None] = print) -> Row | Labeled:
        """Measure every head on random tokens, as frequent as predicted here.

        The measurements have the names of metrics.jsonl, such as `heads/induction/L1H3`, and
        `glass.heads.say.findings.summarize` states what they show. Of several texts, the result has
        the mean scores of the heads, (L · H, scores).
        """
        if (texts := list_texts(text)) is not None:
            return self._average_scores(texts, log)
        row = Row()
        for stage in self._measure_in_stages(row, text):
            log(f"attention: {stage}")
        return row

    def _average_scores(self, texts: Sequence[Text], log: Callable[[str], None]) -> Labeled:
        def measure(text: Text) -> Row:
            row = Row()
            stages = self._measure_in_stages(row, text)
            next(stages)
            next(stages)  # the scores are measured; compositions would take most of the time
            return row

        log(f"attention: scores of every head for {pluralize(len(texts), 'text')}")
        rows = self._ask_each("text", measure, zip(texts))
        c = self.model.config
        heads = [Head(*place) for place in np.ndindex(c.n_layer, c.n_head)]
        names = list(dict.fromkeys(name for row in rows for name in row.scores()))
        axes = {"head": [str(head) for head in heads], "score": names}
        answers = []
        for row in rows:
            scores = [[row.score(name, head).value for name in names] for head in heads]
            answers.append(Labeled("score", np.array(scores), axes))
        return average("score", answers, "text", map(str, texts))

    def _measure_in_stages(self, row: Row, text: Text) -> Iterator[str]:
        model = in_float32(self.model)
        text_pass = capture(model, np.array([self._encode(text)]))
        return measure_in_stages(row, model, self.tokenizer, text_pass)

    def _mean_loss(self, off: Heads, hidden: Positions, text: Text) -> Labeled:
        losses = self.loss(text, off, hidden)
        if not losses.values.size:
            raise UserError("its only token is not predicted: use at least two tokens")
        return Labeled(losses.name, losses.values.mean(dtype=np.float64), {})

    def _average(self, name: str, texts: Sequence[Text], ask: Callable[[Text], Labeled]) -> Labeled:
        return average(name, self._ask_each("text", ask, zip(texts)), "text", map(str, texts))

    def _ask_each(
        self, noun: str, ask: Callable[..., Answer], cases: Iterable[tuple]
    ) -> list[Answer]:
        """Return an answer about each text or pair; an error says which one it is about."""
        answers = []
        for number, case in enumerate(cases):
            try:
                answers.append(ask(*case))
            except UserError as e:
                raise UserError(f"{noun} {number}, {quote_text(case[0])}: {e}") from None
        return answers

    def _patch_pair(
        self,
        kind: str,
        off: Heads,
        hidden: Positions,
        clean: Text,
        corrupted: Text,
        answer: Text | None,
        wrong: Text | None,
    ) -> PatchedPair:
        source = self._read(clean, off, hidden, "clean")
        base = self._read(corrupted, off, hidden, "corrupted")
        answer_id = self._find_id("answer", answer, source)
        wrong_id = self._find_id("wrong", wrong, base, other_than=answer_id)
        contrast = Contrast(source.length - 1, answer_id, wrong_id)
        patching = source.patch_into(base, contrast)
        lowest = base.logit_difference(contrast)
        highest = source.logit_difference(contrast)
        if lowest == highest:
            raise UserError(
                f"the two texts have the same logit difference, {lowest:.4g}: choose another "
                "corrupted text, or two different answers"
            )

        axes = self._label_patches(kind, base)
        differences = np.zeros([len(labels) for labels in axes.values()])
        is_residual = kind == "residual"
        measured = patching.patch_residuals() if is_residual else patching.patch_components()
        for cells, values in measured:
            differences[tuple(cells.T)] = values
        name = f"logit {' - '.join(self._spell((answer_id, wrong_id)))}"
        shares = Labeled(name, (differences - lowest) / (highest - lowest), axes)
        return PatchedPair(shares, lowest, highest)

    def _encode(self, text: Text, name: str = "text") -> list[int]:
        limit = max_tokens(self.model.config)
        return encode_end(self.model, self.tokenizer, text, limit, name)

    def _read_changes(self, off: Heads, hidden: Positions) -> tuple[Heads, Positions]:
        """Read both once for all texts; they may be iterators."""
        config = self.model.config
        return read_heads(off, config), read_positions(hidden, max_tokens(config))

    def _read(self, text: Text, off: Heads, hidden: Positions, name: str = "text") -> TextPass:
        """Run the model on a text anew, because its weights may have changed."""
        ids = self._encode(text, name)
        text_pass = TextPass(self.model, read_heads(off, self.model.config))
        text_pass.read(ids, read_positions(hidden, len(ids)))
        return text_pass

    def _find_id(
        self, name: str, token: Text | None, text_pass: TextPass, other_than: int | None = None
    ) -> int:
        """Return the id of a token, or of the likeliest next one after a text."""
        if token is None:
            likeliest = text_pass.logits(-1)[0].topk(2).indices.tolist()
            return next(id for id in likeliest if id != other_than)
        ids = read_ids(name, token, self.tokenizer.encode, self.model.config.vocab_size)
        if len(ids) != 1:
            raise UserError(f"{name}={quote(token)} has {pluralize(len(ids), 'token')}: use one")
        return ids[0]

    def _label_tokens(self, text_pass: TextPass) -> list[str]:
        tokens = self._spell(text_pass.forward.tokens[0].tolist())
        return [f"T{place} {token}" for place, token in enumerate(tokens)]

    def _label_heads(self) -> dict[str, list[str]]:
        c = self.model.config
        heads = [f"H{number}" for number in range(c.n_head)]
        return {"layer": [f"L{layer}" for layer in range(c.n_layer)], "head": heads}

    def _label_patches(self, kind: str, text_pass: TextPass) -> dict[str, list[str]]:
        labels = self._label_heads()
        if kind == "residual":
            return {"layer": labels["layer"], "token": self._label_tokens(text_pass)}
        mlp = [] if self.model.config.mlp == "none" else ["MLP"]
        return {"layer": labels["layer"], "component": [*labels["head"], *mlp]}

    def _spell(self, ids: Iterable[int]) -> list[str]:
        """Return the tokens with visible white space."""
        return [token.translate(VISIBLE_SPACES) for token in spell_tokens(self.tokenizer, ids)]


def pair_up(
    clean: Texts, corrupted: Texts, answer: Text | None, wrong: Text | None
) -> list[tuple] | None:
    """Return (clean, corrupted, answer, wrong) of each pair of lists; None for one pair."""
    cleans, corrupteds = list_texts(clean), list_texts(corrupted)
    if cleans is None and corrupteds is None:
        return None
    columns = {
        "clean": cleans or [clean],
        "corrupted": corrupteds or [corrupted],
        "answer": list_values(answer),
        "wrong": list_values(wrong),
    }
    count = max(map(len, columns.values()))
    for name, values in columns.items():
        if len(values) == 1:
            columns[name] = values * count
        elif len(values) != count:
            raise UserError(
                f"{name} has {len(values)} values for {count} pairs: give one for each pair, or "
                "one for all"
            )
    return list(zip(*columns.values()))


def name_shares(pairs: Sequence[PatchedPair]) -> str:
    """Return what the shares of one or several pairs are shares of."""
    names = {pair.shares.name for pair in pairs}
    name = names.pop() if len(names) == 1 else "a logit difference"
    lowest = np.mean([pair.lowest for pair in pairs])
    highest = np.mean([pair.highest for pair in pairs])
    return f"share of {name}: 0 is {lowest:.2f}, 1 is {highest:.2f}"
