/** The curves of a sweep's page: losses and head scores over the steps of training. */

import { $ } from "./dom.js";
import { formatCount, formatNumber, pluralize } from "./format.js";
import { drawLineCharts } from "./line_chart.js";
import { mean, standardError } from "./statistics.js";
import {
  allSettings,
  bestMark,
  data,
  describeMark,
  hasSeveralSeeds,
  highlightNear,
  lossFigure,
  measuredRuns,
  runName,
  runs,
  runsOf,
  settingDash,
  settingName,
  settingNoun,
} from "./sweep_data.js";
import { explanationOf, SCORES, scoreLabel, scoreTitle } from "./terms.js";

const LINES_NOTE = hasSeveralSeeds
  ? `Bold lines are means over the finished runs of each ${settingNoun}; thin lines are single runs.`
  : "";
/** A `stroke-dasharray` for runs that have not finished. */
const UNFINISHED_DASH = "3 3";
/** Losses before this share of the run are left out of the range of the y axis. */
const WARMUP_SHARE = 0.1;
/** Steps of the longest run per step of the shortest from which the steps have a log scale. */
const MIN_LOG_RATIO = 10;

/**
 * The mean over the finished runs of a setting, at the steps that all of them have; null if no run
 * has finished.
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
 * finished is a dashed line of its own. `dots` returns the indices of marked values.
 *
 * @returns {Series[]}
 */
function settingLines(curveOf, { bold = true, dots = (_run, _curve) => [] } = {}) {
  const background = [];
  const foreground = [];
  for (const setting of allSettings) {
    const name = settingName(setting);
    const label = name + bestMark(setting);
    const style = { color: `s${setting}`, group: setting, dash: settingDash(setting) };
    const average = meanCurve(setting, curveOf);
    const hasMeanLine = average !== null && average.seedCount > 1;
    for (const run of runsOf[setting]) {
      const curve = curveOf(run);
      if (!curve?.steps.length) continue;
      const { steps: xs, values: ys } = curve;
      const line = { ...style, name: runName(run), xs, ys, run, dots: dots(run, curve) };
      if (run.status !== "finished") foreground.push({ ...line, dash: UNFINISHED_DASH });
      else if (hasMeanLine) background.push({ ...line, faint: true });
      else foreground.push({ ...line, bold, label });
    }
    if (hasMeanLine) foreground.push({ ...style, ...average, name, bold, label });
  }
  return [...background, ...foreground.reverse()];
}

/** @returns {LineChart["describe"]} */
function describeValue(unit) {
  return ({ name, xs, ys, run, seedCount, group }, k) => {
    const details = [`step ${formatCount(xs[k])}`];
    if (seedCount) details.push(`mean of ${pluralize(seedCount, "run")}`);
    if (run && run.status !== "finished") details.push(run.status);
    return describeMark(name, bestMark(group), formatNumber(ys[k]), unit, [details.join(", ")]);
  };
}

/**
 * Upper end of the y axis. The steep beginning, which is much the same in all runs, and runs that
 * diverge would flatten all differences.
 */
function upperLimit(metric) {
  const curves = runs.map(run => run.curves[metric]).filter(({ steps }) => steps.length > 1);
  if (!curves.length) return Infinity;
  const starts = curves.map(({ values }) => values[0]).sort((a, b) => a - b);
  const medianStart = starts[starts.length >> 1];
  const valueAfterWarmup = ({ steps, values }) => {
    // The last value before its end: if evaluations are rare, lines would begin above the chart.
    const k = steps.findLastIndex(step => step <= WARMUP_SHARE * steps.at(-1));
    return values[Math.max(0, k)];
  };
  return Math.min(1.02 * medianStart, Math.max(...curves.map(valueAfterWarmup)));
}

/** Return what a logarithmic axis can show of a curve. */
function withoutStepZero({ steps, values, of }) {
  const first = steps.filter(step => step === 0).length;
  return { steps: steps.slice(first), values: values.slice(first), of };
}

/** Return whether short runs would be vertical lines beside long ones. */
function needsLogSteps() {
  const lengths = runs.filter(({ status }) => status === "finished").map(({ step }) => step);
  return Math.max(...lengths) >= MIN_LOG_RATIO * Math.min(...lengths);
}

/** Draw the validation loss and, if it is comparable, the training loss. */
export function drawLossCurves() {
  const hasLogSteps = needsLogSteps();
  const candidates = [{ metric: data.metric, name: "Validation loss", bold: true }];
  if (data.metric === "val/loss") {
    candidates.push({ metric: "train/loss", name: "Training loss", bold: false });
  }
  const charts = candidates.filter(({ metric }) =>
    runs.some(run => run.curves[metric].steps.length > 1),
  );
  const drawn = charts.map(({ metric, name, bold }, k) => ({
    id: `curve-${k}`,
    title: `${name} (${lossFigure.unit || "bits per byte"})`,
    explanation: explanationOf(name),
    series: settingLines(
      run => (hasLogSteps ? withoutStepZero(run.curves[metric]) : run.curves[metric]),
      { bold },
    ),
    hasLogSteps,
    height: $("curves").clientWidth > 1500 ? 400 : 320,
    yMax: upperLimit(metric),
    describe: describeValue(lossFigure.unit),
    onNear: highlightNear,
  }));
  drawLineCharts($("curves-charts"), drawn);
  $("curves").hidden = !charts.length;
  $("curves-note").textContent = curvesNote(charts.map(({ metric }) => metric));
}

/** Explain the charts of these metrics. */
function curvesNote(metrics) {
  const curves = metrics.flatMap(metric => runs.map(run => run.curves[metric]));
  const unfinished = runs.filter(({ status, curves }) => {
    return status !== "finished" && metrics.some(metric => curves[metric].steps.length);
  });
  const isCut = metrics.some(metric => {
    const limit = upperLimit(metric);
    return runs.some(run => run.curves[metric].values.some(value => value > limit));
  });
  const maxPoints = Math.max(0, ...curves.map(curve => curve.of));
  const notes = [
    LINES_NOTE,
    data.hasSeveralTexts ? "The texts differ, so the losses are not comparable." : "",
    unfinished.length ? "Dashed lines are runs that have not finished." : "",
    isCut ? "Values above the chart are cut off: the steep beginning, or a run that diverges." : "",
    data.metric === "val/loss"
      ? ""
      : "Training losses are not shown, because they are per token and the tokenizers differ.",
    maxPoints > data.points
      ? `Curves show ${formatCount(data.points)} of up to ${formatCount(maxPoints)} points, evenly spaced.`
      : "",
  ];
  return notes.filter(Boolean).join(" ");
}

/** Draw the score of each kind of head. */
export function drawScoreCurves() {
  const allScores = [...new Set(runs.flatMap(run => Object.keys(run.heads)))];
  const scores = allScores.filter(score => runs.some(run => run.heads[score]?.steps.length > 1));
  $("heads").hidden = !scores.length;
  const charts = scores.map(score => {
    const emergenceDot = (run, { steps }) =>
      [steps.findLastIndex(step => step <= run.emerged[score])].filter(index => index >= 0);
    return {
      id: `head-${score}`,
      title: scoreTitle(score),
      explanation: SCORES[score]?.explanation,
      height: 220,
      includes: data.averagedScores.includes(score) ? [] : [0, 0.3],
      series: settingLines(run => run.heads[score], { dots: emergenceDot }),
      describe: describeValue(SCORES[score]?.unit ?? ""),
      onNear: highlightNear,
    };
  });
  drawLineCharts($("heads-charts"), charts);
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
