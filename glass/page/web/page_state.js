/**
 * The data embedded in a run's page, what the reader has selected, and the events that views follow.
 *
 * Views import this module; it imports no view.
 */

/**
 * One snapshot of a probe, read cell by cell: attention weights or token effects.
 *
 * @typedef {object} CellView
 * @property {number} L - Layers.
 * @property {number} H - Heads per layer.
 * @property {number} T - Tokens.
 * @property {string[]} tokens
 * @property {number} largest - Top of the color scale, the same at every step.
 * @property {boolean} [signed] - Whether values are token effects, which have a sign.
 * @property {boolean} [exact] - Whether values were computed here instead of read from a byte.
 * @property {number} [from] - First row and column that is shown.
 * @property {Float32Array | null} norms - ‖v W_O‖ of each token, (L, H, T).
 * @property {(l: number, h: number, i: number, j: number) => number} at - Value of query i, key j.
 * @property {(l: number, h: number) => boolean} hasPattern - Whether a head's values are there; until
 *   then they are NaN.
 * @property {(l: number, h: number, i: number) => number} bound - Largest error in row i.
 */

/**
 * The predictions after each token of a probe: a CellView of token effects, and more.
 *
 * @typedef {object} PredictionFields
 * @property {number} step - Training step at which they were measured.
 * @property {(i: number) => number} loss - Loss of the token after i, in nats.
 * @property {(i: number, j: number) => number} kl - KL divergence when token j is hidden, in nats.
 * @property {(l: number, h: number, i: number) => number} headEffect - Nats lost without a head.
 * @property {(k: number, i: number) => number} lens - Loss after block k (logit lens), in nats.
 * @property {(part: number, i: number, target: number) => number} direct - Logit contribution.
 * @property {(i: number) => {id: number, chance: number, was?: number}[]} predicted
 * @property {(l: number, h: number, i: number) => number[]} writes - Promoted, suppressed tokens.
 */

/** @typedef {CellView & PredictionFields} Predictions */

import { $ } from "./dom.js";

/** The page's data, as glass/page/write.py writes it. */
export const data = JSON.parse($("data").textContent);

/** Steps at which heads were scored, and one column of values per metric of a head. */
export const scoredSteps = data.scored.steps;
export const columns = data.scored.columns;

const shape = data.shape ?? shapeFromMetrics();
export const L = shape[0];
export const H = shape[1];

/** Key/value heads per layer. */
export const groups = data.groups && H % data.groups === 0 ? data.groups : H;

/** Whether the model's heads have sink logits, so that the weights on tokens sum to less than 1. */
export const hasSink = Boolean(data.modelConfig?.attention_sink);

/** What the model is validated on. */
export const validationName = data.config?.some(
  ([name, value]) => name === "data.source" && value === "synthetic",
)
  ? "held-out sequences"
  : "validation text";

/** Whether the model has MLPs. */
export const hasMlps = data.modelConfig?.mlp !== "none";

/** Steps of the slider. */
export const steps = data.steps.length ? data.steps : scoredSteps;

/** Whether the model runs in the Python process that served the page (explore.py). */
export const hasServer = Boolean(data.server);

/** Steps of the slider at which the model can run: the server's, or those with weights in the page. */
export const runnableSteps = steps.filter(step => hasServer || step in (data.weights?.blobs ?? {}));

/** The largest number of tokens that the model reads at once. */
export const maxTokens = data.server?.maxTokens ?? data.modelConfig?.block_size;

/** What the reader has selected. */
export const selection = {
  step: Math.max(0, steps.length - 1), // index into `steps`
  layer: 0,
  head: 0,
  probe: 0, // index into `data.probes`
  averageHeads: false,
  weightByValues: false,
  excludeFirst: false,
  showTokenEffect: false,
  token: null, // token that is highlighted: the hovered one, else the pinned one
  pinned: null, // token that stays highlighted
  pinnedCell: null, // [query, key] of the cell that was clicked
  pinAutomatically: true, // until the reader pins a token
  target: 0, // next token of the prediction breakdown: 0 the true one, k the k-th likeliest
};

/**
 * The step and the input that the reader wants to see. They become the selection when they have been
 * loaded, so that the slider, the titles and all values always belong to the same step.
 */
export const wanted = {
  step: selection.step,
  probe: selection.probe,
  pin: null, // token to pin then
};

/** What is on display: the attention of one probe and step, and its predictions, if measured. */
export const display = {
  /** @type {(CellView & {withoutFirst?: CellView}) | null} */
  attention: null,
  /** @type {Predictions | null} */
  predictions: null,
};

/** The probe that the reader types. Its arrays follow the text (own_text.js). */
export const ownText = {
  name: "your text",
  period: null,
  tokenEffects: [],
  maps: [],
  tokens: [],
  ids: [],
  T: 0,
  off: [], // names of ablated heads
  hidden: [], // tokens hidden from all later ones
  view: null,
  predictions: null,
  isReading: false,
  readAgain: false,
  isContinuing: false,
};

/** Return [layers, heads] as far as the names of metrics tell. */
function shapeFromMetrics() {
  const heads = Object.keys(columns)
    .map(key => /L(\d+)H(\d+)$/.exec(key))
    .filter(Boolean);
  return [1, 2].map(k => Math.max(0, ...heads.map(match => Number(match[k]) + 1)));
}

/** Return the training step of the slider. */
export const currentStep = () => steps[selection.step] ?? 0;

/** Return the selected probe. */
export const currentProbe = () => data.probes[selection.probe];

/** Return whether the selected probe is the reader's own text. */
export const isOwnText = () => currentProbe() === ownText;

/** Return whether the reader wants to see their own text. */
export const wantsOwnText = () => data.probes[wanted.probe] === ownText;

/** Return the training step that the reader wants to see. */
export const wantedStep = () => steps[wanted.step] ?? 0;

/**
 * Return the indices of the steps at which the wanted input can be shown: the model reads the
 * reader's own text only at the steps at which it can run.
 *
 * @returns {number[]}
 */
export const wantedStops = () =>
  [...steps.keys()].filter(k => !wantsOwnText() || runnableSteps.includes(steps[k]));

/** Return which maps are read: one head's, or their average if `head` is null. */
export const selectedMaps = () => ({
  layer: selection.layer,
  head: selection.averageHeads ? null : selection.head,
  weightByValues: selection.weightByValues,
});

// ---- events

/** @type {Record<string, (() => void)[]>} */
const listeners = {};

/**
 * Call `listener` whenever an event is emitted.
 *
 * @param {"head" | "token" | "pin" | "cell" | "wanted" | "selected" | "draw" | "stepChanged"} event
 * @param {() => void} listener
 */
export function on(event, listener) {
  listeners[event] ??= [];
  listeners[event].push(listener);
}

/**
 * Call the listeners of an event.
 *
 * @param {string} event
 */
export function emit(event) {
  for (const listener of listeners[event] ?? []) listener();
}

/**
 * Select a head.
 *
 * @param {number} layer
 * @param {number} head
 */
export function chooseHead(layer, head) {
  Object.assign(selection, { layer, head });
  emit("head");
}

/**
 * Load a probe and then select it.
 *
 * @param {number} k - Index into `data.probes`.
 */
export function chooseProbe(k) {
  if (k === wanted.probe) return;
  wanted.probe = k;
  chooseStep(wanted.step);
}

/**
 * Load a step and then select it; if the wanted input cannot be shown there, the nearest one.
 *
 * @param {number} k - Index into `steps`.
 */
export function chooseStep(k) {
  snapToStop(k);
  emit("wanted");
}

/** Want the step at an index, or the nearest one at which the wanted input can be shown. */
export function snapToStop(k) {
  const nearer = (a, b) => (Math.abs(b - k) < Math.abs(a - k) ? b : a);
  wanted.step = wantedStops().reduce(nearer, wantedStops()[0] ?? k);
}

/** Select what the reader wanted, now that `loaded` is its attention and its predictions. */
export function selectWanted(loaded) {
  Object.assign(selection, { step: wanted.step, probe: wanted.probe });
  Object.assign(display, loaded);
}

/** Stop wanting what cannot be loaded. */
export function keepSelection() {
  Object.assign(wanted, { step: selection.step, probe: selection.probe, pin: null });
}

/**
 * Highlight token i; null: the pinned token, if there is one.
 *
 * @param {number | null} i
 */
export function highlightToken(i) {
  selection.token = i ?? selection.pinned;
  emit("token");
}

/**
 * Pin token i, or unpin it if it is pinned.
 *
 * @param {number} i
 */
export function togglePin(i) {
  const pinned = selection.pinned === i ? null : i;
  Object.assign(selection, { pinned, pinAutomatically: false, target: 0 });
  highlightToken(i);
  emit("pin");
}

/**
 * Pin query token i and explain its attention to key token j.
 *
 * @param {number} i
 * @param {number} j
 */
export function pinCell(i, j) {
  Object.assign(selection, { pinned: i, pinnedCell: [i, j], pinAutomatically: false, target: 0 });
  highlightToken(i);
  emit("cell");
}
