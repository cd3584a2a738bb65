/**
 * What the model is asked about the reader's own text once it has read it: attention patterns, the
 * prediction breakdown, head effects and token effects.
 */

import { drawAttention, drawSmallMaps } from "./attention_map.js";
import { $, throttle } from "./dom.js";
import { askModel, cancel, describeFailure } from "./engine.js";
import { headsInView } from "./head_grid.js";
import { updateHeadEffects } from "./logit_attribution.js";
import { data, display, H, isOwnText, L, ownText, selectedMaps, selection } from "./page_state.js";
import { MIN_CLEAR_EFFECT_NATS } from "./token_effect.js";

const REDRAW_DELAY = 200; // milliseconds between two views of effects that come in

/** Requests about a text that is not asked for any more once another one is read. */
const REQUESTS_OF_A_TEXT = ["patterns", "headEffects", "tokenEffects", "patchCells"];

/** Stop the requests about the text that was read last. */
export function cancelRequestsOfText() {
  for (const request of REQUESTS_OF_A_TEXT) cancel(request);
}

/** Ask the model about the text; if that fails, say so and return undefined. */
async function ask(request, parameters, onPart) {
  try {
    return await askModel(request, ownText.ids, parameters, onPart);
  } catch (error) {
    $("own-text-status").textContent = describeFailure(error);
    return undefined;
  }
}

// ---- attention patterns

/**
 * Return the view of a text whose attention patterns have not arrived yet.
 *
 * @param {string[]} tokens
 * @param {{norms: Float32Array, largest: number}} results - Of the request `read`.
 * @returns {import("./page_state.js").CellView & {patterns: Float32Array[]}}
 */
export function createPatternView(tokens, { norms, largest }) {
  const patterns = []; // of each head, a lower triangle row after row
  return {
    L,
    H,
    T: tokens.length,
    tokens,
    largest,
    exact: true,
    norms,
    patterns,
    hasPattern: (l, h) => patterns[l * H + h] !== undefined,
    at: (l, h, i, j) => patterns[l * H + h]?.[(i * (i + 1)) / 2 + j] ?? Number.NaN,
    bound: () => 0,
  };
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
 * @param {ReturnType<typeof createPatternView>} view - Receives the patterns.
 * @param {number[]} ids
 * @param {{step: number, off: string[], hidden: number[]}} parameters
 * @returns {Promise<void>} Resolves when the first patterns have arrived.
 */
export function requestPatterns(view, ids, parameters) {
  const triangle = (view.T * (view.T + 1)) / 2;
  return new Promise((resolve, reject) => {
    const receive = ({ heads, maps }) => {
      heads.forEach((k, n) => {
        view.patterns[k] = maps.subarray(n * triangle, (n + 1) * triangle);
      });
      resolve();
      if (display.attention === view) drawPatterns(heads);
    };
    askModel("patterns", ids, { ...parameters, heads: orderHeads() }, receive).then(
      () => resolve(),
      reject,
    );
  });
}

/** Draw the patterns of heads that have arrived. */
function drawPatterns(heads) {
  const { layer, head } = selectedMaps();
  const isSelected = k => Math.floor(k / H) === layer && (head === null || k % H === head);
  if (heads.some(isSelected)) drawAttention();
  else drawSmallMaps();
}

// ---- predictions

/**
 * Return the predictions of a text, as token_effect.js decodes stored ones. The breakdown, the head
 * effects and the token effects are empty until they are requested.
 *
 * @param {string[]} tokens
 * @param {object} results - Of the request `read`, with the interventions `off` and `hidden`.
 * @param {number} step
 * @returns {import("./page_state.js").Predictions}
 */
export function createPredictions(tokens, { next, chances, losses, was, off, hidden }, step) {
  const predictions = {
    L,
    H,
    T: tokens.length,
    tokens,
    step,
    parts: L * (H + 1) + 2,
    largest: MIN_CLEAR_EFFECT_NATS,
    signed: true,
    norms: null,
    losses,
    off,
    hidden,
    was, // losses and chances without interventions
    breakdown: null,
    headEffectsToken: null, // token whose head effects were requested
    headEffects: [],
    columns: [], // of each hidden token j: its effects and KL divergences at later tokens
    bound: () => 0,
  };
  const cell = (i, j, key) => {
    if (hidden.includes(j) && i + 1 < tokens.length) return 0; // hiding it changes nothing
    return predictions.columns[j]?.[key][i - j - 1] ?? Number.NaN;
  };
  const breakdownOf = i => (predictions.breakdown?.i === i ? predictions.breakdown : null);
  return Object.assign(predictions, {
    at: (_l, _h, i, j) => (j < i ? cell(i, j, "effects") : 0),
    kl: (i, j) => cell(i, j, "kl"),
    loss: i => losses[i],
    headEffect: (l, h, i) =>
      (predictions.headEffectsToken === i ? predictions.headEffects[l * H + h] : undefined) ??
      Number.NaN,
    lens: (k, i) => breakdownOf(i)?.lens[k] ?? Number.NaN,
    direct: (part, i, target) => breakdownOf(i)?.direct[part][target] ?? Number.NaN,
    predicted: i =>
      next[i].map((id, k) => ({ id, chance: chances[i][k], was: was?.chances[i][k] })),
    writes: (l, h, i) => {
      const breakdown = breakdownOf(i);
      const isOfHead = breakdown?.of[0] === l && breakdown.of[1] === h;
      return isOfHead ? breakdown.writes : [];
    },
  });
}

/**
 * Request the breakdown of token i, then the effect of ablating each head on it.
 *
 * @param {number} i
 * @param {() => void} draw - Called when the breakdown has arrived, and when all effects have.
 */
export async function requestBreakdown(i, draw) {
  const { predictions } = ownText;
  const of = [selection.layer, selection.head];
  const key = JSON.stringify([i, of]);
  if (predictions.requestedBreakdown === key) return;
  predictions.requestedBreakdown = key;
  const isCurrent = () =>
    predictions === ownText.predictions && predictions.requestedBreakdown === key;
  const hasHeadEffects = () =>
    predictions === ownText.predictions && predictions.headEffectsToken === i;
  if (!hasHeadEffects()) {
    cancel("headEffects"); // of another token
    predictions.headEffectsToken = null;
  }
  const breakdown = await ask("breakDown", { i, of });
  if (!breakdown || !isCurrent()) return;
  Object.assign(data.words, breakdown.words);
  predictions.breakdown = breakdown;
  draw();
  if (hasHeadEffects() || i + 1 >= ownText.T) return;
  Object.assign(predictions, { headEffectsToken: i, headEffects: [] });
  const redraw = throttle(updateHeadEffects, REDRAW_DELAY);
  await ask("headEffects", { i }, ({ heads, nats }) => {
    if (!hasHeadEffects()) return;
    heads.forEach((k, n) => {
      predictions.headEffects[k] = nats[n];
    });
    redraw();
  });
  if (hasHeadEffects()) draw();
}

/** Request the token effects of the text, a hidden token at a time. */
export async function requestTokenEffects() {
  const { predictions } = ownText;
  if (predictions.requestedTokenEffects) return;
  predictions.requestedTokenEffects = true;
  const isShown = () =>
    predictions === ownText.predictions && selection.showTokenEffect && isOwnText();
  const redraw = throttle(drawAttention, REDRAW_DELAY);
  await ask("tokenEffects", {}, ({ j, effects, kl }) => {
    predictions.columns[j] = { effects, kl };
    for (const effect of effects) {
      predictions.largest = Math.max(predictions.largest, Math.abs(effect) || 0);
    }
    if (isShown()) redraw();
  });
  if (isShown()) drawAttention();
}
