/**
 * The section with the scores of all heads, their course over training, emergence and composition.
 */

import { createCellGrid } from "./cell_grid.js";
import { colorIndex, isDark } from "./colors.js";
import { drawComposition } from "./composition.js";
import { $, el } from "./dom.js";
import { drawEmergence } from "./emergence.js";
import { formatCount, formatWithError } from "./format.js";
import {
  compositionAt,
  emergences,
  hasComposition,
  headNames,
  isShare,
  measuredIndices,
  metricAt,
  scoreAt,
  scoreNames,
  snapshotIndex,
} from "./head_metrics.js";
import { headGridLayout, headName } from "./labels.js";
import { drawLineChart } from "./line_chart.js";
import { chooseHead, columns, data, H, L, scoredSteps, selection, steps } from "./page_state.js";
import { SCORES, scoreLabel, term } from "./terms.js";

const COLORS = ["c1", "c2", "c3", "c4", "c5", "c6", "c7"];
/** Scores between -1 and 1, whose color scale has two ends. */
const SIGNED_SCORES = ["copying"];

/** The scores that have a color of their own, those of emerged heads included. */
const coloredScores = [
  ...new Set([...scoreNames.filter(isShare), ...emergences.map(({ score }) => score)]),
];

/** @type {Record<string, {draw: Function, caption: HTMLElement}>} */
const scoreTables = {};
/** What the score tables were last drawn for. Choosing another head changes none of them. */
let drawnFor = "";

/** @param {string} score */
function scoreColor(score) {
  return COLORS[coloredScores.indexOf(score) % COLORS.length];
}

/** Return at which step, or on which tokens, the heads were scored. */
function describeScored() {
  if (data.kind === "run") return `at step ${formatCount(steps[selection.step] ?? 0)}`;
  return data.maxSteps ? `at step ${formatCount(scoredSteps[0])}` : "on random tokens";
}

/** Draw the section. */
export function drawHeads() {
  $("heads").hidden = !scoreNames.length;
  if ($("heads").hidden) return;
  // Whether these are shown decides how wide the charts are.
  $("emergence").hidden = !emergences.length;
  $("composition").hidden = !hasComposition;
  $("scored-at").textContent = describeScored();

  const circumstances = [
    selection.step,
    isDark(),
    $("scores").clientWidth,
    devicePixelRatio,
  ].join();
  const isOutdated = circumstances !== drawnFor;
  drawnFor = circumstances;
  if (isOutdated) {
    $("scores").style.setProperty("--heads", H);
    scoreNames.forEach(drawScoreTable);
  }
  drawTrajectory();
  if (isOutdated && emergences.length) drawEmergence($("emergence"), coloredScores, scoreColor);
  if (hasComposition) drawCompositionNow();
}

/** Draw the scores of the chosen head over the steps of training. */
function drawTrajectory() {
  const scores = scoreNames.filter(score => measuredIndices[score].length > 1 && isShare(score));
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
    title: `Scores of ${headName(selection.layer, selection.head)} during training, ± one standard error`,
    height: 240,
    currentStep: steps[selection.step],
    includes: [0, 1],
    series,
  });
}

function drawCompositionNow() {
  const k = scoredSteps.findLastIndex(step => step <= steps[selection.step]);
  const when = data.kind === "run" ? ` at step ${formatCount(steps[selection.step])}` : "";
  drawComposition($("composition"), {
    shape: [L, H],
    compositions: compositionAt(k),
    title: `Head composition (Q, K, V)${when}`,
    chosen: [selection.layer, selection.head],
    choose: chooseHead,
  });
}

/** @param {string} score */
function scoreHeading(score) {
  const label = scoreLabel(score);
  const explanation = SCORES[score]?.explanation;
  if (!explanation) return el("h3", {}, label);
  // Not in the tab order: its cells say what the score means.
  return el("h3", {}, Object.assign(term(label, explanation), { tabIndex: -1 }));
}

/**
 * Draw a score of all heads as a table of colored cells.
 *
 * @param {string} score
 */
function drawScoreTable(score) {
  if (!scoreTables[score]) {
    const host = el("div", { className: "cells" });
    const caption = el("span", { className: "quiet" });
    const figcaption = el("figcaption", {}, scoreHeading(score), caption);
    $("scores").append(el("figure", { "data-score": score }, figcaption, host));
    scoreTables[score] = {
      draw: createCellGrid(host, `${scoreLabel(score)} of every head`),
      caption,
    };
  }
  scoreTables[score].caption.textContent = scoreCaption(score);
  scoreTables[score].draw(scoreCells(score));
}

/**
 * @param {string} score
 * @returns {string} Range of the colors: "0 to 1", "0 to 12 tokens".
 */
function scoreCaption(score) {
  const k = snapshotIndex(score);
  const low = SIGNED_SCORES.includes(score) ? "−1" : "0";
  const unit = SCORES[score]?.unit;
  const range = `${low} to ${Number(maxScore(score).toPrecision(2))}${unit ? ` ${unit}` : ""}`;
  const isMeasuredOnce = measuredIndices[score].length === 1 && data.kind === "run";
  const when = isMeasuredOnce ? `, at step ${formatCount(scoredSteps[k])}` : "";
  const unknownCount = headNames.filter(
    name => metricAt(`heads/${score}/${name}`, k) === null,
  ).length;
  const isPartial = score === "copying" && unknownCount > 0 && unknownCount < headNames.length;
  return range + when + (isPartial ? ", induction heads only" : "");
}

/**
 * Upper end of a score's colors, the same at all steps.
 *
 * @param {string} score
 * @returns {number}
 */
function maxScore(score) {
  if (isShare(score)) return 1;
  const values = headNames.flatMap(name => columns[`heads/${score}/${name}`] ?? []);
  return values.reduce((max, value) => Math.max(max, value), 0) || 1;
}

/**
 * What `cells` draws for a score of all heads.
 *
 * @param {string} score
 */
function scoreCells(score) {
  const k = snapshotIndex(score);
  const max = maxScore(score);
  const isSigned = SIGNED_SCORES.includes(score);
  const colorLevel = value => (value === null ? -1 : colorIndex(value / max, isSigned));
  return {
    ...headGridLayout(L, H, 360),
    signed: isSigned,
    level: (layer, head) => colorLevel(scoreAt(score, layer, head, k).value),
    write: (layer, head) => formatInCell(scoreAt(score, layer, head, k), max),
    pick: chooseHead,
    tell: (layer, head) => describeScore(score, layer, head, scoreAt(score, layer, head, k)),
  };
}

/** Draws the overview; created at its first use. @type {Function | null} */
let drawOverviewCells = null;

/**
 * Draw a score of all heads of a deep model, small, beside its attention map.
 *
 * @param {HTMLElement} host
 * @param {string} score
 */
export function drawOverview(host, score) {
  drawOverviewCells ??= createCellGrid(host, "a score of every head");
  const cellHeight = Math.max(5, Math.min(12, (0.34 * innerHeight) / L));
  drawOverviewCells({ ...scoreCells(score), high: cellHeight, write: null });
}

/**
 * What the tooltip says about a head's score.
 *
 * @param {string} score
 * @param {number} layer
 * @param {number} head
 * @param {import("./head_metrics.js").ScoreValue} scoreValue
 * @returns {Node[]}
 */
function describeScore(score, layer, head, { value, error, withoutFirst }) {
  const unit = SCORES[score]?.unit;
  const lines = [
    el("div", {}, `${headName(layer, head)}: ${scoreLabel(score).toLowerCase()}`),
    el(
      "div",
      { className: "value" },
      el("b", {}, formatWithError(value, error)),
      unit ? ` ${unit}` : "",
    ),
  ];
  if (SCORES[score]) lines.push(el("div", { className: "quiet" }, SCORES[score].explanation));
  if (withoutFirst !== null) {
    lines.push(
      el("div", {}, `${withoutFirst.toFixed(2)} if attention to the first token is excluded`),
    );
  }
  return lines;
}

/**
 * Write a score in a cell: .15, 12.3. It has fewer digits if its standard error is large.
 *
 * @param {import("./head_metrics.js").ScoreValue} scoreValue
 * @param {number} max - Upper end of the colors.
 * @returns {string}
 */
function formatInCell({ value, error }, max) {
  const significantDigits = error ? Math.max(0, -Math.floor(Math.log10(error))) : 2;
  const text = value.toFixed(Math.min(significantDigits, max >= 10 ? 1 : 2));
  const withoutMinusZero = text.replace(/^-(0\.?0*)$/, "$1");
  return withoutMinusZero.replace(/^(-?)0\./, "$1.");
}
