/**
 * What the model is asked about the reader's own text once it has read it: attention patterns, the
 * prediction breakdown, head effects and token effects.
 */

import { $, throttle } from "../base/dom.js";
import { ask, cancel, describeFailure } from "../client/client.js";
import { H, L } from "../state/page_data.js";
import { display, ownText, selectedMaps, selection } from "../state/selection.js";
import { drawAttention, drawSmallMaps } from "./attention_map.js";
import { headsInView } from "./head_grid.js";
import { updateHeadEffects } from "./logit_attribution.js";
import { drawPinnedToken } from "./pinned_token.js";

const REDRAW_DELAY = 200; // milliseconds between two views of effects that come in

/** Stop the requests about the text that was read last. */
export function cancelRequestsOfText() {
  for (const request of ["patterns", "headEffects", "tokenEffects", "patchCells"]) cancel(request);
}

/** Return all heads, as layer · H + head: the selected ones first, then those in view. */
function orderHeads() {
  const { layer, head } = selectedMaps();
  const first = head === null ? [...Array(H).keys()] : [head];
  const selected = first.map(h => layer * H + h);
  return [...new Set([...selected, ...headsInView(), ...Array(L * H).keys()])];
}

/**
 * Request the attention patterns of a text, and draw them as they arrive.
 *
 * @param {Cells} cells - Receives the patterns.
 * @param {object} input
 * @returns {Promise<boolean>} Resolves when the first patterns have arrived; false: the text is not
 *   wanted any more.
 */
export function requestPatterns(cells, input) {
  const triangle = (cells.T * (cells.T + 1)) / 2;
  return new Promise((resolve, reject) => {
    const onPart = ({ heads, maps }) => {
      heads.forEach((k, n) => {
        cells.triangles[k] = maps.subarray(n * triangle, (n + 1) * triangle);
      });
      resolve(true);
      if (display.attention === cells) drawPatterns(heads);
    };
    const question = { request: "patterns", ...input, heads: orderHeads() };
    ask(question, { onPart }).then(() => resolve(false), reject);
  });
}

function drawPatterns(heads) {
  const { layer, head } = selectedMaps();
  const isSelected = k => Math.floor(k / H) === layer && (head === null || k % H === head);
  if (heads.some(isSelected)) {
    drawAttention();
    drawPinnedToken();
  } else drawSmallMaps();
}

/** Ask about the text; if that fails, say so. */
async function askOrExplain(question, onPart = undefined) {
  try {
    return await ask(question, { onPart });
  } catch (error) {
    $("own-text-status").textContent = describeFailure(error);
    return undefined;
  }
}

/**
 * Request the breakdown of the prediction of `answer` after token i, then the effect of ablating each
 * head on the loss there.
 *
 * @param {number} i
 * @param {number} answer - Id of a next token.
 * @param {() => void} draw - Called when the breakdown has arrived, and when all effects have.
 */
export async function requestBreakdown(i, answer, draw) {
  const { predictions } = ownText;
  const { requested } = predictions;
  const of = [selection.layer, selection.head];
  if (requested.breakdown === String([i, of, answer])) return;
  requested.breakdown = String([i, of, answer]);
  if (requested.headEffects !== i) {
    cancel("headEffects"); // of another token
    requested.headEffects = null;
  }
  const breakdown = await askOrExplain({ request: "breakDown", i, of, answer });
  if (!breakdown || predictions !== ownText.predictions) return;
  predictions.addBreakdown(breakdown);
  draw();
  if (requested.headEffects === i || i + 1 >= ownText.T) return;
  requested.headEffects = i;
  const redraw = throttle(updateHeadEffects, REDRAW_DELAY);
  await askOrExplain({ request: "headEffects", i }, part => {
    predictions.addHeadEffects(i, part);
    redraw();
  });
  draw();
}

/** Request the token effects of the text, a hidden token at a time. */
export async function requestTokenEffects() {
  const { predictions } = ownText;
  if (predictions.requested.tokenEffects) return;
  predictions.requested.tokenEffects = true;
  const isShown = () => display.predictions === predictions && selection.showTokenEffect;
  const redraw = throttle(drawAttention, REDRAW_DELAY);
  await askOrExplain({ request: "tokenEffects" }, part => {
    predictions.addTokenEffects(part);
    if (isShown()) redraw();
  });
  if (isShown()) drawAttention();
}
