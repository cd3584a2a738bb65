/** HTML elements. Data enters the page as text nodes only; nothing is ever parsed as HTML. */

/**
 * Return the element with an id.
 *
 * @param {string} id
 * @returns {any} The element, whose type depends on the page; null if there is none.
 */
export const $ = id => document.getElementById(id);

/**
 * Create an element.
 *
 * @param {string} tag - Name of the element; "svg:" before it creates an SVG element.
 * @param {Record<string, any>} [properties] - Properties of an HTML element; attributes otherwise.
 * @param {...any} children - Nodes and texts.
 * @returns {any} The element.
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

/**
 * Return a function that calls another one, unless it has done so less than `delay` ms ago.
 *
 * @param {() => void} call
 * @param {number} delay
 */
export function throttle(call, delay) {
  let lastCall = 0;
  return () => {
    if (performance.now() - lastCall < delay) return;
    lastCall = performance.now();
    call();
  };
}

/**
 * Create an element whose text cannot change the direction of the text around it.
 *
 * @param {string} text
 * @param {string} [className]
 * @returns {HTMLElement}
 */
export const bdi = (text, className = "") => el("bdi", { className }, text);
