/** The functions of `glass`, for the browser's console. */

import { send } from "../client/client.js";
import { data, runnableSteps, textLimit } from "../state/page_data.js";
import { currentStep } from "../state/selection.js";

/** Offer the functions of `glass`; they run the model by default at the step on display. */
export function setUpConsole() {
  const { maxTokens } = textLimit;
  const { vocab_size: V } = data.modelConfig;
  const run = (request, ids, { step = currentStep(), off = [], hidden = [] } = {}) => {
    const areIds = [...ids].every(id => Number.isInteger(id) && id >= 0 && id < V);
    if (!areIds || !ids.length || ids.length > maxTokens) {
      throw new Error(`give 1 to ${maxTokens} token ids from 0 to ${V - 1}`);
    }
    if (runnableSteps.includes(step)) return send(request, { ids: [...ids], step, off, hidden });
    throw new Error(`the model cannot run at step ${step}: choose ${runnableSteps.join(", ")}`);
  };
  window.glass = {
    encode: text => send("encode", { text }),
    decode: ids => send("decode", { ids: [...ids] }),
    logits: async (ids, interventions) => run("logits", ids, interventions),
    maps: async (ids, interventions) => run("maps", ids, interventions),
  };
}
