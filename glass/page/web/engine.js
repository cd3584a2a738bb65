/**
 * The client of the model. The model runs in a worker of the page, which has the weights, or in the
 * Python process that served the page; views do not know which.
 *
 * The promise of a request that is canceled resolves to undefined.
 */

import { currentStep, data, ownText } from "./page_state.js";
import { createServerTransport } from "./server_transport.js";
import { createWorkerTransport } from "./worker_transport.js";

/**
 * What runs the model.
 *
 * @typedef {object} Transport
 * @property {(request: string, parameters?: object, onPart?: (part: any) => void) => Promise<any>}
 *   send
 * @property {(request: string) => void} cancel - Stops all requests of this name sent so far.
 * @property {() => Promise<void>} start - Prepares the tokenizer.
 * @property {(step: number) => Promise<void>} loadWeights - Prepares the weights of a step.
 * @property {() => boolean} isBusy - Whether a request is not answered yet.
 * @property {(error: Error) => string} describeFailure - Says why a request failed.
 */

/** @type {Transport} */
const transport = data.server ? createServerTransport() : createWorkerTransport();

/**
 * Send a request that needs no weights.
 *
 * @param {string} request - Name of a handler in requests.js.
 * @param {object} [parameters]
 * @param {(part: any) => void} [onPart] - Receives partial answers.
 * @returns {Promise<any>}
 */
export const send = transport.send;

/** Return whether a request is not answered yet. */
export const isModelBusy = transport.isBusy;

/**
 * Stop all requests of this name that were sent so far.
 *
 * @param {string} request
 */
export const cancel = transport.cancel;

/**
 * Prepare the tokenizer.
 *
 * @returns {Promise<void>}
 */
export const startModel = transport.start;

/**
 * Say in a sentence why a request failed.
 *
 * @param {Error} error
 */
export const describeFailure = transport.describeFailure;

/**
 * Ask the model of a step that can run about token ids.
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
  await transport.loadWeights(message.step);
  return transport.send(request, message, onPart);
}
