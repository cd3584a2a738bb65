/** Modules of the worker and of the page, where a test reaches them as `engine`. */

import { readFrames } from "../../../glass/page/web/client/frames.js";
import { placesRead } from "../../../glass/page/web/engine/decoding.js";
import { PATCH_HANDLERS } from "../../../glass/page/web/engine/patch_requests.js";
import { HANDLERS, models, passes, session } from "../../../glass/page/web/engine/requests.js";
import { createTokenizer } from "../../../glass/page/web/engine/tokenizer.js";
import { scoredDiagonals } from "../../../glass/page/web/views/token_effect.js";

const toPlain = value => {
  if (ArrayBuffer.isView(value)) return [...value];
  if (Array.isArray(value)) return value.map(toPlain);
  if (typeof value !== "object" || value === null) return value;
  return Object.fromEntries(Object.entries(value).map(([key, part]) => [key, toPlain(part)]));
};

/** Return the parts of the answer to each question about a model, or the answer. */
async function ask([config, weights, questions]) {
  for (const weight of Object.values(weights)) weight.data = Float64Array.from(weight.data);
  Object.assign(session, { config, tokenizer: { tokenText: String, decode: String, size: 23 } });
  models.set(0, weights);
  passes.clear();
  const answers = [];
  for (const { request, endOfText = null, ...parameters } of questions) {
    session.tokenizer.endOfText = endOfText;
    const parts = [];
    const handler = HANDLERS[request] ?? PATCH_HANDLERS[request];
    const sendPart = part => parts.push(toPlain(part));
    const answer = await handler({ step: 0, ...parameters }, sendPart, async () => false);
    answers.push(parts.length ? parts : toPlain(answer));
  }
  return answers;
}

window.engine = {
  ask,
  createTokenizer,
  placesRead,
  readFrames,
  scoredDiagonals,
};
