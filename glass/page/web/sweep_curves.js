/** The curves of a sweep's page: losses and head scores over the steps of training. */

import { chartPanel } from "./chart_axes.js";
import { $, bdi, el } from "./dom.js";
import { formatCount, formatNumber, pluralize } from "./format.js";
import { drawLineChart } from "./line_chart.js";
import { mean, standardError } from "./statistics.js";
import {
  allSettings,
  data,
  hasSeveralSeeds,
  lossUnit,
  measuredRuns,
  runs,
  runsOf,
  settingNoun,
} from "./sweep_data.js";
import { highlightNear, settingDash } from "./sweep_highlight.js";
import { bestMark, runName, settingName } from "./sweep_names.js";
import { explanationOf, SCORES, scoreLabel, scoreTitle } from "./terms.js";

/**
 * @typedef {import("./sweep_data.js").Curve} Curve
 * @typedef {import("./sweep_data.js").Run} Run
 * @typedef {import("./line_chart.js").Series & {run?: Run, seedCount?: number}} SettingSeries
 */

export const LINES_NOTE = hasSeveralSeeds
  ? `Bold lines are means over the finished runs of each ${settingNoun}; thin lines are single runs.`
  : "";
/** An `stroke-dasharray` for runs that have not finished. */
const UNFINISHED_DASH = "3 3";
/** Losses up to this share of the run are left out of the range of the y axis. */
const WARMUP_SHARE = 0.1;
/**
 * The mean over the finished runs of a setting, at the steps that all of them have.
 *
 * @param {number} setting
 * @param {(run: Run) => Curve | undefined} curveOf
 * @returns {{xs: number[], ys: number[], errors: (number | null)[], seedCount: number} | null} Null
 *   if no run has finished.
 */
function meanCurve(setting, curveOf) {
  const curves = measuredRuns(setting)
    .map(curveOf)
    .filter(curve => curve?.steps.length);
  if (!curves.length) return null;
  const valueByStep = curves.map(
    ({ steps, values }) => new Map(steps.map((step, k) => [step, values[k]])),
  );
  const xs = curves[0].steps.filter(step => valueByStep.every(values => values.has(step)));
  const valuesAt = step => valueByStep.map(values => values.get(step));
  return {
    xs,
    ys: xs.map(step => mean(valuesAt(step))),
    errors: xs.map(step => standardError(valuesAt(step))),
    seedCount: curves.length,
  };
}

/**
 * The lines of all settings, best on top: the mean with its runs behind it. A run that has not
 * finished is a dashed line of its own.
 *
 * @param {(run: Run) => Curve | undefined} curveOf
 * @param {object} [options]
 * @param {boolean} [options.bold]
 * @param {(run: Run, curve: Curve) => number[]} [options.dots] - Indices of marked values of a
 *   run's curve.
 * @returns {SettingSeries[]}
 */
export function settingLines(curveOf, { bold = true, dots = () => [] } = {}) {
  const background = [];
  const foreground = [];
  for (const setting of allSettings) {
    const label = settingName(setting) + bestMark(setting);
    const style = { color: `s${setting}`, group: setting, dash: settingDash(setting) };
    const average = meanCurve(setting, curveOf);
    const hasMeanLine = average !== null && average.seedCount > 1;
    for (const run of runsOf[setting]) {
      const curve = curveOf(run);
      if (!curve?.steps.length) continue;
      const line = {
        ...style,
        name: runName(run),
        xs: curve.steps,
        ys: curve.values,
        run,
        dots: dots(run, curve),
      };
      if (run.status !== "finished") foreground.push({ ...line, dash: UNFINISHED_DASH });
      else if (hasMeanLine) background.push({ ...line, faint: true });
      else foreground.push({ ...line, bold, label });
    }
    if (hasMeanLine)
      foreground.push({ ...style, ...average, name: settingName(setting), bold, label });
  }
  return [...background, ...foreground.reverse()];
}

/**
 * @param {string} unit
 * @returns {(series: SettingSeries, index: number) => Node[]} What the tooltip says about a value.
 */
export function describeValue(unit) {
  return ({ name, xs, ys, run, seedCount, group }, k) => {
    const details = [`step ${formatCount(xs[k])}`];
    if (seedCount) details.push(`mean of ${pluralize(seedCount, "run")}`);
    if (run && run.status !== "finished") details.push(run.status);
    return [
      el("div", {}, el("b", {}, bdi(name)), bestMark(group)),
      el("div", { className: "value" }, el("b", {}, formatNumber(ys[k])), ` ${unit}`),
      el("div", {}, el("small", {}, details.join(", "))),
    ];
  };
}

/**
 * Upper end of the y axis. The steep beginning, which is much the same in all runs, and runs that
 * diverge would flatten all differences.
 *
 * @param {(run: Run) => Curve | undefined} curveOf
 * @returns {number}
 */
function upperLimit(curveOf) {
  const curves = runs.map(curveOf).filter(curve => curve?.steps.length > 1);
  if (!curves.length) return Infinity;
  const starts = curves.map(({ values }) => values[0]).sort((a, b) => a - b);
  const medianStart = starts[starts.length >> 1];
  const valueAfterWarmup = ({ steps, values }) => {
    const end = WARMUP_SHARE * steps.at(-1);
    return values[steps.findIndex((step, k) => k > 0 && step >= end)];
  };
  return Math.min(1.02 * medianStart, Math.max(...curves.map(valueAfterWarmup)));
}

/** Draw the validation loss and, if it is comparable, the training loss. */
export function drawLossCurves() {
  const validation = {
    curveOf: run => run.curves[data.metric],
    name: "Validation loss",
    bold: true,
  };
  const training = { curveOf: run => run.curves["train/loss"], name: "Training loss", bold: false };
  const candidates = data.metric === "val/loss" ? [validation, training] : [validation];
  const charts = candidates.filter(({ curveOf }) =>
    runs.some(run => curveOf(run).steps.length > 1),
  );
  const height = $("curves").clientWidth > 1500 ? 400 : 320;
  // All panels exist before the first is drawn, because they share the width.
  charts.forEach((_, k) => {
    chartPanel($("curves-charts"), `curve-${k}`);
  });
  charts.forEach(({ curveOf, name, bold }, k) => {
    drawLineChart($(`curve-${k}`), {
      title: `${name} (${lossUnit})`,
      explanation: explanationOf(name),
      series: settingLines(curveOf, { bold }),
      height,
      yMax: upperLimit(curveOf),
      describe: describeValue(lossUnit),
      onNear: highlightNear,
    });
  });
  $("curves").hidden = !charts.length;
  $("curves-note").textContent = curvesNote(charts.map(({ curveOf }) => curveOf));
}

/**
 * @param {((run: Run) => Curve)[]} curvesOf - curvesOf of the charts that are shown.
 * @returns {string}
 */
function curvesNote(curvesOf) {
  const isAny = test =>
    curvesOf.some(curveOf => runs.some(run => test(run, curveOf(run), upperLimit(curveOf))));
  const pointCounts = curvesOf.flatMap(curveOf => runs.map(run => curveOf(run).of));
  const maxPoints = Math.max(0, ...pointCounts);
  const notes = [LINES_NOTE];
  if (data.hasSeveralTexts) notes.push("The texts differ, so the losses are not comparable.");
  if (isAny((run, curve) => run.status !== "finished" && curve.steps.length)) {
    notes.push("Dashed lines are runs that have not finished.");
  }
  if (isAny((_run, curve, limit) => curve.values.some(value => value > limit))) {
    notes.push("Values above the chart are cut off: the steep beginning, or a run that diverges.");
  }
  if (data.metric !== "val/loss") {
    notes.push(
      "Training losses are not shown, because they are per token and the tokenizers differ.",
    );
  }
  if (maxPoints > data.points) {
    notes.push(
      `Curves show ${formatCount(data.points)} of up to ${formatCount(maxPoints)} points, evenly spaced.`,
    );
  }
  return notes.filter(Boolean).join(" ");
}

/** Draw the score of each kind of head. */
export function drawScoreCurves() {
  const allScores = [...new Set(runs.flatMap(run => Object.keys(run.heads)))];
  const scores = allScores.filter(score => runs.some(run => run.heads[score]?.steps.length > 1));
  $("heads").hidden = !scores.length;
  for (const score of scores) {
    const emergenceDot = (run, { steps }) =>
      [steps.findLastIndex(step => step <= run.emerged[score])].filter(k => k >= 0);
    drawLineChart(chartPanel($("heads-charts"), `head-${score}`), {
      title: scoreTitle(score),
      explanation: SCORES[score]?.explanation,
      height: 220,
      includes: data.averagedScores.includes(score) ? [] : [0, 0.3],
      series: settingLines(run => run.heads[score], { dots: emergenceDot }),
      describe: describeValue(SCORES[score]?.unit ?? ""),
      onNear: highlightNear,
    });
  }
  const averaged = scores.filter(score => data.averagedScores.includes(score)).map(scoreLabel);
  const averagedNote = averaged.length
    ? `; for ${averaged.join(" and ").toLowerCase()}, the mean over all heads`
    : "";
  const hasEmerged = runs.some(run => Object.keys(run.emerged).length);
  const notes = [
    `Score of the strongest head at each step${averagedNote}.`,
    LINES_NOTE,
    hasEmerged ? "A dot marks the step at which the first such head emerged." : "No head emerged.",
  ];
  $("heads-note").textContent = notes.filter(Boolean).join(" ");
}
