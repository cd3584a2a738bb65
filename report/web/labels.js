// Names of tokens and heads.

import { bdi, el } from "./dom.js";
import { shortenToken } from "./format.js";

// ---- tokens and heads

export const headName = (layer, head) => `L${layer}H${head}`;

// A token with its place
export const labelToken = (view, i) => [
  bdi(shortenToken(view.tokens[i]), "token"),
  el("small", {}, ` ${i}`),
];

export const MIN_DEEP_LAYERS = 10; // layers, from which a page is laid out for many

// The cells of layers × heads, at most so tall in all.
export function headGridLayout(L, H, tall) {
  return {
    rows: L,
    cols: H,
    start: [0, 0],
    least: 0,
    upright: true,
    most: 64 * H + 26,
    high: Math.min(46, Math.max(L > MIN_DEEP_LAYERS ? 9 : 14, tall / Math.max(L, H))),
    rowNames: Array.from({ length: L }, (_, l) => `L${l}`),
    colNames: Array.from({ length: H }, (_, h) => `H${h}`),
  };
}
