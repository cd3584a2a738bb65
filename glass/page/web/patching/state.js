/** Activation patching: what the reader has selected, and its measurement. */

import { $, throttle } from "../base/dom.js";
import { formatNumber, makeVisible, pluralize } from "../base/format.js";
import { ask, cancel, describeFailure, send } from "../client/client.js";
import { placesRead } from "../engine/decoding.js";
import { PREDICTED_TOKENS } from "../engine/logits.js";
import { firstDifference, parsePatch } from "../engine/patches.js";
import { emit } from "../state/events.js";
import { data, H, hasMlps, L, textLimit } from "../state/page_data.js";
import { isOwnText, ownText, selection } from "../state/selection.js";

/** Logits. Shares of a smaller difference between the texts would be noise. */
const MIN_DIFFERENCE = 0.1;
const REDRAW_DELAY = 100; // milliseconds between two views of cells that come in

/** What the reader has selected. */
export const choices = {
  isOpen: false,
  corrupted: null, // text; null: the same as the clean one
  answer: null, // token id; null: the likeliest next token of the clean text
  wrong: null, // token id; null: the likeliest next token of the corrupted text
  direction: "denoising",
  kept: [], // names of the patches of all runs
};

/** What was not measured yet of two texts. */
const UNMEASURED = {
  cleanTokens: [],
  corruptedTokens: [],
  tokenCount: 0, // of the whole clean text; fewer may be read
  first: 0, // first token that differs between the texts
  cleanNext: [], // likeliest next tokens after token i
  corruptedNext: [],
  answer: null,
  wrong: null,
  kept: [], // names of the patches of all runs that can change the prediction
};

/** What was measured of the selection. */
export const measured = {
  ...UNMEASURED,
  problem: "", // a sentence that says why nothing is measured
  i: 0, // token after which the answer is predicted
  contrast: null, // logit differences of the runs, and likeliest next tokens of the patched one
  cells: { residual: new Map(), component: new Map() }, // by "row,column", with one more patch
};

/** Return the parts of the page's address that name the selection; null if they are not needed. */
export function describeChoices() {
  const { isOpen, corrupted, answer, wrong, direction, kept } = choices;
  if (!isOpen) return {};
  return {
    corrupted: corrupted ?? $("typed").value,
    answer,
    wrong,
    direction: direction === "denoising" ? null : direction,
    patched: kept.join(",") || null,
  };
}

export function readChoices(parameters) {
  const corrupted = parameters.get("corrupted");
  const readId = name => {
    const id = Number(parameters.get(name) ?? Number.NaN);
    return Number.isInteger(id) && id >= 0 && id < data.modelConfig?.vocab_size ? id : null;
  };
  Object.assign(choices, {
    isOpen: corrupted !== null,
    corrupted: corrupted === parameters.get("text") ? null : corrupted,
    answer: readId("answer"),
    wrong: readId("wrong"),
    direction: parameters.get("direction") === "noising" ? "noising" : "denoising",
    kept: (parameters.get("patched") ?? "").split(",").filter(isPatchOfModel),
  });
  // Only here: a click opens the section before its event `toggle` arrives, and a view that is drawn
  // in between must not close it again.
  $("patching").open = choices.isOpen;
}

/** Return whether a name is that of a patch that the model has; its token may be any. */
function isPatchOfModel(name) {
  const patch = parsePatch(name);
  if (!patch || patch.layer >= L) return false;
  return patch.kind === "heads" ? patch.index < H : patch.kind === "residual" || hasMlps;
}

/**
 * Return the share of the difference between the texts that a run restores (denoising) or removes
 * (noising).
 */
export function shareOf(logitDifference) {
  const { clean, corrupted } = measured.contrast;
  const change =
    choices.direction === "denoising" ? logitDifference - corrupted : clean - logitDifference;
  return change / (clean - corrupted);
}

export function patchName(kind, row, column) {
  if (kind === "residual") return `L${row}T${column}`;
  return column === H ? `L${row}MLP` : `L${row}H${column}`;
}

// ---- measuring

/** What is being measured or has been, as JSON. */
let measurement = "";

/**
 * Measure what is selected, unless that has been done. This emits "measured" when the prediction is
 * there, and at the end; "cellsMeasured" at intervals while cells come in.
 */
export async function measure() {
  const { ids, predictions } = ownText;
  if (!choices.isOpen || !isOwnText() || !predictions) {
    stopMeasuring();
    Object.assign(measured, UNMEASURED, { contrast: null, problem: "Type a text above." });
    emit("measured");
    return;
  }
  const { off, hidden, step } = predictions;
  const i = Math.min(selection.pinned ?? ids.length - 1, ids.length - 1);
  const input = { ids, step, off, hidden, i };
  const requested = JSON.stringify([input, choices]);
  if (requested === measurement) return;
  stopMeasuring();
  measurement = requested;
  const isCurrent = () => measurement === requested;
  Object.assign(measured, { problem: "", contrast: null, i });
  measured.cells = { residual: new Map(), component: new Map() };
  try {
    const problem = await measureAll(input, isCurrent);
    if (!isCurrent()) return;
    measured.problem = problem;
    const isComplete = countMeasured() === countCells();
    if (!problem && !isComplete) measurement = ""; // canceled: measured at the next change
  } catch (error) {
    if (!isCurrent()) return;
    measured.problem = describeFailure(error);
  }
  emit("measured");
}

function stopMeasuring() {
  measurement = "";
  cancel("contrast");
  cancel("patchCells");
}

/**
 * Compare the texts and measure all patches. Return a sentence that says why nothing is measured; ""
 * if it is or if the measurement was canceled.
 */
async function measureAll(input, isCurrent) {
  const { tokens: cleanTokens, allIds } = ownText;
  const text = choices.corrupted;
  const allCorrupted = text === null ? allIds : await send("encode", { text });
  const corrupted = placesRead(allCorrupted, textLimit).map(place => allCorrupted[place]);
  const corruptedTokens = await send("tokenTexts", { ids: corrupted });
  if (!isCurrent()) return "";
  const { ids, i } = input;
  const first = firstDifference(ids, corrupted);
  const tokenCount = allIds.length;
  Object.assign(measured, UNMEASURED, { cleanTokens, corruptedTokens, tokenCount, first });
  const problem = compareTexts(allIds, allCorrupted) || compareReadTokens(ids, first, i);
  return problem || measureAnswers({ request: "contrast", ...input, corrupted }, isCurrent);
}

/** Predict the next token after both texts, choose the answers, and measure all patches. */
async function measureAnswers(texts, isCurrent) {
  const cleanNext = ownText.predictions.predicted(texts.i).slice(0, PREDICTED_TOKENS);
  const [answer, wrong] = cleanNext.map(({ id }) => id);
  const unpatched = { answer, wrong, direction: "denoising", patched: [] };
  const onCorrupted = await ask({ ...texts, ...unpatched });
  if (!onCorrupted) return "";
  Object.assign(measured, { cleanNext, corruptedNext: onCorrupted.next });
  await chooseAnswers();
  if (!isCurrent()) return "";
  if (measured.answer === measured.wrong) return "Choose a wrong answer that is not the answer.";
  return measurePatches(texts);
}

async function measurePatches(texts) {
  const { answer, wrong, first } = measured;
  const kept = choices.kept.filter(name => isEffective(name, first, texts.i));
  const question = { ...texts, answer, wrong, direction: choices.direction, patched: kept };
  const contrast = await ask(question);
  if (!contrast) return "";
  Object.assign(measured, { kept, contrast });
  const { clean, corrupted } = contrast;
  if (Math.abs(clean - corrupted) < MIN_DIFFERENCE) {
    return (
      "The texts do not differ in this prediction: the logit difference is " +
      `${formatNumber(clean)} for the clean and ${formatNumber(corrupted)} for the corrupted text.`
    );
  }
  emit("measured");
  const emitCells = throttle(() => emit("cellsMeasured"), REDRAW_DELAY);
  for (const kind of ["component", "residual"]) {
    const onPart = ({ cells, values }) => {
      cells.forEach(([row, column], k) => {
        measured.cells[kind].set(`${row},${column}`, values[k]);
      });
      emitCells();
    };
    await ask({ ...question, request: "patchCells", kind }, { onPart });
    if (measured.contrast !== contrast) return ""; // another question is being measured
  }
  return "";
}

/** Say why two whole texts cannot be compared, or return "". */
function compareTexts(ids, corrupted) {
  if (ids.length !== corrupted.length) {
    return (
      `The clean text has ${pluralize(ids.length, "token")}, the corrupted text ` +
      `${corrupted.length}: replace words by others of as many tokens.`
    );
  }
  if (choices.corrupted === null || firstDifference(ids, corrupted) === ids.length) {
    return "Change something in the corrupted text: both texts are the same.";
  }
  return "";
}

/** Say why the tokens that are read of two texts cannot be compared, or return "". */
function compareReadTokens(ids, first, i) {
  if (first === ids.length) {
    return "The texts differ only in tokens that are not read: change a later one.";
  }
  if (first > i) {
    return `The texts are the same up to token ${i}: pin a later token, whose prediction can differ.`;
  }
  return "";
}

/** Return whether a patch can change the prediction after token i. */
function isEffective(name, first, i) {
  const { kind, index } = parsePatch(name);
  return kind !== "residual" || (index >= first && index <= i);
}

/** Use the answers that were chosen, or the likeliest, and learn their texts. */
async function chooseAnswers() {
  const { cleanNext, corruptedNext } = measured;
  const answer = choices.answer ?? cleanNext.find(({ id }) => id !== choices.wrong).id;
  const wrong = choices.wrong ?? corruptedNext.find(({ id }) => id !== answer).id;
  Object.assign(measured, { answer, wrong });
  const unnamed = [answer, wrong].filter(id => data.words[id] === undefined);
  const texts = unnamed.length ? await send("tokenTexts", { ids: unnamed }) : [];
  unnamed.forEach((id, k) => {
    data.words[id] = texts[k];
  });
}

export const countCells = () => L * (measured.i + 1 + H + (hasMlps ? 1 : 0));

export const countMeasured = () => measured.cells.residual.size + measured.cells.component.size;

/** Encode a text that must be one token: return its id, or a sentence that says why there is none. */
export async function encodeToken(text) {
  try {
    let ids = text ? await send("encode", { text }) : [];
    if (ids[0] === textLimit.beginOfText) ids = ids.slice(1);
    if (ids.length === 1) return { id: ids[0], problem: "" };
    const tokens = await send("tokenTexts", { ids });
    const names = tokens.length ? ` (${tokens.map(makeVisible).join(" ")})` : "";
    return { id: null, problem: `This is ${pluralize(ids.length, "token")}${names}: type one.` };
  } catch (error) {
    return { id: null, problem: describeFailure(error) };
  }
}
