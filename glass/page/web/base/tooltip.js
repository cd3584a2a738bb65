/** Tooltips beside the pointer, and what the keyboard needs: announcements and arrow keys. */

import { $, el } from "./dom.js";

const WINDOW_MARGIN = 4; // least pixels between a tooltip and the border of the window

/** Show nodes in the tooltip beside a point of the window; null hides the tooltip. */
export function showTooltip(nodes, x = 0, y = 0) {
  const tooltip = $("tip");
  tooltip.hidden = !nodes;
  if (!nodes) return;
  tooltip.replaceChildren(...nodes);
  const { offsetWidth: width, offsetHeight: height } = tooltip;
  const maxLeft = document.documentElement.clientWidth - width - WINDOW_MARGIN;
  const fitsBelow = y + 18 + height <= innerHeight;
  const top = fitsBelow ? y + 18 : Math.max(WINDOW_MARGIN, y - height - 10);
  tooltip.style.left = `${Math.max(WINDOW_MARGIN, Math.min(x + 14, maxLeft))}px`;
  tooltip.style.top = `${top}px`;
}

/** Create the line of a tooltip that has its value. */
export const valueLine = (value, ...rest) =>
  el("div", { className: "value" }, el("b", {}, value), ...rest);

/** Let screen readers speak a copy of these nodes. */
export function announce(nodes) {
  const copies = nodes.map(node => (node instanceof Node ? node.cloneNode(true) : node));
  $("live").replaceChildren(...copies);
}

/**
 * Show a tooltip while an element is pointed at or has the focus.
 *
 * @param {any} element - An HTML or SVG element.
 * @param {() => (Node | string)[]} nodes - Returns the content.
 * @param {(() => void) | null} [pick] - Called at a click, Enter or the space bar.
 * @returns {any} The element.
 */
export function addTooltip(element, nodes, pick = null) {
  const show = event => {
    const box = element.getBoundingClientRect();
    const content = nodes();
    showTooltip(content, box.right, box.bottom - 12);
    if (event.type === "focus") announce(content);
  };
  const hide = () => showTooltip(null);
  element.onpointerenter = show;
  element.onfocus = show;
  element.onpointerleave = hide;
  element.onblur = hide;
  element.onclick = pick;
  element.onkeydown = event => {
    if (!pick || (event.key !== "Enter" && event.key !== " ")) return;
    event.preventDefault();
    pick();
  };
  return element;
}

/**
 * Let arrow keys walk over items, of which one at a time is in the tab order.
 *
 * @param {any} container - Element around the items.
 * @param {any[]} items - Elements, row by row.
 * @param {object} [options]
 * @param {number} [options.columns] - Items in a row.
 * @param {number} [options.current] - Index of the item that is in the tab order at first.
 * @param {(index: number) => void} [options.enter] - Called with the item that a key leads to.
 */
export function addArrowKeys(container, items, { columns = 1, current = 0, enter } = {}) {
  items.forEach((item, k) => {
    item.tabIndex = k === current ? 0 : -1;
  });
  container.onkeydown = event => {
    const index = items.indexOf(event.target.closest("[tabindex]"));
    const target = {
      ArrowRight: index + 1,
      ArrowLeft: index - 1,
      ArrowDown: index + columns,
      ArrowUp: index - columns,
      Home: 0,
      End: items.length - 1,
    }[event.key];
    if (index < 0 || target === undefined || !items[target]) return;
    event.preventDefault();
    items[index].tabIndex = -1;
    items[target].tabIndex = 0;
    items[target].focus();
    enter?.(target);
  };
}
