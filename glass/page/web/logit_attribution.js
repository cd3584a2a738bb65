/**
 * The prediction after a token: the expected next tokens, and the breakdown by components of the
 * model.
 */

import { barList, largestBars, sumOfValues } from "./bars.js";
import { createCellGrid } from "./cell_grid.js";
import { colorIndex } from "./colors.js";
import { bdi, el } from "./dom.js";
import { formatNumber, formatSigned, shortenToken } from "./format.js";
import { headGridLayout, headName } from "./labels.js";
import { hasMlps } from "./page_state.js";
import { term } from "./terms.js";

/** Contributions that have a bar of their own. */
const MAX_BARS = 10;
/** Nats below which the colors of head effects do not get stronger. */
const MIN_EFFECT_SCALE = 0.1;

/** @typedef {import("./page_state.js").Predictions} Predictions */

/**
 * @param {number} part - Index of a component in the direct logit attribution.
 * @param {number} layerCount
 * @param {number} headCount
 * @returns {{name: string, layer?: number, head?: number}} `layer` and `head` only if it is a head.
 */
function componentOf(part, layerCount, headCount) {
  if (part === 0) return { name: "embedding" };
  if (part === layerCount * (headCount + 1) + 1) return { name: "biases" };
  const layer = Math.floor((part - 1) / (headCount + 1));
  const head = (part - 1) % (headCount + 1);
  if (head === headCount) return { name: `L${layer} MLP` };
  return { name: headName(layer, head), layer, head };
}

/** @param {number} probability */
function formatProbability(probability) {
  return probability >= 0.001 ? probability.toFixed(3) : probability.toExponential(1);
}

/**
 * A button with a possible next token and its probability.
 *
 * @param {object} options
 * @param {string} options.text
 * @param {number} options.probability
 * @param {number} [options.previous] - Probability before heads were switched off or tokens hidden.
 * @param {boolean} options.isActual - Whether it is the token that follows.
 * @param {boolean} options.isTarget - Whether the breakdown is about it.
 * @param {() => void} options.pick
 */
export function predictionButton({
  text,
  probability,
  previous = probability,
  isActual,
  isTarget,
  pick,
}) {
  const [now, before] = [formatProbability(probability), formatProbability(previous)];
  return el(
    "button",
    {
      type: "button",
      className: `chance${isActual ? " real" : ""}`,
      "aria-pressed": isTarget,
      style: `--w: ${(100 * probability).toFixed(1)}%`,
      onclick: pick,
    },
    bdi(shortenToken(text), "token"),
    el("b", {}, now),
    ...(now === before ? [] : [el("small", {}, ` was ${before}`)]),
  );
}

/**
 * The likeliest next tokens after token `i` as buttons, and a sentence about the actual one.
 *
 * @param {Predictions} explanation
 * @param {string[]} words - Tokens by id.
 * @param {number} i
 * @param {number} target - Which next token the breakdown is about: 0 for the actual one, or for the
 *   likeliest if the text ends here; k for the k-th likeliest.
 * @param {(target: number) => void} pick - Called with the target that is clicked.
 * @returns {{buttons: HTMLElement[], sentence: (Node | string)[]}}
 */
export function nextTokens(explanation, words, i, target, pick) {
  const actual = explanation.tokens[i + 1] ?? null;
  const likeliest = explanation
    .predicted(i)
    .map(({ id, chance, was }, k) => ({
      id,
      target: k + 1,
      text: words[id] ?? "",
      probability: chance,
      previous: was,
    }))
    .filter(({ id }) => id >= 0);
  // Tokens of the glossary of words are cut to 40 characters.
  const hit =
    actual === null ? undefined : likeliest.find(({ text }) => text === actual.slice(0, 40));
  const initial = actual === null ? likeliest[0] : hit; // what target 0 stands for
  const buttons = likeliest.map(prediction =>
    predictionButton({
      ...prediction,
      isActual: prediction === hit,
      isTarget: target ? target === prediction.target : prediction === initial,
      pick: () => pick(prediction.target),
    }),
  );
  if (actual === null) return { buttons, sentence: ["The text ends here."] };
  if (!hit) {
    const probability = Math.exp(-explanation.loss(i));
    const isTarget = target === 0;
    buttons.push(
      predictionButton({
        text: actual,
        probability,
        isActual: true,
        isTarget,
        pick: () => pick(0),
      }),
    );
  }
  const loss = `, has a loss of ${formatNumber(explanation.loss(i))} nats.`;
  return { buttons, sentence: ["The next token, ", bdi(shortenToken(actual), "token"), loss] };
}

/**
 * @typedef {object} BreakdownOptions
 * @property {number} layer
 * @property {number} head
 * @property {number} target - See `nextTokens`.
 * @property {boolean} tied - Whether input and output embeddings are one matrix.
 * @property {string[]} words - Tokens by id.
 * @property {number} vocabSize
 * @property {(layer: number, head: number) => void} choose - Called when a head is clicked.
 */

/** Draws the head effects of the breakdown on display. */
let redrawHeadEffects = () => {};

/**
 * Draw the breakdown of the prediction after token `i` into `host`.
 *
 * @param {HTMLElement} host
 * @param {Predictions} explanation
 * @param {number} i
 * @param {BreakdownOptions} options
 */
export function drawBreakdown(host, explanation, i, options) {
  const contributions = directContributions(explanation, i, options);
  const promoted = promotedTokens(explanation, i, options);
  if (i === explanation.tokens.length - 1) {
    host.replaceChildren(contributions, promoted); // no next token, so no loss
    return;
  }
  const effects = el("div", { className: "cells" });
  host.replaceChildren(
    lossByBlock(explanation, i, options.tied),
    contributions,
    promoted,
    panel(
      "effects",
      ["Effect of ablating each head"],
      note(
        explanation.lacksHeadEffects
          ? "They were not measured, because the text is too long for a model of this size."
          : "Increase of this token's loss if a head's output is set to zero, in nats. Importance is its mean over the text.",
      ),
      effects,
    ),
  );
  if (explanation.lacksHeadEffects) return;
  // The grid needs its width, so it is in the page already.
  const drawGrid = createCellGrid(
    effects,
    `effect of ablating each head on the loss after token ${i}, in nats`,
  );
  redrawHeadEffects = () => drawGrid(describeHeadEffects(explanation, i, options.choose));
  redrawHeadEffects();
}

/** Draw the head effects of the breakdown on display again, while more of them are measured. */
export const updateHeadEffects = () => redrawHeadEffects();

/**
 * @param {string} id
 * @param {(Node | string)[]} title
 * @param {...Node} content
 */
function panel(id, title, ...content) {
  return el("div", { "data-part": id }, el("h4", {}, ...title), ...content);
}

/** @param {...(Node | string)} content */
function note(...content) {
  return el("p", { className: "quiet" }, ...content);
}

/**
 * @param {Predictions} explanation
 * @param {number} i
 * @param {boolean} tied
 */
function lossByBlock(explanation, i, tied) {
  const bars = Array.from({ length: explanation.L + 1 }, (_, k) => ({
    name: k ? `block ${k - 1}` : "embedding",
    value: explanation.lens(k, i),
  }));
  const intro = note(
    "Loss of the next token in nats if the model ended after that block (",
    term("logit lens"),
    ").",
  );
  const tiedNote = note(
    "Input and output embeddings are tied, so the embedding alone predicts the token itself.",
  );
  return panel(
    "lens",
    ["Loss after each block"],
    intro,
    barList(bars, formatNumber),
    ...(tied ? [tiedNote] : []),
  );
}

/**
 * @param {Predictions} explanation
 * @param {number} i
 * @param {BreakdownOptions} options
 */
function directContributions(explanation, i, { target, words, choose }) {
  const next = explanation.tokens[i + 1];
  const bars = Array.from({ length: explanation.parts }, (_, part) => {
    const { name, layer, head } = componentOf(part, explanation.L, explanation.H);
    const bar = { name, value: explanation.direct(part, i, target) };
    if (head === undefined) return bar;
    const detail = next === undefined ? "" : formatSigned(explanation.headEffect(layer, head, i));
    return { ...bar, detail, pick: () => choose(layer, head) };
  });
  const existing = bars.filter(({ name }) => hasMlps || !name.endsWith("MLP"));
  const likeliest = words[explanation.predicted(i)[Math.max(0, target - 1)].id];
  const text = target ? likeliest : (next ?? likeliest);
  return panel(
    "direct",
    ["Direct contributions to the logit of ", bdi(shortenToken(text ?? ""), "token")],
    note(
      `Their sum, ${formatSigned(sumOfValues(bars))}, is the logit minus the mean of all logits (`,
      term("direct logit attribution"),
      next === undefined
        ? ")."
        : "). Gray: increase of the loss if the head is ablated, which includes its effect on later layers.",
    ),
    barList(largestBars(existing, MAX_BARS)),
  );
}

/**
 * @param {Predictions} explanation
 * @param {number} i
 * @param {BreakdownOptions} options
 */
function promotedTokens(explanation, i, { layer, head, words, vocabSize }) {
  const ids = explanation.writes(layer, head, i);
  // Three each are stored; of a small vocabulary they would be the same tokens.
  const count = Math.min(3, Math.floor(vocabSize / 2));
  // A token that is part of a character has no text.
  const tokenText = id => (/[^\ufffd]/.test(words[id] ?? "") ? shortenToken(words[id]) : `#${id}`);
  const chips = tokenIds =>
    tokenIds
      .filter(id => id >= 0)
      .flatMap(id => [el("bdi", { className: "token chip" }, tokenText(id)), " "]);
  return panel(
    "promoted",
    ["Top promoted and suppressed tokens"],
    note(`Tokens whose logits ${headName(layer, head)} raises and lowers the most, directly.`),
    el("p", { "data-direction": "promoted" }, "promoted ", ...chips(ids.slice(0, count))),
    el("p", { "data-direction": "suppressed" }, "suppressed ", ...chips(ids.slice(3, 3 + count))),
  );
}

/**
 * Return what `createCellGrid` draws of the effects of ablating each head.
 *
 * @param {Predictions} explanation
 * @param {number} i
 * @param {(layer: number, head: number) => void} choose
 * @returns {import("./cell_grid.js").CellGrid}
 */
function describeHeadEffects(explanation, i, choose) {
  const { L, H } = explanation;
  const effectOf = (layer, head) => explanation.headEffect(layer, head, i);
  const sizes = Array.from(
    { length: L * H },
    (_, k) => Math.abs(effectOf(Math.floor(k / H), k % H)) || 0,
  );
  const scale = Math.max(MIN_EFFECT_SCALE, ...sizes);
  return {
    ...headGridLayout(L, H, 260),
    signed: true,
    pick: choose,
    level: (layer, head) => colorIndex(effectOf(layer, head) / scale, true),
    write: (layer, head) => formatSigned(effectOf(layer, head)),
    tell: (layer, head) => [
      el("div", {}, `without ${headName(layer, head)}`),
      el(
        "div",
        { className: "value" },
        el("b", {}, formatSigned(effectOf(layer, head))),
        " nats for the next token",
      ),
    ],
  };
}

/**
 * Draw the attribution of a head's attention score: its largest terms and the sum of the others.
 *
 * @param {HTMLElement} host
 * @param {{query: string, key: string, value: number}[]} terms
 * @param {(Node | string)[]} title
 */
export function drawScoreAttribution(host, terms, title) {
  const bars = terms.map(({ query, key, value }) => ({ name: `${query} × ${key}`, value }));
  host.replaceChildren(
    el("h3", {}, ...title),
    note(
      `The attention score before the softmax, minus its mean over the visible tokens, is ${formatSigned(sumOfValues(terms))}. ` +
        "It is a sum over pairs: what wrote the query × what wrote the key.",
    ),
    barList(largestBars(bars, MAX_BARS)),
  );
}
