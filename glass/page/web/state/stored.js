/** The attention and the predictions that are stored in the page. */

import { decodeAttention, decodePredictions } from "./cells.js";
import { data, steps } from "./page_data.js";

const decoded = new Map();

/** Return cells that were decoded before, or decode them. */
function decodeOnce(key, decode) {
  if (!decoded.has(key)) decoded.set(key, decode());
  return decoded.get(key);
}

/**
 * Load the attention of probe p at the step with index s, and the predictions measured last before.
 */
export async function loadStored(p, s) {
  const probe = data.probes[p];
  const attention = await decodeOnce(`${p}/${s}`, () =>
    decodeAttention(probe.maps[s], data.shape, probe),
  );
  const k = probe.tokenEffects.findLastIndex((packed, at) => packed && at <= s);
  if (k < 0) return { attention, predictions: null };
  const predictions = await decodeOnce(`${p}/${k}/predictions`, () =>
    decodePredictions(probe.tokenEffects[k], data.shape, probe, steps[k]),
  );
  return { attention, predictions };
}
