/** The explanation of the pinned cell: which components produced its attention score. */

import { $, el } from "./dom.js";
import { askModel, describeFailure } from "./engine.js";
import { formatCount } from "./format.js";
import { headName, labelToken } from "./labels.js";
import { drawScoreAttribution } from "./logit_attribution.js";
import {
  currentProbe,
  currentStep,
  display,
  isOwnText,
  ownText,
  runnableSteps,
  selection,
} from "./page_state.js";

const NARROW_WINDOW = 1000; // below this width the page has one column

/** What the explanation on display depends on. */
let shownFor = [];

/** Return what the explanation depends on, to notice that another one is wanted meanwhile. */
function explainedCell() {
  const { pinnedCell, layer, head, probe } = selection;
  return [pinnedCell, layer, head, probe, currentStep()];
}

/** Explain the attention score of the pinned cell, if the model can run in the page. */
export async function explainPinnedCell() {
  const host = $("score-attribution");
  const { pinnedCell, layer, head, averageHeads, showTokenEffect } = selection;
  const canExplain = runnableSteps.length && currentProbe().ids.length;
  host.hidden = !pinnedCell || averageHeads || showTokenEffect || !canExplain;
  if (host.hidden) return;
  (innerWidth < NARROW_WINDOW ? $("zoom") : $("expected")).before(host); // beside the cell
  if (!isOwnText() && !runnableSteps.includes(currentStep())) {
    const stored = runnableSteps.map(formatCount).join(", ");
    host.replaceChildren(
      el(
        "p",
        { className: "quiet" },
        `Attention scores can be explained at steps whose weights are in this page: ${stored}.`,
      ),
    );
    return;
  }

  const [i, j] = pinnedCell;
  if (j === currentProbe().T) {
    const sentence = "The sink logit is a learned number of each head, the same for all queries.";
    host.replaceChildren(el("p", { className: "quiet" }, sentence));
    shownFor = [];
    return;
  }
  if (isOwnText() && j < i && ownText.predictions?.hidden.includes(j)) {
    const sentence = `Token ${j} is hidden from token ${i}: no head attends to it.`;
    host.replaceChildren(el("p", { className: "quiet" }, sentence));
    shownFor = [];
    return;
  }
  const interventions = isOwnText() ? {} : { off: [], hidden: [] };
  const requested = explainedCell();
  if (requested.some((part, k) => part !== shownFor[k])) host.replaceChildren(); // of another one
  const parameters = { layer, head, i, j, ...interventions };
  let terms = [];
  let failure = null;
  try {
    terms = await askModel("explainScore", currentProbe().ids, parameters);
  } catch (error) {
    failure = describeFailure(error);
  }
  if (explainedCell().some((part, k) => part !== requested[k])) return;
  shownFor = requested;
  if (failure) {
    host.replaceChildren(el("p", { className: "quiet" }, failure));
    return;
  }
  const { attention } = display;
  drawScoreAttribution(host, terms, [
    `Why ${headName(layer, head)} attends from `,
    ...labelToken(attention, i),
    " to ",
    ...labelToken(attention, j),
  ]);
}
