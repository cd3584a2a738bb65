/** The findings of a run: a headline, further findings, and the numbers behind them. */

import { $, el } from "./dom.js";
import { annotate } from "./terms.js";
import { addTooltip } from "./tooltip.js";

/**
 * @typedef {object} Finding as glass/heads/findings.py states it
 * @property {string} title - The phenomenon: "Induction head".
 * @property {string} text - Sentences that explain it.
 * @property {string[]} details - Measurements with standard errors.
 * @property {string[]} heads - Names of the heads, strongest first.
 */

/**
 * Show findings, the first one as the headline.
 *
 * @param {Finding[]} findings
 * @param {(layer: number, head: number) => void} chooseHead - Called when a head in the text is
 *   clicked.
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
  const noFindings = el("p", { className: "quiet" }, "No significant findings yet.");
  $("headline").replaceChildren(headline ?? noFindings);
  $("more").replaceChildren(...others, ...(headline ? [$("numbers")] : []));
  $("numbers").hidden = !headline;
  const evidenceLines = findings.map(finding => {
    const details = el(
      "div",
      { className: "quiet" },
      ...annotate(finding.details.join("; "), chooseHead),
    );
    return el("li", {}, ...sentences(finding), details);
  });
  $("numbers")
    .querySelector("ul")
    .replaceChildren(...evidenceLines);
}
