/** The data embedded in a run's page. */

import { $ } from "../base/dom.js";

/** The page's data, as glass/page/write.py writes it. */
export const data = JSON.parse($("data").textContent);

/** Whether this is the page of a run, not of a prompt or of explore.py. */
export const isRun = data.kind === "run";

/** Steps at which heads were scored, and one column of values per metric of a head. */
export const scoredSteps = data.scored.steps;
export const columns = data.scored.columns;

const shape = data.shape ?? shapeFromMetrics();
export const L = shape[0];
export const H = shape[1];

/** Whether the model has so many layers that the page shows the heads in a frame that scrolls. */
export const isDeep = L > 10;

const keyHeads = data.modelConfig?.n_kv_head ?? H;
export const groups = H % keyHeads === 0 ? keyHeads : H;

/** Whether the model's heads have sink logits, so that the weights on tokens sum to less than 1. */
export const hasSink = Boolean(data.modelConfig?.attention_sink);

/** What the model is validated on. */
export const validationName = data.config?.some(
  ([name, value]) => name === "data.source" && value === "synthetic",
)
  ? "held-out sequences"
  : "validation text";

export const hasMlps = data.modelConfig?.mlp !== "none";

/** Steps of the slider. */
export const steps = data.steps.length ? data.steps : scoredSteps;

/** Whether the page shows a model at several steps: a run's, or those of a series. */
export const hasSteps = isRun || steps.length > 1;

/** Whether the model runs in the Python process that served the page (explore.py). */
export const hasServer = Boolean(data.server);

/** Steps of the slider at which the model can run: the server's, or those with weights in the page. */
export const runnableSteps = steps.filter(step => hasServer || step in (data.weights?.blobs ?? {}));

/** The largest number of tokens that the model reads at once, and the token that is never cut off. */
export const textLimit = {
  maxTokens: data.server?.maxTokens ?? data.modelConfig?.block_size,
  beginOfText: data.server?.beginOfText,
};

/**
 * The index of the step on which the page opens: the nearest to the best one if the model overfits,
 * else the newest.
 */
export const openingIndex = nearestIndex(data.openingStep ?? Number.POSITIVE_INFINITY);

/** Return [layers, heads] as far as the names of metrics tell. */
function shapeFromMetrics() {
  const heads = Object.keys(columns)
    .map(key => /L(\d+)H(\d+)$/.exec(key))
    .filter(Boolean);
  return [1, 2].map(k => Math.max(0, ...heads.map(match => Number(match[k]) + 1)));
}

/** Return the index of the step of the slider that is nearest to a step. */
function nearestIndex(step) {
  const distance = k => Math.abs(Math.min(step, steps.at(-1)) - steps[k]);
  return [...steps.keys()].reduce((a, b) => (distance(b) < distance(a) ? b : a), 0);
}
