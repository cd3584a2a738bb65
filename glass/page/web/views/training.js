/** The section about a run's training: figures, curves, samples, time by activity. */

import { $, bdi, el } from "../base/dom.js";
import {
  formatCompact,
  formatCount,
  formatDuration,
  formatNumber,
  pluralize,
  printable,
} from "../base/format.js";
import { explanationOf, TASK_CHARTS, term } from "../base/terms.js";
import { drawLineCharts, valuesAfterWarmup } from "../charts/line_chart.js";
import { columns, data, isRun, scoredSteps } from "../state/page_data.js";

export const LOSS_AXIS =
  "The axis ends at the highest loss after the first tenth of the run; earlier losses may lie above it.";

/** Between the last and the first step above 0, beyond which a series has a logarithmic axis. */
const LOG_RATIO = 50;

/** Activities of a run, their labels and colors. */
const ACTIVITIES = {
  train: { label: "Training", color: "c4" },
  evaluate: { label: "Evaluation", color: "c1" },
  attention: { label: "Attention analysis", color: "c2" },
  save: { label: "Saving checkpoints", color: "c5" },
};

/**
 * A metric as a line of a chart, with a band if the page has its standard errors.
 *
 * @returns {Series}
 */
export function metricSeries(key, name, color, bold = false) {
  const { steps, values } = data.curves[key];
  return { name, color, bold, xs: steps, ys: values, errors: data.curves[`${key}_se`]?.values };
}

/** Return the lines of both losses, and the end of an axis that shows the last nine tenths of a run. */
export function lossLines() {
  const series = [
    metricSeries("train/loss", "training", "soft"),
    metricSeries("val/loss", "validation", "accent", true),
  ];
  return { series, yMax: Math.max(...series.flatMap(({ xs, ys }) => valuesAfterWarmup(xs, ys))) };
}

const firstStep = scoredSteps.find(step => step > 0);

/** The x axis over the steps of a series: logarithmic if they are spread like that. */
export const STEP_AXIS =
  !isRun && scoredSteps.at(-1) > LOG_RATIO * firstStep
    ? { hasLogX: true, xTicks: scoredSteps.map(step => [step, formatCompact(step)]) }
    : {};

/** Return a chart of one metric, which the glossary explains by its name. */
const metricChart = (id, title, key, name) => ({
  id,
  title,
  explanation: explanationOf(name),
  series: [metricSeries(key, name, "accent")],
});

/** Draw the curves. */
export function drawTraining() {
  drawLineCharts($("charts"), [
    {
      id: "chart-loss",
      title: "Loss (nats/token)",
      explanation: `${explanationOf("loss")} ${LOSS_AXIS}`,
      height: 170,
      ...lossLines(),
    },
    {
      id: "chart-gain",
      title: "Copying gain (nats)",
      explanation: explanationOf("copying gain"),
      includes: [0, 0.1],
      series: [copyingGainSeries()],
    },
    {
      id: "chart-in-context",
      title: "In-context learning (nats/token)",
      explanation: explanationOf("in-context learning score"),
      includes: [0, 0.1],
      series: [metricSeries("val/in_context_score", "in-context learning score", "accent", true)],
    },
    {
      id: "chart-lr",
      title: "Learning rate",
      explanation: explanationOf("learning rate"),
      series: learningRateSeries(),
    },
    {
      id: "chart-speed",
      title: "Throughput (tokens/s)",
      explanation: explanationOf("throughput"),
      includes: [0, 1],
      series: [metricSeries("train/tokens_per_second", "tokens/s", "accent")],
    },
    metricChart("chart-bits", "Bits per byte", "val/bits_per_byte", "bits per byte"),
    metricChart("chart-norm", "Gradient norm", "train/grad_norm", "gradient norm"),
  ]);
  drawTask();
}

/** Draw the charts of the task's metrics, if the run has one. */
function drawTask() {
  const charts = TASK_CHARTS.map(({ metrics, ...chart }, k) => ({
    ...chart,
    id: `task-${k}`,
    includes: [0],
    series: Object.keys(metrics)
      .filter(name => data.curves[`task/${name}`]?.steps.length > 1)
      .map((name, line) => metricSeries(`task/${name}`, metrics[name], `c${line + 1}`)),
  }));
  drawLineCharts(
    $("task-charts"),
    charts.filter(({ series }) => series.length),
  );
}

/** @returns {Series} */
export function copyingGainSeries() {
  const gains = columns["probe/copying_gain"] ?? [];
  const errors = columns["probe/copying_gain_se"];
  const measured = [...gains.keys()].filter(k => gains[k] !== null);
  return {
    name: "copying gain",
    color: "accent",
    bold: true,
    xs: measured.map(k => scoredSteps[k]),
    ys: measured.map(k => gains[k]),
    errors: measured.map(k => errors?.[k] ?? null),
  };
}

/** One line, or one for each optimizer. */
function learningRateSeries() {
  const muon = metricSeries("train/muon_lr", "Muon", "accent", true);
  if (!muon.xs.length) return [metricSeries("train/lr", "learning rate", "accent")];
  return [metricSeries("train/lr", "AdamW", "soft"), muon];
}

function totalSeconds() {
  return Object.values(data.seconds).reduce((sum, seconds) => sum + seconds, 0);
}

/** Fill in all but the curves. */
export function setUpTraining() {
  $("training").hidden = false;
  showFigures();
  const pointCount = Math.max(...Object.values(data.curves).map(curve => curve.of));
  $("points").hidden = pointCount <= data.maxCurvePoints;
  $("points").textContent =
    `Curves show ${formatCount(data.maxCurvePoints)} of up to ${formatCount(pointCount)} measured points, evenly spaced.`;
  const settingRow = ([name, value]) =>
    el("tr", {}, el("th", { scope: "row" }, bdi(name)), el("td", {}, bdi(printable(value))));
  $("config").hidden = !data.config.length;
  $("config")
    .querySelector("tbody")
    .append(...data.config.map(settingRow));
  $("time").hidden = !totalSeconds();
  $("time").parentElement.hidden = !totalSeconds() && !data.samples.length;
  showTime();
  if (data.samples.length) setUpSamples(data.samples);
}

/** Show the run's main figures. */
function showFigures() {
  const { msPerStep, mfu, peakGib } = data.speed;
  /** @type {[string, string | Node][]} */
  const figures = [];
  if (data.best) {
    const step = `at step ${formatCount(data.best.step)}`;
    const perplexity = formatNumber(Math.exp(data.best.loss));
    const unit = `nats/token, perplexity ${perplexity}`;
    figures.push([formatNumber(data.best.loss), `best validation loss (${unit}), ${step}`]);
  }
  if (data.step !== null) {
    const isUnfinished = data.maxSteps > data.step;
    const [count, noun] = pluralize(data.step, "step").split(" ");
    figures.push([count, isUnfinished ? `of ${pluralize(data.maxSteps, "step")} so far` : noun]);
  }
  if (data.tokens) {
    figures.push([formatCompact(Number(data.tokens.toPrecision(3))), "training tokens"]);
  }
  if (totalSeconds()) figures.push([formatDuration(totalSeconds()), "total time"]);
  if (msPerStep !== null) {
    const isShort = msPerStep < 999.5;
    const duration = isShort ? `${msPerStep.toPrecision(3)} ms` : formatDuration(msPerStep / 1000);
    figures.push([duration, "per training step"]);
  }
  if (mfu !== null) {
    figures.push([`${(100 * mfu).toFixed(1)}%`, term("model FLOPs utilization")]);
  }
  if (peakGib !== null) figures.push([`${peakGib.toPrecision(3)} GiB`, "peak memory"]);
  const boxes = figures.map(([value, name]) =>
    el("div", {}, el("b", {}, value), el("span", {}, name)),
  );
  if (!boxes.length) {
    boxes.push(el("p", { className: "quiet" }, "No metrics have been recorded yet."));
  }
  $("figures").append(...boxes);
}

/** Show how much time each activity took. */
function showTime() {
  const total = totalSeconds();
  for (const [activity, seconds] of Object.entries(data.seconds)) {
    if (!seconds) continue;
    const { label, color } = ACTIVITIES[activity];
    const share = seconds / total;
    const style = `flex: ${share} 0 0; background: var(--${color})`;
    const title = `${label}: ${formatDuration(seconds)}`;
    $("time-bar").append(el("span", { style, title }));
    $("time-list").append(
      el(
        "li",
        { style: `--c: var(--${color})` },
        label,
        el("b", {}, formatDuration(seconds)),
        el("i", {}, `${(100 * share).toFixed(1)}%`),
      ),
    );
  }
}

/** @param {{step: number, text: string}[]} samples - The newest is shown first. */
function setUpSamples(samples) {
  const select = $("sample-step");
  const selected = () => Number(select.value);

  function show(k) {
    select.value = k;
    $("sample").textContent = printable(samples[k].text).replace(/^\n+/, "");
    $("sample-before").disabled = k === 0;
    $("sample-after").disabled = k === samples.length - 1;
  }

  $("samples").hidden = false;
  select.append(
    ...samples.map(({ step }, k) => el("option", { value: k }, `step ${formatCount(step)}`)),
  );
  select.onchange = () => show(selected());
  $("sample-before").onclick = () => show(selected() - 1);
  $("sample-after").onclick = () => show(selected() + 1);
  show(samples.length - 1);
}
