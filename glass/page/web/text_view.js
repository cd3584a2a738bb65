/** The tokens of the selected probe as running text, colored by the selected map. */

import { cellReader, scaleTop } from "./attention_data.js";
import { $, el } from "./dom.js";
import { formatCount, formatNumber, makeVisible } from "./format.js";
import { labelToken } from "./labels.js";
import {
  currentProbe,
  data,
  display,
  highlightToken,
  isOwnText,
  ownText,
  selectedMaps,
  selection,
  togglePin,
} from "./page_state.js";
import { shownSink, shownView } from "./shown_view.js";
import { addArrowKeys } from "./tooltip.js";

const MAX_LISTED = 8;
const SHADES = 20; // values that differ by less are drawn alike, so that fewer elements change
const MARK = /[·⏎⇥␍⍽]/;

/** @type {HTMLElement[]} */
let spans = [];

/** The probe that `spans` show. */
let shownProbe = null;

/** Return whether the text shows the selected probe. */
export const textIsCurrent = () => shownProbe === currentProbe();

/** Return the token that has the focus, else the pinned one; null if there is neither. */
export function tokenInFocus() {
  const focused = spans.indexOf(document.activeElement);
  return focused < 0 ? selection.pinned : focused;
}

/** Return the number of tokens in the text. */
export const textLength = () => spans.length;

/** Fill the text with the tokens of the selected probe; nothing is pinned. */
export function fillText() {
  const host = $("text");
  const { tokens } = currentProbe();
  const focused = spans.indexOf(document.activeElement);
  Object.assign(selection, {
    token: null,
    pinned: null,
    pinnedCell: null,
    pinAutomatically: true,
  });
  spans = tokens.map(createToken);
  shownProbe = currentProbe();
  host.classList.toggle("own", isOwnText());
  host.replaceChildren(
    ...spans.flatMap((span, i) => {
      if (isOwnText()) return tokens[i].includes("\n") ? [span, el("br")] : [span];
      return breakAfter(span);
    }),
  );
  spans[data.promptTokens]?.before(el("span", { className: "border" }, "▏generated from here on▕"));
  host.onpointerleave = () => highlightToken(null);
  const reached = focused < 0 ? spans.length - 1 : Math.min(focused, spans.length - 1);
  addArrowKeys(host, spans, 1, () => {}, reached);
  const moveWithArrows = host.onkeydown;
  host.onkeydown = event => {
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      event.target.click();
    } else if (event.key === "Escape") {
      selection.pinned = null;
      highlightToken(null);
    } else if (event.key !== "ArrowUp" && event.key !== "ArrowDown") moveWithArrows(event);
  };
  if (focused >= 0) spans[reached]?.focus({ preventScroll: true });
}

/** Create the element of token i. */
function createToken(text, i) {
  const losses = isOwnText() ? createLosses(i) : [];
  const span = el(
    "bdi",
    { className: "token", role: "button", "aria-label": `token ${i}` },
    ...splitMarks(text),
    ...losses,
  );
  if (isOwnText()) span.classList.toggle("hidden-token", ownText.hidden.includes(i));
  span.onpointerenter = () => highlightToken(i);
  span.onfocus = () => highlightToken(i);
  span.onclick = () => togglePin(i);
  return span;
}

/** Return a token's text as nodes in which white space is visible and lines may break. */
export function splitMarks(text) {
  return makeVisible(text)
    .split(/([·⏎⇥␍⍽]+)/)
    .filter(Boolean)
    .flatMap(part => (MARK.test(part) ? [...part].flatMap(createMark) : [part]));
}

/** Return a token's element and its last line break, moved out so that its frame ends before it. */
export function breakAfter(span) {
  return span.lastChild?.nodeName === "BR" ? [span, span.lastChild] : [span];
}

/** Create the nodes of one mark of white space. */
function createMark(mark) {
  return mark === "⏎" ? [el("i", {}, mark), el("br")] : [el("wbr"), el("i", {}, mark)];
}

/** Create the loss below token i, and its loss without interventions if that differs. */
function createLosses(i) {
  const { losses, was } = ownText.predictions;
  const format = loss => (Number.isFinite(loss) ? loss.toFixed(1) : "\u00a0");
  const now = format(losses[i - 1]);
  if (!was) return [el("small", {}, now)];
  const before = format(was.losses[i - 1]);
  const previous = before === now ? "\u00a0" : `was ${before}`;
  return [el("small", {}, now), el("small", { className: "was" }, previous)];
}

/** Color what the highlighted token attends to, and what attends to it, and list both. */
export function drawHighlights() {
  if (!spans.length || !display.attention) {
    $("lists").replaceChildren();
    return;
  }
  const view = shownView();
  const read = cellReader(view, selectedMaps());
  const { token } = selection;
  colorTokens(view, read, token);
  const isRead = token !== null && token >= (view.from ?? 0);
  $("lists").replaceChildren(...(isRead ? createLists(view, read, token) : []));
}

/** Color each token by its value in the row or column of `token`. */
function colorTokens(view, read, token) {
  const top = scaleTop(view, selection.weightByValues);
  spans.forEach((span, k) => {
    const isColored = token !== null && k !== token;
    const style = isColored ? tokenStyle(view, read, token, k, top) : "";
    if (span.shownStyle !== style) {
      span.style.cssText = style;
      span.shownStyle = style;
    }
    const isLit = k === token;
    if (span.isLit !== isLit) {
      span.classList.toggle("lit", isLit);
      span.isLit = isLit;
    }
  });
}

/** Return the style of token k while `token` is highlighted. */
function tokenStyle(view, read, token, k, top) {
  const isKey = k < token;
  const value = isKey ? read(token, k) : read(k, token);
  const share = Math.max(0, Math.min(1, Math.abs(value) / top || 0));
  const percent = (100 / SHADES) * Math.round(SHADES * Math.sqrt(share));
  let color = isKey ? "to" : "from";
  if (view.signed && value < 0) color = "negative";
  else if (view.signed && isKey) color = "positive";
  return `background: color-mix(in oklab, var(--${color}) ${percent}%, transparent)`;
}

/** List the largest values in the row and column of `token`. */
function createLists(view, read, token) {
  if (view.signed && token === view.T - 1) {
    return [el("p", {}, "The text ends here: there is no next token whose loss could change.")];
  }
  const keys = [];
  const queries = [];
  for (let k = view.from ?? 0; k < view.T; k++) {
    if (k <= token) keys.push({ token: k, value: read(token, k) });
    if (k >= token) queries.push({ token: k, value: read(k, token) });
  }
  const readSink = shownSink();
  if (readSink) keys.push({ token: null, value: readSink(token) });
  if (!view.signed) {
    return [
      createList(view, token, "attends to", "to", keys),
      createList(view, token, "attended to by", "from", queries),
    ];
  }
  const negated = keys.map(({ token: k, value }) => ({ token: k, value: -value }));
  return [
    createList(view, token, "helped by (nats)", "helped", keys),
    createList(view, token, "hurt by (nats)", "hurt", negated),
    createList(view, token, "helps (nats)", "from", queries),
  ];
}

/** Create one list of tokens with positive values, largest first; no token stands for the sink. */
function createList(view, token, name, kind, entries) {
  const positive = entries.filter(({ value }) => value > 0).sort((a, b) => b.value - a.value);
  const largest = positive.slice(0, MAX_LISTED);
  const top = largest[0]?.value ?? 1;
  const items = largest.map(({ token: k, value }) =>
    el(
      "li",
      { style: `--w: ${((100 * value) / top).toFixed(1)}%` },
      el("span", {}, ...(k === null ? ["sink"] : labelToken(view, k))),
      el("b", {}, formatNumber(value)),
    ),
  );
  const list = el(
    "div",
    { className: kind },
    el("h4", {}, ...labelToken(view, token), ` ${name}`),
    el("ol", {}, ...items),
  );
  if (!positive.length) list.append(el("p", { className: "quiet" }, "none"));
  const omitted = positive.length - largest.length;
  if (omitted) list.append(el("p", { className: "quiet" }, `and ${formatCount(omitted)} more`));
  return list;
}

/**
 * Scroll the text, and nothing else, until token i is visible.
 *
 * @param {number} i
 */
export function revealToken(i) {
  if (!spans[i]) return;
  const host = $("text");
  const frame = host.getBoundingClientRect();
  const box = spans[i].getBoundingClientRect();
  if (box.top < frame.top) host.scrollTop -= frame.top - box.top + 20;
  else if (box.bottom > frame.bottom) host.scrollTop += box.bottom - frame.bottom + 20;
}
