// The forward pass of one text over typed arrays, as model.py has it: the same names, shapes in comments. Knows nothing
// of the page. A matrix (n, m) is an array of n · m numbers, row after row. Letters: T tokens, C channels, H query
// heads, G key/value heads, d_k and d_v the sizes of a query and a value, V the vocabulary.

const SMALLEST = 2 ** -23; // float32's epsilon, as torch adds it where a norm names none
const ROPE_LOW = 1, ROPE_HIGH = 4;

// The sizes that a configuration (config.py) leaves to others.
function sizesOf(c) {
  const G = c.n_kv_head ?? c.n_head, d_k = c.head_dim ?? Math.floor(c.n_embd / c.n_head), d_v = c.value_head_dim ?? d_k;
  return { L: c.n_layer, H: c.n_head, G, C: c.n_embd, d_k, d_v };
}

// x (n, in) → (n, out), by the weight (out, in) of this name and its bias, where there is one.
function linear(W, name, x, n) {
  const { shape: [out, size], data } = W[`${name}.weight`], bias = W[`${name}.bias`]?.data;
  const y = new Float64Array(n * out);
  for (let i = 0; i < n; i++) for (let o = 0; o < out; o++) {
    let sum = bias ? bias[o] : 0;
    for (let k = 0, a = i * size, b = o * size; k < size; k++) sum += x[a + k] * data[b + k];
    y[i * out + o] = sum;
  }
  return y;
}

// What normalises each of the rows x (n, C): `scales` (n), which it multiplies by, and `centred`, whether it takes the
// mean away first.
function scalesOf(x, C, eps, centred) {
  const n = x.length / C, scales = new Float64Array(n);
  for (let i = 0; i < n; i++) {
    const row = x.subarray(i * C, (i + 1) * C), mean = centred ? row.reduce((a, b) => a + b, 0) / C : 0;
    scales[i] = 1 / Math.sqrt(row.reduce((sum, v) => sum + (v - mean) ** 2, 0) / C + eps);
  }
  return { scales, centred };
}

// x (n, C) normalised by scales that may be another's: a linear map, but for the bias.
function normalised(x, C, { scales, centred }, gain = null, bias = null) {
  const y = new Float64Array(x.length);
  for (let i = 0; i < scales.length; i++) {
    let mean = 0;
    if (centred) { for (let k = 0; k < C; k++) mean += x[i * C + k]; mean /= C; }
    for (let k = 0; k < C; k++) {
      y[i * C + k] = (x[i * C + k] - mean) * scales[i] * (gain ? gain[k] : 1) + (bias ? bias[k] : 0);
    }
  }
  return y;
}

const scalesHere = (c, x) => scalesOf(x, c.n_embd, c.norm_eps, c.norm === "layernorm");
const norm = (W, c, name, x) =>
  normalised(x, c.n_embd, scalesHere(c, x), W[`${name}.weight`]?.data, W[`${name}.bias`]?.data);

// Radians that each pair of numbers turns by from one position to the next, (d_k/2).
function frequencies(c, d_k) {
  return Array.from({ length: d_k / 2 }, (_, k) => {
    const plain = c.rope_theta ** (-2 * k / d_k);
    if (c.rope_factor === 1) return plain;
    const turns = (c.rope_trained ?? 0) / (2 * Math.PI / plain);
    const kept = Math.max(0, Math.min(1, (turns - ROPE_LOW) / (ROPE_HIGH - ROPE_LOW)));
    return (1 - kept) * plain / c.rope_factor + kept * plain;
  });
}

// Turns the pairs (x_i, x_{i + d/2}) of each head's vectors x (T, heads, d_k) by their positions' angles, in place.
function rotate(x, T, heads, d_k, of) {
  const half = d_k / 2;
  for (let t = 0; t < T; t++) for (let k = 0; k < half; k++) {
    const cos = Math.cos(t * of[k]), sin = Math.sin(t * of[k]);
    for (let h = 0; h < heads; h++) {
      const a = (t * heads + h) * d_k + k, b = a + half, [u, v] = [x[a], x[b]];
      x[a] = u * cos - v * sin;
      x[b] = v * cos + u * sin;
    }
  }
  return x;
}

const silu = x => x / (1 + Math.exp(-x));
const gelu = x => 0.5 * x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3)));

function mlp(W, c, name, x, T) {
  const h = linear(W, `${name}.W_in`, x, T), gate = c.mlp === "swiglu" ? linear(W, `${name}.W_gate`, x, T) : null;
  const active = h.map((v, k) => gate ? silu(gate[k]) * v : c.mlp === "relu2" ? Math.max(0, v) ** 2 : gelu(v));
  return linear(W, `${name}.W_out`, active, T);
}

// The queries (T, H, d_k) or keys (T, G, d_k) of normalised inputs x (T, C), whole; `scales` of their norms, where the
// configuration has one, are kept for `why`.
function projected(W, c, name, which, x, T) {
  const { H, G, d_k } = sizesOf(c), heads = which === "Q" ? H : G;
  let y = linear(W, `${name}.W_${which}`, x, T), scales = null;
  if (c.qk_norm) {
    scales = scalesOf(y, d_k, c.qk_norm === "gains" ? c.norm_eps : SMALLEST, false);
    y = normalised(y, d_k, scales, W[`${name}.norm_${which.toLowerCase()}.weight`]?.data);
  }
  if (c.position === "rope") rotate(y, T, heads, d_k, frequencies(c, d_k));
  return { y, scales };
}

// What the heads of a layer gather, (T, H, d_v), and their weights (H, T, T), of queries, keys and values.
function attend(q, k, v, T, { H, G, d_k, d_v }) {
  const weights = new Float64Array(H * T * T), heads = new Float64Array(T * H * d_v), root = Math.sqrt(d_k);
  for (let h = 0; h < H; h++) {
    const g = Math.floor(h / (H / G));
    for (let i = 0; i < T; i++) {
      const row = weights.subarray((h * T + i) * T, (h * T + i) * T + i + 1);
      for (let j = 0; j <= i; j++) {
        let sum = 0;
        for (let n = 0; n < d_k; n++) sum += q[(i * H + h) * d_k + n] * k[(j * G + g) * d_k + n];
        row[j] = sum / root;
      }
      const most = row.reduce((a, b) => Math.max(a, b), -Infinity);
      let whole = 0;
      for (let j = 0; j <= i; j++) whole += row[j] = Math.exp(row[j] - most);
      for (let j = 0; j <= i; j++) {
        row[j] /= whole;
        for (let n = 0; n < d_v; n++) heads[(i * H + h) * d_v + n] += row[j] * v[(j * G + g) * d_v + n];
      }
    }
  }
  return { weights, heads };
}

// What each head writes, [(T, C)] of H, of what all gathered, (T, H, d_v).
function written(W, name, heads, T, { H, C, d_v }) {
  const W_O = W[`${name}.W_O.weight`].data;
  return Array.from({ length: H }, (_, h) => {
    const y = new Float64Array(T * C);
    for (let t = 0; t < T; t++) for (let c = 0; c < C; c++) {
      let sum = 0;
      for (let n = 0, a = (t * H + h) * d_v, b = (c * H + h) * d_v; n < d_v; n++) sum += heads[a + n] * W_O[b + n];
      y[t * C + c] = sum;
    }
    return y;
  });
}

function added(x, ...others) {
  const y = x.slice();
  for (const other of others) for (let k = 0; k < y.length; k++) y[k] += other[k];
  return y;
}

// The same row for each of T tokens, (T, C); none without a row.
const repeated = (row, T) => row ? Float64Array.from({ length: T * row.length }, (_, k) => row[k % row.length]) : null;

// All of a pass over ids: `logits` (T, V); `layers`, each with its input `x` (T, C) and its attention `weights`
// (H, T, T); and `parts`, [{name, layer, wrote (T, C)}], that wrote to the residual stream, in order.
function forward(W, c, ids) {
  const T = ids.length, sizes = sizesOf(c), { L, C } = sizes, E = W["token_embedding.weight"].data;
  let x = Float64Array.from({ length: T * C }, (_, k) => E[ids[Math.floor(k / C)] * C + k % C]);
  const places = W["position_embedding.weight"]?.data;
  if (places) for (let k = 0; k < T * C; k++) x[k] += places[k];
  if (c.norm_embedding) x = normalised(x, C, scalesOf(x, C, SMALLEST, false));
  const parts = [{ name: "embedding", layer: -1, wrote: x }], layers = [];
  for (let l = 0; l < L; l++) {
    const block = `blocks.${l}`, name = `${block}.attention`, inside = norm(W, c, `${block}.norm_1`, x); // (T, C)
    const [q, k] = ["Q", "K"].map(which => projected(W, c, name, which, inside, T).y);
    const { weights, heads } = attend(q, k, linear(W, `${name}.W_V`, inside, T), T, sizes);
    layers.push({ x, weights });
    const wrote = written(W, name, heads, T, sizes), bias = repeated(W[`${name}.W_O.bias`]?.data, T);
    wrote.forEach((one, h) => parts.push({ name: `L${l}H${h}`, layer: l, wrote: one }));
    if (bias) parts.push({ name: `L${l} bias`, layer: l, wrote: bias });
    x = added(x, ...wrote, ...bias ? [bias] : []);
    const more = mlp(W, c, `${block}.mlp`, norm(W, c, `${block}.norm_2`, x), T);
    parts.push({ name: `L${l} MLP`, layer: l, wrote: more });
    x = added(x, more);
  }
  const head = W["head.weight"] ? "head" : "token_embedding";
  return { T, layers, parts, logits: linear({ "head.weight": W[`${head}.weight`] }, "head", norm(W, c, "norm", x), T) };
}
