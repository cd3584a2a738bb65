/** The model in the page: requests to a worker (worker.js), which has the weights of the page. */

import { $ } from "./dom.js";
import { blobs, unpack } from "./packed.js";
import { data } from "./page_state.js";

/** @typedef {{resolve: Function, reject: Function, onPart: Function}} PendingRequest */

/**
 * Return a transport whose worker starts at the first request.
 *
 * @returns {import("./engine.js").Transport}
 */
export function createWorkerTransport() {
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

  function send(request, parameters = {}, onPart = () => {}) {
    worker ??= startWorker();
    lastId += 1;
    const id = lastId;
    return new Promise((resolve, reject) => {
      pending.set(id, { resolve, reject, onPart });
      worker.postMessage({ id, request, ...parameters });
    });
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

  function start() {
    started ??= sendTokenizer();
    return started;
  }

  return {
    send,
    start,
    cancel: request => worker?.postMessage({ id: lastId, request: "cancel", name: request }),
    isBusy: () => isStarting || pending.size > 0,

    async loadWeights(step) {
      await start();
      if (!loadedWeights.has(step)) {
        const packed = blobs[data.weights.blobs[step]].textContent;
        const { tensors } = data.weights;
        loadedWeights.set(step, send("loadWeights", { step, tensors, packed }));
      }
      await loadedWeights.get(step);
    },

    describeFailure(error) {
      if (error.name === "UnknownCharacterError") return `${error.message}.`;
      return `The model cannot run in this page (${error.message}). The stored values are shown.`;
    },
  };
}
