/** The explanation of the pinned cell: which components produced its attention score. */

import { $, el, isNarrow, labelToken, note } from "../base/dom.js";
import { formatCount, formatSigned, headName } from "../base/format.js";
import { barList, largestBars, sumOfValues } from "../charts/bars.js";
import { ask, describeFailure } from "../client/client.js";
import { runnableSteps } from "../state/page_data.js";
import {
  currentProbe,
  currentStep,
  display,
  isOwnText,
  ownText,
  selection,
} from "../state/selection.js";

/** What the explanation on display depends on. */
let shownFor = "";

/** Explain the attention score of the pinned cell, if the model can run in the page. */
export async function explainPinnedCell() {
  const host = $("score-attribution");
  host.hidden = !canExplain();
  if (host.hidden) return;
  (isNarrow() ? $("zoom") : $("expected")).before(host); // beside the cell
  const obstacle = describeObstacle(...selection.pinnedCell);
  const requested = explainedCell();
  if (obstacle) {
    host.replaceChildren(note(obstacle));
    shownFor = "";
    return;
  }
  if (requested !== shownFor) host.replaceChildren(); // of another one
  const content = await requestExplanation();
  if (!content || explainedCell() !== requested) return;
  shownFor = requested;
  host.replaceChildren(...content);
}

function canExplain() {
  const { pinnedCell, averageHeads, showTokenEffect } = selection;
  if (!pinnedCell || averageHeads || showTokenEffect) return false;
  return runnableSteps.length > 0 && currentProbe().ids.length > 0;
}

/** Return the explanation, or why there is none, as nodes; undefined if the request was canceled. */
async function requestExplanation() {
  const { layer, head } = selection;
  const [i, j] = selection.pinnedCell;
  const interventions = isOwnText() ? {} : { off: [], hidden: [] };
  const input = { ids: currentProbe().ids, ...interventions };
  try {
    const terms = await ask({ request: "explainScore", ...input, layer, head, i, j });
    return terms && describeTerms(terms, i, j);
  } catch (error) {
    return [note(describeFailure(error))];
  }
}

/** Return what the explanation depends on, to notice that another one is wanted meanwhile. */
function explainedCell() {
  const { pinnedCell, layer, head, probe } = selection;
  return [pinnedCell, layer, head, probe, currentStep()].join();
}

/** Say why the score of a cell cannot be explained; "" if it can. */
function describeObstacle(i, j) {
  if (!isOwnText() && !runnableSteps.includes(currentStep())) {
    const stored = runnableSteps.map(formatCount).join(", ");
    return `Attention scores can be explained at steps whose weights are in this page: ${stored}.`;
  }
  if (j === currentProbe().T) {
    return "The sink logit is a learned number of each head, the same for all queries.";
  }
  if (isOwnText() && j < i && ownText.predictions?.hidden.includes(j)) {
    return `Token ${j} is hidden from token ${i}: no head attends to it.`;
  }
  return "";
}

/** Return the largest terms of the pinned cell's score as bars, and the sum of the others. */
function describeTerms(terms, i, j) {
  const { layer, head } = selection;
  const { attention } = display;
  const bars = terms.map(({ query, key, value }) => ({ name: `${query} × ${key}`, value }));
  return [
    el(
      "h3",
      {},
      `Why ${headName(layer, head)} attends from `,
      ...labelToken(attention, i),
      " to ",
      ...labelToken(attention, j),
    ),
    note(
      "The attention score before the softmax, minus its mean over the visible tokens, is " +
        `${formatSigned(sumOfValues(terms))}. It is a sum over pairs: what wrote the query × what ` +
        "wrote the key.",
    ),
    barList(largestBars(bars)),
  ];
}
