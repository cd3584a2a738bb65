/** The prediction after the highlighted token, and the breakdown of the pinned one. */

import { $, button, el, labelToken, note, tokenName } from "../base/dom.js";
import { formatCount, formatNumber, formatProbability, formatSigned } from "../base/format.js";
import { MIN_CLEAR_EFFECT_NATS } from "../state/cells.js";
import { data } from "../state/page_data.js";
import {
  currentProbe,
  currentStep,
  display,
  highlightToken,
  ownText,
  selection,
} from "../state/selection.js";
import { drawBreakdown } from "./logit_attribution.js";
import { requestBreakdown } from "./own_requests.js";
import { describeExplained } from "./token_effect.js";

const MAX_HELPING_TOKENS = 3;

/** Draw the prediction after the highlighted token and the breakdown of the pinned token. */
export function drawPrediction() {
  const { predictions } = display;
  const { token, pinned } = selection;
  $("expected").hidden = !predictions || token === null;
  let hasBreakdown = isExplained(predictions, pinned);
  const chosen = hasBreakdown && listPredictions(predictions, pinned).chosen;
  if (hasBreakdown && predictions === ownText.predictions) {
    requestBreakdown(pinned, chosen.id, drawPrediction);
    hasBreakdown = predictions.hasBreakdown(pinned);
  }
  $("breakdown-part").hidden = !hasBreakdown;
  if (!$("expected").hidden) drawExpected(predictions, token);
  if (!hasBreakdown || token !== pinned) return;
  $("breakdown-title").replaceChildren(
    "Prediction breakdown of ",
    ...labelToken(predictions, pinned),
    nameOtherStep(predictions),
  );
  drawBreakdown($("breakdown"), predictions, pinned, chosen);
}

/** Return whether the prediction after token i is explained; in a long text only the last are. */
function isExplained(predictions, i) {
  return Boolean(predictions) && i !== null && i >= predictions.firstToken;
}

/** Draw the likeliest next tokens after token i, and what helps the prediction. */
function drawExpected(predictions, i) {
  if (!isExplained(predictions, i)) {
    const part = describeExplained(predictions);
    const sentence = `The text is long: predictions and token effects were measured for the ${part}.`;
    $("expected").replaceChildren(el("p", {}, sentence));
    return;
  }
  const sentence =
    i + 1 < predictions.T
      ? [
          "The next token, ",
          tokenName(predictions.tokens[i + 1]),
          `, has a loss of ${formatNumber(predictions.loss(i))} nats.`,
        ]
      : ["The text ends here."];
  $("expected").replaceChildren(
    el("h4", {}, "Predicted after ", ...labelToken(predictions, i), nameOtherStep(predictions)),
    ...createPredictions(predictions, i),
    el("p", {}, ...sentence, ...describeHelpingTokens(predictions, i)),
  );
}

/**
 * Create buttons with the likeliest next tokens after token i and the actual one, which choose the
 * token of the breakdown. With interventions, those whose probability changed most come first.
 */
function createPredictions(predictions, i) {
  const hasNext = i + 1 < predictions.T;
  const { listed, initial, chosen } = listPredictions(predictions, i);
  if (predictions.was) listed.sort((a, b) => changeOf(b) - changeOf(a));
  const buttons = listed.map(prediction =>
    predictionButton(prediction, {
      isActual: hasNext && prediction === initial,
      isTarget: prediction === chosen,
      pick: () => {
        selection.target = prediction.id;
        highlightToken(selection.token);
      },
    }),
  );
  if (!predictions.was) return [el("div", { className: "chances" }, ...buttons)];
  const caption = note("Probability without → with the interventions, the largest change first.");
  return [caption, el("div", { className: "chances changes" }, ...buttons)];
}

/**
 * Return the likeliest next tokens after token i and the actual one; the `initial` one of the
 * breakdown, which is the actual one, or the likeliest if the text ends here; and the `chosen` one.
 */
function listPredictions(predictions, i) {
  const isLast = i + 1 === predictions.T;
  const id = isLast ? predictions.likeliest(i).id : currentProbe().ids[i + 1];
  const listed = predictions
    .predicted(i)
    .map(prediction => ({ ...prediction, text: data.words[prediction.id] }));
  let initial = listed.find(prediction => prediction.id === id);
  if (!initial) {
    initial = { id, text: predictions.tokens[i + 1] };
    listed.push(initial);
  }
  if (!isLast) Object.assign(initial, predictions.following(i)); // one source of its probability
  const target = i === selection.pinned ? selection.target : null;
  const chosen = listed.find(prediction => prediction.id === target) ?? initial;
  return { listed, initial, chosen };
}

const changeOf = ({ chance, was }) => Math.abs(chance - was);

/**
 * Create a button with a possible next token and its probability, which `was` another one without
 * interventions.
 */
export function predictionButton(
  { text = "", chance, was = chance },
  { isActual, isTarget, pick },
) {
  const percent = share => `${(100 * share).toFixed(1)}%`;
  const before = was === chance ? "" : `${formatProbability(was)} → `;
  const properties = {
    className: `chance${isActual ? " real" : ""}${was > chance ? " fell" : ""}`,
    "aria-pressed": isTarget,
    style: `--w: ${percent(Math.min(chance, was))}; --changed: ${percent(Math.max(chance, was))}`,
    onclick: pick,
  };
  return button(properties, tokenName(text), el("b", {}, before, formatProbability(chance)));
}

/** Name the step of predictions if it is not the one on display. */
const nameOtherStep = ({ step }) =>
  step === currentStep() ? "" : ` (at step ${formatCount(step)})`;

/** Name the tokens whose hiding raises the loss after token i most. */
function describeHelpingTokens(predictions, i) {
  const helping = Array.from({ length: i }, (_, j) => ({ j, effect: predictions.at(0, 0, i, j) }))
    .filter(({ effect }) => effect >= MIN_CLEAR_EFFECT_NATS)
    .sort((a, b) => b.effect - a.effect)
    .slice(0, MAX_HELPING_TOKENS);
  if (!helping.length) return [];
  const names = helping.flatMap(({ j, effect }, k) => [
    k ? ", " : " ",
    tokenName(predictions.tokens[j]),
    ` ${formatSigned(effect)}`,
  ]);
  return [" Hiding these tokens raises it:", ...names, "."];
}
