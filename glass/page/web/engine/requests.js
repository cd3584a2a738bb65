/** The requests that the worker answers: the model at several steps, read with interventions. */

import { breakDown } from "./breakdown.js";
import { findHidden, placesRead, sample } from "./decoding.js";
import { ForwardPass } from "./forward.js";
import { outputWeight } from "./layers.js";
import { argTop, logNormalizers, PREDICTED_TOKENS } from "./logits.js";
import { inflate, unpackWeights } from "./packed.js";
import { attributeScore } from "./score_attribution.js";
import { createTokenizer } from "./tokenizer.js";

const MAX_CACHED_PASSES = 6;
const MAX_PART_NUMBERS = 1 << 20; // of a part of attention patterns

export const session = { config: null, tokenizer: null, tensors: null };

export const models = new Map();

/** Forward passes by what they read, the least recently used first. */
export const passes = new Map();

export async function startSession({ config, tokenizer, tensors }) {
  const saved = JSON.parse(new TextDecoder().decode(await inflate(tokenizer)));
  Object.assign(session, { config, tensors, tokenizer: createTokenizer(saved) });
}

export async function loadWeights(step, packed) {
  models.set(step, unpackWeights(session.tensors, await inflate(packed)));
}

/**
 * Return the cached forward pass of a step with these heads ablated, or a new one. Passes of
 * different names do not evict each other's tokens.
 */
function cachedPass({ step, off = [], cacheName = "" }) {
  const key = JSON.stringify([step, [...off].sort(), cacheName]);
  const pass = passes.get(key) ?? new ForwardPass(models.get(step), session.config, off);
  passes.delete(key);
  passes.set(key, pass);
  if (passes.size > MAX_CACHED_PASSES) passes.delete(passes.keys().next().value);
  return pass;
}

/** Run the model on an input; tokens before an edit are cached. */
export function runModel(input) {
  const pass = cachedPass(input);
  pass.read(input.ids, input.hidden);
  return pass;
}

/**
 * Return the prediction after each token: the likeliest ids, the id that follows and its loss. Those
 * before an edit are cached.
 */
function predict(pass) {
  const { T, ids, predictions } = pass;
  const V = session.config.vocab_size;
  const last = predictions.length - 1;
  if (last >= 0 && predictions[last].follows !== ids[last + 1]) predictions.pop();
  const start = predictions.length;
  const logits = pass.logits(start);
  const normalizers = logNormalizers(logits, V);
  for (let t = start; t < T; t++) {
    const row = logits.subarray((t - start) * V, (t - start + 1) * V);
    const logNormalizer = normalizers[t - start];
    predictions.push({
      logNormalizer,
      next: argTop(row, PREDICTED_TOKENS),
      follows: ids[t + 1],
      loss: t + 1 < T ? logNormalizer - row[ids[t + 1]] : Number.NaN,
    });
  }
  return predictions;
}

/** Return the loss of the token after i, in nats. */
function lossAfter(pass, i) {
  const row = pass.logits(i).subarray(0, session.config.vocab_size);
  return logNormalizers(row, row.length)[0] - row[pass.ids[i + 1]];
}

/** Return the probabilities that a pass gives to some ids after each token, and its losses. */
function measurePredictions(pass, ids) {
  const { C } = pass.sizes;
  const x = pass.normalizedOutput();
  const { data: E } = outputWeight(pass.weights);
  const chances = pass.predictions.map(({ logNormalizer }, t) =>
    ids[t].map(id => {
      let logit = 0;
      for (let k = 0; k < C; k++) logit += x[t * C + k] * E[id * C + k];
      return Math.exp(logit - logNormalizer);
    }),
  );
  return { chances, losses: pass.predictions.map(({ loss }) => loss) };
}

/**
 * Return the norms of what each head writes of each token, (L, H, T), and their largest product with
 * an attention weight.
 */
function measureNorms(pass) {
  const { T } = pass;
  const { L, H } = pass.sizes;
  const norms = new Float32Array(L * H * T);
  let largest = 0;
  pass.measureNorms();
  for (let k = 0; k < L * H; k++) {
    const headNorms = pass.layers[Math.floor(k / H)].norms[k % H].data.subarray(0, T);
    const attention = pass.patternOf(k);
    norms.set(headNorms, k * T);
    for (let i = 0; i < T; i++) {
      const row = (i * (i + 1)) / 2;
      for (let j = 0; j <= i; j++) largest = Math.max(largest, attention[row + j] * headNorms[j]);
    }
  }
  return { norms, largest };
}

export const textsOf = ids =>
  Object.fromEntries(ids.map(id => [id, session.tokenizer.tokenText(id)]));

/**
 * Measure the effects of hiding token j on all later predictions, in nats.
 *
 * @param {ForwardPass} pass - Has read the text.
 * @param {Input} input
 * @param {number} j
 * @param {{logits: Float32Array, normalizers: Float64Array}} plain - Of the whole text.
 */
function hideToken(pass, { ids, hidden }, j, plain) {
  const V = session.config.vocab_size;
  pass.read(ids, [...hidden, j]);
  const logits = pass.logits(j + 1);
  const normalizers = logNormalizers(logits, V);
  const effects = [];
  const kl = [];
  for (let i = j + 1; i < ids.length; i++) {
    const row = i * V;
    const hiddenRow = (i - j - 1) * V;
    const logP = id => plain.logits[row + id] - plain.normalizers[i];
    const logQ = id => logits[hiddenRow + id] - normalizers[i - j - 1];
    let divergence = 0;
    for (let id = 0; id < V; id++) divergence += Math.exp(logP(id)) * (logP(id) - logQ(id));
    const next = ids[i + 1];
    effects.push(i + 1 < ids.length ? logP(next) - logQ(next) : Number.NaN);
    kl.push(divergence);
  }
  return { j, effects, kl };
}

/**
 * What answers each request, by its name. A handler receives the parameters, a function that sends
 * partial answers, and one that lets the worker receive messages and then tells whether the request
 * was canceled.
 *
 * @type {Record<string, Handler>}
 */
export const HANDLERS = {
  /** Return the ids with which the model reads a text. */
  encode({ text }) {
    const ids = session.tokenizer.encode(text);
    return ids.length ? ids : [session.tokenizer.startToken];
  },

  decode: ({ ids }) => session.tokenizer.decode(ids),
  tokenTexts: ({ ids }) => ids.map(id => session.tokenizer.tokenText(id)),

  /** Return logits (T, V). */
  logits: input => runModel(input).logits(),

  /** Return attention weights (L, H, T, T). */
  maps(input) {
    const pass = runModel(input);
    const { T } = pass;
    const { L, H } = pass.sizes;
    const maps = new Float32Array(L * H * T * T);
    for (let k = 0; k < L * H; k++) {
      const pattern = pass.patternOf(k);
      for (let i = 0; i < T; i++) {
        const row = (i * (i + 1)) / 2;
        maps.set(pattern.subarray(row, row + i + 1), (k * T + i) * T);
      }
    }
    return maps;
  },

  /**
   * Return norms and predictions. With interventions, the likeliest tokens without them follow in
   * `next`, and `was` has the predictions without them.
   */
  read(input) {
    const pass = runModel(input);
    let next = predict(pass).map(prediction => prediction.next);
    let was = null;
    if (input.off.length || input.hidden.length) {
      // It has a pass of its own, so that the one above still has the attention patterns.
      const cacheName = input.off.length ? "" : "without hidden tokens";
      const plain = runModel({ ...input, off: [], hidden: [], cacheName });
      const before = predict(plain);
      next = next.map((ids, t) => [...ids, ...before[t].next]);
      was = measurePredictions(plain, next);
    }
    const predictions = measurePredictions(pass, next);
    return { ...measureNorms(pass), ...predictions, next, was, words: textsOf(next.flat()) };
  },

  /** Send the attention patterns of heads, in their order: lower triangles, row after row. */
  async patterns({ heads, ...input }, sendPart, isCanceled) {
    const triangle = (input.ids.length * (input.ids.length + 1)) / 2;
    const count = Math.max(1, Math.floor(MAX_PART_NUMBERS / triangle));
    for (let start = 0; start < heads.length; start += count) {
      const part = heads.slice(start, start + count);
      const pass = runModel(input);
      const maps = new Float32Array(part.length * triangle);
      part.forEach((k, n) => {
        maps.set(pass.patternOf(k), n * triangle);
      });
      sendPart({ heads: part, maps });
      if (await isCanceled()) return;
    }
  },

  breakDown({ i, of, answer, ...input }) {
    const breakdown = breakDown(runModel(input), i, of, answer, PREDICTED_TOKENS);
    return { ...breakdown, words: textsOf([...breakdown.targets, ...breakdown.writes]) };
  },

  /** Send the loss increase of the token after i without each head (zero ablation), in nats. */
  async headEffects({ i, ...input }, sendPart, isCanceled) {
    const ids = input.ids.slice(0, i + 2);
    const base = runModel({ ...input, ids, cacheName: "head effects" });
    const before = lossAfter(base, i);
    const { L, H } = base.sizes;
    for (let l = 0; l < L; l++) {
      const nats = [];
      for (let h = 0; h < H; h++) {
        const pass = new ForwardPass(base.weights, base.config, [...input.off, `L${l}H${h}`]);
        pass.runFrom(base, l, 0);
        nats.push(lossAfter(pass, i) - before);
        if (await isCanceled()) return;
      }
      sendPart({ heads: nats.map((_, h) => l * H + h), nats });
    }
  },

  /** Send the token effects (attention knockout), a hidden token at a time, the last first. */
  async tokenEffects(input, sendPart, isCanceled) {
    const pass = cachedPass({ ...input, cacheName: "token effects" });
    pass.read(input.ids, input.hidden);
    const logits = pass.logits();
    const plain = { logits, normalizers: logNormalizers(logits, session.config.vocab_size) };
    for (let j = input.ids.length - 2; j >= 0; j--) {
      if (input.hidden.includes(j)) continue;
      sendPart(hideToken(pass, input, j, plain));
      if (await isCanceled()) return;
    }
  },

  explainScore: ({ layer, head, i, j, ...input }) =>
    attributeScore(runModel(input), layer, head, i, j),

  /**
   * Send the text continued token by token up to its end, which the last part may say; beyond the
   * block size the window moves.
   */
  async continue({ temperature, maxTokens, ...input }, sendPart, isCanceled) {
    const ids = [...input.ids];
    for (let count = 0; count < maxTokens; count++) {
      const places = placesRead(ids, { maxTokens: session.config.block_size }, true);
      const hidden = findHidden(input.hidden, places);
      const read = places.map(place => ids[place]);
      const pass = runModel({ ...input, ids: read, hidden, cacheName: "continuation" });
      const logits = pass.logits(pass.T - 1);
      // A vocabulary may be padded with ids that are not tokens.
      const id = sample(logits.subarray(0, session.tokenizer.size), temperature);
      if (id === session.tokenizer.endOfText) {
        sendPart({ ids, isComplete: true });
        return;
      }
      ids.push(id);
      sendPart({ ids: [...ids] });
      if (await isCanceled()) return;
    }
  },
};
