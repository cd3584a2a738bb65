/** What the maps on display show of cells: of one head or averaged, weighted or not. */

/** How precisely the page stores weights, in words. */
export const STORED_PRECISION =
  "Weights are stored in one byte each: a weight is exact within ±0.4% of the largest weight in its " +
  "row, and the sum of a row within 1%.";

/**
 * Return a function (i, j) → value of the selected maps.
 *
 * @param {Cells} view
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

/** Return a function i → the weight of query i on the sink logit: what those on tokens leave. */
export function sinkReader(view, maps) {
  const read = cellReader(view, { ...maps, weightByValues: false });
  return i => {
    let remaining = 1;
    for (let j = view.from; j <= i; j++) remaining -= read(i, j);
    return Math.max(0, remaining);
  };
}

/** Return the largest error of a value that `cellReader` reads. */
export function maxError(view, { layer, head, weightByValues }, i, j) {
  const heads = head === null ? [...Array(view.H).keys()] : [head];
  const normOf = h => (weightByValues ? view.norms[(layer * view.H + h) * view.T + j] : 1);
  const errors = heads.map(h => view.bound(layer, h, i, j) * normOf(h));
  return errors.reduce((sum, error) => sum + error, 0) / heads.length;
}

/**
 * Return cells without their first token, each row renormalized to sum to 1.
 *
 * @param {Cells} view
 * @returns {Cells}
 */
export function withoutFirstToken(view) {
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
  return Object.assign(Object.create(view), {
    from: 1,
    bound: (l, h, i, j) => Math.min(1, view.bound(l, h, i, j) / remaining(l, h, i)),
    at: (l, h, i, j) => (i > 0 && j > 0 ? view.at(l, h, i, j) / remaining(l, h, i) : 0),
  });
}

/** Return the value at the top of the color scale, the same at all steps of a run. */
export function scaleTop(view, weightByValues) {
  return view.signed || weightByValues ? view.largest || 1 : 1;
}
