/** The findings of a run: a headline, further findings, and the numbers behind them. */

import { $, bdi, el, note } from "../base/dom.js";
import { formatCount, pluralize } from "../base/format.js";
import { annotate } from "../base/terms.js";
import { addTooltip } from "../base/tooltip.js";
import { emergences } from "../state/head_metrics.js";
import { data } from "../state/page_data.js";

const MAX_SOURCE_LENGTH = 40; // characters of the text whose predictions gave the random tokens

/** Say on which tokens heads were scored, because their number depends on that. */
function describeSource(text) {
  return el(
    "div",
    { className: "quiet" },
    "Heads are scored on random tokens that the model expects in “",
    bdi(text.length > MAX_SOURCE_LENGTH ? `${text.slice(0, MAX_SOURCE_LENGTH)}…` : text),
    "”; on those of another text, heads near a threshold may pass or fail.",
  );
}

/** Say what a run in progress waits for until an induction head has emerged. */
function describeAwaited() {
  const { step, nextSnapshot, inductionStep, speed } = data;
  if (!nextSnapshot || emergences.some(({ score }) => score === "induction")) return "";
  const next = `No induction head has emerged; the next snapshot is at step ${formatCount(nextSnapshot)}.`;
  if (!(inductionStep > step)) return el("div", { className: "quiet" }, next);
  const minutes = Math.max(1, Math.round(((inductionStep - step) * speed.msPerStep) / 60_000));
  const time = speed.msPerStep ? `, in about ${pluralize(minutes, "minute")},` : "";
  const known = `An induction head forms around step ${formatCount(inductionStep)}${time} with these settings.`;
  return el("div", { className: "quiet" }, known);
}

/**
 * Show findings, the first one as the headline; a head in them calls `chooseHead`.
 *
 * @param {Finding[]} findings
 */
export function drawFindings(findings, chooseHead) {
  const sentences = ({ title, text }) => [
    el("b", {}, ...annotate(`${title}:`, chooseHead)),
    " ",
    ...annotate(text, chooseHead),
  ];
  const [headline, ...others] = findings.map(finding => {
    const line = el("div", {}, ...sentences(finding));
    if (!finding.details.length) return line;
    return addTooltip(line, () => finding.details.map(detail => el("div", {}, detail)));
  });
  const evidence = findings
    .filter(({ details }) => details.length)
    .map(({ title, details }) =>
      el("li", {}, el("b", {}, `${title}: `), ...annotate(details.join("; "), chooseHead)),
    );
  $("headline").replaceChildren(headline ?? note("No significant findings yet."));
  const context = data.scoredText ? describeSource(data.scoredText) : describeAwaited();
  $("more").replaceChildren(...others, context, ...(evidence.length ? [$("numbers")] : []));
  $("numbers").hidden = !evidence.length;
  $("numbers")
    .querySelector("ul")
    .replaceChildren(...evidence);
}
