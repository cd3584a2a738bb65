/** Attention weights: decoded from the page when they are looked at, then read cell by cell. */

import { unpack } from "./packed.js";

/** @typedef {import("./page_state.js").CellView} CellView */
/** @typedef {{layer: number, head: number | null, weightByValues: boolean}} Maps */

const MAX_CACHED_VIEWS = 24;
const MAX_CACHED_LARGE_VIEWS = 4;
const LARGE_VIEW_BYTES = 3e7;

/** A byte holds 256 levels, from 0 to the largest weight of its row (glass/page/pack.py). */
const LEVELS = 255;

/** How precisely the page stores weights, in words. */
export const STORED_PRECISION =
  "Weights are stored in one byte each: a weight is exact within ±0.4% of the largest weight in its " +
  "row, and the sum of a row within 1%.";

/**
 * Decode the attention weights of one probe at one step (glass/page/pack.py, `pack_maps`).
 *
 * @param {[number, number, number]} packed - Places of the weights and of the value norms, and the
 *   largest product of both.
 * @param {[number, number]} shape - Layers and heads.
 * @param {{T: number, tokens: string[], maps: [number, number, number][]}} probe
 * @returns {Promise<CellView>}
 */
export async function decodeAttention([weights, norms], [L, H], { T, tokens, maps }) {
  const bytes = await unpack(weights);
  const rowCount = L * H * T;
  const rowMaxima = new Float32Array(bytes.buffer, 0, rowCount);
  const codes = bytes.subarray(4 * rowCount);
  const triangle = (T * (T + 1)) / 2;
  const place = (l, h, i, j) => (l * H + h) * triangle + (i * (i + 1)) / 2 + j;
  const rowMax = (l, h, i) => rowMaxima[(l * H + h) * T + i];
  return {
    L,
    H,
    T,
    tokens,
    size: bytes.length,
    largest: Math.max(...maps.map(([, , largest]) => largest)),
    exact: false,
    norms: new Float32Array((await unpack(norms)).buffer),
    hasPattern: () => true,
    at: (l, h, i, j) => (codes[place(l, h, i, j)] * rowMax(l, h, i)) / LEVELS,
    bound: (l, h, i) => rowMax(l, h, i) / LEVELS,
  };
}

/** Decoded views by key, the least recently used first. */
const cache = new Map();

/**
 * Return a decoded view from the cache, or decode it.
 *
 * @template View
 * @param {string} key
 * @param {() => Promise<View>} decode
 * @returns {Promise<View>}
 */
export function loadCached(key, decode) {
  const view = cache.get(key) ?? decode();
  cache.delete(key);
  cache.set(key, view);
  const isLarge = view.size > LARGE_VIEW_BYTES;
  if (cache.size > MAX_CACHED_VIEWS || (isLarge && cache.size > MAX_CACHED_LARGE_VIEWS)) {
    cache.delete(cache.keys().next().value);
  }
  view.then(decoded => {
    view.size = decoded.size;
  });
  return view;
}

/**
 * Return a function (i, j) → value of the selected maps.
 *
 * @param {CellView} view
 * @param {Maps} maps
 * @returns {(i: number, j: number) => number}
 */
export function cellReader(view, maps) {
  const { layer, head, weightByValues } = maps;
  if (head === null) {
    const readers = Array.from({ length: view.H }, (_, h) =>
      cellReader(view, { ...maps, head: h }),
    );
    return (i, j) => readers.reduce((sum, read) => sum + read(i, j), 0) / view.H;
  }
  if (!weightByValues) return (i, j) => view.at(layer, head, i, j);
  const start = (layer * view.H + head) * view.T;
  return (i, j) => view.at(layer, head, i, j) * view.norms[start + j];
}

/**
 * Return a function i → the weight of query i on the sink logit: what its weights on tokens leave.
 *
 * @param {CellView} view
 * @param {Maps} maps
 * @returns {(i: number) => number}
 */
export function sinkReader(view, maps) {
  const read = cellReader(view, { ...maps, weightByValues: false });
  return i => {
    let remaining = 1;
    for (let j = view.from ?? 0; j <= i; j++) remaining -= read(i, j);
    return Math.max(0, remaining);
  };
}

/**
 * Return the largest error of a value that `cellReader` reads.
 *
 * @param {CellView} view
 * @param {Maps} maps
 * @param {number} i
 * @param {number} j
 */
export function maxError(view, { layer, head, weightByValues }, i, j) {
  const heads = head === null ? [...Array(view.H).keys()] : [head];
  const errors = heads.map(h => {
    const norm = weightByValues ? view.norms[(layer * view.H + h) * view.T + j] : 1;
    return view.bound(layer, h, i) * norm;
  });
  return errors.reduce((sum, error) => sum + error, 0) / heads.length;
}

/**
 * Return a view without its first token, each row renormalized to sum to 1.
 *
 * @param {CellView} view
 * @param {CellView} [stored] - The same, stored with full precision; by default computed from `view`.
 * @returns {CellView}
 */
export function withoutFirstToken(view, stored = undefined) {
  const sums = new Float32Array(view.L * view.H * view.T); // of each row that was read, or 0
  const remaining = (l, h, i) => {
    const row = (l * view.H + h) * view.T + i;
    if (!sums[row]) {
      let sum = 0;
      for (let j = 1; j <= i; j++) sum += view.at(l, h, i, j);
      sums[row] = Math.max(1e-6, sum);
    }
    return sums[row];
  };
  const at = stored?.at ?? ((l, h, i, j) => view.at(l, h, i, j) / remaining(l, h, i));
  const bound =
    stored?.bound ?? ((l, h, i) => Math.min(1, view.bound(l, h, i) / remaining(l, h, i)));
  return { ...view, from: 1, bound, at: (l, h, i, j) => (i > 0 && j > 0 ? at(l, h, i, j) : 0) };
}

/**
 * Return the value at the top of the color scale, the same at all steps of a run.
 *
 * @param {CellView} view
 * @param {boolean} weightByValues
 */
export function scaleTop(view, weightByValues) {
  return view.signed || weightByValues ? view.largest || 1 : 1;
}
