// Tooltips and keyboard access.

import { $, el } from "./dom.js";

// ---- the tip beside the pointer, and for the keyboard what is spoken

export function showTooltip(nodes, x = 0, y = 0) {
  const tip = $("tip");
  tip.hidden = !nodes;
  if (!nodes) return;
  tip.replaceChildren(...nodes);
  const { offsetWidth: w, offsetHeight: h } = tip;
  tip.style.left = `${Math.max(4, Math.min(x + 14, document.documentElement.clientWidth - w - 4))}px`;
  tip.style.top = `${y + 18 + h > innerHeight ? Math.max(4, y - h - 10) : y + 18}px`;
}

export function announce(nodes) {
  $("live").replaceChildren(...nodes.map(node => node.cloneNode?.(true) ?? node));
}

// What a mark tells when it is pointed at or focused; `pick` is done at a click, Enter or the space bar, `near` hears
// whether it is told of.
export function addTooltip(mark, nodes, pick = null, near = () => {}) {
  mark.onpointerenter = mark.onfocus = event => {
    const place = mark.getBoundingClientRect();
    const told = nodes();
    showTooltip(told, place.right, place.bottom - 12);
    if (event.type === "focus") announce(told);
    near(true);
  };
  mark.onpointerleave = mark.onblur = () => {
    showTooltip(null);
    near(false);
  };
  mark.onclick = pick;
  mark.onkeydown = event => {
    if (pick && (event.key === "Enter" || event.key === " ")) {
      event.preventDefault();
      pick();
    }
  };
  return mark;
}

// Words that the page has with an explanation, data-explanation: told under the pointer, and of a choice when the keyboard is
// there.
export function explainTerms() {
  for (const word of document.querySelectorAll("[data-explanation]")) {
    const input = word.closest("label")?.querySelector("input");
    word.classList.add("term");
    addTooltip(word, () => [el("div", {}, word.dataset.explanation)]);
    if (!input) {
      word.tabIndex = 0;
      continue;
    }
    input.onfocus = event => {
      if (input.matches(":focus-visible")) word.onfocus(event);
    };
    input.onblur = word.onblur;
  }
}

// Arrow keys walk over `items`; one of them at a time is in the tab order.
export function addArrowKeys(container, items, columns, enter, chosen = 0) {
  items.forEach((item, k) => {
    item.tabIndex = k === chosen ? 0 : -1;
  });
  container.onkeydown = event => {
    const k = items.indexOf(event.target.closest("[tabindex]"));
    const to = {
      ArrowRight: k + 1,
      ArrowLeft: k - 1,
      ArrowDown: k + columns,
      ArrowUp: k - columns,
      Home: 0,
      End: items.length - 1,
    }[event.key];
    if (k < 0 || to === undefined || !items[to]) return;
    event.preventDefault();
    items[k].tabIndex = -1;
    items[to].tabIndex = 0;
    items[to].focus();
    enter(to);
  };
}
