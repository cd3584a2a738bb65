/** How a sweep's page names settings, runs, values and costs. */

import { formatCompact } from "./chart_axes.js";
import {
  formatCount,
  formatDuration,
  formatWithError,
  pluralize,
  printableName,
} from "./format.js";
import {
  allSettings,
  bestSetting,
  data,
  hasSeveralSeeds,
  hasSingleValue,
  results,
  runsOf,
  sweptKeys,
} from "./sweep_data.js";

/**
 * @typedef {import("./sweep_data.js").Run} Run
 */

const lastParts = sweptKeys.map(({ name }) => name.slice(name.lastIndexOf(".") + 1));

/**
 * The last part of a key's name, or all of it if the last part is ambiguous: n_head for
 * model.n_head.
 *
 * @param {number} k - Index of the swept key.
 * @returns {string}
 */
export function keyName(k) {
  const isAmbiguous = lastParts.filter(name => name === lastParts[k]).length > 1;
  return printableName(isAmbiguous ? sweptKeys[k].name : lastParts[k]);
}

/**
 * @param {Run} run
 * @param {number} k - Index of the swept key.
 * @returns {string}
 */
export function valueName(run, k) {
  return printableName(sweptKeys[k].values[run.valueIndices[k]]);
}

/**
 * A value with its key, or alone if it explains itself: "n_head 4", "muon".
 *
 * @param {Run} run
 * @param {number} k - Index of the swept key.
 * @returns {string}
 */
export function keyAndValue(run, k) {
  const { axis, values } = sweptKeys[k];
  const isWord =
    axis === "names" && !/^(true|false|null|none|)$/i.test(values[run.valueIndices[k]]);
  if ((sweptKeys.length > 1 || data.study) && isWord) return valueName(run, k);
  return `${keyName(k)} ${valueName(run, k)}`;
}

/**
 * @param {number} setting
 * @returns {string}
 */
export function settingName(setting) {
  if (data.isComparison) return runName(runsOf[setting][0]);
  const parts = sweptKeys.map((_, k) =>
    hasSingleValue(setting, k) ? keyAndValue(runsOf[setting][0], k) : "",
  );
  return parts.filter(Boolean).join(", ") || "all seeds";
}

/**
 * A star after the name of the setting that is declared best.
 *
 * @param {number | null} setting
 * @returns {string}
 */
export function bestMark(setting) {
  return setting !== null && setting === bestSetting ? " ★" : "";
}

/**
 * @param {Run} run
 * @returns {string}
 */
export function runName(run) {
  if (data.isComparison) return printableName(run.name);
  const parts = sweptKeys.map((_, k) => keyAndValue(run, k));
  if (run.seed && hasSeveralSeeds && sweptKeys[0].name !== "seed")
    parts.push(`seed ${printableName(run.seed)}`);
  return parts.join(", ") || printableName(run.name);
}

/**
 * How a run ended: "finished", "failed after 10 of 20 steps".
 *
 * @param {Run} run
 * @returns {string}
 */
export function outcome({ status, figures, maxSteps }) {
  if (status === "finished") return status;
  if (figures.step === null) return `${status} before its first step`;
  if (!maxSteps) return `${status} after ${pluralize(figures.step, "step")}`;
  return `${status} after ${formatCount(figures.step)} of ${pluralize(maxSteps, "step")}`;
}

/**
 * @param {number} value
 * @param {number} digits
 * @returns {number} The value rounded to so many significant digits.
 */
function roundToDigits(value, digits) {
  return Number(value.toPrecision(digits));
}

/**
 * A mean with its standard error, if that is known, to two digits of it.
 *
 * @param {number | null | undefined} value
 * @param {number | null | undefined} error
 * @returns {string}
 */
export const withError = (value, error) => formatWithError(value, error, 2);

/**
 * A large number with its standard error, if that is known: 1.7M, 1.67 ± 0.34M.
 *
 * @param {number} value
 * @param {number | null} error
 * @returns {string}
 */
export function formatMagnitude(value, error) {
  if (!error) return formatCompact(roundToDigits(value, 2));
  const power = Math.min(3, Math.floor(Math.log10(Math.max(1, value)) / 3));
  const size = 1000 ** power;
  return withError(value / size, error / size) + ["", "k", "M", "G"][power];
}

/**
 * @param {number} size - In bytes.
 * @returns {string}
 */
export function formatBytes(size) {
  const power = Math.min(3, Math.floor(Math.log10(Math.max(1, size)) / 3));
  const unit = ["bytes", "kB", "MB", "GB"][power];
  return `${formatCount(roundToDigits(size / 1000 ** power, 3))} ${unit}`;
}

/**
 * What a setting costs.
 *
 * @typedef {object} Cost
 * @property {string} name
 * @property {string} unit - "" if its values are written with their unit, or have none.
 * @property {(value: number) => string} format
 * @property {(value: number) => string} formatTick
 * @property {boolean} isMeasured - Whether it differs between runs of the same setting.
 */

/** @type {Record<string, Cost>} */
export const COSTS = {
  parameters: {
    name: "Parameters",
    unit: "",
    format: formatCount,
    formatTick: value => formatCompact(roundToDigits(value, 3)),
    isMeasured: false,
  },
  kv_cache_bytes: {
    name: "KV cache",
    unit: "",
    format: formatBytes,
    formatTick: formatBytes,
    isMeasured: false,
  },
  tokens_per_second: {
    name: "Throughput",
    unit: "tokens/s",
    format: value => formatCount(roundToDigits(value, 3)),
    formatTick: value => formatCompact(roundToDigits(value, 3)),
    isMeasured: true,
  },
  train_seconds: {
    name: "Training time",
    unit: "",
    format: formatDuration,
    formatTick: value => `${formatCompact(roundToDigits(value, 3))} s`,
    isMeasured: true,
  },
};

/**
 * @param {number} setting
 * @param {string} name - Name of the cost.
 * @returns {number | null}
 */
export function costOf(setting, name) {
  return results[setting].figures[name] ?? null;
}

/**
 * The distinct values of a cost, in ascending order.
 *
 * @param {string} name - Name of the cost.
 * @returns {number[]}
 */
export function distinctCosts(name) {
  const costs = allSettings.map(setting => costOf(setting, name)).filter(cost => cost !== null);
  return [...new Set(costs)].sort((a, b) => a - b);
}

/**
 * The name of a cost with its unit: "Throughput (tokens/s)".
 *
 * @param {string} name - Name of the cost.
 * @returns {string}
 */
export function costTitle(name) {
  const { name: title, unit } = COSTS[name];
  return unit ? `${title} (${unit})` : title;
}

/**
 * @param {string} name - Name of the cost.
 * @param {number | null} value
 * @returns {string}
 */
export function formatCost(name, value) {
  return value === null ? "–" : COSTS[name].format(value);
}
