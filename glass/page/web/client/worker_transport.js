/** The model in the page: requests to a worker (engine/worker.js), which has the weights of the page. */

import { $ } from "../base/dom.js";
import { blobText } from "../engine/packed.js";
import { data } from "../state/page_state.js";

/** @returns {Transport} */
export function createWorkerTransport() {
  const pending = new Map(); // requests that are not answered yet, by id
  const sentWeights = new Set(); // steps
  let worker = null;
  let lastId = 0;

  function startWorker() {
    const { tokenizer, tensors } = data.weights;
    const script = new Blob([$("worker").textContent], { type: "text/javascript" });
    worker = new Worker(URL.createObjectURL(script));
    worker.onmessage = ({ data: reply }) => receive(reply);
    worker.onerror = event => {
      for (const { reject } of pending.values()) {
        reject(new Error(event.message ?? "the browser allows no worker"));
      }
      pending.clear();
    };
    const config = data.modelConfig;
    worker.postMessage({ request: "start", config, tensors, tokenizer: blobText(tokenizer) });
  }

  function receive({ id, part, answer, error }) {
    const call = pending.get(id);
    if (!call) return; // it was canceled
    if (part) {
      call.onPart(part);
      return;
    }
    pending.delete(id);
    if (error) call.reject(Object.assign(new Error(error.message), { name: error.name }));
    else call.resolve(answer);
  }

  function sendWeights(step) {
    if (step === undefined || sentWeights.has(step)) return;
    sentWeights.add(step);
    worker.postMessage({ request: "load", step, packed: blobText(data.weights.blobs[step]) });
  }

  return {
    async send(request, parameters = {}, onPart = () => {}) {
      if (!worker) startWorker();
      sendWeights(parameters.step);
      lastId += 1;
      worker.postMessage({ id: lastId, request, parameters });
      return new Promise((resolve, reject) => {
        pending.set(lastId, { request, resolve, reject, onPart });
      });
    },

    cancel(request) {
      for (const [id, call] of pending) {
        if (call.request !== request) continue;
        pending.delete(id);
        call.resolve(undefined);
        worker.postMessage({ request: "cancel", id });
      }
    },

    isBusy: () => pending.size > 0,

    describeFailure(error) {
      if (error.name === "UnknownCharacterError") return `${error.message}.`;
      return `The model cannot run in this page (${error.message}). The stored values are shown.`;
    },
  };
}
