/** HTML elements. Data enters the page as text nodes only; nothing is ever parsed as HTML. */

import { shortenToken } from "./format.js";

const NARROW_WINDOW = 1000; // pixels; below this width the page has one column

/** @type {(id: string) => any} */
export const $ = id => document.getElementById(id);

/** Return whether the page has one column. */
export const isNarrow = () => innerWidth < NARROW_WINDOW;

/**
 * Create an element.
 *
 * @param {string} tag - Name of the element; "svg:" before it creates an SVG element.
 * @param {Record<string, any>} [properties] - Properties of an HTML element; attributes otherwise.
 * @param {...any} children - Nodes and texts.
 * @returns {any}
 */
export function el(tag, properties = {}, ...children) {
  const isSvg = tag.startsWith("svg:");
  const element = isSvg
    ? document.createElementNS("http://www.w3.org/2000/svg", tag.slice("svg:".length))
    : document.createElement(tag);
  for (const [key, value] of Object.entries(properties)) {
    if (key in element && !isSvg) element[key] = value;
    else element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
}

/** Create an element whose text cannot change the direction of the text around it. */
export const bdi = (text, className = "") => el("bdi", { className }, text);

/** Create the name of a token. */
export const tokenName = text => bdi(shortenToken(text), "token");

/** Return token i of a text with its position, as nodes. */
export const labelToken = ({ tokens }, i) => [tokenName(tokens[i]), el("small", {}, ` ${i}`)];

export const button = (properties, ...children) =>
  el("button", { type: "button", ...properties }, ...children);

/** Create a quiet paragraph. */
export const note = (...children) => el("p", { className: "quiet" }, ...children);

/** Scroll an element, and nothing else, until another one in it is visible. */
export function scrollWithin(host, element) {
  const frame = host.getBoundingClientRect();
  const box = element.getBoundingClientRect();
  if (box.top < frame.top || box.bottom > frame.bottom) {
    host.scrollTop += box.top - frame.top - (frame.height - box.height) / 2;
  }
}

/** Return a function that calls another one, unless it has done so less than `delay` ms ago. */
export function throttle(call, delay) {
  let lastCall = 0;
  return () => {
    if (performance.now() - lastCall < delay) return;
    lastCall = performance.now();
    call();
  };
}
