/** Lists of named values with bars. */

import { button, el } from "../base/dom.js";
import { formatSigned, pluralize } from "../base/format.js";

const MAX_BARS = 10; // values that have a bar of their own
const MIN_BAR = 0.005; // smaller values are written as 0.00

/**
 * Create a list with bars to either side of zero; with a `format`, values are positive and bars start
 * at the left.
 *
 * @param {Bar[]} bars
 */
export function barList(bars, format = null) {
  const largest = Math.max(1e-9, ...bars.map(({ value }) => Math.abs(value) || 0));
  const items = bars.map(({ name, value, detail = "", pick }) => {
    const width = ((50 * Math.abs(value || 0)) / largest).toFixed(1);
    const className = value < 0 ? "negative" : "positive";
    return el(
      "li",
      {},
      pick ? button({ onclick: pick }, name) : el("span", {}, name),
      el("i", { className, style: `--w: ${width}%` }),
      el("b", {}, (format ?? formatSigned)(value)),
      el("span", { className: "quiet" }, detail),
    );
  });
  return el("ol", { className: format ? "bars plain" : "bars" }, ...items);
}

/**
 * Return the largest values as bars, and one bar for the sum of all others. Values that are written
 * as zero are left out, with those of components that the model does not have or that are ablated.
 */
export function largestBars(bars) {
  const nonzero = bars.filter(({ value }) => Math.abs(value) >= MIN_BAR);
  const ordered = nonzero.sort((a, b) => Math.abs(b.value) - Math.abs(a.value));
  const others = ordered.slice(MAX_BARS);
  if (!others.length) return ordered;
  const rest = { name: pluralize(others.length, "other"), value: sumOfValues(others) };
  return [...ordered.slice(0, MAX_BARS), rest];
}

export function sumOfValues(bars) {
  return bars.reduce((sum, { value }) => sum + value, 0);
}
