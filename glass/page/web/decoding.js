/** Continuing a text token by token, as generation/sampling.py does. */

import { argTop, logNormalizers } from "./logits.js";

/**
 * Return the first token that the model reads of a text that it continues. Beyond the limit the
 * window moves by a quarter at a time, so that most tokens are cached.
 */
export function windowStart(length, maxTokens) {
  const stride = Math.max(1, Math.floor(maxTokens / 4));
  return Math.max(0, Math.ceil((length - maxTokens) / stride)) * stride;
}

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
