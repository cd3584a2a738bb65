/** The loss of each token of a scored text, as colored text. */

import { $, bdi, el } from "../base/dom.js";
import { formatCount, formatNumber, makeVisible, pluralize } from "../base/format.js";
import { addArrowKeys, addTooltip } from "../base/tooltip.js";
import { currentProbe } from "../state/selection.js";
import { breakAfter, splitMarks } from "./text.js";

const TICKS = [0, 0.25, 0.5, 0.75, 1]; // shares of the color scale

/** @param {ScoredText} scored */
export function drawLosses(scored) {
  $("losses").hidden = false;
  $("losses-summary").textContent = `${scored.summary}.`;
  const top = Math.log(scored.vocabSize); // loss of a uniform guess
  $("losses-note").textContent = describe(scored, top);
  drawLegend(top);
  const spans = scored.tokens.map((text, i) => createToken(text, i, scored.losses[i], top));
  $("losses-text").replaceChildren(...spans.flatMap(breakAfter));
  addArrowKeys($("losses-text"), spans);
}

/** Describe the colors, the part that is shown of a long text, and how the model read it. */
function describe({ tokens, tokenCount, window }, top) {
  const sentences = [
    `The strongest color is the loss of a uniform guess, ${top.toFixed(1)} nats, or more.`,
    "Point at a token, or use the arrow keys.",
  ];
  if (tokens.length < tokenCount) {
    sentences.push(`The first ${formatCount(tokens.length)} tokens are shown.`);
  }
  if (window < tokenCount) {
    sentences.push(`The model reads ${pluralize(window, "token")} at a time and then starts anew.`);
  }
  const attended = currentProbe()?.T;
  if (attended > 1) {
    sentences.push(
      `The views below show the attention over the first ${pluralize(attended - 1, "token")}, after ` +
        "the token that begins every text.",
    );
  }
  return sentences.join(" ");
}

function drawLegend(top) {
  const ticks = TICKS.map(share =>
    el("span", { style: `left: ${100 * share}%` }, (share * top).toFixed(1)),
  );
  $("losses-bar").replaceChildren(
    el("span", {}, "loss in nats"),
    el("span", { className: "ramp" }),
    el("div", { className: "ticks" }, ...ticks),
  );
}

/** Create the element of a token; `top` is the loss of the last color. */
function createToken(text, i, loss, top) {
  const percent = Math.round(100 * Math.min(1, loss / top));
  const properties = { className: "token", style: `--share: ${percent}%` };
  const token = el("bdi", properties, ...splitMarks(text));
  const chance = `${formatNumber(100 * Math.exp(-loss))}%`;
  return addTooltip(token, () => [
    el("div", {}, `token ${i + 1}: `, bdi(makeVisible(text))),
    el("div", {}, el("b", {}, loss.toFixed(3)), ` nats (probability ${chance})`),
  ]);
}
