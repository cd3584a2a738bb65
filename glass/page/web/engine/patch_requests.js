/** The requests of activation patching that the worker answers. */

import { argTop, logNormalizers, PREDICTED_TOKENS } from "./logits.js";
import { parsePatch } from "./patches.js";
import { logitDifference, Patching } from "./patching.js";
import { runModel, session, textsOf } from "./requests.js";

const PART_INTERVAL = 50; // milliseconds of computing until cells are sent

/** @param {PatchingParameters} parameters */
function preparePatching({ ids, corrupted, i, answer, wrong, direction, patched, ...input }) {
  const readText = (text, cacheName) =>
    runModel({ ...input, ids: text.slice(0, i + 1), cacheName });
  const cleanPass = readText(ids, "clean");
  const corruptedPass = readText(corrupted, "corrupted");
  const passes = [cleanPass, corruptedPass];
  const [source, base] = direction === "denoising" ? passes : passes.reverse();
  const patching = new Patching(source, base, { answer, wrong }, patched.map(parsePatch));
  return { cleanPass, corruptedPass, patching };
}

/** @type {Record<string, Handler>} */
export const PATCH_HANDLERS = {
  /**
   * Return the logit differences of the clean, the corrupted and the patched run, and the likeliest
   * next tokens of the patched run.
   */
  contrast(parameters) {
    const { cleanPass, corruptedPass, patching } = preparePatching(parameters);
    const logits = patching.patched.logits(parameters.i);
    const [logNormalizer] = logNormalizers(logits, session.config.vocab_size);
    const next = argTop(logits, PREDICTED_TOKENS);
    return {
      clean: logitDifference(cleanPass, parameters),
      corrupted: logitDifference(corruptedPass, parameters),
      patched: logitDifference(patching.patched, parameters),
      next: next.map(id => ({ id, chance: Math.exp(logits[id] - logNormalizer) })),
      words: textsOf(next),
    };
  },

  /** Send the logit differences with one more patch, cell by cell. */
  async patchCells({ kind, ...parameters }, sendPart, isCanceled) {
    const { patching } = preparePatching(parameters);
    let cells = [];
    let values = [];
    const send = () => sendPart({ cells, values: Float32Array.from(values) });
    let sent = performance.now();
    for (const { cell, value } of patching.measureCells(kind)) {
      cells.push(cell);
      values.push(value);
      if (performance.now() - sent < PART_INTERVAL) continue;
      send();
      if (await isCanceled()) return;
      cells = [];
      values = [];
      sent = performance.now();
    }
    send();
  },
};
