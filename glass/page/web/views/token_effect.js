/** Token effects, described and outlined. */

import { el, labelToken } from "../base/dom.js";
import { formatCount, formatSigned } from "../base/format.js";
import { valueLine } from "../base/tooltip.js";
import { resolveColor } from "../charts/colors.js";
import { MIN_CLEAR_EFFECT_NATS } from "../state/cells.js";

/** Return the diagonals that scores read of tokens that repeat after `period` tokens. */
export const scoredDiagonals = period => [
  { score: "duplicate token", color: "c2", distance: period },
  { score: "induction", color: "c3", distance: period - 1 },
];

/** Name the tokens of a long text that are explained. */
export const describeExplained = ({ firstToken, T }) =>
  `last ${T - firstToken} of ${formatCount(T)} tokens`;

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
