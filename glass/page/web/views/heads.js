/**
 * The section with the scores of all heads, their course over training, emergence and composition.
 */

import { $, el } from "../base/dom.js";
import { formatCount, formatInCell, formatWithError, headName } from "../base/format.js";
import { explainedTitle, SCORES, scoreLabel } from "../base/terms.js";
import { valueLine } from "../base/tooltip.js";
import { CellGrid } from "../charts/cell_grid.js";
import { isDark, linearColorIndex } from "../charts/colors.js";
import { drawLineChart } from "../charts/line_chart.js";
import { emit } from "../state/events.js";
import {
  emergences,
  firstScores,
  hasComposition,
  headNames,
  isShare,
  maxScore,
  measuredIndices,
  metricAt,
  otherScores,
  scoreAt,
  scoreNames,
  snapshotIndex,
} from "../state/head_metrics.js";
import { data, H, hasSteps, L, scoredSteps, steps } from "../state/page_data.js";
import { chooseHead, selection } from "../state/selection.js";
import { drawComposition } from "./composition.js";
import { drawEmergence } from "./emergence.js";
import { headsContent } from "./heads_content.js";
import { STEP_AXIS } from "./training.js";

const COLORS = ["c1", "c2", "c3", "c4", "c7", "c6", "c5"];

/** The scores that have a color of their own, those of emerged heads included. */
const coloredScores = [
  ...new Set([...scoreNames.filter(isShare), ...emergences.map(({ score }) => score)]),
];

/** @type {Record<string, {grid: CellGrid, caption: HTMLElement}>} */
const scoreTables = {};
/** What the score tables were last drawn for. Choosing another head changes none of them. */
let drawnFor = "";
/** The score of every head beside the attention map. @type {CellGrid | null} */
let overview = null;

const scoreColor = score => COLORS[coloredScores.indexOf(score) % COLORS.length];

/** Return at which step, or on which tokens, the heads were scored. */
function describeScored() {
  if (hasSteps) return `at step ${formatCount(steps[selection.step] ?? 0)}`;
  return data.maxSteps ? `at step ${formatCount(scoredSteps[0])}` : "on random tokens";
}

const shownScores = () => (selection.showAllScores ? scoreNames : firstScores);

/** Let the reader show the scores that do not come first. */
export function setUpHeads() {
  $("heads").style.setProperty("--heads", H);
  $("more-scores").hidden = !otherScores.length;
  const names = otherScores.map(score => scoreLabel(score).toLowerCase());
  $("more-scores").firstChild.textContent = `More scores: ${names.join(", ")}`;
  $("more-scores").ontoggle = () => {
    selection.showAllScores = $("more-scores").open;
    emit("draw");
  };
}

export function drawHeads() {
  $("heads").hidden = !scoreNames.length;
  if ($("heads").hidden) return;
  // Whether these are shown decides how wide the charts are.
  $("emergence").hidden = !emergences.length;
  $("composition").hidden = !hasComposition;
  $("scored-at").textContent = describeScored();

  const { step, showAllScores } = selection;
  $("more-scores").open = showAllScores;
  const circumstances = [step, showAllScores, isDark(), $("scores").clientWidth, devicePixelRatio];
  const isOutdated = circumstances.join() !== drawnFor;
  drawnFor = circumstances.join();
  if (isOutdated) {
    shownScores().forEach(drawScoreTable);
  }
  drawTrajectory();
  if (isOutdated && emergences.length) drawEmergence($("emergence"), coloredScores, scoreColor);
  if (hasComposition) drawComposition($("composition"));
}

/** Draw the scores of the chosen head over the steps of training. */
function drawTrajectory() {
  const scores = shownScores().filter(score => measuredIndices[score].length > 1 && isShare(score));
  const series = scores.map(score => {
    const indices = measuredIndices[score];
    const values = indices.map(k => scoreAt(score, selection.layer, selection.head, k));
    return {
      name: scoreLabel(score),
      color: scoreColor(score),
      xs: indices.map(k => scoredSteps[k]),
      ys: values.map(({ value }) => value),
      errors: values.map(({ error }) => error),
    };
  });
  drawLineChart($("trajectory"), {
    ...STEP_AXIS,
    title: `Scores of ${headName(selection.layer, selection.head)} during training, ± one standard error`,
    height: 240,
    currentStep: steps[selection.step],
    includes: [0, 1],
    series,
  });
}

/** Draw a score of all heads as a table of colored cells. */
function drawScoreTable(score) {
  scoreTables[score] ??= createScoreTable(score);
  const { grid, caption } = scoreTables[score];
  caption.textContent = scoreCaption(score);
  grid.draw(scoreContent(score));
}

function createScoreTable(score) {
  const label = scoreLabel(score);
  const heading = explainedTitle(label, SCORES[score]?.explanation);
  const host = el("div", { className: "cells" });
  const caption = el("span", { className: "quiet" });
  const figcaption = el("figcaption", {}, el("h3", {}, heading), caption);
  const scores = $(firstScores.includes(score) ? "scores" : "other-scores");
  scores.append(el("figure", { "data-score": score }, figcaption, host));
  return { grid: new CellGrid(host, `${label} of every head`), caption };
}

/** Return the range of a score's colors: "0 to 1", "0 to 12 tokens". */
function scoreCaption(score) {
  const k = snapshotIndex(score);
  const { unit, isSigned } = SCORES[score] ?? {};
  const low = isSigned ? "−1" : "0";
  const range = `${low} to ${Number(maxScore(score).toPrecision(2))}${unit ? ` ${unit}` : ""}`;
  const isOfOtherStep = hasSteps && scoredSteps[k] !== steps[selection.step];
  const when = isOfOtherStep ? `, at step ${formatCount(scoredSteps[k])}` : "";
  const unknown = headNames.filter(name => metricAt(`heads/${score}/${name}`, k) === null);
  const isPartial = unknown.length > 0 && unknown.length < headNames.length;
  return range + when + (score === "copying" && isPartial ? ", induction heads only" : "");
}

/** @returns {GridContent} */
function scoreContent(score) {
  const k = snapshotIndex(score);
  const max = maxScore(score);
  const signed = Boolean(SCORES[score]?.isSigned);
  const read = (layer, head) => scoreAt(score, layer, head, k);
  return {
    ...headsContent(360),
    signed,
    color: (layer, head) => {
      const { value } = read(layer, head);
      return value === null ? -1 : linearColorIndex(value / max, signed);
    },
    text: (layer, head) => {
      const { value, error } = read(layer, head);
      const errorDigit = error ? Math.max(0, -Math.floor(Math.log10(error))) : 2;
      return formatInCell(value, Math.min(errorDigit, max >= 10 ? 1 : 2));
    },
    pick: chooseHead,
    describe: (layer, head) => describeScore(score, headName(layer, head), read(layer, head)),
  };
}

/** Draw a score of all heads of a deep model, small, beside its attention map. */
export function drawOverview(score) {
  overview ??= new CellGrid($("overview-map"), "a score of every head");
  const cellHeight = Math.max(5, Math.min(12, (0.34 * innerHeight) / L));
  overview.draw({ ...scoreContent(score), cellHeight, text: null });
}

function describeScore(score, name, { value, error, withoutFirst }) {
  const { unit, explanation } = SCORES[score] ?? {};
  const lines = [
    el("div", {}, `${name}: ${scoreLabel(score).toLowerCase()}`),
    valueLine(formatWithError(value, error), unit ? ` ${unit}` : ""),
  ];
  if (explanation) lines.push(el("div", { className: "quiet" }, explanation));
  if (withoutFirst !== null) {
    const text = `${withoutFirst.toFixed(2)} if attention to the first token is excluded`;
    lines.push(el("div", {}, text));
  }
  return lines;
}
