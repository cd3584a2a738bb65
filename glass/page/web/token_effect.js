/** Predictions and token effects: decoded from the page, described and outlined. */

import { resolveColor } from "./colors.js";
import { el } from "./dom.js";
import { floatReader } from "./float16.js";
import { formatCount, formatSigned } from "./format.js";
import { labelToken } from "./labels.js";
import { unpack } from "./packed.js";
import { valueLine } from "./tooltip.js";

const PREDICTED_TOKENS = 5; // likeliest next tokens that are stored for each token
const DIRECT_TARGETS = 6; // the true next token and the predicted ones
const WRITTEN_TOKENS = 6; // three promoted and three suppressed tokens of each head

/** Token effects below this many nats are drawn pale. */
export const MIN_CLEAR_EFFECT_NATS = 0.1;

/** Return the diagonals that scores read of tokens that repeat after `period` tokens. */
export const scoredDiagonals = period => [
  { score: "duplicate token", color: "c2", distance: period },
  { score: "induction", color: "c3", distance: period - 1 },
];

/**
 * Decode the predictions of one probe at one step (glass/page/pack.py, `pack_predictions`).
 *
 * @param {[number, number, number]} packed - Places of the numbers and of the token ids.
 * @param {[number, number]} shape - Layers and heads.
 * @param {object} probe
 * @param {number} step
 * @returns {Promise<Predictions>}
 */
export async function decodePredictions([numbers, tokenIds], [L, H], probe, step) {
  const { T, tokens, tokenEffects } = probe;
  const next = floatReader(await unpack(numbers));
  const ids = new Int32Array((await unpack(tokenIds)).buffer);
  const parts = L * (H + 1) + 2; // embedding, heads and MLPs, biases
  const cell = (i, j) => (i * (i + 1)) / 2 + j;
  const effect = next((T * (T + 1)) / 2);
  const kl = next((T * (T + 1)) / 2);
  const headEffect = next(L * H * T);
  const lens = next((L + 1) * T);
  const direct = next(parts * T * DIRECT_TARGETS);
  const chance = next(T * PREDICTED_TOKENS);

  // Only the last tokens of a long text are explained; the others have no number.
  const isExplained = Array.from({ length: T }, (_, i) => !Number.isNaN(kl(cell(i, i))));

  const predicted = i =>
    Array.from({ length: PREDICTED_TOKENS }, (_, k) => {
      const place = i * PREDICTED_TOKENS + k;
      return { id: ids[place], chance: chance(place) };
    });
  const writes = (l, h, i) => {
    const start = T * PREDICTED_TOKENS + ((l * H + h) * T + i) * WRITTEN_TOKENS;
    return [...ids.subarray(start, start + WRITTEN_TOKENS)];
  };
  return {
    L,
    H,
    T,
    tokens,
    step,
    parts,
    largest: Math.max(...tokenEffects.map(stored => stored?.[2] ?? 0)),
    signed: true,
    from: isExplained.indexOf(true),
    norms: null,
    at: (_l, _h, i, j) => effect(cell(i, j)),
    bound: () => 0,
    kl: (i, j) => kl(cell(i, j)),
    headEffect: (l, h, i) => headEffect((l * H + h) * T + i),
    lacksHeadEffects: T > 1 && Number.isNaN(headEffect(T - 2)),
    lens: (k, i) => lens(k * T + i),
    loss: i => lens(L * T + i),
    direct: (part, i, target) => direct((part * T + i) * DIRECT_TARGETS + target),
    predicted,
    writes,
  };
}

/** Name the tokens of a long text that are explained. */
export const describeExplained = ({ from, T }) => `last ${T - from} of ${formatCount(T)} tokens`;

/** Describe the effect of hiding token j on the prediction after token i, for a tooltip. */
export function describeTokenEffect(predictions, i, j) {
  const effect = predictions.at(0, 0, i, j);
  const tokens = [...labelToken(predictions, i), ", hiding ", ...labelToken(predictions, j)];
  let unit = " nats of loss on the next token";
  if (i === predictions.T - 1) unit = " the text ends here, so there is no next token";
  else if (Number.isNaN(effect)) unit = " not yet measured";
  const lines = [
    el("div", { "data-query": i, "data-key": j }, "after ", ...tokens),
    valueLine(formatSigned(effect), unit),
  ];
  if (j < i) {
    const kl = predictions.kl(i, j);
    const value = Number.isNaN(kl) ? "–" : `${kl.toFixed(2)} nats`;
    lines.push(el("div", {}, `KL divergence of the prediction: ${value}`));
  }
  return lines;
}

/** Return a token effect as it is colored: effects that are not clear are pale. */
export const fadeSmallEffect = nats => (Math.abs(nats) < MIN_CLEAR_EFFECT_NATS ? nats / 9 : nats);

/** Outline the cells of an attention map that scores of repeated tokens read. */
export function outlineScoredCells(context, { left, cellWidth, cellHeight }, period) {
  context.lineWidth = Math.max(1, Math.min(2, cellWidth / 8));
  for (const { color, distance } of scoredDiagonals(period)) {
    context.strokeStyle = resolveColor(`var(--${color})`);
    context.beginPath();
    for (let i = period; i < 2 * period; i++) {
      context.rect(left + (i - distance) * cellWidth, i * cellHeight, cellWidth, cellHeight);
    }
    context.stroke();
  }
}
