/** The interventions on the reader's text: heads that are ablated and tokens that are hidden. */

import { $ } from "../base/dom.js";
import { formatNumber, headName } from "../base/format.js";
import { mean } from "../base/statistics.js";
import { scoreNames } from "../state/head_metrics.js";
import { currentProbe, isOwnText, ownText, selection, wantsOwnText } from "../state/selection.js";
import { headOfEvent, markAblatedHeads } from "./head_grid.js";
import { chooseOwnText, firstTypedToken, isInField, readOwnText } from "./own_text.js";
import { tokenInFocus } from "./text.js";

const TEXT_FIELDS = "textarea, input[type=number], input[type=text]";
const SWITCH_WIDTH = 17; // pixels of a head's switch, at the right end of its button
const SWITCH_HEIGHT = 32;

/** Whether the reader has chosen the selected head, or the scores have; otherwise it is any head. */
const isHeadKnown = () => selection.isHeadChosen || scoreNames.length > 0;

/**
 * Add an element to a list of interventions, or remove it, and read the text. On another input,
 * where nothing is changed yet, this adds the element and shows the reader's text.
 */
function toggle(list, element) {
  const place = list.indexOf(element);
  Object.assign(selection, { isHeadChosen: isHeadKnown(), isTokenChosen: true });
  if (place < 0) list.push(element);
  else if (wantsOwnText()) list.splice(place, 1);
  drawInterventions();
  if (wantsOwnText()) readOwnText();
  else chooseOwnText();
}

function toggleSelectedHead() {
  if (isHeadKnown()) toggle(ownText.off, headName(selection.layer, selection.head));
}

function canHide(token) {
  if (token === null || !isInField()) return false;
  return token >= firstTypedToken() && token < currentProbe().T - 1;
}

const placeInText = token => (isOwnText() ? ownText.places[token] : token - firstTypedToken());

/** Hide the token in focus from all later ones, or show it again. */
function toggleToken() {
  const token = tokenInFocus();
  if (canHide(token)) toggle(ownText.hidden, placeInText(token));
}

/** Draw the buttons of the interventions, the mean loss, and marks on ablated heads. */
export function drawInterventions() {
  const { off, hidden } = ownText;
  const name = headName(selection.layer, selection.head);
  const isOff = isOwnText() && off.includes(name);
  $("ablate-head").disabled = !isHeadKnown();
  $("ablate-head").textContent = isHeadKnown()
    ? `Switch ${name} ${isOff ? "on" : "off (ablate)"}`
    : "Choose a head to switch it off";
  drawHideButton();
  $("reset").disabled = !isOwnText() || (!off.length && !hidden.length);
  $("mean-loss").textContent = describeMeanLoss();
  $("heads-grid").classList.toggle("own", isOwnText());
  markAblatedHeads(isOwnText() ? off : []);
}

export function drawHideButton() {
  const token = tokenInFocus();
  const isHidden = isOwnText() && ownText.hidden.includes(placeInText(token));
  const name = token === null ? "token" : `token ${token}`;
  $("hide-token").disabled = !canHide(token);
  $("hide-token").textContent = `${isHidden ? "Show" : "Hide"} ${name} (h)`;
}

const meanLoss = losses => mean([...losses].filter(Number.isFinite));

/** Describe the mean loss of the text as it was read, and the interventions that changed it. */
function describeMeanLoss() {
  const predictions = isOwnText() ? ownText.predictions : null; // those of the step on display
  const { off = [], hidden = [], losses = null, was = null } = predictions ?? {};
  Object.assign($("mean-loss").dataset, { off: off.join(" "), hidden: hidden.join(" ") });
  if (!(losses?.length > 1)) return "";
  const loss = meanLoss(losses);
  const perplexity = formatNumber(Math.exp(loss));
  const sentence = `Mean loss ${formatNumber(loss)} nats/token (perplexity ${perplexity})`;
  if (!was) return `${sentence}.`;
  const before = formatNumber(meanLoss(was.losses));
  return `${sentence}; ${before} without interventions (${describeInterventions(predictions)}).`;
}

/** Name the heads that are ablated and the tokens that are hidden; "" if there are none. */
export function describeInterventions({ off, hidden }) {
  const ablated = off.length ? [`${off.join(", ")} ablated`] : [];
  const concealed = hidden.length ? [`${hidden.map(j => `token ${j}`).join(", ")} hidden`] : [];
  return [...ablated, ...concealed].join("; ");
}

function pressKey(event) {
  const action = { x: toggleSelectedHead, h: toggleToken }[event.key.toLowerCase()];
  const isShortcut = event.ctrlKey || event.altKey || event.metaKey || event.repeat;
  if (!action || isShortcut || event.target.matches(TEXT_FIELDS)) return;
  event.preventDefault(); // the letter selects nothing in a list
  action();
}

/** Toggle a head if its switch was clicked, at the right end of its button; small ones have none. */
function toggleClickedHead(event) {
  const head = headOfEvent(event);
  if (!head || !isOwnText() || !event.detail) return; // a key's click has no place
  const button = event.target.closest("[role=radio]");
  const box = button.getBoundingClientRect();
  const isOnSwitch =
    getComputedStyle(button, "::after").display !== "none" &&
    event.clientX >= box.right - SWITCH_WIDTH &&
    event.clientY <= box.top + SWITCH_HEIGHT;
  if (!isOnSwitch) return;
  event.stopPropagation();
  toggle(ownText.off, headName(head[0], head[1]));
}

export function setUpInterventions() {
  $("ablate-head").hidden = false;
  $("ablate-head").onclick = toggleSelectedHead;
  $("hide-token").onclick = toggleToken;
  $("reset").onclick = () => {
    Object.assign(ownText, { off: [], hidden: [] });
    readOwnText();
  };
  $("heads-grid").addEventListener("click", toggleClickedHead, true);
  document.addEventListener("keydown", pressKey);
  document.addEventListener("focusout", drawHideButton);
}
