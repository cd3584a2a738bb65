/** What the charts of dots on a sweep's page share: axes, lines and tooltips. */

import { bdi, el } from "./dom.js";
import { printableName } from "./format.js";
import { runsOf, sweptKeys } from "./sweep_data.js";
import { bestMark, keyAndValue, keyName } from "./sweep_names.js";

/**
 * @typedef {import("./dot_chart.js").Dot} Dot
 * @typedef {import("./dot_chart.js").DotAxis} DotAxis
 */

/**
 * What a tooltip says about a dot.
 *
 * @param {string} name - Name of the setting or run.
 * @param {number | null} setting - Its setting, if it may be marked as the best.
 * @param {string} value
 * @param {string} unit
 * @param {(string | false)[]} details - One line each.
 * @returns {Node[]}
 */
export function describeDot(name, setting, value, unit, details) {
  const lines = details.filter(Boolean).map(text => el("div", {}, el("small", {}, text)));
  return [
    el("div", {}, el("b", {}, bdi(name)), bestMark(setting)),
    el("div", { className: "value" }, el("b", {}, value), unit && ` ${unit}`),
    ...lines,
  ];
}

/**
 * The x axis of a swept key.
 *
 * @param {number} k - Index of the key.
 * @returns {DotAxis}
 */
export function keyAxis(k) {
  const { axis, values, numbers } = sweptKeys[k];
  return {
    type: axis,
    showsAllTicks: true,
    ticks: values.map((value, index) => [numbers?.[index] ?? index, printableName(value)]),
    name: axisName(keyName(k), axis === "log"),
  };
}

/**
 * @param {string} name
 * @param {boolean} isLog
 */
export function axisName(name, isLog) {
  return isLog ? `${name}, log scale` : name;
}

/**
 * Join the dots of settings that differ in one key only.
 *
 * @param {Dot[]} dots - Dots of settings.
 * @param {number} k - Index of the key.
 * @returns {{name: string, dots: Dot[]}[]} Lines named by what their settings have in common.
 */
export function joinDots(dots, k) {
  if (sweptKeys[k].axis === "names") return [];
  /** @type {Map<string, Dot[]>} */
  const lines = new Map();
  for (const dot of dots) {
    const otherValues = runsOf[dot.group][0].valueIndices.with(k, -1).join();
    lines.set(otherValues, [...(lines.get(otherValues) ?? []), dot]);
  }
  return [...lines.values()]
    .filter(line => line.length > 1)
    .map(line => {
      const [run] = runsOf[line[0].group];
      const otherKeys = [...sweptKeys.keys()].filter(other => other !== k);
      const name = otherKeys.map(other => keyAndValue(run, other)).join(", ");
      return { name, dots: line.sort((a, b) => a.x - b.x) };
    });
}
