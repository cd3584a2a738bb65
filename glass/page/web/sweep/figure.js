/** The chart of a sweep's page that shows a figure against a swept key. */

import { $, el } from "../base/dom.js";
import { formatNumber } from "../base/format.js";
import { explanationOf } from "../base/terms.js";
import { drawLineChart } from "../charts/line_chart.js";
import {
  allSettings,
  data,
  describeMark,
  highlightNear,
  keyWithMostValues,
  measuredRuns,
  settingName,
  sweptKeys,
} from "./data.js";

/** Losses this many times as far above the best one as the median is are cut off. */
const OUTLIER_DISTANCE = 7;

/** The keys that have several values, but not the names of compared runs. */
const chartedKeys = sweptKeys.filter(({ levels }, k) => {
  return levels.length > 1 && !(data.isComparison && k === 0);
});

/** Set up the choice of what the chart shows. */
export function setUpFigure() {
  $("figure").hidden = !chartedKeys.length || !data.figures.length;
  const options = items => items.map((item, k) => el("option", { value: k }, item.title));
  $("shown").append(...options(data.figures));
  $("against").append(...chartedKeys.map(({ name }, k) => el("option", { value: k }, name)));
  $("against").value = keyWithMostValues(chartedKeys);
  $("shown").onchange = $("against").onchange = drawFigure;
}

/** Draw the chart: means with standard errors before the values of single runs. */
export function drawFigure() {
  if ($("figure").hidden) return;
  const figure = data.figures[$("shown").value];
  const key = chartedKeys[$("against").value];
  const measured = allSettings.filter(setting => figure.values[setting] !== null);
  const otherKeys = sweptKeys.slice(data.isComparison ? 1 : 0).filter(other => other !== key);
  const otherValues = setting => otherKeys.map(({ name, values }) => `${name}=${values[setting]}`);
  const lines = Map.groupBy(measured, setting => otherValues(setting).join(" "));
  const single = measured.flatMap(setting => singleRuns(setting, figure, key));
  const means = [...lines].map(([name, settings]) => meanLine(name, settings, figure, key));
  const yMax = upperLimit(figure);
  const title = figure.unit ? `${figure.title} (${figure.unit})` : figure.title;
  drawLineChart($("figure-chart"), {
    title: `${title} vs. ${key.name}`,
    explanation: explanationOf(figure.title),
    series: [...single, ...means.reverse()],
    height: 320,
    xName: key.axis === "log" ? `${key.name}, log scale` : key.name,
    xTicks: key.ticks,
    hasLogX: key.axis === "log",
    includes: errorBarEnds(figure).filter(end => end <= yMax),
    yMax,
    describe: ({ name, settings, ys }, k) =>
      settings
        ? describeMark(settingName(settings[k]), figure.texts[settings[k]])
        : describeMark(name, formatNumber(ys[k])),
    onNear: (line, k) => highlightNear(line && (line.settings?.[k] ?? line.group)),
  });
}

/**
 * The means of settings that differ in a key only, joined if its values are numbers.
 *
 * @param {string} name
 * @param {number[]} unordered
 * @param {SweepFigure} figure
 * @param {SweptKey} key
 * @returns {Series}
 */
function meanLine(name, unordered, figure, { axis, positions }) {
  const settings = [...unordered].sort((a, b) => positions[a] - positions[b]);
  return {
    name,
    settings,
    label: name,
    xs: settings.map(setting => positions[setting]),
    ys: settings.map(setting => figure.values[setting]),
    errors: settings.map(setting => figure.errors[setting]),
    dots: settings.map((setting, k) => ({ k, color: `s${setting}`, group: setting })),
    color: "soft",
    isJoined: axis !== "names",
  };
}

/** The values of a setting's runs, if there are several. @returns {Series[]} */
function singleRuns(setting, { name }, { positions }) {
  const measured = measuredRuns(setting).filter(run => run.figures[name] !== null);
  if (measured.length < 2) return [];
  const style = { color: `s${setting}`, group: setting, faint: true };
  return measured.map(run => {
    return { ...style, name: run.title, xs: [positions[setting]], ys: [run.figures[name]] };
  });
}

/** @param {SweepFigure} figure */
function errorBarEnds({ values, errors }) {
  const measured = [...values.keys()].filter(k => values[k] !== null);
  return measured.flatMap(k => [values[k] - errors[k], values[k] + errors[k]]);
}

/**
 * Upper end of the y axis: settings that diverge would flatten the differences of the others.
 *
 * @param {SweepFigure} figure
 */
function upperLimit({ name, values }) {
  if (name !== data.figures[0].name) return Infinity; // the loss
  const sorted = values.filter(value => value !== null).sort((a, b) => a - b);
  const [best, median] = [sorted[0], sorted[sorted.length >> 1]];
  return median > best ? best + OUTLIER_DISTANCE * (median - best) : Infinity;
}
