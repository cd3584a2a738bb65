/**
 * The client of the model. The model runs in a worker of the page, which has the weights, or in the
 * Python process that served the page; views do not know which.
 */

import { findHidden } from "../engine/decoding.js";
import { currentStep, data, ownText } from "../state/page_state.js";
import { createServerTransport } from "./server_transport.js";
import { createWorkerTransport } from "./worker_transport.js";

/** @type {Transport} */
const transport = data.server ? createServerTransport() : createWorkerTransport();

/** Send a request without canceling others of its name. */
export const send = transport.send;

/** Stop all requests of a name; their promises resolve to undefined. */
export const cancel = transport.cancel;

/** Return whether a request is not answered yet. */
export const isModelBusy = transport.isBusy;

/** Say in a sentence why a request failed. */
export const describeFailure = transport.describeFailure;

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
