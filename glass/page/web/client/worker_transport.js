/** The model in the page: requests to a worker (engine/worker.js), which has the page's weights. */

import { $ } from "../base/dom.js";
import { blobText } from "../engine/packed.js";
import { data } from "../state/page_data.js";

/** @implements {Transport} */
export class WorkerTransport {
  #pending = new Map(); // requests that are not answered yet, by id
  #sentWeights = new Set(); // steps
  #lastId = 0;
  #worker = null;
  #failure = null; // why the worker has ended, or was refused by a content security policy

  async send(request, parameters = {}, onPart = _part => {}) {
    if (this.#failure) throw this.#failure;
    this.#worker ??= this.#startWorker();
    this.#sendWeights(parameters.step);
    this.#lastId += 1;
    const id = this.#lastId;
    this.#worker.postMessage({ id, request, parameters });
    return new Promise((resolve, reject) => {
      this.#pending.set(id, { request, resolve, reject, onPart });
    });
  }

  cancel(request) {
    for (const [id, call] of this.#pending) {
      if (call.request !== request) continue;
      this.#pending.delete(id);
      call.resolve(undefined);
      this.#worker.postMessage({ request: "cancel", id });
    }
  }

  isBusy() {
    return this.#pending.size > 0;
  }

  describeFailure(error) {
    if (error.name === "UnknownCharacterError") return `${error.message}.`;
    return `The model cannot run in this page (${error.message}). The stored values are shown.`;
  }

  #startWorker() {
    const { tokenizer, tensors } = data.weights;
    const script = new Blob([$("worker").textContent], { type: "text/javascript" });
    const worker = new Worker(URL.createObjectURL(script));
    worker.onmessage = ({ data: reply }) => this.#receive(reply);
    worker.onerror = event => {
      this.#failure = new Error(event.message ?? "the browser allows no worker");
      for (const { reject } of this.#pending.values()) reject(this.#failure);
      this.#pending.clear();
    };
    const config = data.modelConfig;
    worker.postMessage({ request: "start", config, tensors, tokenizer: blobText(tokenizer) });
    return worker;
  }

  #receive({ id, part, answer, error }) {
    const call = this.#pending.get(id);
    if (!call) return; // it was canceled
    if (part) {
      call.onPart(part);
      return;
    }
    this.#pending.delete(id);
    if (error) call.reject(Object.assign(new Error(error.message), { name: error.name }));
    else call.resolve(answer);
  }

  #sendWeights(step) {
    if (step === undefined || this.#sentWeights.has(step)) return;
    this.#sentWeights.add(step);
    const packed = blobText(data.weights.blobs[step]);
    this.#worker.postMessage({ request: "load", step, packed });
  }
}
