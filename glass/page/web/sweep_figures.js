/** The charts of a sweep's page that show a figure against a swept key or a cost. */

import { chartPanel } from "./chart_axes.js";
import { $ } from "./dom.js";
import { drawDotChart } from "./dot_chart.js";
import { pluralize, printableName } from "./format.js";
import {
  allSettings,
  axisValue,
  bestMark,
  bestSetting,
  chartedKeys,
  costFigures,
  data,
  describeMark,
  figures,
  figureTitle,
  formatFigure,
  hasSeveralSeeds,
  hasSingleValue,
  highlightNear,
  keyAndValue,
  keyName,
  lossFigure,
  outcome,
  resultOf,
  runName,
  runs,
  runsOf,
  settingName,
  settingNoun,
  sweptKeys,
  togglePin,
} from "./sweep_data.js";

/** Largest ratio of costs on a linear axis; beyond it the axis is logarithmic. */
const MAX_LINEAR_RATIO = 8;
const DOTS_NOTE = hasSeveralSeeds
  ? ["Large dots are means of settings with standard errors; small dots are single runs."]
  : [];

/** Draw the loss against each swept key and each cost, and the figures of heads against each key. */
export function drawFigures() {
  const keys = chartedKeys.filter(k => sweptKeys[k].values.length > 1 || sweptKeys.length === 1);
  const keyAbscissas = keys.map(keyAbscissa);
  const costAbscissas = costFigures.map(costAbscissa).filter(({ axis }) => axis.ticks.length > 1);
  for (const abscissa of [...keyAbscissas, ...costAbscissas]) {
    drawFigure($("tradeoffs-charts"), `loss-by-${abscissa.id}`, lossFigure, abscissa);
  }
  const ofHeads = figures.filter(({ section }) => section === "heads");
  for (const figure of ofHeads) {
    for (const abscissa of keyAbscissas.filter(({ key }) => sweptKeys[key].values.length > 1)) {
      drawFigure($("formed-charts"), `${figure.name}-by-${abscissa.id}`, figure, abscissa);
    }
  }
  $("tradeoffs").hidden = data.hasSeveralTexts || !figures.includes(lossFigure);
  $("tradeoffs-note").textContent = lossNotes().join(" ");
  $("formed").hidden = !$("formed-charts").childElementCount;
  const notes = [
    ...DOTS_NOTE,
    "Times of emergence are medians.",
    `A ${settingNoun} in which less than half of the runs have such a head has no time.`,
  ];
  $("formed-note").textContent = notes.join(" ");
}

function lossNotes() {
  const notes = [`${figureTitle(lossFigure)} at each run's best step; lower is better.`];
  notes.push(...DOTS_NOTE);
  if (bestSetting !== null) notes.push("The ring marks the best setting.");
  if ($("tradeoffs").querySelector(".connecting") && sweptKeys.length > 1) {
    notes.push("Lines join settings that differ only in this key.");
  }
  if ($("tradeoffs").querySelector(".outlier")) {
    notes.push("Arrowheads mark values far above the chart.");
  }
  return notes;
}

/** @returns {Abscissa} */
function keyAbscissa(k) {
  const { axis: type, values, numbers } = sweptKeys[k];
  /** @type {[number, string][]} */
  const ticks = values.map((value, index) => [numbers?.[index] ?? index, printableName(value)]);
  const name = keyName(k);
  const axis = { type, ticks, name: axisName(name, type === "log") };
  return { id: `key-${k}`, name, key: k, toValue: run => axisValue(run, k), axis };
}

/** @returns {Abscissa} */
function costAbscissa(figure) {
  const results = allSettings.map(setting => resultOf(setting, figure).value);
  const values = [...new Set(results.filter(value => value !== null))].sort((a, b) => a - b);
  const isLog = values[0] > 0 && values.at(-1) > MAX_LINEAR_RATIO * values[0];
  return {
    id: figure.name,
    name: figure.title.replace(/^[A-Z](?=[a-z])/, letter => letter.toLowerCase()),
    key: null,
    toValue: run => results[run.setting],
    describe: value => `${figureTitle(figure)}: ${formatFigure(figure, value)}`,
    axis: {
      type: isLog ? "log" : "linear",
      ticks: values.map(value => [value, formatFigure({ ...figure, isLarge: true }, value)]),
      name: axisName(figureTitle(figure), isLog),
    },
  };
}

function axisName(name, isLog) {
  return isLog ? `${name}, log scale` : name;
}

function drawFigure(section, id, figure, abscissa) {
  const { key, toValue } = abscissa;
  const means = allSettings
    .filter(setting => key === null || hasSingleValue(setting, key))
    .map(setting => meanDot(setting, figure, abscissa))
    .filter(({ y }) => y !== null);
  const settingsWithMean = new Set(means.map(({ group }) => group));
  const isLoss = figure === lossFigure;
  const isSmallDot = run => {
    const isOnlyRun = runsOf[run.setting].length === 1 && settingsWithMean.has(run.setting);
    return (isLoss || run.status === "finished") && !isOnlyRun; // which is the mean
  };
  const singleRuns = key === null ? [] : runs.filter(isSmallDot);
  drawDotChart(chartPanel(section, id), {
    title: `${figureTitle(figure)} vs. ${abscissa.name}`,
    dots: [...singleRuns.map(run => runDot(run, toValue(run), figure)), ...means],
    lines: key === null ? [] : joinDots(means, key),
    axis: abscissa.axis,
    ringedGroup: isLoss ? bestSetting : null,
    cutsOutliers: isLoss,
    onNear: highlightNear,
    onPick: dot => togglePin(new Set([dot.group])),
  });
}

/** @returns {Dot} */
function meanDot(setting, figure, { toValue, describe }) {
  const { value, error, count } = resultOf(setting, figure);
  const x = toValue(runsOf[setting][0]);
  const runCount = runsOf[setting].length;
  const share = count < runCount ? `${count} of ${pluralize(runCount, "run")}` : `${count} runs`;
  const details = runCount > 1 ? [`${figure.isTime ? "median" : "mean"} of ${share}`] : [];
  if (describe) details.push(describe(x));
  const mark = figure === lossFigure ? bestMark(setting) : "";
  const nodes = describeDot(settingName(setting), mark, figure, value, error, details);
  return { x, y: value, error, group: setting, nodes };
}

/** @returns {Dot} */
function runDot(run, x, figure) {
  const value = run.figures[figure.name];
  const nodes = describeDot(runName(run), "", figure, value, null, [outcome(run)]);
  return { x, y: value, group: run.setting, small: true, nodes };
}

function describeDot(name, star, figure, value, error, details) {
  const unit = figure.unit === "B" ? "" : figure.unit;
  return describeMark(name, star, formatFigure(figure, value, error), unit, details);
}

/**
 * Join the dots of settings that differ in key k only, by lines named by what these have in common.
 *
 * @returns {DotLine[]}
 */
function joinDots(dots, k) {
  if (sweptKeys[k].axis === "names") return [];
  const otherValues = dot => runsOf[dot.group][0].valueIndices.with(k, -1).join();
  return [...Map.groupBy(dots, otherValues).values()]
    .filter(line => line.length > 1)
    .map(line => {
      const [run] = runsOf[line[0].group];
      const otherKeys = [...sweptKeys.keys()].filter(other => other !== k);
      const name = otherKeys.map(other => keyAndValue(run, other)).join(", ");
      return { name, dots: line.sort((a, b) => a.x - b.x) };
    });
}
