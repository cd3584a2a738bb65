/** The tables of a sweep's page: all settings, all runs, and the heads at the end of training. */

import { $, bdi, el } from "./dom.js";
import { formatCount, formatNumber, formatWithError, printableName } from "./format.js";
import { censoredMedian } from "./statistics.js";
import {
  allSettings,
  axisValue,
  bestSetting,
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
import { colorSwatch, highlight, togglePin } from "./sweep_highlight.js";
import {
  COSTS,
  costOf,
  costTitle,
  formatCost,
  keyName,
  outcome,
  settingName,
  valueName,
  withError,
} from "./sweep_names.js";
import { fillTable } from "./table.js";
import { explanationOf, SCORES, scoreLabel } from "./terms.js";

/** @type {import("./table.js").Sorting} */
const settingSorting = { column: null, sign: 0 };

/** Fill the three tables. */
export function showTables() {
  $("table").hidden = !allSettings.length;
  if (data.isComparison) $("table-title").textContent = "Runs and their settings";
  $("table-note").textContent = settingsNote();
  fillTable($("settings"), settingColumns(), allSettings, settingRow, settingSorting);
  const runRow = run =>
    el("tr", { "data-group": run.setting }, el("td", {}, colorSwatch(run.setting)));
  fillTable($("runs"), runColumns(), runs, runRow);
  const settingsWithScores = allSettings.filter(
    setting => Object.keys(results[setting].scores).length,
  );
  $("final-scores").hidden = !settingsWithScores.length;
  $("final-scores-title").hidden = !settingsWithScores.length;
  fillTable($("final-scores"), scoreColumns(), settingsWithScores, settingRow);
}

function settingsNote() {
  const values = hasSeveralSeeds ? "Values are means ± standard errors over finished runs. " : "";
  const order =
    data.hasSeveralTexts || data.study ? "" : `Each row is a ${settingNoun}, lowest loss first. `;
  const note =
    `${order}${values}The validation loss (${lossUnit}) is that of each run's best step. ` +
    "Click a column heading to sort, or a row to highlight it.";
  if (data.metric === "val/loss") return note;
  return `${note} The runs use different vocabularies, so compare bits per byte, not the loss per token.`;
}

/** A column for each swept key. */
function keyColumns() {
  return sweptKeys.map((key, k) => ({
    id: key.name,
    name: keyName(k),
    isText: true,
    cell: setting => (hasSingleValue(setting, k) ? bdi(valueName(runsOf[setting][0], k)) : "all"),
    sortValue: setting => (hasSingleValue(setting, k) ? axisValue(runsOf[setting][0], k) : null),
  }));
}

function settingColumns() {
  const lossColumn = {
    id: "loss",
    explanation: explanationOf("validation loss"),
    name: data.metric === "val/loss" ? `Validation loss (${lossUnit})` : "Bits per byte",
    sortValue: setting => results[setting].loss,
    cell: setting => withError(results[setting].loss, results[setting].lossError),
  };
  const seedColumn = {
    id: "seeds",
    name: "Seeds",
    explanation: "Number of finished runs.",
    sortValue: setting => results[setting].runCount,
    cell: seedCount,
  };
  const bitsOf = setting => results[setting].figures["val/bits_per_byte"];
  const hasBits = run => run.figures["val/bits_per_byte"] !== null; // generated data has none
  const bitsColumn = {
    id: "bits_per_byte",
    name: "Bits per byte",
    explanation: explanationOf("bits per byte"),
    sortValue: bitsOf,
    cell: setting => withError(bitsOf(setting), results[setting].figureErrors["val/bits_per_byte"]),
  };
  // Compared runs may differ in many settings, which would hide the loss.
  const leading = data.isComparison ? 1 : sweptKeys.length;
  return [
    ...keyColumns().slice(0, leading),
    lossColumn,
    ...keyColumns().slice(leading),
    ...(hasSeveralSeeds ? [seedColumn] : []),
    ...(data.metric === "val/loss" && data.runs.some(hasBits) ? [bitsColumn] : []),
    ...Object.keys(COSTS).map(costColumn),
  ];
}

/**
 * Number of finished runs of a setting: "3", "2 of 3".
 *
 * @param {number} setting
 * @returns {string}
 */
function seedCount(setting) {
  const [finished, total] = [results[setting].runCount, runsOf[setting].length];
  return finished === total ? String(finished) : `${finished} of ${total}`;
}

/** @param {string} name of the cost */
function costColumn(name) {
  return {
    id: name,
    name: costTitle(name),
    explanation: explanationOf(COSTS[name].name),
    sortValue: setting => costOf(setting, name),
    cell: setting => {
      const cost = costOf(setting, name);
      const error = results[setting].figureErrors[name];
      if (!error) return formatCost(name, cost);
      return withError(cost, error) + (name === "train_seconds" ? " s" : "");
    },
  };
}

/** Columns with the score of each kind of head at the end, and when the first such head emerged. */
function scoreColumns() {
  const scores = [...new Set(results.flatMap(result => Object.keys(result.scores)))];
  const columns = scores.map(score => ({
    id: score,
    name: scoreLabel(score),
    explanation: SCORES[score]?.explanation,
    sortValue: setting => results[setting].scores[score] ?? null,
    cell: setting => finalScore(setting, score) + emergence(setting, score),
  }));
  return [...keyColumns().slice(0, data.isComparison ? 1 : undefined), ...columns];
}

/**
 * @param {number} setting
 * @param {string} score
 * @returns {string}
 */
function finalScore(setting, score) {
  const { scores, scoreErrors } = results[setting];
  return score in scores ? formatWithError(scores[score], scoreErrors[score]) : "–";
}

/**
 * Median step at which the first head of a kind emerged, and in how many runs one did if not in
 * all. Without one in half of the runs the median is unknown.
 *
 * @param {number} setting
 * @param {string} kind
 * @returns {string} "" if none emerged.
 */
function emergence(setting, kind) {
  const steps = results[setting].emerged[kind];
  if (!steps) return "";
  const runCount = measuredRuns(setting).length;
  const median = censoredMedian(steps, runCount);
  const at = median === null ? "" : ` at step ${formatCount(median)}`;
  const share = steps.length < runCount ? ` in ${steps.length} of ${runCount} runs` : "";
  return `; emerged${at}${share}`;
}

function runColumns() {
  const folderName = run => bdi(printableName(run.name));
  const folder = run => (run.page ? el("a", { href: run.page }, folderName(run)) : folderName(run));
  const seedColumn = {
    id: "seed",
    name: "Seed",
    isText: true,
    cell: run => printableName(run.seed || "–"),
  };
  return [
    { id: "setting", name: "Setting", isText: true, cell: run => bdi(settingName(run.setting)) },
    ...(hasSeveralSeeds ? [seedColumn] : []),
    { id: "status", name: "Status", isText: true, cell: outcome },
    {
      id: "loss",
      name: data.metric === "val/loss" ? `Validation loss (${lossUnit})` : "Bits per byte",
      cell: run => formatNumber(lossOf(run)),
    },
    { id: "folder", name: "Folder", isText: true, cell: folder },
  ];
}

/** @param {number} setting */
function settingRow(setting) {
  const star = setting === bestSetting ? el("b", { title: "The best setting" }, "★") : "";
  const row = el("tr", { "data-group": setting }, el("td", {}, colorSwatch(setting), star));
  const settings = new Set([setting]);
  row.onpointerenter = () => highlight(settings);
  row.onpointerleave = () => highlight(null);
  row.onclick = () => togglePin(settings);
  return row;
}
