/**
 * Entry of the worker that runs the model beside the page (client/worker_transport.js is its client).
 *
 * A message is {id, request, parameters}; the replies are any number of {id, part} and then
 * {id, answer} or {id, error}.
 */

import { PATCH_HANDLERS } from "./patch_requests.js";
import { HANDLERS, loadWeights, startSession } from "./requests.js";

const ALL_HANDLERS = { ...HANDLERS, ...PATCH_HANDLERS };
const canceled = new Set(); // ids of requests
const loaded = new Map(); // promises by step
let started = null;

self.onmessage = ({ data: message }) => {
  const { request } = message;
  if (request === "start") started = startSession(message);
  else if (request === "load") loaded.set(message.step, load(message));
  else if (request === "cancel") canceled.add(message.id);
  else answer(message);
};

async function load({ step, packed }) {
  await started;
  await loadWeights(step, packed);
}

async function answer({ id, request, parameters }) {
  /** Let the worker receive messages; return whether this request was canceled meanwhile. */
  const isCanceled = async () => {
    await new Promise(resolve => setTimeout(resolve));
    return canceled.has(id);
  };
  const sendPart = part => postMessage({ id, part });
  try {
    await Promise.all([started, loaded.get(parameters.step)]);
    if (await isCanceled()) return;
    const result = await ALL_HANDLERS[request](parameters, sendPart, isCanceled);
    postMessage({ id, answer: result });
  } catch (error) {
    postMessage({ id, error: { name: error.name, message: error.message } });
  }
}
