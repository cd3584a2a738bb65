/** Which view the large map, the text and the grid of heads show. */

import { sinkReader, withoutFirstToken } from "./attention_data.js";
import { display, hasSink, selectedMaps, selection } from "./page_state.js";

/**
 * Return the attention on display, without the first token if the reader asked for that; null if
 * there is no text.
 */
export function shownAttention() {
  const { attention } = display;
  if (!attention || !selection.excludeFirst) return attention;
  attention.withoutFirst ??= withoutFirstToken(attention);
  return attention.withoutFirst;
}

/**
 * Return a function i → the weight of query i on the sink logit, or null if the model has none or
 * other values are on display.
 *
 * @param {import("./page_state.js").CellView} view
 */
export const shownSink = view =>
  hasSink && !view.signed && !selection.weightByValues ? sinkReader(view, selectedMaps()) : null;

/** Return the view in the large map. */
export const shownView = () =>
  selection.showTokenEffect && display.predictions ? display.predictions : shownAttention();
