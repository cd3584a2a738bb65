/** The tokens of the selected probe as running text, colored by the selected map. */

import { $, el, labelToken, note, scrollWithin } from "../base/dom.js";
import { formatCount, makeVisible } from "../base/format.js";
import { addArrowKeys } from "../base/tooltip.js";
import { data } from "../state/page_data.js";
import {
  currentProbe,
  display,
  highlightToken,
  isOwnText,
  ownText,
  selectedMaps,
  selection,
  togglePin,
} from "../state/selection.js";
import { cellReader, scaleTop, shownCells, shownSink } from "../state/shown_cells.js";

const MAX_LISTED = 8;
const MIN_LISTED_SHARE = 0.01; // of the color scale; the map has the tokens below it
const SHADES = 20; // values that differ by less are drawn alike, so that fewer elements change
const MAX_SHADE = 50; // percent of a color, on which text has a contrast of at least 4.5
const MARK = /([·⏎⇥␍⍽])/;

/** @type {any[]} */
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
  const focused = spans.indexOf(document.activeElement);
  Object.assign(selection, { token: null, pinned: null, pinnedCell: null, target: null });
  selection.isTokenChosen = false;
  shownProbe = currentProbe();
  spans = shownProbe.tokens.map(createToken);
  host.classList.toggle("own", isOwnText());
  host.replaceChildren(...spans.flatMap(isOwnText() ? breakLine : breakAfter));
  spans[data.promptTokens]?.before(el("span", { className: "border" }, "▏generated from here on▕"));
  host.onpointerleave = () => highlightToken(null);
  const reached = focused < 0 ? spans.length - 1 : Math.min(focused, spans.length - 1);
  addKeyboard(host, reached);
  if (focused >= 0) spans[reached]?.focus({ preventScroll: true });
}

/** Let keys move over the tokens, and pin and unpin them; `current` is in the tab order at first. */
function addKeyboard(host, current) {
  addArrowKeys(host, spans, { current });
  const moveWithArrows = host.onkeydown;
  host.onkeydown = event => {
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      event.target.click();
    } else if (event.key === "Escape") {
      Object.assign(selection, { pinned: null, isTokenChosen: true });
      highlightToken(null);
    } else if (event.key !== "ArrowUp" && event.key !== "ArrowDown") moveWithArrows(event);
  };
}

/** Return a token's element, and a line break after it if the token has one. */
const breakLine = (span, i) => (shownProbe.tokens[i].includes("\n") ? [span, el("br")] : [span]);

function createToken(text, i) {
  const properties = {
    className: "token",
    role: "button",
    "aria-label": `token ${i}: ${makeVisible(text)}`,
    onpointerenter: () => highlightToken(i),
    onfocus: () => highlightToken(i),
    onclick: () => togglePin(i),
  };
  const span = el("bdi", properties, ...splitMarks(text));
  if (isOwnText()) {
    span.append(...createLosses(i));
    span.classList.toggle("hidden-token", ownText.hidden.includes(ownText.places[i]));
  }
  return span;
}

/** Return a token's text as nodes in which white space is visible and lines may break. */
export function splitMarks(text) {
  return makeVisible(text)
    .split(MARK)
    .filter(Boolean)
    .flatMap(part => {
      if (part === "⏎") return [el("i", {}, part), el("br")];
      return MARK.test(part) ? [el("wbr"), el("i", {}, part)] : [part];
    });
}

/** Return a token's element and its last line break, moved out so that its frame ends before it. */
export function breakAfter(span) {
  return span.lastChild?.nodeName === "BR" ? [span, span.lastChild] : [span];
}

/** Create the loss below token i, and its loss without interventions if that differs. */
function createLosses(i) {
  const { losses, was } = ownText.predictions;
  const format = loss => (Number.isFinite(loss) ? loss.toFixed(1) : "\u00a0");
  const now = format(losses[i - 1]);
  const before = format((was ?? ownText.predictions).losses[i - 1]);
  const properties = { className: "was", title: "without the interventions" };
  // Its room is kept, so that the text does not jump.
  return [el("small", {}, now), el("small", properties, before === now ? "" : before)];
}

/** Color what the highlighted token attends to, and what attends to it, and list both. */
export function drawHighlights() {
  if (!spans.length || !display.attention) {
    $("lists").replaceChildren();
    return;
  }
  const cells = shownCells();
  const read = cellReader(cells, selectedMaps());
  const { token } = selection;
  colorTokens(cells, read, token);
  const isRead = token !== null && token >= cells.firstToken;
  $("lists").replaceChildren(...(isRead ? createLists(cells, read, token) : []));
}

/** Color each token by its value in the row or column of `token`. */
function colorTokens(cells, read, token) {
  spans.forEach((span, k) => {
    const isColored = token !== null && k !== token;
    const style = isColored ? tokenStyle(cells, read, token, k) : "";
    if (span.shownStyle !== style) span.style.cssText = style;
    span.shownStyle = style;
    span.classList.toggle("lit", k === token);
  });
}

/** Return the style of token k while `token` is highlighted. */
function tokenStyle(cells, read, token, k) {
  const isKey = k < token;
  const value = isKey ? read(token, k) : read(k, token);
  const share = Math.min(1, Math.abs(value) / scaleTop(cells, selection.weightByValues) || 0);
  const percent = (MAX_SHADE / SHADES) * Math.round(SHADES * Math.sqrt(share));
  let color = isKey ? "to" : "from";
  if (cells.signed && value < 0) color = "negative";
  else if (cells.signed && isKey) color = "positive";
  return `background: color-mix(in oklab, var(--${color}) ${percent}%, transparent)`;
}

/** List the largest values in the row and column of `token`. */
function createLists(cells, read, token) {
  if (cells.signed && token === cells.T - 1) {
    return [el("p", {}, "The text ends here: there is no next token whose loss could change.")];
  }
  const keys = [];
  const queries = [];
  for (let k = cells.firstToken; k < cells.T; k++) {
    if (k <= token) keys.push({ token: k, value: read(token, k) });
    if (k >= token) queries.push({ token: k, value: read(k, token) });
  }
  const readSink = shownSink();
  if (readSink) keys.push({ token: null, value: readSink(token) });
  const list = (name, kind, entries) => createList(cells, token, name, kind, entries);
  if (!cells.signed) {
    return [list("attends to", "to", keys), list("attended to by", "from", queries)];
  }
  const negated = keys.map(({ token: k, value }) => ({ token: k, value: -value }));
  return [
    list("helped by (nats)", "helped", keys),
    list("hurt by (nats)", "hurt", negated),
    list("helps (nats)", "from", queries),
  ];
}

/**
 * Create one list of the tokens whose values are not close to zero, largest first; no token stands
 * for the sink.
 */
function createList(cells, i, name, kind, entries) {
  const least = MIN_LISTED_SHARE * scaleTop(cells, selection.weightByValues);
  const decimals = Math.max(0, -Math.floor(Math.log10(least)));
  const listed = entries.filter(({ value }) => value >= least).sort((a, b) => b.value - a.value);
  const largest = listed.slice(0, MAX_LISTED);
  const items = largest.map(({ token, value }) => {
    const width = ((100 * value) / largest[0].value).toFixed(1);
    const key = token === null ? ["sink"] : labelToken(cells, token);
    return el(
      "li",
      { style: `--w: ${width}%` },
      el("span", {}, ...key),
      el("b", {}, value.toFixed(decimals)),
    );
  });
  const heading = el("h4", {}, ...labelToken(cells, i), ` ${name}`);
  const list = el("div", { className: kind }, heading, el("ol", {}, ...items));
  const omitted = listed.length - largest.length;
  if (!listed.length) list.append(note(`none of ${least.toFixed(decimals)} or more`));
  if (omitted) list.append(note(`and ${formatCount(omitted)} more`));
  return list;
}

/** Scroll the text until token i is visible. */
export function revealToken(i) {
  if (spans[i]) scrollWithin($("text"), spans[i]);
}
