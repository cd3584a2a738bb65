/** The metrics of heads at each snapshot, read from the columns of the page's data. */

import { headName, parseHead } from "../base/format.js";
import { SCORES } from "../base/terms.js";
import { columns, data, H, L, scoredSteps, steps } from "./page_data.js";
import { selection } from "./selection.js";

/** The names of all heads, layer by layer. */
export const headNames = Array.from({ length: L * H }, (_, k) =>
  headName(Math.floor(k / H), k % H),
);

/** The scores that come first; the page shows the maps of the others when it is asked for them. */
const FIRST_SCORES = [
  "induction",
  "previous_token",
  "duplicate_token",
  "sink",
  "copying",
  "importance",
];

/** The names of all scores. Standard errors and variants have columns of their own. */
const measuredScores = [...new Set(Object.keys(columns).map(scoreOfColumn))].filter(
  name => name && !/_se$|_without_first$/.test(name),
);
export const firstScores = FIRST_SCORES.filter(name => measuredScores.includes(name));
export const otherScores = measuredScores.filter(name => !FIRST_SCORES.includes(name));
export const scoreNames = [...firstScores, ...otherScores];

/** For each score, the indices of the snapshots at which it was measured. */
export const measuredIndices = Object.fromEntries(
  scoreNames.map(score => [score, [...scoredSteps.keys()].filter(k => isMeasured(score, k))]),
);

function scoreOfColumn(key) {
  return /^heads\/(\w+)\/L\d+H\d+$/.exec(key)?.[1];
}

function isMeasured(score, k) {
  return headNames.some(name => metricAt(`heads/${score}/${name}`, k) !== null);
}

/**
 * Return a metric, by the key of its column, at the k-th snapshot; null if it was not measured there.
 */
export function metricAt(key, k) {
  return columns[key]?.[k] ?? null;
}

/** Return whether a score is a share; the color scale of another one ends at the largest value. */
export const isShare = score => !SCORES[score]?.unit;

/** Return the upper end of a score's scale, the same at all steps. */
export function maxScore(score) {
  if (isShare(score)) return 1;
  const values = headNames.flatMap(name => columns[`heads/${score}/${name}`] ?? []);
  return values.reduce((max, value) => Math.max(max, value), 0) || 1;
}

/**
 * Return a head's score at the k-th snapshot: its value, its standard error, and its value if
 * attention to the first token is excluded. Each is null if it was not measured.
 */
export function scoreAt(score, layer, head, k) {
  const name = headName(layer, head);
  return {
    value: metricAt(`heads/${score}/${name}`, k),
    error: metricAt(`heads/${score}_se/${name}`, k),
    withoutFirst: metricAt(`heads/${score}_without_first/${name}`, k),
  };
}

/**
 * Return the index of the snapshot at the slider's step at which a score was measured, or the last
 * one before; -1 if there is none. A score that was measured once is shown at every step.
 */
export function snapshotIndex(score) {
  const indices = measuredIndices[score];
  const last = indices.findLast(k => scoredSteps[k] <= steps[selection.step]);
  return last ?? (indices.length === 1 ? indices[0] : -1);
}

/** When each head emerged, and when its score was lost again (null: never); earliest first. */
export const emergences = readEmergences();

function readEmergences() {
  const keys = Object.keys(columns).filter(key => key.startsWith("emerged/"));
  const latest = scoredSteps.findLastIndex((_, k) => keys.some(key => columns[key][k] !== null));
  const emerged = keys.filter(key => metricAt(key, latest)); // at 0 it was there before training
  const all = emerged.map(key => {
    const [, score, name] = key.split("/");
    const [layer, head] = parseHead(name);
    const step = columns[key][latest];
    const lostStep = metricAt(`lost/${score}/${name}`, latest);
    return { score, name, layer, head, step, interval: data.emergenceIntervals[key], lostStep };
  });
  return all.sort((a, b) => a.step - b.step);
}

/** Marks the steps at which the selected head emerged. */
export const EMERGENCE_MARK = "◆";

export const emergencesOf = (layer, head) =>
  emergences.filter(one => one.layer === layer && one.head === head);

const COMPOSITION =
  /^composition\/(\w+)\/L(\d+)H(\d+)\/(queries|keys|values)\/(L\d+H\d+|L\d+MLP|embedding)$/;
const compositionColumns = Object.keys(columns)
  .map(key => COMPOSITION.exec(key))
  .filter(match => match && !/_se$|_direct$/.test(match[1]));

/** Whether composition was measured at any snapshot. */
export const hasComposition = compositionColumns.length > 0;

/**
 * Return the composition of all heads at the k-th snapshot: the share of the score of head `to` that
 * is lost if what the component `from` (L0H1, L0MLP or embedding) wrote is removed from an input, and
 * the share that is lost if nothing in between is computed again.
 */
export function compositionAt(k) {
  const all = compositionColumns.map(([key, score, layer, head, input, from]) => {
    const metric = suffix => metricAt(key.replace(score, score + suffix), k);
    return {
      score,
      to: [Number(layer), Number(head)],
      input,
      from,
      share: metric(""),
      error: metric("_se"),
      directShare: metric("_direct"),
      directError: metric("_direct_se"),
    };
  });
  return all.filter(({ share, error }) => share !== null && error !== null);
}
