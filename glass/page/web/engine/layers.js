/**
 * The layers of the model, as model.py defines them.
 *
 * A matrix (n, m) is an array of n · m numbers, row after row. Letters: T tokens, C channels,
 * H query heads, G key/value heads, d_k and d_v the sizes of a query and a value, V the vocabulary.
 * `weights` maps a parameter's name to its {shape, data}; `config` is a GPTConfig (config.py).
 */

const FLOAT32_EPSILON = 2 ** -23; // torch's default where a norm names none
const ROPE_LOW = 1; // turns over the trained length below which a frequency is interpolated (Llama 3.1)
const ROPE_HIGH = 4; // turns from which it is kept

/** Return the entry of a table for the value of a setting; a value without an entry is an error. */
export function entryFor(config, setting, table) {
  const value = String(config[setting]);
  if (Object.hasOwn(table, value)) return table[value];
  throw new Error(`this page cannot compute model.${setting}=${value}`);
}

export function sizesOf(config) {
  const G = config.n_kv_head ?? config.n_head;
  const d_k = config.head_dim ?? Math.floor(config.n_embd / config.n_head);
  const d_v = config.value_head_dim ?? d_k;
  return { L: config.n_layer, H: config.n_head, G, C: config.n_embd, d_k, d_v };
}

/**
 * Multiply x (n, in) by the weight (out, in) of a layer and add its bias, if there is one.
 *
 * Four rows of x at a time: a row of the weight is read once for them, and their sums do not wait
 * for each other.
 *
 * @param {Weights} weights
 * @param {string} name - Of the layer, without ".weight".
 * @param {ArrayLike<number>} x
 * @param {number} n
 */
export function linear(weights, name, x, n) {
  const { shape, data } = weights[`${name}.weight`];
  const [outSize, size] = shape;
  const bias = weights[`${name}.bias`]?.data;
  const y = new Float32Array(n * outSize);
  for (let i = 0; i < n; i += 4) {
    const row0 = i * size;
    const row1 = Math.min(i + 1, n - 1) * size;
    const row2 = Math.min(i + 2, n - 1) * size;
    const row3 = Math.min(i + 3, n - 1) * size;
    for (let o = 0, w = 0; o < outSize; o++, w += size) {
      let sum0 = 0;
      let sum1 = 0;
      let sum2 = 0;
      let sum3 = 0;
      for (let k = 0; k < size; k++) {
        const weight = data[w + k];
        sum0 += x[row0 + k] * weight;
        sum1 += x[row1 + k] * weight;
        sum2 += x[row2 + k] * weight;
        sum3 += x[row3 + k] * weight;
      }
      const offset = bias ? bias[o] : 0;
      const place = i * outSize + o;
      y[place] = sum0 + offset;
      if (i + 1 < n) y[place + outSize] = sum1 + offset;
      if (i + 2 < n) y[place + 2 * outSize] = sum2 + offset;
      if (i + 3 < n) y[place + 3 * outSize] = sum3 + offset;
    }
  }
  return y;
}

// ---- norms

/** Return the mean of row i of x (n, C), or 0 if the norm does not center. */
function rowMean(x, i, C, isCentered) {
  if (!isCentered) return 0;
  let sum = 0;
  for (let k = 0; k < C; k++) sum += x[i * C + k];
  return sum / C;
}

/** Return the scales by which a norm, which may subtract the mean first, multiplies each row of x. */
function normScales(x, C, epsilon, isCentered) {
  const scales = new Float64Array(x.length / C);
  for (let i = 0; i < scales.length; i++) {
    const mean = rowMean(x, i, C, isCentered);
    let squares = 0;
    for (let k = 0; k < C; k++) squares += (x[i * C + k] - mean) ** 2;
    scales[i] = 1 / Math.sqrt(squares / C + epsilon);
  }
  return { scales, isCentered };
}

/** Normalize x (n, C) by scales that may be those of other rows: without the bias a linear map. */
export function normalize(x, C, { scales, isCentered }, gain = null, bias = null) {
  const y = new Float32Array(x.length);
  for (let i = 0; i < scales.length; i++) {
    const mean = rowMean(x, i, C, isCentered);
    for (let k = 0; k < C; k++) {
      const scaled = (x[i * C + k] - mean) * scales[i] * (gain ? gain[k] : 1);
      y[i * C + k] = scaled + (bias ? bias[k] : 0);
    }
  }
  return y;
}

/** Normalize embeddings x (n, C) without parameters, if the model does. */
export function normalizeEmbedding(config, x) {
  if (!entryFor(config, "norm_embedding", { false: false, true: true })) return x;
  const C = config.n_embd;
  return normalize(x, C, normScales(x, C, FLOAT32_EPSILON, false));
}

export function modelScales(config, x) {
  const isCentered = entryFor(config, "norm", { layernorm: true, rmsnorm: false });
  return normScales(x, config.n_embd, config.norm_eps, isCentered);
}

export const norm = (weights, config, name, x) =>
  normalize(
    x,
    config.n_embd,
    modelScales(config, x),
    weights[`${name}.weight`]?.data,
    weights[`${name}.bias`]?.data,
  );

// ---- rotary positions (Su et al. 2021)

/** Return the radians by which each of d_k / 2 pairs turns from one position to the next, or 0. */
export function rotaryFrequencies(config, d_k) {
  const turning = Math.floor(config.rope_share * d_k); // channels
  return Array.from({ length: d_k / 2 }, (_, k) => {
    if (2 * k >= turning) return 0;
    const frequency = config.rope_theta ** ((-2 * k) / turning);
    if (config.rope_factor === 1) return frequency;
    const turns = (config.rope_trained ?? 0) / ((2 * Math.PI) / frequency);
    const kept = Math.max(0, Math.min(1, (turns - ROPE_LOW) / (ROPE_HIGH - ROPE_LOW)));
    return ((1 - kept) * frequency) / config.rope_factor + kept * frequency;
  });
}

/** Rotate the pairs (x_k, x_{k + d/2}) of one vector of x, from `start` on, in place. */
export function rotate(x, start, position, frequencies) {
  const half = frequencies.length;
  for (let k = 0; k < half; k++) {
    const cos = Math.cos(position * frequencies[k]);
    const sin = Math.sin(position * frequencies[k]);
    const u = x[start + k];
    const v = x[start + half + k];
    x[start + k] = u * cos - v * sin;
    x[start + half + k] = v * cos + u * sin;
  }
}

export const isRotary = config => entryFor(config, "position", { learned: false, rope: true });

/** Rotate every head's vectors in x (n, heads, d_k), in place, if positions are rotary. */
export function rotateHeads(config, x, heads, firstPosition) {
  if (!isRotary(config)) return x;
  const { d_k } = sizesOf(config);
  const frequencies = rotaryFrequencies(config, d_k);
  for (let start = 0; start < x.length; start += d_k) {
    const t = Math.floor(start / (heads * d_k));
    rotate(x, start, firstPosition + t, frequencies);
  }
  return x;
}

// ---- attention and MLP

const sigmoid = x => 1 / (1 + Math.exp(-x));

/**
 * Project normalized inputs x (n, C) to queries y (n, H, d_k) or keys (n, G, d_k), with QK-norm,
 * whose scales are returned, too.
 */
export function project(weights, config, name, which, x, n) {
  const { d_k } = sizesOf(config);
  let y = linear(weights, `${name}.W_${which}`, x, n);
  let scales = null;
  const epsilons = { false: null, true: FLOAT32_EPSILON, gains: config.norm_eps };
  const epsilon = entryFor(config, "qk_norm", epsilons);
  if (epsilon !== null) {
    const gain = weights[`${name}.norm_${which.toLowerCase()}.weight`]?.data;
    scales = normScales(y, d_k, epsilon, false);
    y = normalize(y, d_k, scales, gain);
  }
  return { y, scales };
}

/**
 * Multiply what the heads gather (n, H, d_v) by their gates, in place, if they have gates. The gates
 * depend on the normalized inputs x (n, C).
 *
 * Reference: Qiu et al. 2025.
 */
export function applyGates(weights, config, name, gathered, x, n) {
  const { d_v } = sizesOf(config);
  // Number of channels that share a gate.
  const channels = entryFor(config, "attention_gate", { none: null, head: d_v, channel: 1 });
  if (channels === null) return gathered;
  const gates = linear(weights, `${name}.W_gate`, x, n); // (n, H) or (n, H · d_v)
  for (let k = 0; k < gathered.length; k++) gathered[k] *= sigmoid(gates[Math.floor(k / channels)]);
  return gathered;
}

/** Return what one head writes to the residual stream (n, C); its vectors are `stride` apart. */
export function headOutput(weights, name, head, values, stride, n, { H, C, d_v }) {
  const W_O = weights[`${name}.W_O.weight`].data;
  const y = new Float32Array(n * C);
  for (let t = 0; t < n; t++) {
    for (let c = 0; c < C; c++) {
      const row = (c * H + head) * d_v;
      let sum = 0;
      for (let k = 0; k < d_v; k++) sum += values[t * stride + k] * W_O[row + k];
      y[t * C + c] = sum;
    }
  }
  return y;
}

const ERF_COEFFICIENTS = [1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592];

const silu = x => x / (1 + Math.exp(-x));
const gelu = x => 0.5 * x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3)));
const exactGelu = x => 0.5 * x * (1 + erf(x / Math.SQRT2));
const squaredRelu = x => Math.max(0, x) ** 2;

/** Return the error function of x within 1.5e-7 (Abramowitz and Stegun 1964, 7.1.26). */
function erf(x) {
  const t = 1 / (1 + 0.3275911 * Math.abs(x));
  let polynomial = 0;
  for (const coefficient of ERF_COEFFICIENTS) polynomial = (polynomial + coefficient) * t;
  return Math.sign(x) * (1 - polynomial * Math.exp(-x * x));
}

/** Of a gated MLP, the activation is that of the gate, which multiplies the hidden values. */
const MLPS = {
  gelu: { activation: gelu, isGated: false },
  gelu_exact: { activation: exactGelu, isGated: false },
  relu2: { activation: squaredRelu, isGated: false },
  swiglu: { activation: silu, isGated: true },
  none: null,
};

/** Apply the MLP of a block to x (n, C); a model without MLPs adds zeros. */
export function feedForward(weights, config, name, x, n) {
  const mlp = entryFor(config, "mlp", MLPS);
  if (mlp === null) return new Float32Array(x.length);
  const { activation, isGated } = mlp;
  const hidden = linear(weights, `${name}.W_in`, x, n);
  const gate = isGated ? linear(weights, `${name}.W_gate`, x, n) : null;
  for (let k = 0; k < hidden.length; k++) {
    hidden[k] = gate ? hidden[k] * activation(gate[k]) : activation(hidden[k]);
  }
  return linear(weights, `${name}.W_out`, hidden, n);
}

// ---- output

/** Return the output layer's weight (V, C); tied embeddings share it. */
export const outputWeight = weights => weights["head.weight"] ?? weights["token_embedding.weight"];

/** Return the logits (n, V) of residual states x (n, C). */
export function logitsOf(weights, config, x) {
  const output = { "head.weight": outputWeight(weights) };
  return linear(output, "head", norm(weights, config, "norm", x), x.length / config.n_embd);
}
