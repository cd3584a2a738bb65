/** The loss of each token of a scored text, as colored text. */

import { $, bdi, el } from "./dom.js";
import { formatCount, formatNumber, makeVisible, pluralize } from "./format.js";
import { currentProbe } from "./page_state.js";
import { breakAfter, splitMarks } from "./text_view.js";
import { addArrowKeys, announce, showTooltip } from "./tooltip.js";

const TICKS = [0, 0.25, 0.5, 0.75, 1]; // shares of the color scale

/** @param {ScoredText} scored */
export function drawLosses(scored) {
  $("losses").hidden = false;
  $("losses-summary").textContent = `${scored.summary}.`;
  const top = Math.log(scored.vocabSize); // loss of a uniform guess
  $("losses-note").textContent = describe(scored, top);
  drawLegend(top);
  const spans = scored.tokens.map((text, i) => createToken(text, scored.losses[i], top));
  $("losses-text").replaceChildren(...spans.flatMap(breakAfter));
  addArrowKeys($("losses-text"), spans, 1, () => {});
  addTokenTooltip(spans, scored);
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
function createToken(text, loss, top) {
  const percent = Math.round(100 * Math.min(1, loss / top));
  return el("bdi", { className: "token", style: `--share: ${percent}%` }, ...splitMarks(text));
}

function addTokenTooltip(spans, { tokens, losses }) {
  const host = $("losses-text");
  const indices = new Map(spans.map((span, i) => [span, i]));
  const show = event => {
    const span = event.target.closest(".token");
    const i = indices.get(span);
    if (i === undefined) {
      showTooltip(null);
      return;
    }
    const chance = `${formatNumber(100 * Math.exp(-losses[i]))}%`;
    const content = [
      el("div", {}, `token ${i + 1}: `, bdi(makeVisible(tokens[i]))),
      el("div", {}, el("b", {}, losses[i].toFixed(3)), ` nats (probability ${chance})`),
    ];
    const box = span.getClientRects()[0];
    showTooltip(content, box.right, box.bottom - 12);
    if (event.type === "focusin") announce(content);
  };
  const hide = () => showTooltip(null);
  host.onpointerover = show;
  host.addEventListener("focusin", show);
  host.onpointerleave = hide;
  host.addEventListener("focusout", hide);
  host.onscroll = hide;
}
