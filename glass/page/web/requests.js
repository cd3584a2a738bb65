/** The requests that the worker answers: the model at several steps, read with interventions. */

import { breakDown } from "./breakdown.js";
import { sample, windowStart } from "./decoding.js";
import { unpackWeights } from "./float16.js";
import { ForwardPass } from "./forward.js";
import { outputWeight } from "./layers.js";
import { argTop, logNormalizers } from "./logits.js";
import { attributeScore } from "./score_attribution.js";
import { createTokenizer } from "./tokenizer.js";

/**
 * A text, and what the model that reads it lacks.
 *
 * @typedef {object} Input
 * @property {number} step - Step of the weights.
 * @property {number[]} ids
 * @property {string[]} off - Ablated heads, as "L1H3".
 * @property {number[]} hidden - Tokens hidden from all later ones.
 * @property {string} [cacheName] - Reads of different names do not evict each other's tokens.
 */

export const PREDICTED_TOKENS = 5;
const MAX_CACHED_PASSES = 6;
const MAX_PART_NUMBERS = 1 << 20; // of a part of attention patterns

/** The model's configuration and tokenizer. */
export const session = { config: null, tokenizer: null };

/** Weights by step. */
export const models = new Map();

/** Forward passes by what they read, the least recently used first. */
export const passes = new Map();

/** By name of a request, the last id that was canceled. */
const canceled = {};

/**
 * Cancel all requests of a name up to an id.
 *
 * @param {string} name
 * @param {number} id
 */
export function cancelRequests(name, id) {
  canceled[name] = id;
}

/** Let the worker receive messages; return whether this request was canceled meanwhile. */
export async function isCanceled(name, id) {
  await new Promise(resolve => setTimeout(resolve));
  return id <= canceled[name];
}

/**
 * Return the cached forward pass of a step with these heads ablated, or a new one.
 *
 * @param {{step: number, off?: string[], cacheName?: string}} input
 * @returns {ForwardPass}
 */
export function cachedPass({ step, off = [], cacheName = "" }) {
  const key = JSON.stringify([step, [...off].sort(), cacheName]);
  const pass = passes.get(key) ?? new ForwardPass(models.get(step), session.config, off);
  passes.delete(key);
  passes.set(key, pass);
  if (passes.size > MAX_CACHED_PASSES) passes.delete(passes.keys().next().value);
  return pass;
}

/**
 * Run the model on an input; tokens before an edit are cached.
 *
 * @param {Input} input
 * @returns {ForwardPass}
 */
export function runModel(input) {
  const pass = cachedPass(input);
  pass.read(input.ids, input.hidden);
  return pass;
}

/**
 * Return the prediction after each token. Those before an edit are cached.
 *
 * @param {ForwardPass} pass
 * @returns {{logNormalizer: number, next: number[], chances: number[], follows: number,
 *   loss: number}[]} The likeliest ids and their probabilities, the id that follows and its loss.
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
    const next = argTop(row, PREDICTED_TOKENS);
    predictions.push({
      logNormalizer,
      next,
      chances: next.map(id => Math.exp(row[id] - logNormalizer)),
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

/**
 * Return the probabilities that a pass gives to some ids after each token.
 *
 * @param {ForwardPass} pass
 * @param {number[][]} ids - Of each token.
 * @returns {number[][]}
 */
function probabilitiesOf(pass, ids) {
  const { C } = pass.sizes;
  const x = pass.normalizedOutput();
  const { data: E } = outputWeight(pass.weights);
  return predict(pass).map(({ logNormalizer }, t) =>
    ids[t].map(id => {
      let logit = 0;
      for (let k = 0; k < C; k++) logit += x[t * C + k] * E[id * C + k];
      return Math.exp(logit - logNormalizer);
    }),
  );
}

/**
 * Return the norms of what each head writes of each token, (L, H, T), and their largest product with
 * an attention weight.
 *
 * @param {ForwardPass} pass
 */
function measureNorms(pass) {
  const { T } = pass;
  const { L, H } = pass.sizes;
  const norms = new Float32Array(L * H * T);
  let largest = 0;
  pass.measureNorms();
  for (let k = 0; k < L * H; k++) {
    const layer = pass.layers[Math.floor(k / H)];
    const attention = layer.attention[k % H].data;
    const headNorms = layer.norms[k % H].data.subarray(0, T);
    norms.set(headNorms, k * T);
    for (let i = 0; i < T; i++) {
      const row = (i * (i + 1)) / 2;
      for (let j = 0; j <= i; j++) {
        largest = Math.max(largest, attention[row + j] * headNorms[j]);
      }
    }
  }
  return { norms, largest };
}

/**
 * Return the attention weights of some heads as lower triangles, (n, T (T + 1) / 2).
 *
 * @param {ForwardPass} pass
 * @param {number[]} heads - k = layer · H + head of each.
 */
function packPatterns(pass, heads) {
  const { H } = pass.sizes;
  const triangle = (pass.T * (pass.T + 1)) / 2;
  const maps = new Float32Array(heads.length * triangle);
  heads.forEach((k, n) => {
    const { data } = pass.layers[Math.floor(k / H)].attention[k % H];
    maps.set(data.subarray(0, triangle), n * triangle);
  });
  return maps;
}

/** Return the texts of some token ids. */
export const textsOf = ids =>
  Object.fromEntries(ids.map(id => [id, session.tokenizer.tokenText(id)]));

/**
 * Measure the effects of hiding token j on all later predictions.
 *
 * @param {ForwardPass} pass - Has read the text.
 * @param {Input} input
 * @param {number} j
 * @param {{logits: Float32Array, normalizers: Float64Array}} plain - Of the whole text.
 * @returns {{j: number, effects: number[], kl: number[]}} In nats, of tokens j + 1 on.
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
 * partial answers, and the request's id.
 */
export const HANDLERS = {
  /** Take the model's configuration and tokenizer. */
  start({ config, tokenizer }) {
    session.config = config;
    session.tokenizer = createTokenizer(tokenizer);
  },

  /** Take the weights of a step, packed as glass/page/pack.py packs them. */
  async loadWeights({ step, tensors, packed }) {
    const bytes = Uint8Array.from(atob(packed), character => character.charCodeAt(0));
    const plain = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    const buffer = await new Response(plain).arrayBuffer();
    models.set(step, unpackWeights(tensors, new Uint8Array(buffer)));
  },

  encode: ({ text }) => session.tokenizer.encode(text),
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
      const { data } = pass.layers[Math.floor(k / H)].attention[k % H];
      for (let i = 0; i < T; i++) {
        const row = (i * (i + 1)) / 2;
        maps.set(data.subarray(row, row + i + 1), (k * T + i) * T);
      }
    }
    return maps;
  },

  /** Return norms and predictions; `was` has the predictions without interventions. */
  read(input) {
    const pass = runModel(input);
    const predictions = predict(pass);
    const results = {
      ...measureNorms(pass),
      next: predictions.map(prediction => prediction.next),
      chances: predictions.map(prediction => prediction.chances),
      losses: predictions.map(prediction => prediction.loss),
      was: null,
      words: textsOf(predictions.flatMap(prediction => prediction.next)),
    };
    if (input.off.length || input.hidden.length) {
      // It has a pass of its own, so that the one above still has the attention patterns.
      const cacheName = input.off.length ? "" : "without hidden tokens";
      const plain = runModel({ ...input, off: [], hidden: [], cacheName });
      const chances = probabilitiesOf(plain, results.next);
      results.was = { chances, losses: plain.predictions.map(prediction => prediction.loss) };
    }
    return results;
  },

  /** Send the attention patterns of heads, in their order. */
  async patterns({ heads, ...input }, sendPart, id) {
    const triangle = (input.ids.length * (input.ids.length + 1)) / 2;
    const count = Math.max(1, Math.floor(MAX_PART_NUMBERS / triangle));
    for (let start = 0; start < heads.length; start += count) {
      const part = heads.slice(start, start + count);
      sendPart({ heads: part, maps: packPatterns(runModel(input), part) });
      if (await isCanceled("patterns", id)) return;
    }
  },

  /** Return the prediction breakdown of token i. */
  breakDown({ i, of, ...input }) {
    const breakdown = breakDown(runModel(input), i, of, PREDICTED_TOKENS);
    return { ...breakdown, words: textsOf([...breakdown.targets, ...breakdown.writes]) };
  },

  /** Send the loss increase of the token after i without each head (zero ablation), in nats. */
  async headEffects({ i, ...input }, sendPart, id) {
    const ids = input.ids.slice(0, i + 2);
    const { n_layer: L, n_head: H } = session.config;
    const before = lossAfter(runModel({ ...input, ids, cacheName: "head effects" }), i);
    for (let l = 0; l < L; l++) {
      const nats = [];
      for (let h = 0; h < H; h++) {
        const pass = new ForwardPass(models.get(input.step), session.config, [
          ...input.off,
          `L${l}H${h}`,
        ]);
        pass.read(ids, input.hidden);
        nats.push(lossAfter(pass, i) - before);
        if (await isCanceled("headEffects", id)) return;
      }
      sendPart({ heads: nats.map((_, h) => l * H + h), nats });
    }
  },

  /** Send the token effects (attention knockout), a hidden token at a time, the last first. */
  async tokenEffects(input, sendPart, id) {
    const pass = cachedPass({ ...input, cacheName: "token effects" });
    pass.read(input.ids, input.hidden);
    const logits = pass.logits();
    const plain = { logits, normalizers: logNormalizers(logits, session.config.vocab_size) };
    for (let j = input.ids.length - 2; j >= 0; j--) {
      if (input.hidden.includes(j)) continue;
      sendPart(hideToken(pass, input, j, plain));
      if (await isCanceled("tokenEffects", id)) return;
    }
  },

  /** Return the terms of one attention score. */
  explainScore: ({ layer, head, i, j, ...input }) =>
    attributeScore(runModel(input), layer, head, i, j),

  /** Send the text continued token by token; beyond the block size the window moves. */
  async continue({ temperature, maxTokens, ...input }, sendPart, id) {
    const ids = [...input.ids];
    for (let count = 0; count < maxTokens; count++) {
      const start = windowStart(ids.length, session.config.block_size);
      const hidden = input.hidden.map(j => j - start).filter(j => j >= 0);
      const pass = runModel({
        ...input,
        ids: ids.slice(start),
        hidden,
        cacheName: "continuation",
      });
      const logits = pass.logits(pass.T - 1);
      // A vocabulary may be padded with ids that are not tokens.
      ids.push(sample(logits.subarray(0, session.tokenizer.size), temperature));
      sendPart({ ids, text: session.tokenizer.decode(ids) });
      if (await isCanceled("continue", id)) return;
    }
  },
};
