/** The prediction breakdown of one token: logit lens and direct logit attribution. */

import { linear, logitsOf, modelScales, normalize, outputWeight } from "./layers.js";
import { argTop, logNormalizers } from "./logits.js";

const PROMOTED_TOKENS = 3;

/** Return the mean row of the output weight (V, C). */
function meanOutputRow(E, V, C) {
  const mean = new Float64Array(C);
  for (let id = 0; id < V; id++) {
    for (let k = 0; k < C; k++) mean[k] += E[id * C + k] / V;
  }
  return mean;
}

/**
 * Break down the prediction after token i (glass/heads/measure/logit_attribution.py does the same): the loss
 * after each block, and what each component adds to the logit of each target, centered over the
 * vocabulary.
 *
 * @param {import("./forward.js").ForwardPass} pass
 * @param {number} i
 * @param {[number, number]} of - Layer and head whose promoted tokens are named.
 * @param {number} predictedTokens - Likeliest next tokens that are explained, beside the true one.
 *
 * References: Elhage et al. 2021; nostalgebraist 2020.
 */
export function breakDown(pass, i, of, predictedTokens) {
  const { weights, config, ids, T, layers, output } = pass;
  const { L, H, C } = pass.sizes;
  const V = config.vocab_size;
  const rowOf = rows => rows.data.subarray(i * C, (i + 1) * C);
  const { data: E } = outputWeight(weights);

  // Logit lens: the model ends after each block.
  const states = [...layers.map(layer => rowOf(layer.x)), rowOf(output)];
  const logits = states.map(x => logitsOf(weights, config, x));
  const next = argTop(logits[L], predictedTokens);
  const targets = [ids[i + 1] ?? next[0], ...next];
  const lens = logits.map(row =>
    i + 1 < T ? logNormalizers(row, V)[0] - row[targets[0]] : Number.NaN,
  );

  // Direct contributions: what each component wrote, through the final norm.
  const mean = meanOutputRow(E, V, C);
  const scales = modelScales(config, rowOf(output));
  const gain = weights["norm.weight"]?.data;
  const components = pass
    .components()
    .filter(({ name }) => !name.endsWith("bias"))
    .map(({ wrote }) => normalize(wrote.slice(i * C, (i + 1) * C), C, scales, gain));
  const direct = components.map(y =>
    targets.map(id => y.reduce((sum, value, k) => sum + value * (E[id * C + k] - mean[k]), 0)),
  );
  const meanLogit = logits[L].reduce((a, b) => a + b, 0) / V;
  const biases = targets.map((id, k) => {
    const attributed = direct.reduce((sum, contribution) => sum + contribution[k], 0);
    return logits[L][id] - meanLogit - attributed;
  });
  direct.push(biases);

  // The tokens that the selected head promotes and suppresses.
  const [layer, head] = of;
  const headOutput = components[1 + layer * (H + 1) + head];
  const pushed = linear({ "head.weight": outputWeight(weights) }, "head", headOutput, 1);
  const promoted = argTop(pushed, PROMOTED_TOKENS);
  const negated = pushed.map(value => -value);
  const suppressed = argTop(negated, PROMOTED_TOKENS);
  return { i, of, targets, lens, direct, writes: [...promoted, ...suppressed] };
}
