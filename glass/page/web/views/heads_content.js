/** Grids with a cell for each head of the model. */

import { H, isDeep, L } from "../state/page_data.js";

const MAX_HEAD_WIDTH = 64; // pixels of a cell that stands for a head

/**
 * Return the content of a grid with a cell for each head, without values: a row for each layer. All
 * rows together have at most this height in pixels, except in deep models.
 */
export function headsContent(maxHeight) {
  const minRowHeight = isDeep ? 9 : 14;
  return {
    rows: L,
    cols: H,
    start: [0, 0],
    minNamedWidth: 0,
    upright: true,
    maxWidth: maxHeadsWidth(H),
    cellHeight: Math.min(46, Math.max(minRowHeight, maxHeight / Math.max(L, H))),
    rowNames: Array.from({ length: L }, (_, layer) => `L${layer}`),
    colNames: Array.from({ length: H }, (_, head) => `H${head}`),
  };
}

/** Return the largest width of cells like those of heads, in pixels. */
export const maxHeadsWidth = columnCount => MAX_HEAD_WIDTH * columnCount + 26;
