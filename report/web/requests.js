/** The requests that the worker answers: the model at several steps, read with interventions. */

import { breakDown } from "./breakdown.js";
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
 * Return all attention weights of a pass as lower triangles, (L, H, T (T + 1) / 2), the norms of
 * what a head writes of each token, (L, H, T), and the largest product of both.
 *
 * @param {ForwardPass} pass
 */
function packMaps(pass) {
  const { T } = pass;
  const { L, H } = pass.sizes;
  const triangle = (T * (T + 1)) / 2;
  const maps = new Float32Array(L * H * triangle);
  const norms = new Float32Array(L * H * T);
  let largest = 0;
  pass.measureNorms();
  for (let l = 0; l < L; l++) {
    for (let h = 0; h < H; h++) {
      const attention = pass.layers[l].attention[h].data;
      const headNorms = pass.layers[l].norms[h].data.subarray(0, T);
      maps.set(attention.subarray(0, triangle), (l * H + h) * triangle);
      norms.set(headNorms, (l * H + h) * T);
      for (let i = 0; i < T; i++) {
        const row = (i * (i + 1)) / 2;
        for (let j = 0; j <= i; j++) {
          largest = Math.max(largest, attention[row + j] * headNorms[j]);
        }
      }
    }
  }
  return { maps, norms, largest };
}

/** Return the texts of some token ids. */
export const textsOf = ids =>
  Object.fromEntries(ids.map(id => [id, session.tokenizer.tokenText(id)]));

/** Draw an id from the distribution of logits at a temperature. */
function sample(logits, temperature) {
  const scaled = logits.map(logit => logit / temperature);
  const [logNormalizer] = logNormalizers(scaled, scaled.length);
  let remaining = Math.random();
  for (let id = 0; id < scaled.length; id++) {
    remaining -= Math.exp(scaled[id] - logNormalizer);
    if (remaining < 0) return id;
  }
  return argTop(logits, 1)[0];
}

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

  /** Take the weights of a step, packed as report/pack.py packs them. */
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

  /** Return maps, norms and predictions; `was` has the predictions without interventions. */
  read(input) {
    const pass = runModel(input);
    const predictions = predict(pass);
    const results = {
      ...packMaps(pass),
      next: predictions.map(prediction => prediction.next),
      chances: predictions.map(prediction => prediction.chances),
      losses: predictions.map(prediction => prediction.loss),
      was: null,
      words: textsOf(predictions.flatMap(prediction => prediction.next)),
    };
    if (input.off.length || input.hidden.length) {
      // The same pass, if no head is ablated: what it computed before is gone now.
      const plain = runModel({ ...input, off: [], hidden: [] });
      const chances = probabilitiesOf(plain, results.next);
      results.was = { chances, losses: plain.predictions.map(prediction => prediction.loss) };
    }
    return results;
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
    for (let k = 0; k < L * H; k++) {
      const off = [...input.off, `L${Math.floor(k / H)}H${k % H}`];
      const pass = new ForwardPass(models.get(input.step), session.config, off);
      pass.read(ids, input.hidden);
      sendPart({ k, nats: lossAfter(pass, i) - before });
      if (await isCanceled("headEffects", id)) return;
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
    const { block_size: blockSize } = session.config;
    const stride = Math.max(1, Math.floor(blockSize / 4));
    for (let count = 0; count < maxTokens; count++) {
      const start = Math.max(0, Math.ceil((ids.length - blockSize) / stride)) * stride;
      const hidden = input.hidden.map(j => j - start).filter(j => j >= 0);
      const pass = runModel({
        ...input,
        ids: ids.slice(start),
        hidden,
        cacheName: "continuation",
      });
      const logits = pass.logits(pass.T - 1);
      ids.push(temperature > 0 ? sample(logits, temperature) : argTop(logits, 1)[0]);
      sendPart({ ids, text: session.tokenizer.decode(ids) });
      if (await isCanceled("continue", id)) return;
    }
  },
};
