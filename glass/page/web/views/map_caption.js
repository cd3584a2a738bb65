/** The title of the large map and the sentences below it. */

import { $, el, note } from "../base/dom.js";
import { formatCount, formatWithError, headName, pluralize } from "../base/format.js";
import { scoreLabel } from "../base/terms.js";
import {
  EMERGENCE_MARK,
  emergencesOf,
  maxScore,
  scoreAt,
  scoreNames,
} from "../state/head_metrics.js";
import {
  data,
  H,
  hasServer,
  hasSteps,
  runnableSteps,
  scoredSteps,
  steps,
  validationName,
} from "../state/page_data.js";
import { currentProbe, currentStep, isOwnText, selection } from "../state/selection.js";
import { STORED_PRECISION, showsSink } from "../state/shown_cells.js";
import { describeEmergence } from "./emergence.js";
import { describeExplained, scoredDiagonals } from "./token_effect.js";

const COMPUTED_PRECISION = hasServer
  ? "The attention weights are computed by explore.py and rounded to float16."
  : "The attention weights are computed in this page, from the model's parameters in float16.";
const ATTENTION_KEYS = [
  ["to", "attends to"],
  ["from", "attended to by"],
];
const TOKEN_EFFECT_KEYS = [
  ["helped", "helped by"],
  ["hurt", "hurt by"],
  ["from", "helps"],
];
/** Scores that name the kind of a head if they are large. */
const HEAD_KINDS = ["current_token", "previous_token", "sink", "duplicate_token", "induction"];
const MIN_KIND_SCORE = 0.2;
const TOKEN_EFFECT_CAPTION =
  "Row: the token after which the next one is predicted. Column: a token that is hidden from all " +
  "later tokens, in every head. Red: hiding it raises the loss of the next token; blue: hiding " +
  "it lowers the loss. Effects below 0.1 nats are pale. Every value is measured by running the " +
  "model again.";

/** Draw the title, the legend of the text and the caption of the map. */
export function drawCaption(cells) {
  const { layer, head, averageHeads } = selection;
  const keys = cells.signed ? TOKEN_EFFECT_KEYS : ATTENTION_KEYS;
  const caption = cells.signed ? TOKEN_EFFECT_CAPTION : describeAttention();
  const step = cells.signed ? cells.step : currentStep();
  $("map-title").textContent = nameMap(cells) + afterSteps(step) + describePart(cells);
  $("map-note").hidden = !cells.signed;
  $("text-keys").replaceChildren(
    ...keys.flatMap(([kind, name]) => [el("span", { className: `key ${kind}` }, name), " "]),
  );
  $("map-caption").replaceChildren(caption, ...diagonalLegend());
  if (!cells.signed && !averageHeads) {
    const emerged = emergencesOf(layer, head).map(describeEmergence);
    const notes = emerged.map(text => note(`${EMERGENCE_MARK} ${text}`));
    $("map-caption").append(createScores(), ...notes);
  }
  $("precision").textContent = cells.signed ? "" : describePrecision();
  // For style sheets and scripts
  const name = averageHeads ? `L${layer}` : headName(layer, head);
  Object.assign($("large").dataset, {
    map: cells.signed ? "token-effect" : "attention",
    heads: cells.signed ? "all" : name,
    step,
    probe: currentProbe().name,
  });
}

function nameMap(cells) {
  const { layer, head, averageHeads } = selection;
  if (cells.signed) return "Token effect";
  if (!averageHeads) return `Attention pattern of ${headName(layer, head)}`;
  return `Attention pattern of layer ${layer}, average of ${pluralize(H, "head")}`;
}

/** Say after how many steps of a run something was measured. */
const afterSteps = step => (hasSteps ? ` after ${pluralize(step, "step")}` : "");

/** Say which tokens of a long text have token effects. */
const describePart = cells =>
  cells.signed && cells.firstToken > 0 ? `, ${describeExplained(cells)}` : "";

function describeAttention() {
  const { averageHeads, excludeFirst } = selection;
  const sentences = [`Input: ${describeInput()}.`];
  if (data.promptTokens) sentences.push("Below the line: generated tokens.");
  sentences.push("Row: query token. Column: key token.", describeCellValue());
  if (excludeFirst) sentences.push("The first token is excluded; each row is renormalized.");
  if (runnableSteps.length && !averageHeads) {
    sentences.push("Click a cell to see which components produced its attention score.");
  }
  return sentences.join(" ");
}

/** Name the tokens that the model reads. */
function describeInput() {
  const { name, period } = currentProbe();
  if (isOwnText()) {
    const step = formatCount(currentStep());
    return hasSteps ? `your text, read with the weights of step ${step}` : "your text";
  }
  if (data.losses) return "the beginning of the scored text";
  if (data.kind === "prompt") return "the prompt";
  if (name === "text") return `the beginning of the ${validationName}`;
  return `${pluralize(period, "random token")}, then the same ${period} again`;
}

/** Say what the color of a cell means. */
function describeCellValue() {
  if (showsSink()) {
    return (
      "A cell is an attention weight. Each row, with the last column, sums to 1: that is the weight " +
      "on the learned sink logit, which reads no token."
    );
  }
  if (!selection.weightByValues) return "A cell is an attention weight; each row sums to 1.";
  const isGated = (data.modelConfig?.attention_gate ?? "none") !== "none";
  const gated = isGated ? " before its gate" : "";
  const averaged = selection.averageHeads ? ", averaged over the heads" : "";
  return `A cell is weight × ‖v W_O‖, the length of the vector that the head writes${gated}${averaged}.`;
}

/** List the scores of the selected head as bars, the kind of the head in bold. */
function createScores() {
  const k = scoredSteps.indexOf(currentStep());
  const scores = scoreNames
    .map(name => ({ name, ...scoreAt(name, selection.layer, selection.head, k) }))
    .filter(({ value }) => value !== null);
  const kinds = scores.filter(
    ({ name, value }) => HEAD_KINDS.includes(name) && value >= MIN_KIND_SCORE,
  );
  const [kind] = kinds.sort((a, b) => b.value - a.value);
  const items = scores.map(({ name, value, error }) => {
    const width = (100 * Math.max(0, value)) / maxScore(name);
    return el(
      "li",
      { className: name === kind?.name ? "kind" : "" },
      el("span", {}, scoreLabel(name)),
      el("i", { style: `--w: ${width.toFixed(1)}%` }),
      el("b", {}, formatWithError(value, error)),
    );
  });
  return el("ol", { id: "head-scores", className: "bars plain" }, ...items);
}

/** Explain the framed cells of repeated tokens. */
function diagonalLegend() {
  const { period } = currentProbe();
  if (!period) return [];
  const keys = scoredDiagonals(period).map(({ score, color }) =>
    el("span", { className: "key", style: `--c: var(--${color})` }, score),
  );
  return [" The framed cells are used to compute these scores: ", ...keys];
}

/** Say how exact the values are and what the page leaves out. */
function describePrecision() {
  const { snapshotCount, unreadableSnapshots } = data;
  const sentences = [];
  if (selection.showTokenEffect) sentences.push("This page has no token effects of this step.");
  sentences.push(isOwnText() ? COMPUTED_PRECISION : STORED_PRECISION);
  if (steps.length < snapshotCount) {
    const snapshots = pluralize(snapshotCount, "snapshot");
    sentences.push(`Showing ${steps.length} of ${snapshots} to keep the page small.`);
  }
  if (unreadableSnapshots) {
    sentences.push(`${pluralize(unreadableSnapshots, "more snapshot")} could not be read.`);
  }
  return sentences.join(" ");
}
