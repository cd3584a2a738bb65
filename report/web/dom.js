// HTML elements. Data enters the page as text nodes only; nothing is ever parsed as HTML.

export const $ = id => document.getElementById(id);

export function el(tag, properties = {}, ...children) {
  const element = tag.startsWith("svg:")
    ? document.createElementNS("http://www.w3.org/2000/svg", tag.slice(4))
    : document.createElement(tag);
  for (const [key, value] of Object.entries(properties)) {
    if (key in element && !tag.startsWith("svg:")) element[key] = value;
    else element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
}

export const bdi = (text, name = "") => el("bdi", { className: name }, text);
