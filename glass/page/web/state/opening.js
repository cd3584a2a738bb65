/** What a page opens on: a head, an input in which it copies, and the token where it does most. */

import { parseHead } from "../base/format.js";
import { MIN_CLEAR_EFFECT_NATS } from "./cells.js";
import { headNames, measuredIndices, metricAt } from "./head_metrics.js";
import { data } from "./page_data.js";
import { currentProbe, display, ownText, selection, wanted } from "./selection.js";
import { loadStored } from "./stored.js";

const MIN_INDUCTION_SCORE = 0.15; // below this the page opens on a previous-token head
const MIN_DISTANCE = 4; // tokens since the previous occurrence; nearer repeats are trivial
const MIN_WEIGHT = 0.5; // on the token after the previous occurrence
const MIN_PROBABILITY = 0.5; // of the next token, except in random tokens that repeat

/**
 * Return the [layer, head] to open the page on: the first one that the headline names; else the
 * strongest induction head, or the strongest previous-token head if there is none.
 */
export function openingHead() {
  const named = parseHead(data.findings[0]?.heads[0]);
  if (named) return named;
  const score = (name, head) =>
    metricAt(`heads/${name}/${head}`, measuredIndices[name]?.at(-1)) ?? 0;
  const strongest = name =>
    headNames.reduce((best, head) => (score(name, head) > score(name, best) ? head : best), "L0H0");
  const inductionHead = strongest("induction");
  const isInducing = score("induction", inductionHead) >= MIN_INDUCTION_SCORE;
  const chosen =
    isInducing || !measuredIndices.previous_token ? inductionHead : strongest("previous_token");
  return parseHead(chosen);
}

/** Return the first stored input in which the selected head has an induction token, or input 0. */
export async function openingProbe() {
  for (const [k, probe] of data.probes.entries()) {
    if (probe === ownText) break;
    const { attention, predictions } = await loadStored(k, wanted.step);
    if (inductionToken(probe, attention, predictions, selection) !== null) return k;
  }
  return 0;
}

/**
 * Return the token to begin with: the last one of a prompt; in another text, the one where the
 * selected head does most for the prediction, or one in the middle if that is not known.
 */
export function openingToken() {
  const { attention, predictions } = display;
  const { layer, head } = selection;
  if (data.promptTokens) return Math.min(data.promptTokens, currentProbe().T) - 1;
  if (!predictions) return Math.floor((currentProbe().T - 1) * 0.6);
  const token = inductionToken(currentProbe(), attention, predictions, selection);
  return token ?? mostAffectedToken(predictions, layer, head);
}

/**
 * Return the strongest induction token of a head, or null: one that occurred before, whose successor
 * then is attended to, comes next and is predicted. Tokens are compared by attention weight × the
 * probability that is lost without the head.
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
function mostAffectedToken(predictions, layer, head) {
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
