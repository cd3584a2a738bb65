/** The model in the Python process that served the page (explore.py): requests over HTTP. */

import { emit } from "../state/events.js";
import { readFrames } from "./frames.js";

/**
 * Post a request to `ask`, beside the page's address.
 *
 * @param {object} message - The request's name and its parameters.
 * @param {AbortSignal} signal
 * @returns {Promise<ReadableStream<Uint8Array>>} The frames of the answer.
 */
async function post(message, signal) {
  let response = null;
  try {
    response = await fetch("ask", { method: "POST", body: JSON.stringify(message), signal });
  } catch {
    throw new Error(
      "the program explore.py is not running any more: start it again, and open the address that it prints",
    );
  }
  if (response.ok) return response.body;
  throw new Error((await response.text()).trim());
}

/**
 * Return the answer in a stream of frames, and pass its parts on.
 *
 * @param {ReadableStream<Uint8Array>} stream
 * @param {(part: any) => void} onPart
 */
async function readAnswer(stream, onPart) {
  for await (const frame of readFrames(stream)) {
    if ("answer" in frame) return frame.answer;
    if ("error" in frame) {
      throw Object.assign(new Error(frame.error.message), { name: frame.error.name });
    }
    onPart(frame.part);
  }
  throw new Error(
    "the connection to explore.py broke before the answer was complete: see its terminal",
  );
}

/** @implements {Transport} */
export class ServerTransport {
  /** Requests that are not answered yet: their names, and what aborts them. */
  #pending = new Set();

  async send(request, parameters = {}, onPart = _part => {}) {
    const controller = new AbortController();
    const entry = { request, controller };
    this.#pending.add(entry);
    try {
      const stream = await post({ request, ...parameters }, controller.signal);
      return await readAnswer(stream, onPart);
    } catch (error) {
      if (controller.signal.aborted) return undefined;
      if (error.name === "StepChanged") emit("stepChanged");
      throw error;
    } finally {
      this.#pending.delete(entry);
    }
  }

  cancel(request) {
    for (const entry of this.#pending) {
      if (entry.request === request) entry.controller.abort();
    }
  }

  isBusy() {
    return this.#pending.size > 0;
  }

  describeFailure({ message }) {
    const end = message.endsWith(".") ? "" : ".";
    return `${message[0].toUpperCase()}${message.slice(1)}${end}`;
  }
}
