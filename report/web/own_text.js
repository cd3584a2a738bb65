/**
 * The reader's own text: the model in the worker reads it as it is typed, and continues it. It is
 * one more probe for the other views.
 */

import { drawAttention } from "./attention_map.js";
import { $ } from "./dom.js";
import { askModel, cancel, describeFailure, send, startModel } from "./engine.js";
import { formatCount, pluralize } from "./format.js";
import {
  chooseProbe,
  currentProbe,
  currentStep,
  data,
  display,
  emit,
  H,
  isOwnText,
  keepSelection,
  L,
  ownText,
  selection,
  selectWanted,
  steps,
  stepsWithWeights,
  wanted,
  wantedStep,
  wantsOwnText,
} from "./page_state.js";
import { fillText, revealToken } from "./text_view.js";
import { MIN_CLEAR_EFFECT_NATS } from "./token_effect.js";

const SLOW_READING = 300; // milliseconds after which the page says that it is reading
const TYPING_DELAY = 30; // milliseconds in which keys are gathered
const CONTINUING_DELAY = 200; // milliseconds between two views of a text that is continued
const MAX_CONTINUED_TOKENS = 1000;
const REDRAW_DELAY = 200; // milliseconds between two views of token effects that come in

/** The text that the field holds at first: the tokens of a probe, from number `start` on. */
let initial = { probe: null, start: 0, text: "", ids: [] };

// ---- reading

/** Read the text and show it; while it is being read, read it again afterwards. */
export async function readOwnText() {
  if (ownText.isReading) {
    ownText.readAgain = true;
    return;
  }
  ownText.isReading = true;
  const timer = setInterval(sayThatItIsReading, SLOW_READING);
  try {
    await readOnce();
  } catch (error) {
    $("own-text-status").textContent =
      error.name === "UnknownCharacterError" ? `${error.message}.` : describeFailure(error);
    keepSelection();
    emit("draw");
  }
  clearInterval(timer);
  ownText.isReading = false;
  if (!display.attention && !wantsOwnText()) emit("wanted"); // nothing is shown yet
  if (ownText.readAgain) {
    ownText.readAgain = false;
    readOwnText();
  }
}

/** Say which step's weights are to read the text. */
function sayThatItIsReading() {
  const weights =
    data.kind === "run" ? ` with the weights of step ${formatCount(wantedStep())}` : "";
  $("own-text-status").textContent = `reading${weights} …`;
}

/** Encode the text, run the model and update the views, unless another step is wanted meanwhile. */
async function readOnce() {
  const startTime = performance.now();
  const step = wantedStep();
  const allIds = await encodeTyped();
  const ids = allIds.slice(-data.modelConfig.block_size);
  if (!ids.length) {
    showEmptyText();
    return;
  }
  ownText.hidden = ownText.hidden.filter(j => j < ids.length - 1);
  const interventions = { off: [...ownText.off], hidden: [...ownText.hidden] };
  const results = await askModel("read", ids, { step, ...interventions });
  const tokens = await send("tokenTexts", { ids });
  if (!wantsOwnText() || wantedStep() !== step) return;
  const ofAll = ids.length < allIds.length ? `, the last of ${allIds.length}` : "";
  const milliseconds = Math.round(performance.now() - startTime);
  $("own-text-status").textContent =
    `${pluralize(ids.length, "token")}${ofAll}, ${milliseconds} ms`;
  const isEdited = ids.length !== ownText.ids.length || ids.some((id, t) => id !== ownText.ids[t]);
  updateOwnText(ids, tokens, { ...results, ...interventions }, step);
  showOwnText(isEdited);
}

/** Encode the text in the field; the initial text is read as the tokens of its probe. */
async function encodeTyped() {
  await startModel();
  const text = $("typed").value;
  return holdsInitialText() ? initial.ids : send("encode", { text });
}

/** Return whether the field still holds the initial text, whose tokens are known. */
const holdsInitialText = () => initial.ids.length > 0 && $("typed").value === initial.text;

/** Return whether the selected input has the tokens that are in the field. */
export const showsInitialText = () => currentProbe() === initial.probe && holdsInitialText();

/** Return the index, in the selected input, of the first token that is in the field. */
export const firstTypedToken = () => (isOwnText() ? 0 : initial.start);

/** Empty all views, because there is no text. */
function showEmptyText() {
  $("own-text-status").textContent = "";
  cancel("tokenEffects");
  cancel("headEffects");
  Object.assign(ownText, { ids: [], tokens: [], T: 0, hidden: [], view: null, predictions: null });
  if (!wantsOwnText()) return;
  selectWanted({ attention: null, predictions: null });
  fillText();
  emit("selected");
  emit("token");
}

/** Make the worker's results the view and the predictions of the probe. */
function updateOwnText(ids, tokens, results, step) {
  const T = ids.length;
  const { maps, norms, largest } = results;
  const triangle = (T * (T + 1)) / 2;
  const view = {
    L,
    H,
    T,
    tokens,
    size: maps.length,
    largest,
    exact: true,
    norms,
    at: (l, h, i, j) => maps[(l * H + h) * triangle + (i * (i + 1)) / 2 + j],
    bound: () => 0,
  };
  const predictions = createPredictions(tokens, results, step);
  Object.assign(data.words, results.words);
  Object.assign(ownText, { ids, tokens, T, view, predictions });
  cancel("tokenEffects");
  cancel("headEffects");
}

/**
 * Return the predictions of the text, as token_effect.js decodes stored ones. The breakdown, the
 * head effects and the token effects are empty until they are requested.
 *
 * @returns {import("./page_state.js").Predictions}
 */
function createPredictions(tokens, { next, chances, losses, was, off, hidden }, step) {
  const predictions = {
    L,
    H,
    T: tokens.length,
    tokens,
    step,
    parts: L * (H + 1) + 2,
    largest: MIN_CLEAR_EFFECT_NATS,
    signed: true,
    norms: null,
    losses,
    off,
    hidden,
    was, // losses and chances without interventions
    breakdown: null,
    headEffects: [],
    columns: [], // of each hidden token j: its effects and KL divergences at later tokens
    bound: () => 0,
  };
  const cell = (i, j, key) => {
    if (hidden.includes(j) && i + 1 < tokens.length) return 0; // hiding it changes nothing
    return predictions.columns[j]?.[key][i - j - 1] ?? Number.NaN;
  };
  const breakdownOf = i => (predictions.breakdown?.i === i ? predictions.breakdown : null);
  return Object.assign(predictions, {
    at: (_l, _h, i, j) => (j < i ? cell(i, j, "effects") : 0),
    kl: (i, j) => cell(i, j, "kl"),
    loss: i => losses[i],
    headEffect: (l, h, i) =>
      breakdownOf(i) ? (predictions.headEffects[l * H + h] ?? Number.NaN) : Number.NaN,
    lens: (k, i) => breakdownOf(i)?.lens[k] ?? Number.NaN,
    direct: (part, i, target) => breakdownOf(i)?.direct[part][target] ?? Number.NaN,
    predicted: i =>
      next[i].map((id, k) => ({ id, chance: chances[i][k], was: was?.chances[i][k] })),
    writes: (l, h, i) => {
      const breakdown = breakdownOf(i);
      const isOfHead = breakdown?.of[0] === l && breakdown.of[1] === h;
      return isOfHead ? breakdown.writes : [];
    },
  });
}

/** Show the text; a pinned token stays pinned unless the text was edited. */
function showOwnText(isEdited) {
  const { pinned, target } = selection;
  const isFirst = !isOwnText() || !display.attention;
  const isOtherStep = selection.step !== wanted.step;
  const previous = isEdited || isFirst ? null : pinned;
  selectWanted({ attention: ownText.view, predictions: ownText.predictions });
  fillText();
  const pin = wanted.pin ?? previous ?? ownText.T - 1;
  wanted.pin = null;
  Object.assign(selection, {
    pinned: Math.min(pin, ownText.T - 1),
    pinAutomatically: false,
    target,
  });
  if (isFirst || isOtherStep) emit("selected");
  else drawAttention();
  revealToken(selection.pinned);
  if (selection.showTokenEffect) requestTokenEffects();
  emit("pin");
}

/**
 * Request the breakdown of token i, then the effect of ablating each head on it.
 *
 * @param {number} i
 * @param {() => void} draw - Called whenever a result is there.
 */
export async function requestBreakdown(i, draw) {
  const { predictions, ids } = ownText;
  const of = [selection.layer, selection.head];
  const key = JSON.stringify([i, of]);
  if (predictions.requestedBreakdown === key) return;
  predictions.requestedBreakdown = key;
  const isCurrent = () =>
    predictions === ownText.predictions && predictions.requestedBreakdown === key;
  const hasHeadEffects = predictions.breakdown?.i === i;
  const breakdown = await askModel("breakDown", ids, { i, of });
  if (!isCurrent()) return;
  Object.assign(data.words, breakdown.words);
  predictions.breakdown = breakdown;
  if (!hasHeadEffects) predictions.headEffects = [];
  draw();
  if (hasHeadEffects || i + 1 >= ownText.T) return;
  await askModel("headEffects", ids, { i }, ({ k, nats }) => {
    predictions.headEffects[k] = nats;
  });
  if (isCurrent()) draw();
}

/** Request the token effects of the text, a hidden token at a time. */
export async function requestTokenEffects() {
  const { predictions, ids } = ownText;
  if (predictions.requestedTokenEffects) return;
  predictions.requestedTokenEffects = true;
  const isShown = () =>
    predictions === ownText.predictions && selection.showTokenEffect && isOwnText();
  let lastDrawn = 0;
  await askModel("tokenEffects", ids, {}, ({ j, effects, kl }) => {
    predictions.columns[j] = { effects, kl };
    for (const effect of effects) {
      predictions.largest = Math.max(predictions.largest, Math.abs(effect) || 0);
    }
    if (!isShown() || performance.now() - lastDrawn < REDRAW_DELAY) return;
    lastDrawn = performance.now();
    drawAttention();
  });
  if (isShown()) drawAttention();
}

// ---- continuing the text

/** Let the model continue the text; if it is doing that, stop it. */
async function continueText() {
  if (ownText.isContinuing) {
    stopContinuing();
    return;
  }
  ownText.isContinuing = true;
  $("continue").textContent = "Stop";
  chooseProbe(data.probes.indexOf(ownText));
  try {
    const ids = await encodeTyped();
    const start = ids.length ? ids : initial.ids.slice(0, 1);
    const step = wantedStep();
    const parameters = { step, temperature: readTemperature(), maxTokens: MAX_CONTINUED_TOKENS };
    await askModel("continue", start, parameters, ({ text }) => {
      if (wantedStep() !== step) stopContinuing();
      if (!ownText.isContinuing) return;
      $("typed").value = text;
      $("typed").scrollTop = $("typed").scrollHeight;
      readSoon();
    });
  } catch {
    // readOwnText says why the model does not run.
  }
  stopContinuing();
}

/** Return the temperature, and write it into its field as it is used: within the bounds. */
function readTemperature() {
  const { valueAsNumber, defaultValue, min, max } = $("temperature");
  const typed = Number.isFinite(valueAsNumber) ? valueAsNumber : Number(defaultValue);
  const temperature = Math.min(Number(max), Math.max(Number(min), typed));
  $("temperature").value = temperature;
  return temperature;
}

/** Stop continuing the text and read what is there. */
function stopContinuing() {
  if (ownText.isContinuing) cancel("continue");
  ownText.isContinuing = false;
  $("continue").textContent = "Continue";
  readSoon();
}

let timer = 0;

/** Read the text when no key has followed for a moment; while it is continued, at intervals. */
function readSoon() {
  if (timer && ownText.isContinuing) return;
  clearTimeout(timer);
  timer = setTimeout(
    () => {
      timer = 0;
      readOwnText();
    },
    ownText.isContinuing ? CONTINUING_DELAY : TYPING_DELAY,
  );
}

// ---- set-up

/**
 * Set up the section, or say why the model cannot run here.
 *
 * @param {{tokens: string[], ids: number[]} | undefined} probe - Its text is in the field at first.
 * @param {number} start - Number of its tokens that cannot be typed, at its beginning.
 */
export function setUpOwnText(probe, start) {
  $("own-text").hidden = !stepsWithWeights.length;
  const bytes = data.weights?.bytes;
  $("too-large").hidden = !bytes;
  if (bytes) {
    $("too-large").textContent =
      `The model's weights take ${Math.ceil(bytes / 1e6)} MB, too large for a page. To see the ` +
      'attention of your own text, run: python sample.py run_dir=… prompt="…" attention=page.html';
  }
  if (!stepsWithWeights.length) return;
  if (stepsWithWeights.length < steps.length) {
    $("stops").textContent =
      `at ${stepsWithWeights.length} of ${steps.length} steps, marked on the slider: ` +
      "their weights are in this page";
  }
  $("typed").value = (probe?.tokens ?? []).slice(start).join("");
  initial = { probe, start, text: $("typed").value, ids: (probe?.ids ?? []).slice(start) };
  $("typed").oninput = () => {
    chooseProbe(data.probes.indexOf(ownText));
    readSoon();
  };
  $("continue").onclick = continueText;
  $("temperature").onchange = readTemperature;
  window.glass = createConsoleInterface();
}

/** Return the functions of `glass`, for the browser's console: by default at the step on display. */
function createConsoleInterface() {
  const ask = async (request, ids, { step = currentStep(), off = [], hidden = [] } = {}) => {
    if (!stepsWithWeights.includes(step)) {
      throw new Error(
        `the weights of step ${step} are not in this page: choose ${stepsWithWeights.join(", ")}`,
      );
    }
    return askModel(request, [...ids], { step, off, hidden });
  };
  const sendWhenStarted = async (request, parameters) => {
    await startModel();
    return send(request, parameters);
  };
  return {
    encode: text => sendWhenStarted("encode", { text }),
    decode: ids => sendWhenStarted("decode", { ids: [...ids] }),
    logits: (ids, interventions) => ask("logits", ids, interventions),
    maps: (ids, interventions) => ask("maps", ids, interventions),
  };
}
