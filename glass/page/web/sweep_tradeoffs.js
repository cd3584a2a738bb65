/** The section with the loss against each swept key and each cost. */

import { chartPanel, tickValues } from "./chart_axes.js";
import { $ } from "./dom.js";
import { drawDotChart } from "./dot_chart.js";
import { formatNumber, pluralize } from "./format.js";
import {
  allSettings,
  axisValue,
  bestSetting,
  chartedKeys,
  data,
  hasSeveralSeeds,
  hasSingleValue,
  lossOf,
  lossUnit,
  measuredRuns,
  results,
  runs,
  runsOf,
  settingNoun,
  sweptKeys,
} from "./sweep_data.js";
import { axisName, describeDot, joinDots, keyAxis } from "./sweep_dots.js";
import { highlightNear, togglePinOfMark } from "./sweep_highlight.js";
import {
  COSTS,
  costOf,
  costTitle,
  distinctCosts,
  formatBytes,
  formatCost,
  keyName,
  outcome,
  runName,
  settingName,
  withError,
} from "./sweep_names.js";

/**
 * @typedef {import("./dot_chart.js").Dot} Dot
 * @typedef {import("./sweep_data.js").Run} Run
 */

/** Largest ratio of costs on a linear axis; beyond it the axis is logarithmic. */
const MAX_LINEAR_RATIO = 8;
/** A cost with fewer distinct values has a tick at each of them. */
const MAX_VALUE_TICKS = 9;
/** Draw the loss against each swept key and each cost. */
export function drawTradeoffs() {
  for (const k of chartedKeys) {
    if (sweptKeys[k].values.length > 1 || sweptKeys.length === 1) drawLossByKey(k);
  }
  for (const name of Object.keys(COSTS)) drawLossByCost(name);
  $("tradeoffs").hidden = data.hasSeveralTexts || !runs.some(run => lossOf(run) !== null);
  const notes = [`Validation loss (${lossUnit}) at each run's best step; lower is better.`];
  if (hasSeveralSeeds)
    notes.push(
      "Large dots are means of settings with standard errors; small dots are single runs.",
    );
  if (bestSetting !== null) notes.push("The ring marks the best setting.");
  if (document.querySelector("#tradeoffs .connecting") && sweptKeys.length > 1) {
    notes.push("Lines join settings that differ only in this key.");
  }
  if (document.querySelector("#tradeoffs .outlier"))
    notes.push("Arrowheads mark values far above the chart.");
  notes.push(...equalCostsNote());
  $("tradeoffs-note").textContent = notes.join(" ");
}

/** @param {number} k index of the swept key */
function drawLossByKey(k) {
  const hasMean = setting => hasSingleValue(setting, k) && results[setting].loss !== null;
  const means = allSettings
    .filter(hasMean)
    .map(setting => meanLossDot(setting, axisValue(runsOf[setting][0], k)));
  // The only run of a setting is its mean.
  const isShownAsMean = run => hasMean(run.setting) && runsOf[run.setting].length === 1;
  const singleRuns = runs
    .filter(run => lossOf(run) !== null && !isShownAsMean(run))
    .map(run => runLossDot(run, axisValue(run, k)));
  drawDotChart(chartPanel($("tradeoffs-charts"), `loss-by-key-${k}`), {
    title: `Loss (${lossUnit}) vs. ${keyName(k)}`,
    dots: [...singleRuns, ...means],
    lines: joinDots(means, k),
    axis: keyAxis(k),
    ringedGroup: bestSetting,
    onNear: highlightNear,
    onPick: togglePinOfMark,
  });
}

/** @param {string} name of the cost */
function drawLossByCost(name) {
  const { name: title, unit, formatTick } = COSTS[name];
  const host = chartPanel($("tradeoffs-charts"), `loss-by-${name}`);
  const costs = distinctCosts(name);
  host.hidden = costs.length < 2;
  if (host.hidden) return;
  const isLog = costs[0] > 0 && costs.at(-1) > MAX_LINEAR_RATIO * costs[0];
  const settings = allSettings.filter(setting => costOf(setting, name) !== null);
  const dots = settings.map(setting => {
    const cost = costOf(setting, name);
    return meanLossDot(setting, cost, `${title}: ${formatCost(name, cost)} ${unit}`.trim());
  });
  drawDotChart(host, {
    title: `Loss (${lossUnit}) vs. ${title.toLowerCase().replace("kv", "KV")}`,
    dots,
    lines: [],
    axis: {
      type: isLog ? "log" : "linear",
      ticks: costTicks(name, costs, isLog).map(cost => [cost, formatTick(cost)]),
      name: axisName(costTitle(name), isLog),
    },
    ringedGroup: bestSetting,
    onNear: highlightNear,
    onPick: togglePinOfMark,
  });
}

/**
 * @param {string} name - Name of the cost.
 * @param {number[]} costs - Distinct values in ascending order.
 * @param {boolean} isLog
 * @returns {number[]}
 */
function costTicks(name, costs, isLog) {
  if (!COSTS[name].isMeasured && costs.length < MAX_VALUE_TICKS) return costs;
  const [low, high] = [costs[0], costs.at(-1)];
  if (isLog) return tickValues(Math.log2(low), Math.log2(high), 4).map(power => 2 ** power);
  return tickValues(low, high, 5);
}

/**
 * A sentence about the costs that are the same for all settings, which have no chart.
 *
 * @returns {string[]} Empty if there are none.
 */
function equalCostsNote() {
  if (allSettings.length < 2) return [];
  const parts = [];
  const [parameters, cacheSizes] = [distinctCosts("parameters"), distinctCosts("kv_cache_bytes")];
  if (parameters.length === 1) parts.push(pluralize(parameters[0], "parameter"));
  if (cacheSizes.length === 1) parts.push(`a KV cache of ${formatBytes(cacheSizes[0])}`);
  if (!parts.length) return [];
  const haveAllFinished = allSettings.every(setting => measuredRuns(setting).length);
  return [`All ${haveAllFinished ? "" : "finished "}${settingNoun}s have ${parts.join(" and ")}.`];
}

/**
 * The dot of a setting's mean loss.
 *
 * @param {number} setting
 * @param {number} x
 * @param {string} [detail]
 * @returns {Dot}
 */
function meanLossDot(setting, x, detail = "") {
  const { loss, lossError, runCount } = results[setting];
  const details = [runCount > 1 && `mean of ${runCount} runs`, detail];
  const nodes = describeDot(
    settingName(setting),
    setting,
    withError(loss, lossError),
    lossUnit,
    details,
  );
  return { x, y: loss, error: lossError, group: setting, nodes };
}

/**
 * The dot of one run's loss.
 *
 * @param {Run} run
 * @param {number} x
 * @returns {Dot}
 */
function runLossDot(run, x) {
  const loss = lossOf(run);
  const nodes = describeDot(runName(run), null, formatNumber(loss), lossUnit, [outcome(run)]);
  return { x, y: loss, group: run.setting, small: true, nodes };
}
