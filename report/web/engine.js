/** The client of the worker that runs the model (worker.js). */

import { $ } from "./dom.js";
import { blobs, unpack } from "./packed.js";
import { currentStep, data, ownText } from "./page_state.js";

/** @typedef {{resolve: Function, reject: Function, onPart: Function}} PendingRequest */

/** @type {Map<number, PendingRequest>} */
const pending = new Map();

/** @type {Worker | null} */
let worker = null;
let lastId = 0;

/** @type {Promise<void> | null} */
let started = null;
let isStarting = false;

/** Promises that resolve when the worker has the weights of a step. */
const loadedWeights = new Map();

/** Start the worker from the script that is embedded in the page. */
function startWorker() {
  const script = new Blob([$("worker").textContent], { type: "text/javascript" });
  const created = new Worker(URL.createObjectURL(script));
  created.onmessage = ({ data: { id, part, answer, error } }) => {
    const { resolve, reject, onPart } = pending.get(id);
    if (part) return onPart(part);
    pending.delete(id);
    if (error) reject(Object.assign(new Error(error.message), { name: error.name }));
    else resolve(answer);
  };
  created.onerror = event => {
    for (const { reject } of pending.values()) {
      reject(new Error(event.message ?? "the browser allows no worker"));
    }
    pending.clear();
  };
  return created;
}

/**
 * Send a request to the worker.
 *
 * @param {string} request - Name of a handler in requests.js.
 * @param {object} [parameters]
 * @param {(part: any) => void} [onPart] - Receives partial answers.
 * @returns {Promise<any>}
 */
export function send(request, parameters = {}, onPart = () => {}) {
  worker ??= startWorker();
  lastId += 1;
  const id = lastId;
  return new Promise((resolve, reject) => {
    pending.set(id, { resolve, reject, onPart });
    worker.postMessage({ id, request, ...parameters });
  });
}

/** Return whether a request is not answered yet. */
export const isModelBusy = () => isStarting || pending.size > 0;

/**
 * Stop all requests of this name that were sent so far.
 *
 * @param {string} request
 */
export function cancel(request) {
  worker?.postMessage({ id: lastId, request: "cancel", name: request });
}

/**
 * Give the worker the model's configuration and tokenizer.
 *
 * @returns {Promise<void>}
 */
export function startModel() {
  started ??= sendTokenizer();
  return started;
}

/** Unpack the tokenizer and send it with the configuration. */
async function sendTokenizer() {
  isStarting = true;
  const bytes = await unpack(data.weights.tokenizer);
  isStarting = false;
  await send("start", {
    config: data.modelConfig,
    tokenizer: JSON.parse(new TextDecoder().decode(bytes)),
  });
}

/**
 * Give the worker the weights of a step.
 *
 * @param {number} step
 */
async function loadWeights(step) {
  await startModel();
  if (!loadedWeights.has(step)) {
    const packed = blobs[data.weights.blobs[step]].textContent;
    const { tensors } = data.weights;
    loadedWeights.set(step, send("loadWeights", { step, tensors, packed }));
  }
  await loadedWeights.get(step);
}

/**
 * Ask the model of a step whose weights are in the page about token ids.
 *
 * @param {string} request
 * @param {number[]} ids
 * @param {object} [parameters] - By default `step` is the one on display, and `off` and `hidden` are
 *   those of the reader's text.
 * @param {(part: any) => void} [onPart]
 * @returns {Promise<any>}
 */
export async function askModel(request, ids, parameters = {}, onPart = undefined) {
  const input = { ids, step: currentStep(), off: [...ownText.off], hidden: [...ownText.hidden] };
  const message = { ...input, ...parameters };
  await loadWeights(message.step);
  return send(request, message, onPart);
}

/**
 * Say why the model does not run.
 *
 * @param {Error} error
 */
export const describeFailure = error =>
  `The model cannot run in this page (${error.message}). The stored values are shown.`;
