/** What is above the sections of a run's page: its facts, and a warning if the model overfits. */

import { $ } from "../base/dom.js";
import { describeTokens, formatCount, formatNumber, pluralize } from "../base/format.js";
import { data, groups, H, hasServer, isRun, L, openingIndex, steps } from "../state/page_data.js";
import { currentStep } from "../state/selection.js";

export function drawHeader() {
  const warning = describeLossWarning();
  $("summary").textContent = describeRun();
  $("loss-warning").textContent = warning;
  $("loss-warning").hidden = !warning;
}

function describeRun() {
  const facts = [];
  if (hasServer && data.maxSteps) {
    facts.push(`step ${formatCount(currentStep())} of ${formatCount(data.maxSteps)}`);
  }
  if (data.best) {
    const { step, loss } = data.best;
    facts.push(`best validation loss ${formatNumber(loss)} at step ${formatCount(step)}`);
  }
  if (L) {
    const shared = groups < H ? ` over ${pluralize(groups, "key/value head")}` : "";
    facts.push(pluralize(L, "layer"), pluralize(H, "head") + shared);
  }
  if (data.probes[0]?.T) {
    const tokens = describeTokens(data.probes[0].T, data.tokenCount ?? 0);
    facts.push(isRun ? `${tokens} of text shown` : tokens);
  }
  if (data.steps.length > 1)
    facts.push(pluralize(data.steps.length, hasServer ? "step" : "snapshot"));
  return facts.join(" · ");
}

/** Say that the model overfits, and which weights are shown where; "" if the losses are as hoped. */
function describeLossWarning() {
  if (!data.lossWarning) return "";
  const sentences = [data.lossWarning];
  if (data.openingStep !== null && steps.length) {
    const [best, opened] = [data.openingStep, steps[openingIndex]].map(formatCount);
    const here = opened === best ? "on it" : `on step ${opened}, the nearest snapshot`;
    sentences.push(`sample.py and explore.py load step ${best}; this page opens ${here}`);
    sentences.push(`The findings are those of step ${formatCount(steps.at(-1))}`);
  }
  return sentences.map(sentence => `${sentence}.`).join(" ");
}
