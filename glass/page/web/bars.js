/** Lists of named values with bars. */

import { el } from "./dom.js";
import { formatSigned, pluralize } from "./format.js";

/**
 * @typedef {object} Bar
 * @property {string} name
 * @property {number} value
 * @property {string} [detail] - A second number.
 * @property {(() => void) | null} [pick] - Called when the name is clicked.
 */

/**
 * A list with bars to either side of zero; if `format` is given, values are positive and bars start
 * at the left.
 *
 * @param {Bar[]} bars
 * @param {((value: number) => string) | null} [format]
 * @returns {HTMLOListElement}
 */
export function barList(bars, format = null) {
  const largest = Math.max(1e-9, ...bars.map(({ value }) => Math.abs(value) || 0));
  const items = bars.map(({ name, value, detail = "", pick }) => {
    const width = (50 * Math.abs(value || 0)) / largest;
    const label = pick
      ? el("button", { type: "button", onclick: pick }, name)
      : el("span", {}, name);
    return el(
      "li",
      {},
      label,
      el("i", {
        className: value < 0 ? "negative" : "positive",
        style: `--w: ${width.toFixed(1)}%`,
      }),
      el("b", {}, (format ?? formatSigned)(value)),
      el("span", { className: "quiet" }, detail),
    );
  });
  return el("ol", { className: format ? "bars plain" : "bars" }, ...items);
}

/**
 * The largest values as bars, and one bar for the sum of all others. Zeros are left out: they belong
 * to components that the model does not have or that are ablated.
 *
 * @param {Bar[]} bars
 * @param {number} maxCount
 * @returns {Bar[]}
 */
export function largestBars(bars, maxCount) {
  const nonzero = bars.filter(({ value }) => value !== 0);
  const ordered = nonzero.sort((a, b) => Math.abs(b.value) - Math.abs(a.value));
  const others = ordered.slice(maxCount);
  if (!others.length) return ordered;
  return [
    ...ordered.slice(0, maxCount),
    { name: pluralize(others.length, "other"), value: sumOfValues(others) },
  ];
}

/**
 * @param {{value: number}[]} bars
 * @returns {number}
 */
export function sumOfValues(bars) {
  return bars.reduce((sum, { value }) => sum + value, 0);
}
