/** The forward pass of the model on a text that is edited: tokens before an edit are cached. */

import {
  applyGates,
  entryFor,
  feedForward,
  headOutput,
  linear,
  logitsOf,
  norm,
  normalizeEmbedding,
  project,
  rotateHeads,
  sizesOf,
} from "./layers.js";

/** A sink's logit is its parameter times this (variants.py). */
const SINK_SCALE = 10;

/** Rows of numbers that grow, and are overwritten from a place on. */
class GrowingRows {
  constructor() {
    this.data = new Float32Array(256);
  }

  write(place, numbers) {
    if (place + numbers.length > this.data.length) {
      const larger = new Float32Array(2 * (place + numbers.length));
      larger.set(this.data);
      this.data = larger;
    }
    this.data.set(numbers, place);
  }
}

/** @returns {Float32Array} x plus other arrays of its length. */
function add(x, ...others) {
  const sum = x.slice();
  for (const other of others) {
    for (let k = 0; k < sum.length; k++) sum[k] += other[k];
  }
  return sum;
}

/** Repeat a row (C) for each of n tokens, (n, C); return null without a row. */
export function repeatRow(row, n) {
  if (!row) return null;
  return Float32Array.from({ length: n * row.length }, (_, k) => row[k % row.length]);
}

/** The activations of a model that reads a text, with some heads ablated and tokens hidden. */
export class ForwardPass {
  /**
   * @param {Weights} weights
   * @param {GPTConfig} config
   * @param {string[]} off - Names of ablated heads, as "L1H3".
   */
  constructor(weights, config, off) {
    const sizes = sizesOf(config);
    const ofEachHead = () => Array.from({ length: sizes.H }, () => new GrowingRows());
    this.weights = weights;
    this.config = config;
    this.sizes = sizes;
    this.off = new Set(off);
    /** @type {Tap} */
    this.tap = () => {};
    this.ids = [];
    this.hidden = [];
    this.predictions = []; // of requests.js, for each token before an edit
    this.measuredNorms = 0; // tokens whose norms are up to date
    this.output = new GrowingRows(); // after the last block, (T, C)
    this.layers = Array.from({ length: sizes.L }, () => ({
      x: new GrowingRows(), // input of the block, (T, C)
      k: new GrowingRows(), // keys, (T, G, d_k)
      v: new GrowingRows(), // values, (T, G, d_v)
      gathered: new GrowingRows(), // per-head outputs before W_O, (T, H, d_v)
      mlp: new GrowingRows(), // what the MLP wrote, (T, C)
      attention: ofEachHead(), // attention weights, the lower triangle row after row
      norms: ofEachHead(), // ‖v_j W_O‖ of each token, (T)
    }));
  }

  get T() {
    return this.ids.length;
  }

  /** Return the rows (T, width) of one of the activations. */
  rowsOf(rows, width) {
    return rows.data.subarray(0, this.T * width);
  }

  /** Return the attention weights of head k = layer · H + head: a lower triangle, row after row. */
  patternOf(k) {
    const { attention } = this.layers[Math.floor(k / this.sizes.H)];
    return attention[k % this.sizes.H].data.subarray(0, (this.T * (this.T + 1)) / 2);
  }

  /** Read ids with some tokens hidden from all later ones. */
  read(ids, hidden = []) {
    const start = this.firstChange(ids, hidden);
    this.ids = [...ids];
    this.hidden = [...hidden];
    this.measuredNorms = Math.min(this.measuredNorms, start);
    this.predictions.length = Math.min(this.predictions.length, start);
    if (start === this.T) return;
    this.runBlocks(0, this.embed(start), start);
  }

  /**
   * Run the blocks from `layer` on again, for the tokens from `start` on. What comes before is the
   * same as in another pass, whose text this pass takes.
   */
  runFrom(base, layer, start) {
    const { L, C, G, d_k, d_v } = this.sizes;
    Object.assign(this, { ids: base.ids, hidden: base.hidden, measuredNorms: 0, predictions: [] });
    for (let l = layer; l < L; l++) {
      const { k, v } = base.layers[l];
      this.layers[l].k.write(0, k.data.subarray(0, start * G * d_k));
      this.layers[l].v.write(0, v.data.subarray(0, start * G * d_v));
    }
    this.output.write(0, base.output.data.subarray(0, start * C));
    this.runBlocks(layer, base.rowsOf(base.layers[layer].x, C).slice(start * C), start);
  }

  /** Run the blocks from `layer` on over their input x (T - start, C). */
  runBlocks(layer, x, start) {
    let residual = x;
    for (let l = layer; l < this.sizes.L; l++) residual = this.runBlock(l, residual, start);
    this.output.write(start * this.sizes.C, residual);
  }

  firstChange(ids, hidden) {
    const changed = [
      ...hidden.filter(j => !this.hidden.includes(j)),
      ...this.hidden.filter(j => !hidden.includes(j)),
    ];
    const end = Math.min(this.T, ids.length, ...changed.map(j => j + 1));
    const edited = ids.slice(0, end).findIndex((id, t) => id !== this.ids[t]);
    return edited < 0 ? end : edited;
  }

  /** Return the embeddings of the tokens from `start` on, (T - start, C). */
  embed(start) {
    const { weights, config, ids, T } = this;
    const { C } = this.sizes;
    const E = weights["token_embedding.weight"].data;
    let x = /** @type {Float32Array} */ (new Float32Array((T - start) * C));
    for (let t = start; t < T; t++) {
      x.set(E.subarray(ids[t] * C, (ids[t] + 1) * C), (t - start) * C);
    }
    const positions = weights["position_embedding.weight"]?.data;
    if (positions) x = add(x, positions.subarray(start * C, T * C));
    return normalizeEmbedding(config, x);
  }

  /** Run block l on the residual stream x (T - start, C) of the tokens from `start` on. */
  runBlock(l, x, start) {
    const { weights, config } = this;
    const { H, G, C, d_k, d_v } = this.sizes;
    const layer = this.layers[l];
    const block = `blocks.${l}`;
    const name = `${block}.attention`;
    const n = this.T - start;
    this.tap("residual", l, x, start);
    const normalized = norm(weights, config, `${block}.norm_1`, x);
    const q = project(weights, config, name, "Q", normalized, n).y;
    const k = project(weights, config, name, "K", normalized, n).y;
    layer.x.write(start * C, x);
    layer.k.write(start * G * d_k, rotateHeads(config, k, G, start));
    layer.v.write(start * G * d_v, linear(weights, `${name}.W_V`, normalized, n));
    const attended = this.attend(l, rotateHeads(config, q, H, start), start);
    const gathered = applyGates(weights, config, name, attended, normalized, n);
    this.tap("heads", l, gathered, start);
    layer.gathered.write(start * H * d_v, gathered);
    const afterAttention = add(x, linear(weights, `${name}.W_O`, gathered, n));
    const mlpReads = entryFor(config, "parallel_mlp", { false: afterAttention, true: x });
    const mlpInput = norm(weights, config, `${block}.norm_2`, mlpReads);
    const mlpOutput = feedForward(weights, config, `${block}.mlp`, mlpInput, n);
    this.tap("mlp", l, mlpOutput, start);
    layer.mlp.write(start * C, mlpOutput);
    return add(afterAttention, mlpOutput);
  }

  /**
   * Attend with the queries q (T - start, H, d_k) of the tokens from `start` on, and store the
   * attention weights. Return what the heads gather, (T - start, H, d_v).
   */
  attend(l, q, start) {
    const { H, G, d_v } = this.sizes;
    const { T } = this;
    const layer = this.layers[l];
    const v = layer.v.data;
    const gathered = new Float32Array((T - start) * H * d_v);
    for (let h = 0; h < H; h++) {
      const g = Math.floor(h / (H / G));
      const isAblated = this.off.has(`L${l}H${h}`);
      for (let i = start; i < T; i++) {
        const row = this.attentionRow(l, q, i, start, h, g);
        const place = ((i - start) * H + h) * d_v;
        for (let j = 0; j <= i && !isAblated; j++) {
          const value = (j * G + g) * d_v;
          for (let k = 0; k < d_v; k++) gathered[place + k] += row[j] * v[value + k];
        }
        layer.attention[h].write((i * (i + 1)) / 2, row);
      }
    }
    return gathered;
  }

  /** Return the attention weights of query i of head h of layer l over the tokens 0 … i. */
  attentionRow(l, q, i, start, h, g) {
    const { H, G, d_k } = this.sizes;
    const keys = this.layers[l].k.data;
    const hasSink = entryFor(this.config, "attention_sink", { false: false, true: true });
    const sinks = this.weights[`blocks.${l}.attention.sink`];
    const sinkScore = hasSink ? SINK_SCALE * sinks.data[h] : -Infinity;
    const scale = Math.sqrt(d_k);
    const query = ((i - start) * H + h) * d_k;
    const row = new Float32Array(i + 1);
    let largest = sinkScore;
    for (let j = 0; j <= i; j++) {
      const key = (j * G + g) * d_k;
      let score = 0;
      for (let k = 0; k < d_k; k++) score += q[query + k] * keys[key + k];
      row[j] = this.hidden.includes(j) && j < i ? -Infinity : score / scale;
      largest = Math.max(largest, row[j]);
    }
    let total = Math.exp(sinkScore - largest);
    for (let j = 0; j <= i; j++) {
      row[j] = Math.exp(row[j] - largest);
      total += row[j];
    }
    for (let j = 0; j <= i; j++) row[j] /= total;
    return row;
  }

  measureNorms() {
    const { weights, T, sizes, measuredNorms: start } = this;
    const { H, G, C, d_v } = sizes;
    const n = T - start;
    this.layers.forEach(({ v, norms }, l) => {
      norms.forEach((rows, h) => {
        const g = Math.floor(h / (H / G));
        const values = v.data.subarray((start * G + g) * d_v);
        const wrote = headOutput(weights, `blocks.${l}.attention`, h, values, G * d_v, n, sizes);
        const normOf = j => Math.hypot(...wrote.subarray(j * C, (j + 1) * C));
        rows.write(
          start,
          Float32Array.from({ length: n }, (_, j) => normOf(j)),
        );
      });
    });
    this.measuredNorms = T;
  }

  /** Return the final residual stream after the last norm, (T, C). */
  normalizedOutput() {
    return norm(this.weights, this.config, "norm", this.rowsOf(this.output, this.sizes.C));
  }

  /** Return the logits of the tokens from `start` on, (T - start, V). */
  logits(start = 0) {
    const { C } = this.sizes;
    const x = this.rowsOf(this.output, C).subarray(start * C);
    return logitsOf(this.weights, this.config, x);
  }

  /** Return what each component wrote to the residual stream, (T, C), in order. */
  components() {
    const { weights, T, layers, sizes } = this;
    const { L, H, C, d_v } = sizes;
    const components = [{ name: "embedding", layer: -1, wrote: this.rowsOf(layers[0].x, C) }];
    for (let l = 0; l < L; l++) {
      const name = `blocks.${l}.attention`;
      const gathered = this.rowsOf(layers[l].gathered, H * d_v);
      for (let h = 0; h < H; h++) {
        const values = gathered.subarray(h * d_v);
        const wrote = headOutput(weights, name, h, values, H * d_v, T, sizes);
        components.push({ name: `L${l}H${h}`, layer: l, wrote });
      }
      const bias = repeatRow(weights[`${name}.W_O.bias`]?.data, T);
      if (bias) components.push({ name: `L${l}bias`, layer: l, wrote: bias });
      components.push({ name: `L${l}MLP`, layer: l, wrote: this.rowsOf(layers[l].mlp, C) });
    }
    return components;
  }
}
