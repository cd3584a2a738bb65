/** The curves of a sweep's page: losses and head scores over the steps of training. */

import { $ } from "../base/dom.js";
import { formatCount, formatNumber, pluralize } from "../base/format.js";
import { mean, standardError } from "../base/statistics.js";
import { explanationOf, SCORES, scoreLabel, scoreTitle } from "../base/terms.js";
import { drawLineCharts, valuesAfterWarmup } from "../charts/line_chart.js";
import {
  allSettings,
  data,
  describeMark,
  highlightNear,
  measuredRuns,
  runs,
  runsOf,
  settingName,
} from "./data.js";

/** A `stroke-dasharray` for runs that have not finished. */
const UNFINISHED_DASH = "3 3";

/** The mean curve of a setting's runs, at the steps that all of them have. */
function meanCurve(curves) {
  const valueByStep = curves.map(
    ({ steps, values }) => new Map(steps.map((step, k) => [step, values[k]])),
  );
  const xs = curves[0].steps.filter(step => valueByStep.every(values => values.has(step)));
  const valuesAt = step => valueByStep.map(values => values.get(step));
  return {
    xs,
    ys: xs.map(step => mean(valuesAt(step))),
    errors: xs.map(step => standardError(valuesAt(step))),
  };
}

/**
 * The lines of all settings, best on top: the mean over its finished runs in front of the single
 * runs. `dotsOf` returns the indices of a run's marked values.
 *
 * @returns {Series[]}
 */
function settingLines(curveOf, dotsOf = (_run, _curve) => []) {
  const background = [];
  const foreground = [];
  for (const setting of allSettings) {
    const name = settingName(setting);
    const style = { color: `s${setting}`, group: setting };
    const curves = measuredRuns(setting).map(curveOf).filter(hasValues);
    const hasMeanLine = curves.length > 1;
    for (const run of runsOf(setting).filter(run => hasValues(curveOf(run)))) {
      const line = runLine(run, curveOf(run), style, dotsOf);
      if (run.status !== "finished") foreground.push(line);
      else if (hasMeanLine) background.push({ ...line, faint: true });
      else foreground.push({ ...line, bold: true, label: name });
    }
    if (!hasMeanLine) continue;
    const detail = `mean of ${pluralize(curves.length, "run")}`;
    foreground.push({ ...style, ...meanCurve(curves), name, detail, bold: true, label: name });
  }
  return [...background, ...foreground.reverse()];
}

/** The line of one run, dashed if it has not finished. */
function runLine(run, curve, style, dotsOf) {
  const dots = dotsOf(run, curve).map(k => ({ ...style, k }));
  const line = { ...style, name: run.title, xs: curve.steps, ys: curve.values, dots };
  if (run.status === "finished") return line;
  return { ...line, detail: run.status, dash: UNFINISHED_DASH };
}

const hasValues = curve => curve !== undefined && curve.steps.length > 0;

/** @type {LineChart["describe"]} */
const describeValue = ({ name, xs, ys, detail }, k) =>
  describeMark(
    name,
    formatNumber(ys[k]),
    `step ${formatCount(xs[k])}${detail ? `, ${detail}` : ""}`,
  );

/**
 * Upper end of the y axis. The steep beginning, which is much the same in all runs, and runs that
 * diverge would flatten all differences.
 */
function upperLimit(metric) {
  const curves = runs.map(run => run.curves[metric]).filter(hasValues);
  const starts = curves.map(({ values }) => values[0]).sort((a, b) => a - b);
  const later = curves.map(({ steps, values }) => valuesAfterWarmup(steps, values)[0]);
  return Math.min(1.02 * starts[starts.length >> 1], Math.max(...later));
}

/** Draw the losses. */
export function drawLossCurves() {
  const charts = Object.entries(data.losses)
    .filter(([metric]) => runs.some(run => run.curves[metric].steps.length > 1))
    .map(([metric, title], k) => ({
      id: `curve-${k}`,
      title: title.endsWith("loss") ? `${title} (nats/token)` : title,
      explanation: explanationOf(title),
      series: settingLines(run => run.curves[metric]),
      height: 320,
      yMax: upperLimit(metric),
      describe: describeValue,
      onNear: line => highlightNear(line?.group),
    }));
  drawLineCharts($("curves-charts"), charts);
  $("curves").hidden = !charts.length;
}

/** Draw the score of each kind of head. */
export function drawScoreCurves() {
  const allScores = [...new Set(runs.flatMap(run => Object.keys(run.heads)))];
  const scores = allScores.filter(score => runs.some(run => run.heads[score]?.steps.length > 1));
  const emergenceDot = score => (run, curve) =>
    [curve.steps.findLastIndex(step => step <= run.emerged[score])].filter(k => k >= 0);
  const charts = scores.map(score => ({
    id: `head-${score}`,
    title: scoreTitle(score),
    explanation: SCORES[score]?.explanation,
    height: 220,
    includes: data.averagedScores.includes(score) ? [] : [0, 0.3],
    series: settingLines(run => run.heads[score], emergenceDot(score)),
    describe: describeValue,
    onNear: line => highlightNear(line?.group),
  }));
  drawLineCharts($("heads-charts"), charts);
  $("heads").hidden = !charts.length;
  const averaged = scores.filter(score => data.averagedScores.includes(score)).map(scoreLabel);
  const exception = averaged.length ? `; ${averaged.join(" and ")}: the mean over all heads` : "";
  $("heads-note").textContent =
    `Score of the strongest head at each step${exception}. A dot marks the step at which the first such head emerged.`;
}
