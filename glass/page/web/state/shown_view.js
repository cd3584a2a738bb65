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

/** Return whether the view on display has the weights on sink logits. */
export const showsSink = () =>
  hasSink && !selection.weightByValues && !selection.excludeFirst && !shownView().signed;

/** Return a function i → the weight of query i on the sink logit; null if it is not on display. */
export const shownSink = () => (showsSink() ? sinkReader(shownView(), selectedMaps()) : null);

export const shownView = () =>
  selection.showTokenEffect && display.predictions ? display.predictions : shownAttention();
