/** Tokens to open a page at: those where the selected head does most for the prediction. */

import { MIN_CLEAR_EFFECT_NATS } from "./cells.js";

const MIN_DISTANCE = 4; // tokens since the previous occurrence; nearer repeats are trivial
const MIN_WEIGHT = 0.5; // on the token after the previous occurrence
const MIN_PROBABILITY = 0.5; // of the next token, except in random tokens that repeat

/**
 * Return the query of the strongest induction event of a head, or null: a token that occurred before,
 * whose successor then is attended to, comes next and is predicted. Events are compared by attention
 * weight × the probability that is lost without the head.
 *
 * @param {Probe} probe
 * @param {Cells} attention
 * @param {Predictions | null} predictions
 * @returns {number | null}
 */
export function inductionToken(probe, attention, predictions, { layer, head }) {
  const { tokens, T } = attention;
  const minProbability = probe.period ? 0 : MIN_PROBABILITY;
  let strongest = null;
  let largest = 0;
  for (let i = predictions?.firstToken ?? T; i < T - 1; i++) {
    const successor = i < MIN_DISTANCE ? 0 : tokens.lastIndexOf(tokens[i], i - MIN_DISTANCE) + 1;
    if (successor === 0 || tokens[successor] !== tokens[i + 1]) continue;
    const weight = attention.at(layer, head, i, successor);
    const { chance } = predictions.following(i);
    if (!(weight >= MIN_WEIGHT && chance >= minProbability)) continue;
    const effect = predictions.headEffect(layer, head, i);
    const strength = weight * chance * (1 - Math.exp(-effect));
    if (effect >= MIN_CLEAR_EFFECT_NATS && strength > largest) {
      strongest = i;
      largest = strength;
    }
  }
  return strongest;
}

/**
 * Return the token after which the prediction loses most without a head, or, if no loss is clear,
 * without one of the earlier tokens.
 */
export function mostAffectedToken(predictions, layer, head) {
  const { firstToken, T } = predictions;
  const tokens = Array.from({ length: Math.max(1, T - 1 - firstToken) }, (_, k) => firstToken + k);
  const argmax = measure =>
    tokens.reduce((best, i) => (measure(i) > measure(best) ? i : best), firstToken);
  const headEffect = i => predictions.headEffect(layer, head, i);
  const candidate = argmax(headEffect);
  if (headEffect(candidate) >= MIN_CLEAR_EFFECT_NATS) return candidate;
  return argmax(i =>
    Math.max(0, ...tokens.slice(0, i - firstToken).map(j => predictions.at(0, 0, i, j))),
  );
}
