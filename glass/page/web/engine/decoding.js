/** Continuing a text token by token, as generation/sampling.py does. */

import { argTop, logNormalizers } from "./logits.js";

/**
 * Return the places in a text of the tokens that the model reads: the last `maxTokens`, where a
 * begin-of-text token stays the first. When a text is continued, the window moves by a quarter at a
 * time, so that most tokens are cached.
 */
export function placesRead(ids, { maxTokens, beginOfText = null }, isContinued = false) {
  const stride = isContinued ? Math.max(1, Math.floor(maxTokens / 4)) : 1;
  const start = Math.max(0, Math.ceil((ids.length - maxTokens) / stride)) * stride;
  const places = [...ids.keys()].slice(start);
  if (start && ids[0] === beginOfText) places[0] = 0;
  return places;
}

/** Return which of the tokens that are read are hidden, given the places of those in the text. */
export const findHidden = (hidden, places) =>
  hidden.map(place => places.indexOf(place)).filter(k => k >= 0);

/** Draw an id from the distribution of logits at a temperature; the likeliest one at 0. */
export function sample(logits, temperature) {
  if (!(temperature > 0)) return argTop(logits, 1)[0];
  const scaled = logits.map(logit => logit / temperature);
  const [logNormalizer] = logNormalizers(scaled, scaled.length);
  let remaining = Math.random();
  for (let id = 0; id < scaled.length; id++) {
    remaining -= Math.exp(scaled[id] - logNormalizer);
    if (remaining < 0) return id;
  }
  return argTop(logits, 1)[0];
}
