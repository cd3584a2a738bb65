const SMALLEST = 2 ** -23; // float32's epsilon, as torch adds it where a norm names none
const ROPE_LOW = 1;
const ROPE_HIGH = 4;

// The sizes that a configuration (config.py) leaves to others.
function sizesOf(c) {
  const G = c.n_kv_head ?? c.n_head;
  const d_k = c.head_dim ?? Math.floor(c.n_embd / c.n_head);
  const d_v = c.value_head_dim ?? d_k;
  return { L: c.n_layer, H: c.n_head, G, C: c.n_embd, d_k, d_v };
}

// x (n, in) → (n, out), by the weight (out, in) of this name and its bias, where there is one. Four rows of x at a
// time: a row of the weight is read once for them, and their sums do not wait for each other.
export function linear(W, name, x, n) {
  const {
    shape: [out, size],
    data,
  } = W[`${name}.weight`];
  const bias = W[`${name}.bias`]?.data;
  const y = new Float32Array(n * out);
  for (let i = 0; i < n; i += 4) {
    const a = i * size;
    const b = Math.min(i + 1, n - 1) * size;
    const c = Math.min(i + 2, n - 1) * size;
    const d = Math.min(i + 3, n - 1) * size;
    for (let o = 0, w = 0; o < out; o++, w += size) {
      let s = 0;
      let t = 0;
      let u = 0;
      let v = 0;
      for (let k = 0; k < size; k++) {
        const weight = data[w + k];
        s += x[a + k] * weight;
        t += x[b + k] * weight;
        u += x[c + k] * weight;
        v += x[d + k] * weight;
      }
      const more = bias ? bias[o] : 0;
      const at = i * out + o;
      y[at] = s + more;
      if (i + 1 < n) y[at + out] = t + more;
      if (i + 2 < n) y[at + 2 * out] = u + more;
      if (i + 3 < n) y[at + 3 * out] = v + more;
    }
  }
  return y;
}

// What normalises each of the rows x (n, C): `scales` (n), which it multiplies by, and `centred`, whether it takes the
// mean away first.
function scalesOf(x, C, eps, centred) {
  const n = x.length / C;
  const scales = new Float64Array(n);
  for (let i = 0; i < n; i++) {
    let mean = 0;
    let squares = 0;
    if (centred) {
      for (let k = 0; k < C; k++) mean += x[i * C + k];
      mean /= C;
    }
    for (let k = 0; k < C; k++) squares += (x[i * C + k] - mean) ** 2;
    scales[i] = 1 / Math.sqrt(squares / C + eps);
  }
  return { scales, centred };
}

// x (n, C) normalised by scales that may be another's: a linear map, but for the bias.
export function normalised(x, C, { scales, centred }, gain = null, bias = null) {
  const y = new Float32Array(x.length);
  for (let i = 0; i < scales.length; i++) {
    let mean = 0;
    if (centred) {
      for (let k = 0; k < C; k++) mean += x[i * C + k];
      mean /= C;
    }
    for (let k = 0; k < C; k++) {
      y[i * C + k] =
        (x[i * C + k] - mean) * scales[i] * (gain ? gain[k] : 1) + (bias ? bias[k] : 0);
    }
  }
  return y;
}

export const scalesHere = (c, x) => scalesOf(x, c.n_embd, c.norm_eps, c.norm === "layernorm");
export const norm = (W, c, name, x) =>
  normalised(x, c.n_embd, scalesHere(c, x), W[`${name}.weight`]?.data, W[`${name}.bias`]?.data);

// Radians that each pair of numbers turns by from one position to the next, (d_k/2).
export function frequencies(c, d_k) {
  return Array.from({ length: d_k / 2 }, (_, k) => {
    const plain = c.rope_theta ** ((-2 * k) / d_k);
    if (c.rope_factor === 1) return plain;
    const turns = (c.rope_trained ?? 0) / ((2 * Math.PI) / plain);
    const kept = Math.max(0, Math.min(1, (turns - ROPE_LOW) / (ROPE_HIGH - ROPE_LOW)));
    return ((1 - kept) * plain) / c.rope_factor + kept * plain;
  });
}

// Turns the pairs (x_i, x_{i + d/2}) of each head's vectors x (n, heads, d_k) by the angles of positions from `start`
// on, in place.
function rotate(x, n, start, heads, d_k, of) {
  const half = d_k / 2;
  for (let t = 0; t < n; t++)
    for (let k = 0; k < half; k++) {
      const cos = Math.cos((start + t) * of[k]);
      const sin = Math.sin((start + t) * of[k]);
      for (let h = 0; h < heads; h++) {
        const a = (t * heads + h) * d_k + k;
        const b = a + half;
        const u = x[a];
        const v = x[b];
        x[a] = u * cos - v * sin;
        x[b] = v * cos + u * sin;
      }
    }
  return x;
}

const silu = x => x / (1 + Math.exp(-x));
const gelu = x => 0.5 * x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3)));

function mlp(W, c, name, x, n) {
  const h = linear(W, `${name}.W_in`, x, n);
  const gate = c.mlp === "swiglu" ? linear(W, `${name}.W_gate`, x, n) : null;
  for (let k = 0; k < h.length; k++) {
    h[k] = gate ? silu(gate[k]) * h[k] : c.mlp === "relu2" ? Math.max(0, h[k]) ** 2 : gelu(h[k]);
  }
  return linear(W, `${name}.W_out`, h, n);
}

// The queries (n, H, d_k) or keys (n, G, d_k) of normalised inputs x (n, C), whole, at positions from `start` on;
// `scales` of their norms, where the configuration has one, are for `why`.
export function projected(W, c, name, which, x, n, start = 0) {
  const { H, G, d_k } = sizesOf(c);
  const heads = which === "Q" ? H : G;
  let y = linear(W, `${name}.W_${which}`, x, n);
  let scales = null;
  if (c.qk_norm) {
    scales = scalesOf(y, d_k, c.qk_norm === "gains" ? c.norm_eps : SMALLEST, false);
    y = normalised(y, d_k, scales, W[`${name}.norm_${which.toLowerCase()}.weight`]?.data);
  }
  if (c.position === "rope") rotate(y, n, start, heads, d_k, frequencies(c, d_k));
  return { y, scales };
}

// What one head writes, (n, C), of what all gathered, (n, H, d_v).
function written(W, name, head, heads, n, { H, C, d_v }) {
  const W_O = W[`${name}.W_O.weight`].data;
  const y = new Float32Array(n * C);
  for (let t = 0; t < n; t++)
    for (let c = 0; c < C; c++) {
      let sum = 0;
      for (let k = 0, a = (t * H + head) * d_v, b = (c * H + head) * d_v; k < d_v; k++)
        sum += heads[a + k] * W_O[b + k];
      y[t * C + c] = sum;
    }
  return y;
}

function added(x, ...others) {
  const y = x.slice();
  for (const other of others) for (let k = 0; k < y.length; k++) y[k] += other[k];
  return y;
}

// The same row for each of n tokens, (n, C); none without a row.
export const repeated = (row, n) =>
  row ? Float32Array.from({ length: n * row.length }, (_, k) => row[k % row.length]) : null;

// The place of a number in ascending ones, -1 where it is not there.
function placeOf(number, keys) {
  let from = 0;
  let to = keys.length;
  while (from < to) {
    const middle = (from + to) >> 1;
    if (keys[middle] < number) from = middle + 1;
    else to = middle;
  }
  return keys[from] === number ? from : -1;
}

// What n-grams add to the embeddings of ids from place n on: (T - n, C). `isHidden(j, t)` tells whether the token t
// does not see j.
function ngrams(W, c, ids, n, isHidden) {
  const {
    shape: [, size],
    data: table,
  } = W["ngrams.table"];
  const keys = W["ngrams.keys"].data;
  const V = c.vocab_size;
  const sum = new Float32Array((ids.length - n) * c.n_embd);
  const special = 2 * (c.ngrams - 1);
  for (let t = n; t < ids.length; t++)
    for (let length = 2; length <= c.ngrams; length++) {
      let parent = ids[t + 1 - length];
      let absent = t + 1 < length;
      for (let j = t + 1 - length; j < t && !absent; j++) absent = isHidden(j, t);
      for (let j = t + 2 - length; j <= t && parent >= 0 && !absent; j++) {
        const at = placeOf(parent * V + ids[j], keys);
        parent = at < 0 ? -1 : V + at;
      }
      const row = absent ? 2 * length - 3 : parent < 0 ? 2 * length - 4 : special + parent - V;
      for (let k = 0; k < size; k++) sum[(t - n) * c.n_embd + k] += table[row * size + k];
    }
  return sum;
}

// Rows of numbers that grow, and are written over from a place on.
class Rows {
  constructor() {
    this.data = new Float32Array(256);
  }
  put(at, numbers) {
    if (at + numbers.length > this.data.length) {
      const more = new Float32Array(2 * (at + numbers.length));
      more.set(this.data);
      this.data = more;
    }
    this.data.set(numbers, at);
  }
}

// A text as a model reads it, with heads `off` ("L1H3", …): what stands before a change is not computed again.
// `layers` have the input x (T, C) of each, its keys, its values, what its heads gathered (T, H, d_v), what its MLP
// wrote (T, C), and of each head the `weights`, the lower triangle row after row, and the `norms` ‖v_j W_O‖ (T), of the
// first `measured` tokens; `last` is what the last block gives, (T, C). `known` is engine.js's: what it found of tokens.
export class Reading {
  constructor(W, c, off = []) {
    Object.assign(this, {
      W,
      c,
      off: new Set(off),
      sizes: sizesOf(c),
      ids: [],
      hidden: [],
      last: new Rows(),
      measured: 0,
      known: [],
    });
    const each = () => Array.from({ length: this.sizes.H }, () => new Rows());
    this.layers = Array.from({ length: this.sizes.L }, () => ({
      x: new Rows(),
      k: new Rows(),
      v: new Rows(),
      heads: new Rows(),
      mlp: new Rows(),
      weights: each(),
      norms: each(),
    }));
  }

  get T() {
    return this.ids.length;
  }

  // Rows of a part of the reading: (T, width).
  of(rows, width) {
    return rows.data.subarray(0, this.T * width);
  }

  // Read ids, with some tokens hidden from all later ones.
  read(ids, hidden = []) {
    const changed = [
      ...hidden.filter(j => !this.hidden.includes(j)),
      ...this.hidden.filter(j => !hidden.includes(j)),
    ];
    let n = Math.min(this.T, ids.length, ...changed.map(j => j + 1));
    for (let t = 0; t < n; t++) if (ids[t] !== this.ids[t]) n = t;
    Object.assign(this, {
      ids: [...ids],
      hidden: [...hidden],
      measured: Math.min(this.measured, n),
    });
    this.known.length = Math.min(this.known.length, n);
    if (n === this.T) return;
    const {
      W,
      c,
      sizes: { L, H, G, C, d_k, d_v },
    } = this;
    const m = this.T - n;
    let x = this.embed(n);
    for (let l = 0; l < L; l++) {
      const layer = this.layers[l];
      const block = `blocks.${l}`;
      const name = `${block}.attention`;
      const inside = norm(W, c, `${block}.norm_1`, x);
      const q = projected(W, c, name, "Q", inside, m, n).y;
      layer.x.put(n * C, x);
      layer.k.put(n * G * d_k, projected(W, c, name, "K", inside, m, n).y);
      layer.v.put(n * G * d_v, linear(W, `${name}.W_V`, inside, m));
      const heads = this.attend(l, q, n);
      layer.heads.put(n * H * d_v, heads);
      x = added(x, linear(W, `${name}.W_O`, heads, m));
      const more = mlp(W, c, `${block}.mlp`, norm(W, c, `${block}.norm_2`, x), m);
      layer.mlp.put(n * C, more);
      x = added(x, more);
    }
    this.last.put(n * C, x);
  }

  embed(n) {
    const { W, c, ids, T, hidden } = this;
    const { C } = this.sizes;
    const E = W["token_embedding.weight"].data;
    let x = new Float32Array((T - n) * C);
    for (let t = n; t < T; t++) x.set(E.subarray(ids[t] * C, (ids[t] + 1) * C), (t - n) * C);
    const places = W["position_embedding.weight"]?.data;
    if (places) x = added(x, places.subarray(n * C, T * C));
    if (c.ngrams > 1)
      x = added(
        x,
        ngrams(W, c, ids, n, j => hidden.includes(j)),
      );
    return c.norm_embedding ? normalised(x, C, scalesOf(x, C, SMALLEST, false)) : x;
  }

  // What the heads of a layer gather from place n on, (m, H, d_v); their weights are kept.
  attend(l, q, n) {
    const { H, G, d_k, d_v } = this.sizes;
    const { T } = this;
    const layer = this.layers[l];
    const { data: k } = layer.k;
    const { data: v } = layer.v;
    const heads = new Float32Array((T - n) * H * d_v);
    const root = Math.sqrt(d_k);
    for (let h = 0; h < H; h++) {
      const g = Math.floor(h / (H / G));
      const silent = this.off.has(`L${l}H${h}`);
      for (let i = n; i < T; i++) {
        const row = new Float32Array(i + 1);
        const z = ((i - n) * H + h) * d_v;
        let most = -Infinity;
        let whole = 0;
        for (let j = 0; j <= i; j++) {
          let sum = 0;
          for (let k_ = 0, a = ((i - n) * H + h) * d_k, b = (j * G + g) * d_k; k_ < d_k; k_++)
            sum += q[a + k_] * k[b + k_];
          row[j] = this.hidden.includes(j) && j < i ? -Infinity : sum / root;
          most = Math.max(most, row[j]);
        }
        for (let j = 0; j <= i; j++) whole += row[j] = Math.exp(row[j] - most);
        for (let j = 0; j <= i; j++) {
          row[j] /= whole;
          for (let k_ = 0, b = (j * G + g) * d_v; !silent && k_ < d_v; k_++)
            heads[z + k_] += row[j] * v[b + k_];
        }
        layer.weights[h].put((i * (i + 1)) / 2, row);
      }
    }
    return heads;
  }

  // Bring the norms up to the last token.
  measure() {
    const { W, T, measured: n, sizes } = this;
    const { H, G, C, d_v } = sizes;
    const m = T - n;
    this.layers.forEach(({ v, norms }, l) =>
      norms.forEach((rows, h) => {
        const g = Math.floor(h / (H / G));
        const all = new Float32Array(m * H * d_v);
        for (let j = 0; j < m; j++) {
          const from = ((n + j) * G + g) * d_v;
          all.set(v.data.subarray(from, from + d_v), (j * H + h) * d_v);
        }
        const wrote = written(W, `blocks.${l}.attention`, h, all, m, sizes);
        rows.put(
          n,
          Float32Array.from({ length: m }, (_, j) =>
            Math.hypot(...wrote.subarray(j * C, (j + 1) * C)),
          ),
        );
      }),
    );
    this.measured = T;
  }

  // Logits (T - n, V) from place n on.
  logits(n = 0) {
    return logitsOf(this.W, this.c, this.of(this.last, this.sizes.C).subarray(n * this.sizes.C));
  }

  // What wrote to the residual stream, in order: [{name, layer, wrote (T, C)}].
  parts() {
    const { W, T, layers, sizes } = this;
    const { L, H, C, d_v } = sizes;
    const found = [{ name: "embedding", layer: -1, wrote: this.of(layers[0].x, C) }];
    for (let l = 0; l < L; l++) {
      const name = `blocks.${l}.attention`;
      const bias = repeated(W[`${name}.W_O.bias`]?.data, T);
      for (let h = 0; h < H; h++) {
        const wrote = written(W, name, h, this.of(layers[l].heads, H * d_v), T, sizes);
        found.push({ name: `L${l}H${h}`, layer: l, wrote });
      }
      if (bias) found.push({ name: `L${l} bias`, layer: l, wrote: bias });
      found.push({ name: `L${l} MLP`, layer: l, wrote: this.of(layers[l].mlp, C) });
    }
    return found;
  }
}

// The output layer's weight (V, C), the embedding's where they are one.
export const headOf = W => W["head.weight"] ?? W["token_embedding.weight"];

// Logits (n, V) of what a block gives, x (n, C).
export const logitsOf = (W, c, x) =>
  linear({ "head.weight": headOf(W) }, "head", norm(W, c, "norm", x), x.length / c.n_embd);
