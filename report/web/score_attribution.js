// Why a head looked there: the score of a cell before softmax, as a sum over what wrote its query and what wrote its
// key. Stands after forward.js.

import { frequencies, norm, normalised, projected, repeated, scalesHere } from "./forward.js";

// The terms of cell (i, j) of a head (layer, head) in a reading: [{query, key, value}], which sum to its score less the
// mean of its row, over the tokens that i may look at. Norms have the scales that they have in the whole reading.
export function why(reading, layer, head, i, j) {
  const { H, G, d_k } = reading.sizes;
  const g = Math.floor(head / (H / G));
  const queries = sides(reading, layer, "Q", head, [i]);
  const all = Array.from({ length: i + 1 }, (_, t) => t);
  const keys = sides(reading, layer, "K", g, all);
  const terms = [];
  for (const query of queries)
    for (const key of keys) {
      const score = t => {
        let sum = 0;
        for (let n = 0; n < d_k; n++) sum += query.vectors[0][n] * key.vectors[t][n];
        return sum / Math.sqrt(d_k);
      };
      const mean = all.reduce((sum, t) => sum + score(t), 0) / all.length;
      terms.push({ query: query.name, key: key.name, value: score(j) - mean });
    }
  return terms;
}

// What each part below a layer gives to one head's queries or keys at some tokens: [{name, vectors: [(d_k)]}].
function sides(reading, layer, which, head, tokens) {
  const {
    W,
    c,
    T,
    sizes: { H, G, C, d_k },
  } = reading;
  const heads = which === "Q" ? H : G;
  const block = `blocks.${layer}`;
  const name = `${block}.attention`;
  const x = reading.of(reading.layers[layer].x, C);
  const scales = scalesHere(c, x);
  const gain = W[`${block}.norm_1.weight`]?.data;
  const shift = W[`${block}.norm_1.bias`]?.data;
  const own = norm(W, c, `${block}.norm_1`, x);
  const { scales: sizes } = projected(W, c, name, which, own, T);
  const { data: matrix } = W[`${name}.W_${which}.weight`];
  const bias = W[`${name}.W_${which}.bias`]?.data;
  const gains = W[`${name}.norm_${which.toLowerCase()}.weight`]?.data;
  const turns = c.position === "rope" ? frequencies(c, d_k) : null;

  // The vector at token t of an input to the projection, (C) of rows (T, C), with a bias or without.
  function vector(rows, t, offset) {
    const y = new Float64Array(d_k);
    for (let n = 0; n < d_k; n++) {
      const row = (head * d_k + n) * C;
      let sum = offset ? offset[head * d_k + n] : 0;
      for (let k = 0; rows && k < C; k++) sum += rows[t * C + k] * matrix[row + k];
      y[n] = sum * (sizes ? sizes.scales[t * heads + head] * (gains ? gains[n] : 1) : 1);
    }
    return turns ? turned(y, t, turns) : y;
  }

  const found = reading
    .parts()
    .filter(part => part.layer < layer)
    .map(part => {
      const rows = normalised(part.wrote, C, scales, gain);
      return { name: part.name, vectors: tokens.map(t => vector(rows, t, null)) };
    });
  if (bias || shift) {
    const rows = repeated(shift, T);
    found.push({ name: "biases", vectors: tokens.map(t => vector(rows, t, bias)) });
  }
  return found;
}

// A vector (d_k) turned as `rotate` turns it at position t.
function turned(y, t, of) {
  const half = y.length / 2;
  const z = y.slice();
  for (let k = 0; k < half; k++) {
    const cos = Math.cos(t * of[k]);
    const sin = Math.sin(t * of[k]);
    z[k] = y[k] * cos - y[k + half] * sin;
    z[k + half] = y[k + half] * cos + y[k] * sin;
  }
  return z;
}
