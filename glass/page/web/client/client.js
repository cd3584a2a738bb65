/**
 * The client of the model. The model runs in a worker of the page, which has the weights, or in the
 * Python process that served the page; views do not know which.
 */

import { findHidden } from "../engine/decoding.js";
import { data, steps } from "../state/page_data.js";
import { currentStep, ownText } from "../state/selection.js";
import { ServerTransport } from "./server_transport.js";
import { WorkerTransport } from "./worker_transport.js";

/** @type {Transport} */
const transport = data.server ? new ServerTransport() : new WorkerTransport();

/**
 * Send a request without canceling others of its name. The page keeps the texts of the tokens that
 * its answer names.
 *
 * @type {Transport["send"]}
 */
export async function send(request, parameters, onPart) {
  const answer = await transport.send(request, parameters, onPart);
  Object.assign(data.words, answer?.words);
  return answer;
}

/** The step whose weights the server was told to load last. */
let loading = { step: null, done: null };

/**
 * Have the server load the weights of a step, if it has those of several. This cancels the loading of
 * another step, but not that of the same one, so that the reader may type meanwhile.
 */
export async function loadStep(step) {
  if (!data.server || steps.length < 2) return;
  if (loading.step !== step) {
    cancel("loadStep");
    loading = { step, done: send("loadStep", { step }) };
  }
  try {
    await loading.done;
  } catch (error) {
    loading.step = null; // so that it is tried again
    throw error;
  }
}

/** Stop all requests of a name; their promises resolve to undefined. */
export const cancel = request => transport.cancel(request);

/** Return whether a request is not answered yet. */
export const isModelBusy = () => transport.isBusy();

/** Say in a sentence why a request failed. */
export const describeFailure = error => transport.describeFailure(error);

/**
 * Ask the model about a text: by default the reader's, with its interventions, at the step on
 * display. This cancels the older question of the same kind, which resolves to undefined.
 *
 * @param {{request: string, [parameter: string]: any}} question
 * @param {{onPart?: (part: any) => void}} [options]
 */
export function ask({ request, ...parameters }, { onPart } = {}) {
  const { ids, off, places } = ownText;
  const hidden = findHidden(ownText.hidden, places);
  cancel(request);
  return send(request, { ids, off, hidden, step: currentStep(), ...parameters }, onPart);
}
