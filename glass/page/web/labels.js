/** Names of tokens and heads, and the layout of tables with one cell for each head. */

import { bdi, el } from "./dom.js";
import { shortenToken } from "./format.js";

/** A model with more layers is deep: its page shows the heads in a frame that scrolls. */
export const MIN_DEEP_LAYERS = 10;

/**
 * @param {number} layer
 * @param {number} head
 * @returns {string} L2H3 for head 3 of layer 2.
 */
export const headName = (layer, head) => `L${layer}H${head}`;

/**
 * Return a token with its position, as nodes.
 *
 * @param {{tokens: string[]}} view
 * @param {number} i - Position of the token.
 * @returns {Node[]}
 */
export const labelToken = (view, i) => [
  bdi(shortenToken(view.tokens[i]), "token"),
  el("small", {}, ` ${i}`),
];

/**
 * Lay out a cell grid with a row for each layer and a column for each head.
 *
 * @param {number} L - Number of layers.
 * @param {number} H - Number of heads.
 * @param {number} maxHeight - Of all rows together, in pixels; deep models may exceed it.
 * @returns {Omit<import("./cell_grid.js").CellGrid, "level" | "tell">}
 */
export function headGridLayout(L, H, maxHeight) {
  const minRowHeight = L > MIN_DEEP_LAYERS ? 9 : 14;
  return {
    rows: L,
    cols: H,
    start: [0, 0],
    least: 0,
    upright: true,
    most: 64 * H + 26,
    high: Math.min(46, Math.max(minRowHeight, maxHeight / Math.max(L, H))),
    rowNames: Array.from({ length: L }, (_, layer) => `L${layer}`),
    colNames: Array.from({ length: H }, (_, head) => `H${head}`),
  };
}
