/**
 * The data of a sweep's page: its runs, the values that were swept, and the result of each setting.
 *
 * A setting is a combination of swept values; its runs differ only in their seed. Settings are
 * numbered from 0, best first. If any runs are compared, each is a setting of its own: the first
 * swept key is its name, and the others are the settings in which the runs differ.
 */

import { $ } from "./dom.js";
import { mean, standardDeviation, standardError } from "./statistics.js";

/**
 * @typedef {object} Curve
 * @property {number[]} steps
 * @property {number[]} values
 * @property {number} of - Number of measured points, of which the curve keeps some.
 */

/**
 * @typedef {object} Run
 * @property {string} name - Name of the run's folder.
 * @property {string | null} page - Address of the run's own page.
 * @property {"finished" | "failed" | "unfinished"} status
 * @property {string} reason - Why the run failed or could not be continued; "" if it did not.
 * @property {number | null} maxSteps
 * @property {number} setting
 * @property {string} seed
 * @property {number[]} valueIndices - For each swept key, the index of the run's value.
 * @property {Record<string, number | null>} figures
 * @property {Record<string, Curve>} curves
 * @property {Record<string, Curve>} heads - For each score, the strongest head's or the mean over
 *   the heads.
 * @property {Record<string, number>} emerged - For each kind of head, the step at which the first
 *   one emerged.
 * @property {Record<string, number | null>} formed - What the heads had become by the end.
 */

/**
 * A setting that was swept.
 *
 * @typedef {object} SweptKey
 * @property {string} name
 * @property {string[]} values - In their order.
 * @property {"names" | "linear" | "log"} axis - How the values are spread along an axis.
 * @property {number[] | null} numbers - The values as numbers; null if one of them is not a number.
 */

/**
 * Means over the measured runs of a setting, with their standard errors.
 *
 * @typedef {object} Result
 * @property {number} runCount - Measured runs that have a loss.
 * @property {number | null} loss - Mean of the metric that settings are compared by.
 * @property {number | null} lossError
 * @property {Record<string, number>} figures
 * @property {Record<string, number | null>} figureErrors
 * @property {Record<string, number[]>} emerged - For each kind of head, the steps of the runs in
 *   which one emerged.
 * @property {Record<string, number>} scores - At the end of training.
 * @property {Record<string, number | null>} scoreErrors
 */

/** In a comparison of runs that differ in more keys, charts are drawn against the runs only. */
const MAX_CHARTED_KEYS = 5;

export const data = JSON.parse($("data").textContent);

/** @type {SweptKey[]} */
export const sweptKeys = data.keys.map(createSweptKey);

/** @type {Run[]} */
export const runs = data.runs.map(run => ({
  ...run,
  valueIndices: run.values.map((value, k) => sweptKeys[k].values.indexOf(value)),
}));

const settingCount = Math.max(0, ...runs.map(run => run.setting + 1));

/** The numbers of all settings, best first. */
export const allSettings = [...Array(settingCount).keys()];

/** The runs of each setting. */
export const runsOf = allSettings.map(setting => runs.filter(run => run.setting === setting));

/** @type {Result[]} */
export const results = allSettings.map(setting => summarizeRuns(measuredRuns(setting)));

/** Unit of the metric that settings are compared by. */
export const lossUnit = { "val/loss": "nats/token", "val/bits_per_byte": "bits per byte" }[
  data.metric
];

/** What the page calls a setting: in a comparison each run is one, in a study each arm. */
export const settingNoun = data.isComparison ? "run" : data.study ? "arm" : "setting";

/** The setting with the lowest loss; null if there is no result. */
export const lowestLossSetting = data.hasResult ? 0 : null;

/** The setting that is declared best; null without an error estimate. */
export const bestSetting = data.oneSeed ? null : lowestLossSetting;

/** Whether any setting has more than one run. */
export const hasSeveralSeeds = runsOf.some(runsOfSetting => runsOfSetting.length > 1);

/** Indices of the swept keys that charts are drawn against. */
export const chartedKeys =
  data.isComparison && sweptKeys.length > MAX_CHARTED_KEYS ? [0] : [...sweptKeys.keys()];

/**
 * The runs whose results count: the finished ones, or in a comparison of runs each one so far.
 *
 * @param {number} setting
 * @returns {Run[]}
 */
export function measuredRuns(setting) {
  return runsOf[setting].filter(run => run.status === "finished" || data.isComparison);
}

/**
 * Whether all runs of a setting have the same value of a swept key.
 *
 * @param {number} setting
 * @param {number} k - Index of the key.
 * @returns {boolean}
 */
export function hasSingleValue(setting, k) {
  return new Set(runsOf[setting].map(run => run.valueIndices[k])).size === 1;
}

/**
 * The loss of a run at its best step.
 *
 * @param {Run} run
 * @returns {number | null}
 */
export function lossOf(run) {
  return run.figures[data.metric];
}

/**
 * The place of a run's value on an axis: the number, or its index among the names.
 *
 * @param {Run} run
 * @param {number} k - Index of the swept key.
 * @returns {number}
 */
export function axisValue(run, k) {
  const index = run.valueIndices[k];
  return sweptKeys[k].numbers?.[index] ?? index;
}

/**
 * Put the values of a key in order and choose the axis that spaces them more evenly.
 *
 * @param {{name: string, values: string[]}} key
 * @returns {SweptKey}
 */
function createSweptKey({ name, values }) {
  const toNumber = value => (/^[-+.\d]/.test(value) ? Number(value) : NaN);
  const areNumbers = values.every(value => Number.isFinite(toNumber(value)));
  if (!areNumbers) return { name, values, axis: "names", numbers: null };
  const sortedValues = [...values].sort((a, b) => toNumber(a) - toNumber(b));
  const numbers = sortedValues.map(toNumber);
  return { name, values: sortedValues, axis: isSpacedByRatio(numbers) ? "log" : "linear", numbers };
}

/**
 * Whether ascending numbers are more evenly spaced on a logarithmic axis than on a linear one.
 *
 * @param {number[]} numbers
 * @returns {boolean}
 */
function isSpacedByRatio(numbers) {
  const pairs = numbers.slice(1).map((next, k) => [numbers[k], next]);
  if (numbers[0] <= 0 || numbers.length < 2 || pairs.some(([a, b]) => a === b)) return false;
  if (numbers.length === 2) return numbers[1] >= 4 * numbers[0];
  const unevenness = gaps => standardDeviation(gaps) / mean(gaps);
  const ratios = pairs.map(([a, b]) => Math.log(b / a));
  const differences = pairs.map(([a, b]) => b - a);
  return unevenness(ratios) < unevenness(differences);
}

/**
 * @param {Run[]} finished
 * @returns {Result}
 */
function summarizeRuns(finished) {
  const namesIn = table => [...new Set(finished.flatMap(run => Object.keys(run[table])))];
  const valuesIn = (table, name) =>
    finished.map(run => run[table][name] ?? null).filter(value => value !== null);
  const finalScores = score =>
    finished.map(run => run.heads[score]?.values.at(-1)).filter(value => value !== undefined);
  const forEachName = (names, compute) =>
    Object.fromEntries(names.map(name => [name, compute(name)]));

  const losses = valuesIn("figures", data.metric);
  const figures = namesIn("figures");
  const scores = namesIn("heads");
  return {
    runCount: losses.length,
    loss: mean(losses),
    lossError: standardError(losses),
    figures: forEachName(figures, name => mean(valuesIn("figures", name))),
    figureErrors: forEachName(figures, name => standardError(valuesIn("figures", name))),
    emerged: forEachName(namesIn("emerged"), kind => valuesIn("emerged", kind)),
    scores: forEachName(scores, score => mean(finalScores(score))),
    scoreErrors: forEachName(scores, score => standardError(finalScores(score))),
  };
}
