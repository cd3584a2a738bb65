/** The values of one probe at one step, stored in the page or computed by the model. */

import { PREDICTED_TOKENS } from "../engine/logits.js";
import { decodeSplitHalves, splitArray, unpack } from "../engine/packed.js";

/** A byte holds 256 levels, from 0 to the largest weight of its row (glass/page/pack.py). */
const LEVELS = 255;

const DIRECT_TARGETS = 6; // the true next token and the predicted ones
const WRITTEN_TOKENS = 6; // three promoted and three suppressed tokens of each head

/** Token effects below this many nats are drawn pale. */
export const MIN_CLEAR_EFFECT_NATS = 0.1;

const triangleLength = T => (T * (T + 1)) / 2;
const cellIndex = (i, j) => (i * (i + 1)) / 2 + j;

/** Attention weights of all heads, read cell by cell. */
export class Cells {
  signed = false; // whether the values are token effects, which have a sign
  firstToken = 0; // first row and column that are shown

  norms = null; // ‖v W_O‖ of each token, (L, H, T)
  firstWeights = null; // weights on the first token, (L, H, T), if they are not in the triangles
  units = null; // what the values of each row are multiples of, (L, H, T)
  /** The same without the first token, once that has been shown. @type {Cells | null} */
  withoutFirst = null;

  /**
   * `largest` is the top of the color scale, the same at every step. `triangles` has the values of
   * each head, layer · H + head: a lower triangle, row after row.
   */
  constructor({ L, H, tokens, largest, triangles, ...others }) {
    this.L = L;
    this.H = H;
    this.T = tokens.length;
    this.tokens = tokens;
    this.largest = largest;
    this.triangles = triangles;
    Object.assign(this, others);
  }

  /** Return whether the values of a head have arrived; until then they are NaN. */
  hasPattern(l, h) {
    return this.triangles[l * this.H + h] !== undefined;
  }

  at(l, h, i, j) {
    const row = (l * this.H + h) * this.T + i;
    if (j === 0 && this.firstWeights) return this.firstWeights[row];
    const value = this.triangles[l * this.H + h]?.[cellIndex(i, j)] ?? Number.NaN;
    return this.units ? value * this.units[row] : value;
  }

  bound(l, h, i, j) {
    return this.units && j > 0 ? this.units[(l * this.H + h) * this.T + i] : 0;
  }
}

/** Decode the attention weights of a probe at a step (`pack_maps` of glass/page/pack.py). */
export async function decodeAttention([weights, norms], [L, H], { T, tokens, maps }) {
  const bytes = await unpack(weights);
  const rowCount = L * H * T;
  const codes = bytes.subarray(8 * rowCount);
  const triangle = triangleLength(T);
  return new Cells({
    L,
    H,
    tokens,
    largest: Math.max(...maps.map(([, , largest]) => largest)),
    triangles: Array.from({ length: L * H }, (_, k) =>
      codes.subarray(k * triangle, (k + 1) * triangle),
    ),
    norms: new Float32Array((await unpack(norms)).buffer),
    firstWeights: new Float32Array(bytes.buffer, 0, rowCount),
    units: new Float32Array(bytes.buffer, 4 * rowCount, rowCount).map(max => max / LEVELS),
  });
}

/**
 * The predictions after each token: token effects by cell, and what explains the predictions. What
 * was not measured is NaN.
 */
export class Predictions extends Cells {
  signed = true;
  lacksHeadEffects = false; // they were not measured
  requested = { breakdown: "", headEffects: null, tokenEffects: false }; // of the model, for it
  was = null; // chances and losses of each token without interventions, if there are any
  off = []; // ablated heads
  hidden = []; // hidden tokens

  /**
   * Numbers and ids are ordered as by `pack_predictions` of glass/page/pack.py; `step` is the
   * training step at which they were measured.
   */
  constructor({ L, H, tokens, step, largest }, numbers = undefined, ids = undefined) {
    const T = tokens.length;
    const componentCount = L * (H + 1) + 2; // embedding, heads and MLPs, biases
    const lengths = {
      effects: triangleLength(T),
      kl: triangleLength(T),
      headEffects: L * H * T,
      lens: (L + 1) * T,
      direct: componentCount * T * DIRECT_TARGETS,
      chances: T * PREDICTED_TOKENS,
    };
    const count = Object.values(lengths).reduce((a, b) => a + b);
    const arrays = splitArray(numbers ?? new Float32Array(count).fill(Number.NaN), lengths);
    super({ L, H, tokens, largest, triangles: [arrays.effects] });
    const idLengths = { next: T * PREDICTED_TOKENS, writes: L * H * T * WRITTEN_TOKENS };
    const idCount = idLengths.next + idLengths.writes;
    this.step = step;
    this.componentCount = componentCount;
    this.arrays = arrays;
    this.ids = splitArray(ids ?? new Int32Array(idCount).fill(-1), idLengths);
    const rowsOf = values =>
      tokens.map((_, i) => [...values.subarray(i * PREDICTED_TOKENS, (i + 1) * PREDICTED_TOKENS)]);
    this.next = rowsOf(this.ids.next);
    this.chances = rowsOf(arrays.chances);
  }

  at(_l, _h, i, j) {
    return super.at(0, 0, i, j);
  }

  kl(i, j) {
    return this.arrays.kl[cellIndex(i, j)];
  }

  /** Return the loss increase of the token after i without a head, in nats. */
  headEffect(l, h, i) {
    return this.arrays.headEffects[(l * this.H + h) * this.T + i];
  }

  /** Return the loss of the token after i if the model ended after block k (logit lens). */
  lens(k, i) {
    return this.arrays.lens[k * this.T + i];
  }

  loss(i) {
    return this.lens(this.L, i);
  }

  /** Return the probability of the token after i, and `was` without the interventions. */
  following(i) {
    const was = this.was ? Math.exp(-this.was.losses[i]) : undefined;
    return { chance: Math.exp(-this.loss(i)), was };
  }

  get losses() {
    return this.arrays.lens.subarray(this.L * this.T);
  }

  /** Return what a component adds to the logit of a predicted token after token i. */
  direct(component, i, id) {
    const target = 1 + this.next[i].slice(0, PREDICTED_TOKENS).indexOf(id); // 0: no likeliest one
    return this.arrays.direct[(component * this.T + i) * DIRECT_TARGETS + target];
  }

  /**
   * Return the likeliest tokens after token i and their probabilities. With interventions, the
   * likeliest without them follow, and `was` has the probabilities without them.
   */
  predicted(i) {
    const predicted = this.next[i].map((id, k) => ({
      id,
      chance: this.chances[i][k],
      was: this.was?.chances[i][k],
    }));
    return predicted.filter(({ id }, k) => id >= 0 && this.next[i].indexOf(id) === k);
  }

  /** Return the next token that is the likeliest after token i without interventions. */
  likeliest(i) {
    const chance = prediction => prediction.was ?? prediction.chance;
    return this.predicted(i).reduce((a, b) => (chance(b) > chance(a) ? b : a));
  }

  /** Return the tokens that a head promotes, and those that it suppresses. */
  pushedTokens(l, h, i) {
    const start = ((l * this.H + h) * this.T + i) * WRITTEN_TOKENS;
    return [...this.ids.writes.subarray(start, start + WRITTEN_TOKENS)];
  }

  hasBreakdown(i) {
    return !Number.isNaN(this.direct(0, i, 0));
  }

  // ---- what the model answers about the reader's own text

  /** Add the answer of the request `read`, with some heads ablated and some tokens hidden. */
  addRead({ next, chances, losses, was }, off, hidden) {
    const { T } = this;
    Object.assign(this, { next, chances, was, off, hidden });
    for (let i = 0; i < T; i++) {
      this.arrays.effects[cellIndex(i, i)] = 0;
      for (const j of hidden) if (j < i && i + 1 < T) this.addTokenEffect(i, j, 0, 0);
    }
    this.losses.set(losses);
  }

  addTokenEffect(i, j, effect, kl) {
    this.arrays.effects[cellIndex(i, j)] = effect;
    this.arrays.kl[cellIndex(i, j)] = kl;
    this.largest = Math.max(this.largest, Math.abs(effect) || 0);
  }

  addTokenEffects({ j, effects, kl }) {
    for (let k = 0; k < effects.length; k++) this.addTokenEffect(j + 1 + k, j, effects[k], kl[k]);
  }

  addHeadEffects(i, { heads, nats }) {
    heads.forEach((k, n) => {
      this.arrays.headEffects[k * this.T + i] = nats[n];
    });
  }

  addBreakdown({ i, of: [layer, head], lens, direct, writes }) {
    const { T, H } = this;
    for (let k = 0; k < lens.length; k++) this.arrays.lens[k * T + i] = lens[k];
    direct.forEach((targets, component) => {
      this.arrays.direct.set(targets, (component * T + i) * DIRECT_TARGETS);
    });
    this.ids.writes.set(writes, ((layer * H + head) * T + i) * WRITTEN_TOKENS);
  }
}

/** Decode the predictions of a probe at a step (`pack_predictions` of glass/page/pack.py). */
export async function decodePredictions([numbers, ids], [L, H], probe, step) {
  const { T, tokens, tokenEffects } = probe;
  const largest = Math.max(...tokenEffects.map(stored => stored?.[2] ?? 0));
  const predictions = new Predictions(
    { L, H, tokens, step, largest },
    decodeSplitHalves(await unpack(numbers)),
    new Int32Array((await unpack(ids)).buffer),
  );
  // Only the last tokens of a long text are explained; the others have no number.
  const isExplained = Array.from({ length: T }, (_, i) => !Number.isNaN(predictions.kl(i, i)));
  predictions.firstToken = isExplained.indexOf(true);
  predictions.lacksHeadEffects = T > 1 && Number.isNaN(predictions.headEffect(0, 0, T - 2));
  return predictions;
}
