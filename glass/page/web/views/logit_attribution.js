/** The breakdown of a prediction by components of the model. */

import { bdi, el, note, tokenName } from "../base/dom.js";
import { formatSigned, headName, shortenToken } from "../base/format.js";
import { term } from "../base/terms.js";
import { valueLine } from "../base/tooltip.js";
import { barList, largestBars, sumOfValues } from "../charts/bars.js";
import { CellGrid } from "../charts/cell_grid.js";
import { colorIndex } from "../charts/colors.js";
import { headNames } from "../state/head_metrics.js";
import { data, H, hasMlps, L } from "../state/page_data.js";
import { chooseHead, selection } from "../state/selection.js";
import { headsContent } from "./heads_content.js";

const MIN_EFFECT_SCALE = 0.1; // nats; the colors of smaller head effects do not get stronger

/** Draws the head effects of the breakdown on display. */
let redrawHeadEffects = () => {};

/** Draw the breakdown of the prediction of `chosen` after token `i` into `host`. */
export function drawBreakdown(host, predictions, i, chosen) {
  const contributions = createContributions(predictions, i, chosen);
  const promoted = createPromotedTokens(predictions, i);
  if (i === predictions.T - 1) {
    host.replaceChildren(contributions, promoted); // no next token, so no loss
    return;
  }
  const grid = el("div", { className: "cells" });
  const explanation = predictions.lacksHeadEffects
    ? "They were not measured, because the text is too long for a model of this size."
    : "Increase of this token's loss if a head's output is set to zero, in nats. Importance is its mean over the text.";
  const effects = panel("effects", ["Effect of ablating each head"], note(explanation), grid);
  host.replaceChildren(createLens(predictions, i), contributions, promoted, effects);
  if (predictions.lacksHeadEffects) return;
  // The grid needs its width, so it is in the page already.
  const label = `effect of ablating each head on the loss after token ${i}, in nats`;
  const cellGrid = new CellGrid(grid, label);
  redrawHeadEffects = () => cellGrid.draw(headEffectContent(predictions, i));
  redrawHeadEffects();
}

/** Draw the head effects of the breakdown on display again, while more of them are measured. */
export const updateHeadEffects = () => redrawHeadEffects();

const panel = (id, title, ...content) =>
  el("div", { "data-part": id }, el("h4", {}, ...title), ...content);

/** Create the logit lens. */
function createLens(predictions, i) {
  const bars = Array.from({ length: L + 1 }, (_, k) => ({
    name: k ? `block ${k - 1}` : "embedding",
    value: predictions.lens(k, i),
  }));
  const lens = panel(
    "lens",
    ["Loss after each block"],
    note(
      "Loss of the next token in nats if the model ended after that block (",
      term("logit lens"),
      ").",
    ),
    barList(bars, loss => loss.toFixed(3)),
  );
  if (data.modelConfig?.tie_embeddings) {
    lens.append(
      note(
        "Input and output embeddings are tied, so the embedding alone predicts the token itself.",
      ),
    );
  }
  return lens;
}

/** Create the direct logit attribution. */
function createContributions(predictions, i, { id, text = "" }) {
  const next = predictions.tokens[i + 1];
  const bars = Array.from({ length: predictions.componentCount }, (_, component) => {
    const bar = { name: nameComponent(component), value: predictions.direct(component, i, id) };
    const k = headNames.indexOf(bar.name);
    if (k < 0) return bar;
    const [layer, head] = [Math.floor(k / H), k % H];
    const detail = next === undefined ? "" : formatSigned(predictions.headEffect(layer, head, i));
    return { ...bar, detail, pick: () => chooseHead(layer, head) };
  });
  const existing = bars.filter(({ name }) => hasMlps || !name.endsWith("MLP"));
  return panel(
    "direct",
    ["Direct contributions to the logit of ", tokenName(text)],
    note(
      `Their sum, ${formatSigned(sumOfValues(bars))}, is the logit minus the mean of all logits (`,
      term("direct logit attribution"),
      next === undefined
        ? ")."
        : "). Gray: increase of the loss if the head is ablated, which includes its effect on later layers.",
    ),
    barList(largestBars(existing)),
  );
}

/** Name a component by its index in the direct logit attribution. */
function nameComponent(component) {
  if (component === 0) return "embedding";
  const layer = Math.floor((component - 1) / (H + 1));
  const head = (component - 1) % (H + 1);
  if (layer === L) return "biases";
  return head === H ? `L${layer}MLP` : headName(layer, head);
}

function createPromotedTokens(predictions, i) {
  const { layer, head } = selection;
  const ids = predictions.pushedTokens(layer, head, i);
  // Three each are stored; of a small vocabulary they would be the same tokens.
  const count = Math.min(3, Math.floor((data.modelConfig?.vocab_size ?? Infinity) / 2));
  const chips = tokenIds =>
    tokenIds.filter(id => id >= 0).flatMap(id => [bdi(nameOrNumber(id), "token chip"), " "]);
  const sentence = `Tokens whose logits ${headName(layer, head)} raises and lowers the most, directly.`;
  return panel(
    "promoted",
    ["Top promoted and suppressed tokens"],
    note(sentence),
    el("p", { "data-direction": "promoted" }, "promoted ", ...chips(ids.slice(0, count))),
    el("p", { "data-direction": "suppressed" }, "suppressed ", ...chips(ids.slice(3, 3 + count))),
  );
}

/** Return the text of a token; one that is part of a character has none. */
function nameOrNumber(id) {
  const word = data.words[id] ?? "";
  return /[^\ufffd]/.test(word) ? shortenToken(word) : `#${id}`;
}

/** @returns {GridContent} */
function headEffectContent(predictions, i) {
  const effectOf = (layer, head) => predictions.headEffect(layer, head, i);
  const sizes = headNames.map((_, k) => Math.abs(effectOf(Math.floor(k / H), k % H)) || 0);
  const scale = Math.max(MIN_EFFECT_SCALE, ...sizes);
  return {
    ...headsContent(260),
    signed: true,
    pick: chooseHead,
    color: (layer, head) => colorIndex(effectOf(layer, head) / scale, true),
    text: (layer, head) => formatSigned(effectOf(layer, head)),
    describe: (layer, head) => [
      el("div", {}, `without ${headName(layer, head)}`),
      valueLine(formatSigned(effectOf(layer, head)), " nats for the next token"),
    ],
  };
}
