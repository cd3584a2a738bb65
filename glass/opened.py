"""Measure in Python what a page shows of a text, with heads ablated and tokens hidden."""

from __future__ import annotations  # help() prints the names of the types of arguments

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from reprlib import repr as quote
from typing import TYPE_CHECKING, Any, TypedDict
from urllib.parse import urlencode

import numpy as np

from common.errors import UserError, not_one_of
from common.text import VISIBLE_SPACES, pluralize
from data.tokenizer import Tokenizer, decode_characters
from generation.sampling import stream_text
from glass.heads.measure.ablation import mean_outputs, measure_token_effects
from glass.heads.measure.analysis import ProbeRun, analyze, encode_end, make_expected_probes
from glass.heads.measure.arguments import (
    Off,
    Positions,
    Text,
    Texts,
    list_texts,
    list_values,
    read_head,
    read_ids,
    read_off,
    read_positions,
    read_token,
)
from glass.heads.measure.capture import in_float32
from glass.heads.measure.interventions import Interventions
from glass.heads.measure.logit_attribution import attribute_logits, measure_logit_lens
from glass.heads.measure.patching import Contrast
from glass.heads.measure.probes import spell_tokens
from glass.heads.measure.text_pass import TextPass, max_tokens, to_float32
from glass.heads.say.attention_grid import WEIGHT_COLORS
from glass.page.html import FramedPage
from glass.page.prompt import format_analysis
from glass.page.write import format_page
from model import GPT
from run.row import Head, Row
from run.run_dir import RunDir
from training.device import default_settings

try:
    import xarray
    from xarray import DataArray
except ImportError:
    raise UserError("xarray is not installed: pip install xarray matplotlib") from None

if TYPE_CHECKING:
    from typing_extensions import Unpack

ABLATIONS = ("zero", "mean")
PATCH_KINDS = ("component", "residual")  # of patches
LOSS = {"long_name": "loss", "units": "nats"}
INCREASE = {"long_name": "increase of the loss", "units": "nats"}
SHARE = {
    "long_name": "share of the logit difference",
    "comment": "nan unless clean_difference exceeds 0 and corrupted_difference",
}
CONTRIBUTION = {
    "long_name": "contribution to the logit",
    "comment": "they sum to the logit minus the mean of all logits",
}
Coordinates = Mapping[str, Any]
Reader = Callable[..., TextPass]  # of a text, and of its name in an error


class Changes(TypedDict, total=False):
    """Changes of the model's pass.

    Attributes:
        off: Outputs that are ablated: a name, or several, of heads ("L2H0"), MLPs ("L1MLP") and
            layers ("L1"), which then leave the residual stream as it is.
        ablation: "zero" sets these outputs to zero, "mean" to their means over the tokens of the
            text in the unchanged model. The mean of a layer is that of its attention and its MLP.
        reference: A text whose tokens the means are over, instead.
        hidden: Numbers of tokens that no later token can attend to.
    """

    off: Off
    ablation: str
    reference: Text
    hidden: Positions


class PatternPlot(xarray.plot.accessor.DataArrayPlotAccessor):
    """The plots of xarray; a pattern has its queries downwards, and the page's colors."""

    def __call__(self, **options: Any) -> Any:
        """Plot the array as xarray does, with other defaults for patterns."""
        from matplotlib.colors import ListedColormap, PowerNorm

        facets = {options.get("row"), options.get("col")}
        if {*self._da.squeeze().dims} - facets == {"query", "key"}:
            options = {"yincrease": False, **options}
            if self._da.min() >= 0:  # weights or counts, no differences
                top = options.get("vmax", max(1, self._da.max().item()))
                norm = PowerNorm(0.5, options.get("vmin", 0), top)  # small weights are visible
                options = {"cmap": ListedColormap(WEIGHT_COLORS / 255), "norm": norm, **options}
        return super().__call__(**options)


class Patterns(DataArray):
    """Attention patterns."""

    __slots__ = ()
    plot = property(PatternPlot)


class Opened:
    """A model and its tokenizer, with measurements of what they make of a text.

    A text may also be given as token ids, in a list, an array or a tensor (T,) or (1, T), or as
    a tokenizer of transformers returns them. Tokens are numbered from 0, with begin-of-text if the
    tokenizer has it. Of a text longer than the context, or of more than 67 million attention
    weights, only the end is read.

    Most questions take `Changes` of the model's pass as keyword arguments.

    Answers are arrays of xarray. Axes of layers, heads and tokens have their numbers, and the texts
    of `token` are the coordinate `token_text`.

    `loss`, `head_effects`, `patch` and `measure_heads` also take a list of texts, which are then
    the first axis: `glass.mean_and_error` returns the mean over it.

    Every answer runs the model as it is at that moment, in evaluation mode. Its weights, mode and
    random numbers are left alone.
    """

    def __init__(self, model: GPT, tokenizer: Tokenizer, run_dir: RunDir | None = None) -> None:
        if not isinstance(model, GPT) or not isinstance(tokenizer, Tokenizer):
            raise UserError(
                f"{type(model).__name__} and {type(tokenizer).__name__} are not a model and a "
                "tokenizer of GlassGPT: use what interop.load(PATH_OR_NAME) returns"
            )
        self.model = model
        self.tokenizer = tokenizer
        self.run_dir = run_dir  # of the run that the model is from

    def __repr__(self) -> str:
        c = self.model.config
        return (
            f"{self.model.source or 'a model'}: {c.n_layer} layers × {c.n_head} heads, "
            f"{self.model.num_parameters():,} parameters, a vocabulary of {c.vocab_size:,} tokens "
            f"and a context of {c.block_size:,}"
        )

    def tokens(self, text: Text) -> DataArray:
        """Return the text of each token, (T,), with the coordinate `id`."""
        ids = self._encode(text)
        coordinates = {"token": range(len(ids)), "id": ("token", ids)}
        return DataArray(self._spell(ids), coordinates, ["token"], "token_text")

    @default_settings()
    def show(
        self, text: Text | None = None, head: str | Head | None = None, token: int | None = None
    ) -> FramedPage:
        """Return the page of a text, or of the run without one; notebooks show it under the cell.

        Args:
            text: The text that `sample.py attention=FILE` would write the page of.
            head: The head that is selected, such as "L1H3".
            token: The number of the token of the text that is pinned.
        """
        selection: dict[str, Any] = {}
        if head is not None:
            selection["head"] = read_head("head", head, self.model.config)
        if text is not None:
            ids = self._encode(text)
            if token is not None:
                selection["token"] = read_token(token, len(ids))
            analysis = analyze(self.model, self.tokenizer, ids)
            title = f"“{decode_characters(self.tokenizer, ids)}”"
            parts = format_analysis({"title": title}, self.model, self.tokenizer, analysis)
        elif self.run_dir and token is None:
            parts = format_page(self.run_dir, self.run_dir.rows())
        else:
            raise UserError("there is no text, and only a run has a page without one: give a text")
        return FramedPage("".join(parts), urlencode(selection))

    @default_settings()
    def loss(self, text: Texts, **changes: Unpack[Changes]) -> DataArray:
        """Return the loss of each token but the first, (T - 1,) in nats.

        Of several texts, it is the mean loss per token of each, (texts,).
        """
        read = self._change(**changes)
        if (texts := list_texts(text)) is not None:
            return self._ask_each("text", partial(self._mean_loss, read), zip(texts))
        return self._losses(read, text)

    @default_settings()
    def logits(self, text: Text, **changes: Unpack[Changes]) -> DataArray:
        """Return the logits after each token, (T, V)."""
        text_pass = self._change(**changes)(text)
        coordinates = {
            **self._label_tokens("token", text_pass.ids),
            **self._label_tokens("next_token", range(self.model.head.out_features)),
        }
        logits = to_float32(text_pass.logits())
        return DataArray(logits, coordinates, ["token", "next_token"], "logit")

    @default_settings()
    def patterns(self, text: Text, **changes: Unpack[Changes]) -> Patterns:
        """Return the attention pattern of every head, (L, H, T, T)."""
        text_pass = self._change(**changes)(text)
        coordinates = {
            **self._label_heads(),
            **self._label_tokens("query", text_pass.ids),
            **self._label_tokens("key", text_pass.ids),
        }
        weights = to_float32(text_pass.forward.weights[:, 0])
        axes = ["layer", "head", "query", "key"]
        attributes = {"long_name": "attention weight"}
        return Patterns(weights, coordinates, axes, "attention_weight", attributes)

    @default_settings()
    def head_effects(self, text: Texts, token: int = -1, **changes: Unpack[Changes]) -> DataArray:
        """Return by how much ablating each head raises the loss of a token, (L, H) in nats."""
        ask = partial(self._head_effects, self._change(**changes), token)
        texts = list_texts(text)
        return ask(text) if texts is None else self._ask_each("text", ask, zip(texts))

    @default_settings()
    def token_effects(self, text: Text, **changes: Unpack[Changes]) -> DataArray:
        """Return by how much hiding each token raises the loss of each later one, in nats.

        The table (T - 1, T - 1) has a row for each predicted token, from the second on, and a
        column for each hidden one, without the last.
        """
        text_pass = self._change(**changes)(text)
        effects, _ = measure_token_effects(self.model, text_pass.forward, text_pass.interventions)
        coordinates = {
            **self._label_tokens("token", text_pass.ids[1:], first=1),
            **self._label_tokens("hidden", text_pass.ids[:-1]),
        }
        axes = ["token", "hidden"]
        return DataArray(effects[:-1, :-1], coordinates, axes, "loss_increase", INCREASE)

    @default_settings()
    def patch(
        self,
        clean: Texts,
        corrupted: Texts,
        answer: Text | None = None,
        wrong: Text | None = None,
        kind: str = "component",
        **changes: Unpack[Changes],
    ) -> DataArray:
        """Return how much of a prediction each activation of a clean text restores.

        Each activation is copied into the run of a corrupted text with as many tokens (denoising).
        The result is a share of the difference of two logits after the last token: 0 is the
        corrupted run, 1 the clean one; the differences are coordinates. The shares are nan if the
        clean run does not prefer the answer, or no more than the corrupted run does: they would
        mean nothing. For noising, exchange the texts, and the answers if you pass them.

        Of lists, pairs are the first axis. What is no list belongs to every pair.

        Args:
            clean: The text whose activations are copied.
            corrupted: The text in whose run they replace others.
            answer: The token, or its id, of the first logit. None: the likeliest after `clean`.
            wrong: The token, or its id, of the logit that is subtracted. None: the likeliest other
                token after `corrupted`.
            kind: "component" patches the output of a head or an MLP at all tokens,
                (L, H + 1); "residual" the residual stream before a layer at one token, (L, T).
            changes: Of both runs. Means are over the tokens of each run's own text, and of the
                corrupted one in those that patch it.
        """
        if kind not in PATCH_KINDS:
            raise UserError(not_one_of("kind", kind, PATCH_KINDS))
        ask = partial(self._patch_pair, self._change(**changes), kind)
        cases = pair_up(clean, corrupted, answer, wrong)
        if cases is None:
            return ask(clean, corrupted, answer, wrong)
        return self._ask_each("pair", ask, cases)

    @default_settings()
    def logit_lens(self, text: Text, **changes: Unpack[Changes]) -> DataArray:
        """Return the loss of each token but the first if the model ended earlier, in nats.

        The table (L + 1, T - 1) has a row after the embedding and after each layer, L0 and so on.
        """
        text_pass = self._change(**changes)(text)
        losses = to_float32(measure_logit_lens(self.model, text_pass.forward))
        layers = [f"L{layer}" for layer in range(self.model.config.n_layer)]
        coordinates = {
            "after": ["embedding", *layers],
            **self._label_tokens("token", text_pass.ids[1:], first=1),
        }
        return DataArray(losses[:, :-1], coordinates, ["after", "token"], "loss", LOSS)

    @default_settings()
    def logit_attribution(
        self, text: Text, token: int | str = -1, **changes: Unpack[Changes]
    ) -> DataArray:
        """Return what each component adds to the logit of a token directly.

        The token is given as its number in the text, or as the text of one that may follow it. The
        components are the embedding, heads (L0H0), MLPs (L0MLP) and all biases together. They sum
        to the logit minus the mean of all logits.
        """
        text_pass = self._change(**changes)(text)
        if isinstance(token, str):
            number = len(text_pass.ids)
            id = self._find_id("token", token, text_pass)
        else:
            number = read_token(token, len(text_pass.ids), first=1)
            id = text_pass.ids[number]
        forward = text_pass.forward.first_tokens(number)
        attribution = attribute_logits(self.model, forward, number - 1, id)
        of_embedding, *of_layers, of_biases = attribution.logit_attribution[:, -1, 0]
        parts = self._label_components()
        by_layer = np.reshape(of_layers, (self.model.config.n_layer, -1))[:, : len(parts)]
        names = [f"L{layer}{part}" for layer in range(len(by_layer)) for part in parts]
        coordinates = {
            "component": ["embedding", *names, "biases"],
            "token": number,
            "token_text": self._spell([id])[0],
        }
        values = [of_embedding, *by_layer.flat, of_biases]
        return DataArray(values, coordinates, ["component"], "contribution", CONTRIBUTION)

    @default_settings()
    def generate(
        self,
        text: Text,
        max_new_tokens: int = 100,
        temperature: float = 0.8,
        seed: int = 1337,
        **changes: Unpack[Changes],
    ) -> str:
        """Return what the model writes after a text, as `sample.py` does with these settings."""
        if not temperature >= 0:
            raise UserError(f"temperature={quote(temperature)} is negative: use 0 or more")
        text_pass = self._change(**changes)(text)
        ids = text_pass.continue_text(self.tokenizer, max_new_tokens, temperature, seed)
        return "".join(stream_text(self.tokenizer, ids))

    @default_settings()
    def measure_heads(self, text: Texts, log: Callable[[str], None] = print) -> Row | DataArray:
        """Measure every head on random tokens, as frequent as predicted here.

        The measurements have the names of metrics.jsonl, such as `heads/induction/L1H3`, and
        `glass.heads.say.findings.summarize` states what they show. Of several texts, the result has
        the scores of the heads, (texts, scores, L, H).
        """
        if (texts := list_texts(text)) is not None:
            log(f"attention: scores of every head for {pluralize(len(texts), 'text')}")
            return self._ask_each("text", self._score_heads, zip(texts))
        row = Row()
        for stage in self._run_probes(text).measure_in_stages(row):
            log(f"attention: {stage}")
        return row

    def _score_heads(self, text: Text) -> DataArray:
        row = self._run_probes(text).score_heads()
        coordinates = {"score": list(row.scores()), **self._label_heads()}
        scores = DataArray(np.nan, coordinates, ["score", "layer", "head"], "score")
        for values, heads in zip(scores.values, row.scores().values()):  # (L, H)
            for head, score in heads.items():
                values[head] = score
        return scores

    def _run_probes(self, text: Text) -> ProbeRun:
        model = in_float32(self.model)
        return ProbeRun(model, make_expected_probes(model, self.tokenizer, self._encode(text)))

    def _losses(self, read: Reader, text: Text) -> DataArray:
        text_pass = read(text)
        tokens = self._label_tokens("token", text_pass.ids[1:], first=1)
        return DataArray(text_pass.losses()[:-1], tokens, ["token"], "loss", LOSS)

    def _mean_loss(self, read: Reader, text: Text) -> DataArray:
        losses = self._losses(read, text)
        if not losses.size:
            raise UserError("its only token is not predicted: use at least two tokens")
        return losses.mean(dtype=np.float64, keep_attrs=True)

    def _head_effects(self, read: Reader, token: int, text: Text) -> DataArray:
        text_pass = read(text)
        token = read_token(token, len(text_pass.ids), first=1)  # token 0 is never predicted
        effects = np.stack(list(text_pass.head_effects(token - 1)))
        (token_text,) = self._spell([text_pass.ids[token]])
        coordinates = {**self._label_heads(), "token": token, "token_text": token_text}
        return DataArray(effects, coordinates, ["layer", "head"], "loss_increase", INCREASE)

    def _ask_each(
        self, axis: str, ask: Callable[..., DataArray], cases: Iterable[tuple]
    ) -> DataArray:
        """Return the answers about each text or pair; an error says which one it is about."""
        answers, labels = [], []
        for number, case in enumerate(cases):
            try:
                answers.append(ask(*case))
            except UserError as e:
                raise UserError(f"{axis} {number}, {quote(case[0])}: {e}") from None
            labels.append(" → ".join(map(str, case[:2])))  # the texts; answers may follow
        places = DataArray(labels, dims=axis, name=axis)
        return xarray.concat(answers, places, coords="different", compat="equals", join="outer")

    def _patch_pair(
        self,
        read: Reader,
        kind: str,
        clean: Text,
        corrupted: Text,
        answer: Text | None,
        wrong: Text | None,
    ) -> DataArray:
        source = read(clean, "clean")
        base = read(corrupted, "corrupted")
        answer_id = self._find_id("answer", answer, source)
        wrong_id = self._find_id("wrong", wrong, base, other_than=answer_id)
        contrast = Contrast(len(source.ids) - 1, answer_id, wrong_id)
        patching = source.patch_into(base, contrast, self.tokenizer)
        lowest = base.logit_difference(contrast)
        highest = source.logit_difference(contrast)
        answer_text, wrong_text = self._spell((answer_id, wrong_id))
        if kind == "residual":
            axis, labels = "token", self._label_tokens("token", base.ids)
            measured = patching.patch_residuals()
        else:
            axis, labels = "component", {"component": self._label_components()}
            measured = patching.patch_components()
        coordinates = {
            "layer": range(self.model.config.n_layer),
            **labels,
            "answer": answer_text,
            "wrong": wrong_text,
            "clean_difference": highest,
            "corrupted_difference": lowest,
        }
        shares = DataArray(np.nan, coordinates, ["layer", axis], "share", SHARE)
        if highest > max(lowest, 0):
            for cells, values in measured:
                differences = values.astype(np.float64)
                shares.values[tuple(cells.T)] = (differences - lowest) / (highest - lowest)
        return shares

    def _encode(self, text: Text, name: str = "text") -> list[int]:
        limit = max_tokens(self.model.config)
        return encode_end(self.model, self.tokenizer, text, limit, name)

    def _change(
        self,
        off: Off = (),
        hidden: Positions = (),
        ablation: str = "zero",
        reference: Text | None = None,
    ) -> Reader:
        """Return a function that runs the model on a text with these changes.

        They are read once for all texts, because they may be iterators.
        """
        if ablation not in ABLATIONS:
            raise UserError(not_one_of("ablation", ablation, ABLATIONS))
        if reference is not None and ablation != "mean":
            raise UserError(f'reference has no effect with ablation="{ablation}": use "mean"')
        ablated = read_off(off, self.model.config)
        positions = read_positions(hidden, max_tokens(self.model.config))
        means = {}
        if reference is not None:
            means = mean_outputs(self.model, self._encode(reference, "reference"))

        def read(text: Text, name: str = "text") -> TextPass:
            ids = self._encode(text, name)
            own = mean_outputs(self.model, ids) if ablation == "mean" and not means else means
            text_pass = TextPass(self.model, Interventions(ablated, means=own))
            text_pass.read(ids, read_positions(positions, len(ids)))
            return text_pass

        return read

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

    def _label_tokens(self, axis: str, ids: Sequence[int], first: int = 0) -> Coordinates:
        """Return the coordinates of an axis of tokens: their numbers, and their texts."""
        return {axis: range(first, first + len(ids)), f"{axis}_text": (axis, self._spell(ids))}

    def _label_heads(self) -> Coordinates:
        c = self.model.config
        return {"layer": range(c.n_layer), "head": range(c.n_head)}

    def _label_components(self) -> list[str]:
        """Return the names of the components of a layer."""
        c = self.model.config
        mlp = [] if c.mlp == "none" else ["MLP"]
        return [*(f"H{number}" for number in range(c.n_head)), *mlp]

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
        "answer": list_values(answer, "answer"),
        "wrong": list_values(wrong, "wrong"),
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
