/** The section with in-context copying and the emergence of heads against what was swept. */

import { chartPanel } from "./chart_axes.js";
import { $ } from "./dom.js";
import { drawDotChart } from "./dot_chart.js";
import { pluralize } from "./format.js";
import { censoredMedian, mean, standardError } from "./statistics.js";
import {
  allSettings,
  axisValue,
  chartedKeys,
  data,
  hasSeveralSeeds,
  measuredRuns,
  runs,
  runsOf,
  settingNoun,
  sweptKeys,
} from "./sweep_data.js";
import { axisName, describeDot, joinDots, keyAxis } from "./sweep_dots.js";
import { highlightNear, togglePinOfMark } from "./sweep_highlight.js";
import {
  distinctCosts,
  formatBytes,
  formatMagnitude,
  keyName,
  runName,
  settingName,
  withError,
} from "./sweep_names.js";

/**
 * @typedef {import("./dot_chart.js").Dot} Dot
 * @typedef {import("./dot_chart.js").DotAxis} DotAxis
 * @typedef {import("./sweep_data.js").Run} Run
 */

/**
 * Least difference between the settings' texts, as a share of repeated pairs, that has a chart of
 * its own.
 */
const MIN_TEXT_DIFFERENCE = 0.02;

/**
 * @typedef {object} Outcome
 * @property {string} title - With its unit.
 * @property {(value: number, error?: number | null) => string} format
 * @property {boolean} [isTime] - Whether it is censored in runs that do not have it.
 */

/** Write a value with its standard error, if that is known; two decimals otherwise. */
const formatWithTwoDecimals = (value, error) =>
  error ? withError(value, error) : value.toFixed(2);

/** @type {Record<string, Outcome>} */
const OUTCOMES = {
  copying_gain: {
    title: "Copying gain (nats)",
    format: formatWithTwoDecimals,
  },
  "tokens_at_emergence/induction": {
    title: "Tokens until an induction head emerged",
    format: formatMagnitude,
    isTime: true,
  },
  "heads/induction": {
    title: "Highest prefix-matching score",
    format: formatWithTwoDecimals,
  },
  "tokens_at_emergence/previous_token": {
    title: "Tokens until a previous-token head emerged",
    format: formatMagnitude,
    isTime: true,
  },
  "heads/previous_token": {
    title: "Highest previous-token score",
    format: formatWithTwoDecimals,
  },
};

/**
 * The dot of a setting's mean outcome; of a time of emergence, its median.
 *
 * @param {number} setting
 * @param {number} x
 * @param {Outcome} outcome
 * @param {(run: Run) => number | null | undefined} outcomeOf
 * @returns {Dot | null} Null if no run of the setting has the outcome, or less than half of them
 *   the time.
 */
function meanOutcomeDot(setting, x, { format, isTime }, outcomeOf) {
  const measured = measuredRuns(setting);
  const values = measured.map(outcomeOf).filter(value => value !== undefined && value !== null);
  const y = isTime ? censoredMedian(values, measured.length) : mean(values);
  if (!values.length || y === null) return null;
  const error = isTime ? null : standardError(values);
  const detail = `${isTime ? "median; " : ""}in ${values.length} of ${pluralize(measured.length, "run")}`;
  const nodes = describeDot(settingName(setting), null, format(y, error), "", [detail]);
  return { x, y, error, group: setting, nodes };
}

/**
 * What outcomes are drawn against.
 *
 * @typedef {object} Abscissa
 * @property {string} id
 * @property {string} name
 * @property {number | null} key - Index of the swept key; null if it is another measure.
 * @property {(run: Run) => number} toValue
 * @property {DotAxis} axis
 */

/** @returns {Abscissa[]} */
function outcomeAbscissas() {
  const abscissas = chartedKeys
    .filter(k => sweptKeys[k].values.length > 1)
    .map(k => ({
      id: String(k),
      name: keyName(k),
      key: k,
      toValue: run => axisValue(run, k),
      axis: keyAxis(k),
    }));
  return [...abscissas, ...textAbscissa(), ...cacheAbscissa()];
}

/**
 * The share of repeated token pairs in the text, if settings differ in it.
 *
 * @returns {Abscissa[]}
 */
function textAbscissa() {
  const shares = allSettings.map(setting =>
    mean(measuredRuns(setting).map(run => run.formed.pairs_again ?? NaN)),
  );
  const differ = Math.max(...shares) - Math.min(...shares) > MIN_TEXT_DIFFERENCE;
  if (!shares.every(Number.isFinite) || !differ) return [];
  const distinctShares = [...new Set(shares)].sort((a, b) => a - b);
  /** @type {DotAxis} */
  const axis = {
    type: "linear",
    showsAllTicks: true,
    name: "share of token pairs seen earlier in the window",
    ticks: distinctShares.map(share => [share, share.toFixed(2)]),
  };
  return [
    {
      id: "text",
      name: "repetition in the text",
      key: null,
      toValue: run => shares[run.setting],
      axis,
    },
  ];
}

/**
 * The size of the KV cache, if key/value heads were swept.
 *
 * @returns {Abscissa[]}
 */
function cacheAbscissa() {
  const sizes = distinctCosts("kv_cache_bytes");
  const sweepsKvHeads = sweptKeys.some(({ name }) => name.endsWith("n_kv_head"));
  if (sizes.length < 2 || !sweepsKvHeads) return [];
  /** @type {DotAxis} */
  const axis = {
    type: "log",
    showsAllTicks: true,
    name: axisName("KV cache", true),
    ticks: sizes.map(size => [size, formatBytes(size)]),
  };
  return [
    { id: "cache", name: "KV cache", key: null, toValue: run => run.figures.kv_cache_bytes, axis },
  ];
}

/** Draw the outcomes of training in terms of heads against what was swept. */
export function drawOutcomes() {
  const abscissas = outcomeAbscissas();
  for (const [name, outcome] of Object.entries(OUTCOMES)) {
    if (!runs.some(run => run.formed[name] !== undefined)) continue;
    for (const abscissa of abscissas) drawOutcome(name, outcome, abscissa);
  }
  $("formed").hidden = !$("formed-charts").childElementCount;
  const notes = [];
  if (data.oneSeed && !data.isComparison) notes.push("With one seed there is no error estimate.");
  if (hasSeveralSeeds)
    notes.push(
      "Large dots are means of settings with standard errors over seeds, or medians of times; small dots are single runs.",
    );
  notes.push(`A ${settingNoun} in which less than half of the runs have such a head has no time.`);
  $("formed-note").textContent = notes.join(" ");
}

/**
 * @param {string} name - Name of the outcome in the data.
 * @param {Outcome} outcome
 * @param {Abscissa} abscissa
 */
function drawOutcome(name, outcome, { id, name: abscissaName, key, toValue, axis }) {
  const outcomeOf = run => run.formed[name];
  const means = allSettings
    .map(setting => meanOutcomeDot(setting, toValue(runsOf[setting][0]), outcome, outcomeOf))
    .filter(dot => dot !== null);
  const isShown = run =>
    run.status === "finished" && outcomeOf(run) !== undefined && runsOf[run.setting].length > 1;
  const singleRuns = runs.filter(isShown).map(run => ({
    x: toValue(run),
    y: outcomeOf(run),
    group: run.setting,
    small: true,
    nodes: describeDot(runName(run), null, outcome.format(outcomeOf(run)), "", []),
  }));
  drawDotChart(chartPanel($("formed-charts"), `formed-${name}-${id}`), {
    title: `${outcome.title} vs. ${abscissaName}`,
    dots: [...singleRuns, ...means],
    lines: key === null ? [] : joinDots(means, key),
    axis,
    ringedGroup: null,
    showsOutliers: true,
    onNear: highlightNear,
    onPick: togglePinOfMark,
  });
}
