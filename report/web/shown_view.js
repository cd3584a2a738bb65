/** Which view the large map, the text and the grid of heads show. */

import { withoutFirstToken } from "./attention_data.js";
import { display, selection } from "./page_state.js";

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

/** Return the view in the large map. */
export const shownView = () =>
  selection.showTokenEffect && display.predictions ? display.predictions : shownAttention();
