/** The reader's own text: the model reads it as it is typed. It is one more probe for other views. */

import { $ } from "../base/dom.js";
import { describeTokens, formatCount, headName } from "../base/format.js";
import { ask, describeFailure, loadStep, send } from "../client/client.js";
import { findHidden, placesRead } from "../engine/decoding.js";
import { Cells, MIN_CLEAR_EFFECT_NATS, Predictions } from "../state/cells.js";
import { emit } from "../state/events.js";
import { inductionToken } from "../state/opening.js";
import { data, H, hasSteps, L, runnableSteps, steps, textLimit } from "../state/page_data.js";
import {
  chooseProbe,
  currentProbe,
  display,
  isOwnText,
  keepSelection,
  ownText,
  selection,
  selectWanted,
  wanted,
  wantedStep,
  wantsOwnText,
} from "../state/selection.js";
import { drawAttention } from "./attention_map.js";
import { cancelRequestsOfText, requestPatterns, requestTokenEffects } from "./own_requests.js";
import { fillText, revealToken } from "./text.js";

const SLOW_READING = 300; // milliseconds after which the page says that it is reading
const TYPING_DELAY = 10; // milliseconds in which keys are gathered

/**
 * What the field shows until it is edited: the whole characters of `ids`. These are the reader's, as
 * the model continued them, or those of a stored probe from number `start` on.
 */
const filled = { probe: null, start: 0, text: "", ids: [] };

let filling = Promise.resolve();

// ---- reading

let readings = 0;

/** Read the text and show it, unless another text or another step is wanted meanwhile. */
export async function readOwnText() {
  readings += 1;
  const reading = readings;
  const timer = setTimeout(sayThatItIsReading, SLOW_READING);
  try {
    await readOnce(() => reading === readings && wantsOwnText());
  } catch (error) {
    $("own-text-status").textContent = describeFailure(error);
    keepSelection();
    emit(display.attention || wantsOwnText() ? "draw" : "wanted");
  }
  clearTimeout(timer);
}

/** Say which step's weights are to read the text. */
function sayThatItIsReading() {
  const weights = hasSteps ? ` with the weights of step ${formatCount(wantedStep())}` : "";
  $("own-text-status").textContent = `reading${weights} …`;
}

/** Encode the text, run the model and update the views. */
async function readOnce(isWanted) {
  const startTime = performance.now();
  const step = wantedStep();
  const allIds = await encodeTyped();
  if (!isWanted()) return;
  if (isFieldEmpty()) {
    showEmptyText();
    return;
  }
  cancelRequestsOfText();
  await loadStep(step);
  if (!isWanted()) return;
  const places = placesRead(allIds, textLimit);
  const ids = places.map(place => allIds[place]);
  ownText.hidden = ownText.hidden.filter(place => place < allIds.length - 1);
  const hidden = findHidden(ownText.hidden, places);
  const input = { ids, step, off: [...ownText.off], hidden };
  const [results, tokens] = await Promise.all([
    ask({ request: "read", ...input }),
    send("tokenTexts", { ids }),
  ]);
  if (!results || !isWanted()) return;
  const { norms, largest } = results;
  const attention = new Cells({ L, H, tokens, largest, norms, triangles: [] });
  if (!(await requestPatterns(attention, input)) || !isWanted()) return;
  const milliseconds = Math.round(performance.now() - startTime);
  const isEdited = String(ids) !== String(ownText.ids);
  const facts = { L, H, tokens, step, largest: MIN_CLEAR_EFFECT_NATS };
  const predictions = new Predictions(facts);
  predictions.addRead(results, input.off, input.hidden);
  Object.assign(ownText, { ids, tokens, T: ids.length, allIds, places, attention, predictions });
  if (!display.attention && wanted.pin === null) {
    wanted.pin = await findInductionToken(input, predictions);
  }
  if (!isWanted()) return;
  $("own-text-status").textContent = describeLength(ids.length, allIds.length, milliseconds);
  showOwnText(isEdited);
}

/** Return the strongest induction token of the selected head, whose effects this measures first. */
async function findInductionToken(input, predictions) {
  const { layer, head } = selection;
  const off = [...input.off, headName(layer, head)];
  const { losses } = await send("read", { ...input, off });
  losses.forEach((loss, i) => {
    const effect = { heads: [layer * H + head], nats: [loss - predictions.loss(i)] };
    predictions.addHeadEffects(i, effect);
  });
  return inductionToken(ownText, ownText.attention, predictions, selection);
}

/** Say how many tokens were read, and why these are not all. */
function describeLength(count, countOfAll, milliseconds) {
  const reason =
    textLimit.maxTokens === data.modelConfig.block_size
      ? "the model's context length"
      : "the attention patterns of more tokens would take too much memory";
  const part = count < countOfAll ? ` (${reason})` : "";
  return `${describeTokens(count, countOfAll)}${part}, ${milliseconds} ms`;
}

/** Return the ids of the text in the field: until it is edited, those with which it was filled. */
export async function encodeTyped() {
  await filling;
  return keptIds() ?? send("encode", { text: $("typed").value });
}

/** Return the ids with which the field was filled; null if the reader has changed its characters. */
export const keptIds = () =>
  filled.ids.length && $("typed").value === filled.text ? filled.ids : null;

/** Read the characters in the field instead of the ids with which it was filled. */
export function readAsTyped() {
  if (!keptIds()) return;
  filled.ids = [];
  readOwnText();
}

export const isFieldEmpty = () => !$("typed").value && !keptIds();

const showsStoredText = () => currentProbe() === filled.probe && keptIds() !== null;

/** Return the index, in the selected input, of the first token that is in the field. */
export const firstTypedToken = () => (isOwnText() ? 0 : filled.start);

export const isInField = () => isOwnText() || showsStoredText();

/** Show the reader's text in all views; if it is that of the selected input, with the same pin. */
export function chooseOwnText() {
  if (showsStoredText() && selection.pinned !== null) {
    wanted.pin = Math.max(0, selection.pinned - firstTypedToken());
  }
  chooseProbe(data.probes.indexOf(ownText));
}

function showEmptyText() {
  $("own-text-status").textContent = "";
  cancelRequestsOfText();
  Object.assign(ownText, { ids: [], tokens: [], T: 0, allIds: [], places: [], hidden: [] });
  Object.assign(ownText, { attention: null, predictions: null });
  selectWanted({ attention: null, predictions: null });
  fillText();
  emit("selected");
  emit("token");
}

/** Show the text; a pinned token stays pinned unless the text was edited. */
function showOwnText(isEdited) {
  const { pinned, target, isTokenChosen } = selection;
  const isFirst = !isOwnText() || !display.attention;
  const isOtherStep = selection.step !== wanted.step;
  const previous = isEdited || isFirst ? null : pinned;
  selectWanted({ attention: ownText.attention, predictions: ownText.predictions });
  fillText();
  const kept = wanted.pin ?? previous;
  wanted.pin = null;
  Object.assign(selection, {
    pinned: Math.min(kept ?? ownText.T - 1, ownText.T - 1),
    isTokenChosen,
    target: kept === null ? null : target,
  });
  if (isFirst || isOtherStep) emit("selected");
  else drawAttention();
  revealToken(selection.pinned);
  if (selection.showTokenEffect) requestTokenEffects();
  emit("pin");
}

// ---- set-up

/**
 * Set up the section, or say why the model cannot run here.
 *
 * @param {number} start - Number of tokens of a stored probe that cannot be typed, at its beginning.
 */
export function setUpOwnText(start) {
  const obstacle = runnableSteps.length ? "" : describeObstacle();
  $("own-text").hidden = !runnableSteps.length;
  $("not-run").hidden = !obstacle;
  $("not-run").textContent =
    `${obstacle} To see the attention of your own text, run: python explore.py run_dir=… (or, as a ` +
    'file: python sample.py run_dir=… prompt="…" attention=page.html)';
  if (!runnableSteps.length) return;
  $("stops").textContent = describeStops();
  filled.start = start;
  if (data.server) showKept(data.server.promptIds, data.server.prompt, ownText);
  let timer = 0;
  $("typed").oninput = () => {
    chooseProbe(data.probes.indexOf(ownText));
    clearTimeout(timer);
    timer = setTimeout(readOwnText, TYPING_DELAY);
  };
}

/** Say why the page has no weights; "" if the run has none. */
function describeObstacle() {
  const { bytes, cannotRun, unreadable } = data.weights ?? {};
  if (unreadable) return "The weights of this run's snapshots are damaged or not finite.";
  if (cannotRun) return `A page cannot run a model with ${cannotRun}.`;
  return bytes
    ? `The model's weights take ${Math.ceil(bytes / 1e6)} MB, too large for a page.`
    : "";
}

/** Say at which steps of the slider the model runs; "" if it runs at every step. */
function describeStops() {
  if (runnableSteps.length === steps.length) return "";
  const stops = `at ${runnableSteps.length} of ${steps.length} steps, marked on the slider`;
  const { unreadable } = data.weights;
  const damaged = unreadable ? `; those of ${unreadable} are damaged or not finite` : "";
  return `${stops}: their weights are in this page${damaged}`;
}

/**
 * Put the text of a stored probe into the field, unless the reader has written or changed something.
 */
export async function fillField(probe) {
  const isKept = $("typed").value !== filled.text || [probe, ownText].includes(filled.probe);
  if (!runnableSteps.length || isKept || ownText.hidden.length) return;
  try {
    await showIds(probe.ids.slice(filled.start), probe);
  } catch (error) {
    $("own-text-status").textContent = describeFailure(error);
  }
}

/** Put the whole characters of ids into the field, unless its text changes meanwhile. */
export function showIds(ids, probe = ownText) {
  const before = $("typed").value;
  filling = send("decode", { ids }).then(text => {
    if ($("typed").value === before) showKept(ids, text, probe);
  });
  return filling;
}

function showKept(ids, text, probe) {
  $("typed").value = text;
  Object.assign(filled, { probe, text, ids });
}
