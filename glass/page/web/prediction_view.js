/** The prediction after the highlighted token, and the breakdown of the pinned one. */

import { $, bdi, el } from "./dom.js";
import { formatCount, formatSigned, shortenToken } from "./format.js";
import { labelToken } from "./labels.js";
import { drawBreakdown, nextTokens } from "./logit_attribution.js";
import { requestBreakdown } from "./own_requests.js";
import {
  chooseHead,
  currentStep,
  data,
  display,
  highlightToken,
  ownText,
  selection,
} from "./page_state.js";
import { describeExplained, MIN_CLEAR_EFFECT_NATS } from "./token_effect.js";

const MAX_HELPING_TOKENS = 3;

/** Draw the prediction after the highlighted token and the breakdown of the pinned token. */
export function drawPrediction() {
  const { predictions } = display;
  const { token, pinned } = selection;
  $("expected").hidden = !predictions || token === null;
  let hasBreakdown = isExplained(predictions, pinned);
  if (hasBreakdown && predictions === ownText.predictions) {
    requestBreakdown(pinned, drawPrediction);
    hasBreakdown = predictions.breakdown?.i === pinned;
  }
  $("breakdown-part").hidden = !hasBreakdown;
  if (!$("expected").hidden) drawExpected(predictions, token);
  if (hasBreakdown && token === pinned) drawPinnedBreakdown(predictions, pinned);
}

/** Return whether the prediction after token i is explained; in a long text only the last are. */
function isExplained(predictions, i) {
  return Boolean(predictions) && i !== null && i >= (predictions.from ?? 0);
}

/** Draw the likeliest next tokens after token i, and what helps the prediction. */
function drawExpected(predictions, i) {
  if (!isExplained(predictions, i)) {
    const part = describeExplained(predictions);
    const sentence = `The text is long: predictions and token effects were measured for the ${part}.`;
    $("expected").replaceChildren(el("p", {}, sentence));
    return;
  }
  const chooseTarget = k => {
    selection.target = k;
    highlightToken(selection.token);
  };
  const { target } = selection;
  const { buttons, sentence } = nextTokens(predictions, data.words, i, target, chooseTarget);
  $("expected").replaceChildren(
    el("h4", {}, "Predicted after ", ...labelToken(predictions, i), nameOtherStep(predictions)),
    el("div", { className: "chances" }, ...buttons),
    el("p", {}, ...sentence, ...describeHelpingTokens(predictions, i)),
  );
}

/** Name the step of predictions if it is not the one on display. */
function nameOtherStep({ step }) {
  return step === currentStep() ? "" : ` (at step ${formatCount(step)})`;
}

/** Name the tokens whose hiding raises the loss after token i most. */
function describeHelpingTokens(predictions, i) {
  const helping = Array.from({ length: i }, (_, j) => ({ j, effect: predictions.at(0, 0, i, j) }))
    .filter(({ effect }) => effect >= MIN_CLEAR_EFFECT_NATS)
    .sort((a, b) => b.effect - a.effect)
    .slice(0, MAX_HELPING_TOKENS);
  if (!helping.length) return [];
  const names = helping.flatMap(({ j, effect }, k) => [
    k ? ", " : " ",
    bdi(shortenToken(predictions.tokens[j]), "token"),
    ` ${formatSigned(effect)}`,
  ]);
  return [" Hiding these tokens raises it:", ...names, "."];
}

/** Draw the prediction breakdown of token i. */
function drawPinnedBreakdown(predictions, i) {
  const { layer, head, target } = selection;
  $("breakdown-title").replaceChildren(
    "Prediction breakdown of ",
    ...labelToken(predictions, i),
    nameOtherStep(predictions),
  );
  drawBreakdown($("breakdown"), predictions, i, {
    layer,
    head,
    target,
    tied: data.tiedEmbeddings,
    words: data.words,
    vocabSize: data.modelConfig?.vocab_size ?? Number.POSITIVE_INFINITY,
    choose: chooseHead,
  });
}
