/** The metrics of heads at each snapshot, read from the columns of the page's data. */

import { headName } from "./labels.js";
import { columns, data, H, L, scoredSteps, selection, steps } from "./page_state.js";

/** The names of all heads, layer by layer. */
export const headNames = Array.from({ length: L * H }, (_, k) =>
  headName(Math.floor(k / H), k % H),
);

/** Scores that are not shares, so that their color scale ends at the largest value. */
const UNBOUNDED_SCORES = ["distance", "importance"];

/** The names of all scores. Standard errors and variants have columns of their own. */
export const scoreNames = [...new Set(Object.keys(columns).map(scoreOfColumn))].filter(
  name => name && !/_se$|_without_first$/.test(name),
);

/** For each score, the indices of the snapshots at which it was measured. */
export const measuredIndices = Object.fromEntries(
  scoreNames.map(score => [score, [...scoredSteps.keys()].filter(k => isMeasured(score, k))]),
);

/** @param {string} key of a column */
function scoreOfColumn(key) {
  return /^heads\/(\w+)\/L\d+H\d+$/.exec(key)?.[1];
}

/**
 * @param {string} score
 * @param {number} k - Index of a snapshot.
 */
function isMeasured(score, k) {
  return headNames.some(name => metricAt(`heads/${score}/${name}`, k) !== null);
}

/**
 * @param {string} key - Key of a column.
 * @param {number} k - Index of a snapshot.
 * @returns {number | null} Null if it was not measured there.
 */
export function metricAt(key, k) {
  return columns[key]?.[k] ?? null;
}

/**
 * @param {string} score
 * @returns {boolean} Whether the score is a share.
 */
export function isShare(score) {
  return !UNBOUNDED_SCORES.includes(score);
}

/**
 * A head's score at a snapshot.
 *
 * @typedef {object} ScoreValue
 * @property {number | null} value
 * @property {number | null} error - Standard error.
 * @property {number | null} withoutFirst - The score if attention to the first token is excluded.
 */

/**
 * @param {string} score
 * @param {number} layer
 * @param {number} head
 * @param {number} k - Index of a snapshot.
 * @returns {ScoreValue}
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
 * The snapshot at the slider's step at which a score was measured, or the last one before. A score
 * that was measured once is shown at every step.
 *
 * @param {string} score
 * @returns {number} Index of the snapshot; -1 if the score was not measured yet.
 */
export function snapshotIndex(score) {
  const indices = measuredIndices[score];
  const last = indices.findLast(k => scoredSteps[k] <= steps[selection.step]);
  return last ?? (indices.length === 1 ? indices[0] : -1);
}

/**
 * @typedef {object} Emergence
 * @property {string} score
 * @property {string} name - Name of the head.
 * @property {number} layer
 * @property {number} head
 * @property {number} step - First snapshot at which the head passed the score's threshold.
 * @property {string} interval - The interval in which it emerged, in words.
 * @property {number | null} lostStep - Last snapshot before its score fell below the threshold by more
 *   than two standard errors; null if it has not.
 */

/** When each head emerged, earliest first. @type {Emergence[]} */
export const emergences = readEmergences();

function readEmergences() {
  const keys = Object.keys(columns).filter(key => key.startsWith("emerged/"));
  const latest = scoredSteps.findLastIndex((_, k) => keys.some(key => columns[key][k] !== null));
  const found = keys
    .filter(key => metricAt(key, latest) !== null)
    .map(key => {
      const [, score, name] = key.split("/");
      const [layer, head] = name.slice(1).split("H").map(Number);
      const step = columns[key][latest];
      const lostStep = metricAt(`lost/${score}/${name}`, latest);
      const interval = data.emergenceIntervals[key];
      return { score, name, layer, head, step, interval, lostStep };
    });
  return found.sort((a, b) => a.step - b.step);
}

/**
 * The share of a head's score that is lost without what an upstream component wrote.
 *
 * @typedef {object} Composition
 * @property {string} score
 * @property {[number, number]} to - The head, as layer and head.
 * @property {string} input - Input of the head (queries, keys or values) in which the component is
 *   removed.
 * @property {string} from - The upstream component: L0H1, L0MLP or embedding.
 * @property {number} share
 * @property {number} error - Standard error.
 * @property {number | null} directShare - The share if nothing in between is computed again.
 * @property {number | null} directError
 */

const COMPOSITION =
  /^composition\/(\w+)\/L(\d+)H(\d+)\/(queries|keys|values)\/(L\d+H\d+|L\d+MLP|embedding)$/;
const compositionColumns = Object.keys(columns)
  .map(key => COMPOSITION.exec(key))
  .filter(match => match && !/_se$|_direct$/.test(match[1]));

/** Whether composition was measured at any snapshot. */
export const hasComposition = compositionColumns.length > 0;

/**
 * @param {number} k - Index of a snapshot.
 * @returns {Composition[]}
 */
export function compositionAt(k) {
  const all = compositionColumns.map(([key, score, layer, head, input, from]) => {
    const metric = suffix => metricAt(key.replace(score, score + suffix), k);
    return {
      score,
      to: /** @type {[number, number]} */ ([Number(layer), Number(head)]),
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
