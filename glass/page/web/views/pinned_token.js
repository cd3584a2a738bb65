/** One line about the pinned token: what the selected head attends to, and what is predicted. */

import { $, el, tokenName } from "../base/dom.js";
import { formatProbability, headName } from "../base/format.js";
import { data } from "../state/page_data.js";
import { currentStep, display, selection } from "../state/selection.js";

/** Draw the line beside the button that switches the head off. */
export function drawPinnedToken() {
  const { attention, predictions } = display;
  const { layer, head, pinned } = selection;
  if (pinned === null || !attention?.hasPattern(layer, head))
    $("pinned-token-text").replaceChildren();
  else {
    const attended = describeAttended(attention, layer, head, pinned);
    $("pinned-token-text").replaceChildren(...attended, ...describeNext(predictions, pinned));
  }
}

const quote = text => ["“", tokenName(text), "”"];

/** Describe the token that a head attends to most at token i. */
function describeAttended(attention, layer, head, i) {
  const weight = j => attention.at(layer, head, i, j);
  let key = i;
  for (let j = 0; j < i; j++) if (weight(j) > weight(key)) key = j;
  const { tokens } = attention;
  const start = [el("b", {}, headName(layer, head)), " at ", ...quote(tokens[i])];
  start.push(` attends ${weight(key).toFixed(2)} to `);
  if (key === i) return [...start, "itself."];
  start.push(...quote(tokens[key]));
  if (tokens[key - 1] === tokens[i]) {
    return [...start, ", which followed ", ...quote(tokens[i]), " earlier."];
  }
  if (tokens[key] === tokens[i]) return [...start, ", an earlier copy."];
  if (key === i - 1) return [...start, ", the token before it."];
  return [...start, key === 0 ? ", the first token." : "."];
}

/**
 * Give the probability of the token after i at this step. If the text ends there, it is that of the
 * token that is the likeliest without interventions.
 */
function describeNext(predictions, i) {
  if (predictions?.step !== currentStep() || i < predictions.firstToken) return [];
  const { tokens, T } = predictions;
  const isLast = i + 1 >= T;
  const likeliest = predictions.likeliest(i);
  const text = isLast ? data.words[likeliest.id] : tokens[i + 1];
  const { chance, was } = isLast ? likeliest : predictions.following(i);
  if (text === undefined) return [];
  const start = isLast && was === undefined ? " Likeliest next token " : " Next token ";
  const nodes = [start, ...quote(text), ": p = ", el("b", {}, formatProbability(chance))];
  if (was === undefined) return [...nodes, "."];
  return [...nodes, el("b", {}, `, before ${formatProbability(was)}`), "."];
}
