/** What the reader has selected in a run's page, and what is on display. */

import { emit } from "./events.js";
import { data, openingIndex, runnableSteps, steps } from "./page_data.js";

/** What the reader has selected. */
export const selection = {
  step: openingIndex, // index into `steps`
  layer: 0,
  head: 0,
  probe: 0, // index into `data.probes`
  averageHeads: false,
  weightByValues: false,
  excludeFirst: false,
  showTokenEffect: false,
  showAllScores: false,
  showAllComposition: false,
  token: null, // token that is highlighted: the hovered one, else the pinned one
  pinned: null, // token that stays highlighted
  pinnedCell: null, // [query, key] of the cell that was clicked
  isHeadChosen: false, // true: by the reader; false: by the page
  isTokenChosen: false, // pinned or unpinned by the reader
  target: null, // id of the next token of the prediction breakdown, if the reader chose one
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
  /** @type {Cells | null} */
  attention: null,
  /** @type {Predictions | null} */
  predictions: null,
};

/** The probe that the reader types. Its arrays follow the text (views/own_text.js). */
export const ownText = {
  name: "your text",
  period: null,
  tokenEffects: [],
  maps: [],
  tokens: [],
  ids: [],
  T: 0,
  allIds: [], // of the whole text, of which `ids` are read
  places: [], // of `ids` in it
  off: [], // names of ablated heads
  hidden: [], // places of the tokens hidden from all later ones
  attention: null,
  predictions: null,
};

export const currentStep = () => steps[selection.step] ?? 0;

/** @returns {Probe} The selected one. */
export const currentProbe = () => data.probes[selection.probe];

export const isOwnText = () => currentProbe() === ownText;

export const wantsOwnText = () => data.probes[wanted.probe] === ownText;

export const wantedStep = () => steps[wanted.step] ?? 0;

/**
 * Return the indices of the steps at which the wanted input can be shown: the model reads the
 * reader's own text only at the steps at which it can run.
 */
export const wantedStops = () =>
  [...steps.keys()].filter(k => !wantsOwnText() || runnableSteps.includes(steps[k]));

/** Return which maps are read: one head's, or their average if `head` is null. */
export const selectedMaps = () => ({
  layer: selection.layer,
  head: selection.averageHeads ? null : selection.head,
  weightByValues: selection.weightByValues,
});

// ---- changes

export function chooseHead(layer, head) {
  Object.assign(selection, { layer, head, isHeadChosen: true });
  emit("head");
}

/** Load probe k and then select it. */
export function chooseProbe(k) {
  if (k === wanted.probe) return;
  wanted.probe = k;
  chooseStep(wanted.step);
}

/** Load step k of the slider, or the nearest at which the wanted input can be shown; select it. */
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

export function keepSelection() {
  Object.assign(wanted, { step: selection.step, probe: selection.probe, pin: null });
}

/** Highlight token i; null: the pinned token, if there is one. */
export function highlightToken(i) {
  selection.token = i ?? selection.pinned;
  emit("token");
}

/** Pin token i, or unpin it if it is pinned. */
export function togglePin(i) {
  const pinned = selection.pinned === i ? null : i;
  Object.assign(selection, { pinned, isTokenChosen: true, target: null });
  highlightToken(i);
  emit("pin");
}

/** Pin query token i and explain its attention to key token j. */
export function pinCell(i, j) {
  Object.assign(selection, { pinned: i, pinnedCell: [i, j], isTokenChosen: true, target: null });
  highlightToken(i);
  emit("cell");
}
