/** The cells on display, and what the maps show of them: of one head or averaged, weighted or not. */

import { hasSink } from "./page_data.js";
import { display, selectedMaps, selection } from "./selection.js";

/** How precisely the page stores weights, in words. */
export const STORED_PRECISION =
  "Weights are stored in one byte each: a weight is exact within ±0.4% of the largest weight in its " +
  "row, and the sum of a row within 1%.";

/**
 * Return a function (i, j) → value of the selected maps.
 *
 * @param {Cells} cells
 * @param {MapChoice} maps
 * @returns {(i: number, j: number) => number}
 */
export function cellReader(cells, maps) {
  const { layer, head, weightByValues } = maps;
  if (head === null) {
    const readers = Array.from({ length: cells.H }, (_, h) =>
      cellReader(cells, { ...maps, head: h }),
    );
    return (i, j) => readers.reduce((sum, read) => sum + read(i, j), 0) / cells.H;
  }
  if (!weightByValues) return (i, j) => cells.at(layer, head, i, j);
  const start = (layer * cells.H + head) * cells.T;
  return (i, j) => cells.at(layer, head, i, j) * cells.norms[start + j];
}

/** Return a function i → the weight of query i on the sink logit: what those on tokens leave. */
export function sinkReader(cells, maps) {
  const read = cellReader(cells, { ...maps, weightByValues: false });
  return i => {
    let remaining = 1;
    for (let j = cells.firstToken; j <= i; j++) remaining -= read(i, j);
    return Math.max(0, remaining);
  };
}

/** Return the largest error of a value that `cellReader` reads. */
export function maxError(cells, { layer, head, weightByValues }, i, j) {
  const heads = head === null ? [...Array(cells.H).keys()] : [head];
  const normOf = h => (weightByValues ? cells.norms[(layer * cells.H + h) * cells.T + j] : 1);
  const errors = heads.map(h => cells.bound(layer, h, i, j) * normOf(h));
  return errors.reduce((sum, error) => sum + error, 0) / heads.length;
}

/**
 * Return cells without their first token, each row renormalized to sum to 1.
 *
 * @param {Cells} cells
 * @returns {Cells}
 */
function withoutFirstToken(cells) {
  const sums = new Float32Array(cells.L * cells.H * cells.T); // of each row that was read, or 0
  const remaining = (l, h, i) => {
    const row = (l * cells.H + h) * cells.T + i;
    if (!sums[row]) {
      let sum = 0;
      for (let j = 1; j <= i; j++) sum += cells.at(l, h, i, j);
      sums[row] = Math.max(1e-6, sum);
    }
    return sums[row];
  };
  return Object.assign(Object.create(cells), {
    firstToken: 1,
    bound: (l, h, i, j) => Math.min(1, cells.bound(l, h, i, j) / remaining(l, h, i)),
    at: (l, h, i, j) => (i > 0 && j > 0 ? cells.at(l, h, i, j) / remaining(l, h, i) : 0),
  });
}

/** Return the value at the top of the color scale, the same at all steps of a run. */
export function scaleTop(cells, weightByValues) {
  return cells.signed || weightByValues ? cells.largest || 1 : 1;
}

// ---- on display

/**
 * Return the attention on display, without the first token if the reader asked for that; null if
 * there is no text.
 */
export function shownAttention() {
  const { attention } = display;
  if (!attention || !selection.excludeFirst) return attention;
  attention.withoutFirst ??= withoutFirstToken(attention);
  return attention.withoutFirst;
}

/** Return whether the map on display has the weights on sink logits. */
export const showsSink = () =>
  hasSink && !selection.weightByValues && !selection.excludeFirst && !shownCells().signed;

/** Return a function i → the weight of query i on the sink logit; null if it is not on display. */
export const shownSink = () => (showsSink() ? sinkReader(shownCells(), selectedMaps()) : null);

/** Return the token effects or the attention, whichever the large map and the text show. */
export const shownCells = () =>
  selection.showTokenEffect && display.predictions ? display.predictions : shownAttention();
