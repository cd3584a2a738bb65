/** The findings of a run: a headline, further findings, and the numbers behind them. */

import { $, el } from "./dom.js";
import { annotate } from "./terms.js";
import { addTooltip } from "./tooltip.js";

/**
 *
 * @typedef {[text: string, evidence: string]} Finding a sentence, and its numbers with standard
 *   errors
 */

/**
 * Show findings, the first one as the headline.
 *
 * @param {Finding[]} findings
 * @param {(layer: number, head: number) => void} chooseHead - Called when a head in the text is
 *   clicked.
 */
export function drawFindings(findings, chooseHead) {
  const [headline, ...others] = findings.map(([text, evidence]) => {
    const line = el("div", {}, ...annotate(text, chooseHead));
    return evidence ? addTooltip(line, () => [el("div", {}, evidence)]) : line;
  });
  const noFindings = el("p", { className: "quiet" }, "No significant findings yet.");
  $("headline").replaceChildren(headline ?? noFindings);
  $("more").replaceChildren(...others, ...(headline ? [$("numbers")] : []));
  $("numbers").hidden = !headline;
  const evidenceLines = findings.map(([text, evidence]) => {
    const details = el("div", { className: "quiet" }, ...annotate(evidence, chooseHead));
    return el("li", {}, ...annotate(text, chooseHead), details);
  });
  $("numbers")
    .querySelector("ul")
    .replaceChildren(...evidenceLines);
}
