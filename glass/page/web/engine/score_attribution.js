/**
 * Attention-score attribution: which components of the model produced one attention score.
 *
 * Reference: Kamath et al. 2025.
 */

import { repeatRow } from "./forward.js";
import {
  isRotary,
  modelScales,
  norm,
  normalize,
  project,
  rotaryFrequencies,
  rotate,
} from "./layers.js";

/**
 * Attribute the pre-softmax score of cell (i, j) to pairs of components that wrote the query and the
 * key. The terms sum to the score minus its mean over the tokens that are not hidden from the query.
 * Norms have the scales of the whole residual stream.
 *
 * @param {import("./forward.js").ForwardPass} pass
 * @param {number} layer
 * @param {number} head
 * @param {number} i - Query token.
 * @param {number} j - Key token.
 * @returns {{query: string, key: string, value: number}[]}
 */
export function attributeScore(pass, layer, head, i, j) {
  const { H, G, d_k } = pass.sizes;
  const tokens = Array.from({ length: i + 1 }, (_, t) => t);
  const visible = tokens.filter(t => t === i || !pass.hidden.includes(t));
  const queries = projectComponents(pass, layer, "Q", head, [i]);
  const keys = projectComponents(pass, layer, "K", Math.floor(head / (H / G)), tokens);
  const terms = [];
  for (const query of queries) {
    for (const key of keys) {
      const score = t => dot(query.vectors[0], key.vectors[t]) / Math.sqrt(d_k);
      const mean = visible.reduce((sum, t) => sum + score(t), 0) / visible.length;
      terms.push({ query: query.name, key: key.name, value: score(j) - mean });
    }
  }
  return terms;
}

function dot(a, b) {
  let sum = 0;
  for (let k = 0; k < a.length; k++) sum += a[k] * b[k];
  return sum;
}

/**
 * Project what each component below a layer wrote to one head's queries or keys.
 *
 * @param {import("./forward.js").ForwardPass} pass
 * @param {number} layer
 * @param {"Q" | "K"} which
 * @param {number} head - Query head, or key/value head.
 * @param {number[]} tokens
 * @returns {{name: string, vectors: Float64Array[]}[]} The vector (d_k) of each token.
 */
function projectComponents(pass, layer, which, head, tokens) {
  const { weights, config } = pass;
  const { C } = pass.sizes;
  const norm_1 = `blocks.${layer}.norm_1`;
  const scales = modelScales(config, pass.rowsOf(pass.layers[layer].x, C));
  const gain = weights[`${norm_1}.weight`]?.data;
  const projectToken = createTokenProjection(pass, layer, which, head);
  const below = pass.components().filter(component => component.layer < layer);
  const projected = below.map(({ name, wrote }) => {
    const rows = normalize(wrote, C, scales, gain);
    return { name, vectors: tokens.map(t => projectToken(rows, null, t)) };
  });
  const normBias = weights[`${norm_1}.bias`]?.data;
  const bias = weights[`blocks.${layer}.attention.W_${which}.bias`]?.data;
  if (bias || normBias) {
    const rows = repeatRow(normBias, pass.T);
    projected.push({ name: "biases", vectors: tokens.map(t => projectToken(rows, bias, t)) });
  }
  return projected;
}

/**
 * Return a function (rows, bias, t) → vector (d_k) that projects token t of normalized rows (T, C),
 * or of zeros if there are none, to a head's query or key, scaled and rotated as in the pass.
 */
function createTokenProjection(pass, layer, which, head) {
  const { weights, config, T } = pass;
  const { H, G, C, d_k } = pass.sizes;
  const heads = which === "Q" ? H : G;
  const block = `blocks.${layer}`;
  const name = `${block}.attention`;
  const normalized = norm(weights, config, `${block}.norm_1`, pass.rowsOf(pass.layers[layer].x, C));
  const { scales: qkScales } = project(weights, config, name, which, normalized, T);
  const { data: W } = weights[`${name}.W_${which}.weight`];
  const qkGain = weights[`${name}.norm_${which.toLowerCase()}.weight`]?.data;
  const frequencies = isRotary(config) ? rotaryFrequencies(config, d_k) : null;
  return (rows, bias, t) => {
    const vector = new Float64Array(d_k);
    for (let n = 0; n < d_k; n++) {
      const row = (head * d_k + n) * C;
      let sum = bias ? bias[head * d_k + n] : 0;
      for (let k = 0; rows && k < C; k++) sum += rows[t * C + k] * W[row + k];
      const gain = qkGain ? qkGain[n] : 1;
      vector[n] = qkScales ? sum * qkScales.scales[t * heads + head] * gain : sum;
    }
    if (frequencies) rotate(vector, 0, t, frequencies);
    return vector;
  };
}
