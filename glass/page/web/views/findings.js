/** The findings of a run: a headline, further findings, and the numbers behind them. */

import { $, el, note } from "../base/dom.js";
import { annotate } from "../base/terms.js";
import { addTooltip } from "../base/tooltip.js";

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
  $("more").replaceChildren(...others, ...(evidence.length ? [$("numbers")] : []));
  $("numbers").hidden = !evidence.length;
  $("numbers")
    .querySelector("ul")
    .replaceChildren(...evidence);
}
