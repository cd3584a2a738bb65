/** The reader's own text: the model reads it as it is typed. It is one more probe for other views. */

import { drawAttention } from "./attention_map.js";
import { $ } from "./dom.js";
import { askModel, cancel, describeFailure, send, startModel } from "./engine.js";
import { formatCount, pluralize } from "./format.js";
import {
  cancelRequestsOfText,
  createPatternView,
  createPredictions,
  requestPatterns,
  requestTokenEffects,
} from "./own_requests.js";
import {
  chooseProbe,
  currentProbe,
  currentStep,
  data,
  display,
  emit,
  isOwnText,
  keepSelection,
  maxTokens,
  ownText,
  runnableSteps,
  selection,
  selectWanted,
  steps,
  wanted,
  wantedStep,
  wantsOwnText,
} from "./page_state.js";
import { fillText, revealToken } from "./text_view.js";

const SLOW_READING = 300; // milliseconds after which the page says that it is reading
const TYPING_DELAY = 10; // milliseconds in which keys are gathered
const CONTINUING_DELAY = 200; // milliseconds between two views of a text that is continued

/** The text that the field holds at first: the tokens of a probe, from number `start` on. */
let initial = { probe: null, start: 0, text: "", ids: [] };

// ---- reading

/** Text that is being read. */
let textBeingRead = "";

/** Read the text and show it; while it is being read, read it again afterwards. */
export async function readOwnText() {
  if (ownText.isReading) {
    ownText.readAgain = true;
    if (!$("typed").value.startsWith(textBeingRead)) cancel("read"); // it shares no beginning
    return;
  }
  ownText.isReading = true;
  const timer = setInterval(sayThatItIsReading, SLOW_READING);
  try {
    await readOnce();
  } catch (error) {
    $("own-text-status").textContent = describeFailure(error);
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
  textBeingRead = $("typed").value;
  const allIds = await encodeTyped();
  const ids = allIds.slice(-maxTokens);
  if (!ids.length) {
    showEmptyText();
    return;
  }
  ownText.hidden = ownText.hidden.filter(j => j < ids.length - 1);
  const interventions = { off: [...ownText.off], hidden: [...ownText.hidden] };
  cancelRequestsOfText();
  const [results, tokens] = await Promise.all([
    askModel("read", ids, { step, ...interventions }),
    send("tokenTexts", { ids }),
  ]);
  if (!results) return; // it was canceled
  const view = createPatternView(tokens, results);
  await requestPatterns(view, ids, { step, ...interventions });
  if (!wantsOwnText() || wantedStep() !== step) return;
  const milliseconds = Math.round(performance.now() - startTime);
  $("own-text-status").textContent = describeLength(ids.length, allIds.length, milliseconds);
  const isEdited = ids.length !== ownText.ids.length || ids.some((id, t) => id !== ownText.ids[t]);
  const predictions = createPredictions(tokens, { ...results, ...interventions }, step);
  Object.assign(data.words, results.words);
  Object.assign(ownText, { ids, tokens, T: ids.length, view, predictions });
  showOwnText(isEdited);
}

/** Say how many tokens were read, and why these are not all. */
function describeLength(count, countOfAll, milliseconds) {
  const sentence = `${pluralize(count, "token")}, ${milliseconds} ms`;
  if (count === countOfAll) return sentence;
  const reason =
    maxTokens === data.modelConfig.block_size
      ? "the model's context length"
      : "the attention patterns of more tokens would take too much memory";
  return `${pluralize(count, "token")}, the last of ${formatCount(countOfAll)} (${reason}), ${milliseconds} ms`;
}

/**
 * Encode the text in the field; the initial text is read as the tokens of its probe.
 *
 * @returns {Promise<number[]>}
 */
export async function encodeTyped() {
  await startModel();
  const text = $("typed").value;
  return holdsInitialText() ? initial.ids : send("encode", { text });
}

/** Return the ids that an empty text is continued from. */
export async function firstIds() {
  return initial.ids.length ? initial.ids.slice(0, 1) : send("encode", { text: "\n" });
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
  cancelRequestsOfText();
  Object.assign(ownText, { ids: [], tokens: [], T: 0, hidden: [], view: null, predictions: null });
  if (!wantsOwnText()) return;
  selectWanted({ attention: null, predictions: null });
  fillText();
  emit("selected");
  emit("token");
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

let timer = 0;

/** Read the text when no key has followed for a moment; while it is continued, at intervals. */
export function readSoon() {
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
  $("own-text").hidden = !runnableSteps.length;
  const { bytes, cannotRun } = data.weights ?? {};
  $("not-run").hidden = !(bytes || cannotRun);
  const reason = cannotRun
    ? `A page cannot run a model with ${cannotRun}.`
    : `The model's weights take ${Math.ceil(bytes / 1e6)} MB, too large for a page.`;
  $("not-run").textContent =
    `${reason} To see the attention of your own text, run: python explore.py run_dir=… (or, as a ` +
    'file: python sample.py run_dir=… prompt="…" attention=page.html)';
  if (!runnableSteps.length) return;
  if (runnableSteps.length < steps.length) {
    $("stops").textContent =
      `at ${runnableSteps.length} of ${steps.length} steps, marked on the slider: ` +
      "their weights are in this page";
  }
  const tokens = (probe?.tokens ?? []).slice(start);
  $("typed").value = data.server?.prompt ?? tokens.join("");
  initial = { probe, start, text: $("typed").value, ids: (probe?.ids ?? []).slice(start) };
  $("typed").oninput = () => {
    chooseProbe(data.probes.indexOf(ownText));
    readSoon();
  };
  window.glass = createConsoleInterface();
}

/** Return the functions of `glass`, for the browser's console: by default at the step on display. */
function createConsoleInterface() {
  const ask = async (request, ids, { step = currentStep(), off = [], hidden = [] } = {}) => {
    if (!runnableSteps.includes(step)) {
      throw new Error(`the model cannot run at step ${step}: choose ${runnableSteps.join(", ")}`);
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
