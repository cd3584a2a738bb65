/** The tables of a sweep's page: all settings, all runs, and the heads at the end of training. */

import { $, bdi, el } from "./dom.js";
import { formatCount, formatWithError, printableName } from "./format.js";
import { censoredMedian, mean, standardError } from "./statistics.js";
import {
  allSettings,
  axisValue,
  bestSetting,
  colorSwatch,
  costFigures,
  data,
  figures,
  figureTitle,
  formatFigure,
  hasSeveralSeeds,
  hasSingleValue,
  highlight,
  keyName,
  lossFigure,
  measuredRuns,
  outcome,
  resultOf,
  runs,
  runsOf,
  settingName,
  settingNoun,
  sweptKeys,
  togglePin,
  valueName,
} from "./sweep_data.js";
import { fillTable } from "./table.js";
import { explanationOf, SCORES, scoreLabel } from "./terms.js";

/** @type {Sorting} */
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
  const scores = [...new Set(runs.flatMap(run => Object.keys(run.heads)))];
  $("final-scores").hidden = $("final-scores-title").hidden = !scores.length;
  const leading = keyColumns().slice(0, data.isComparison ? 1 : undefined);
  const columns = [...leading, ...scores.map(scoreColumn)];
  const isScored = setting => measuredRuns(setting).some(run => Object.keys(run.heads).length);
  fillTable($("final-scores"), columns, allSettings.filter(isScored), settingRow);
}

function settingsNote() {
  const notes = [
    data.hasSeveralTexts ? "" : `Each row is a ${settingNoun}, lowest loss first.`,
    hasSeveralSeeds ? "Values are means ± standard errors over finished runs." : "",
    "The validation loss is that of each run's best step.",
    "Click a column heading to sort, or a row to highlight it.",
    data.metric === "val/loss"
      ? ""
      : "The runs use different vocabularies, so compare bits per byte, not the loss per token.",
  ];
  return notes.filter(Boolean).join(" ");
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
  const seedColumn = {
    id: "seeds",
    name: "Seeds",
    explanation: "Number of finished runs.",
    sortValue: setting => measuredRuns(setting).length,
    cell: seedCount,
  };
  const bits = figures.filter(figure => figure.section === "loss" && figure !== lossFigure);
  // Compared runs may differ in many settings, which would hide the loss.
  const leading = data.isComparison ? 1 : sweptKeys.length;
  return [
    ...keyColumns().slice(0, leading),
    figureColumn("loss", lossFigure),
    ...keyColumns().slice(leading),
    ...(hasSeveralSeeds ? [seedColumn] : []),
    ...(data.metric === "val/loss" ? bits : []).map(figure => figureColumn(figure.name, figure)),
    ...costFigures.map(figure => figureColumn(figure.name, figure)),
  ];
}

/** Number of finished runs of a setting: "3", "2 of 3". */
function seedCount(setting) {
  const [finished, total] = [measuredRuns(setting).length, runsOf[setting].length];
  return finished === total ? String(finished) : `${finished} of ${total}`;
}

function figureColumn(id, figure) {
  return {
    id,
    name: figureTitle(figure),
    explanation: explanationOf(figure.title),
    sortValue: setting => resultOf(setting, figure).value,
    cell: setting => {
      const { value, error } = resultOf(setting, figure);
      return formatFigure(figure, value, error);
    },
  };
}

/** The score of a kind of head at the end, and when the first such head emerged. */
function scoreColumn(score) {
  const finalScores = setting =>
    measuredRuns(setting)
      .map(run => run.heads[score]?.values.at(-1))
      .filter(value => value !== undefined);
  return {
    id: score,
    name: scoreLabel(score),
    explanation: SCORES[score]?.explanation,
    cell: setting => {
      const scores = finalScores(setting);
      return formatWithError(mean(scores), standardError(scores)) + emergence(setting, score);
    },
  };
}

/**
 * Median step at which the first head of a kind emerged, and in how many runs one did if not in
 * all; "" if in none. Without one in half of the runs the median is unknown.
 */
function emergence(setting, kind) {
  const measured = measuredRuns(setting);
  const steps = measured.map(run => run.emerged[kind]).filter(step => step !== undefined);
  if (!steps.length) return "";
  const median = censoredMedian(steps, measured.length);
  const at = median === null ? "" : ` at step ${formatCount(median)}`;
  const share =
    steps.length < measured.length ? ` in ${steps.length} of ${measured.length} runs` : "";
  return `; emerged${at}${share}`;
}

function runColumns() {
  const folderName = run => bdi(printableName(run.name));
  const folder = run => (run.page ? el("a", { href: run.page }, folderName(run)) : folderName(run));
  const seed = run => printableName(run.seed || "–");
  return [
    { id: "setting", name: "Setting", isText: true, cell: run => bdi(settingName(run.setting)) },
    ...(hasSeveralSeeds ? [{ id: "seed", name: "Seed", isText: true, cell: seed }] : []),
    { id: "status", name: "Status", isText: true, cell: outcome },
    {
      id: "loss",
      name: figureTitle(lossFigure),
      cell: run => formatFigure(lossFigure, run.figures[data.metric]),
    },
    { id: "folder", name: "Folder", isText: true, cell: folder },
  ];
}

function settingRow(setting) {
  const star = setting === bestSetting ? el("b", { title: "The best setting" }, "★") : "";
  const row = el("tr", { "data-group": setting }, el("td", {}, colorSwatch(setting), star));
  const settings = new Set([setting]);
  row.onpointerenter = () => highlight(settings);
  row.onpointerleave = () => highlight(null);
  row.onclick = () => togglePin(settings);
  return row;
}
