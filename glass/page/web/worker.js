/**
 * Entry of the worker that runs the model beside the page (engine.js is its client).
 *
 * A message is {id, request, …parameters}; the replies are any number of {id, part} and then
 * {id, answer} or {id, error}.
 */

import { PATCH_HANDLERS } from "./patch_requests.js";
import { cancelRequests, HANDLERS } from "./requests.js";

const ALL_HANDLERS = { ...HANDLERS, ...PATCH_HANDLERS };

self.onmessage = async ({ data: { id, request, ...parameters } }) => {
  if (request === "cancel") {
    cancelRequests(parameters.name, id);
    return;
  }
  try {
    const answer = await ALL_HANDLERS[request](parameters, part => postMessage({ id, part }), id);
    postMessage({ id, answer });
  } catch (error) {
    postMessage({ id, error: { name: error.name, message: error.message } });
  }
};
