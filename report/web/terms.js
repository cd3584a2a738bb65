// Words of the field, explained where they stand; sentences in which heads are buttons. Stands after draw.js.

import { $, el } from "./dom.js";
import { addTooltip } from "./tooltip.js";

const TOLD_BY_NAME = "move what stands there. L2H3 is head 3 of layer 2, counted from 0.";
const NAT = "A loss of one nat less: the right token is 2.7 times as likely.";
const GAIN =
  "How much lower the loss of random tokens is when they come again in the same order than in another.";
const TERMS = {
  nats: NAT,
  nat: NAT,
  head: `One of the parts of a layer that look back at earlier tokens, and ${TOLD_BY_NAME}`,
  heads: `The parts of a layer that look back at earlier tokens, and ${TOLD_BY_NAME}`,
  "layer 0":
    "The layer that reads the tokens themselves: the layers above use what its heads gathered.",
  score:
    "A share: 0.6 is 60% of the head's attention, as a mean over 16 texts; ± its standard error.",
  born: "The first snapshot from which the head's score stayed above its threshold.",
  keys: "What a token offers to be found by; queries look for it.",
  queries: "What a token looks for among the keys.",
  values: "What a head moves from where it looks.",
  "what followed last time":
    "Where a token came before, the head looks at the token that came after it then: an " +
    "induction head (Olsson et al. 2022). So the model can repeat what it has seen.",
  copies: "It raises the chance of the token that it looks at.",
  "pushes down": "It lowers the chance of the token that it looks at.",
  copying:
    "How often the head makes the token that it looks at likely, less how often unlikely: from −1 to 1.",
  "fed by": "This head reads what that one wrote: without it, it no longer finds where to look.",
  "the gain": `The repeat gain. ${GAIN}`,
  "that gain": `The repeat gain. ${GAIN}`,
  "repeat gain": GAIN,
  "the token just before":
    "Of its attention most goes to the previous token: what induction heads are made of.",
  "the same token": "Where a token came before, the head looks at where that was.",
  "the token itself":
    "Most of its attention stays where it is: it adds to what is known of this token alone.",
  "matters most":
    "Its importance is the largest: how much the validation loss rises when it writes nothing.",
  "matter most":
    "Their importance is the largest: how much the validation loss rises when one writes nothing.",
  "validation loss": "In nats per token, on text that was not trained on.",
};
const LONGEST_FIRST = Object.keys(TERMS).sort((a, b) => b.length - a.length);
const NAMED = new RegExp(`(L\\d+H\\d+|\\b(?:${LONGEST_FIRST.join("|")})\\b)`);

// A word with a dotted line under it, and its explanation.
export const term = (word, says = TERMS[word]) =>
  addTooltip(el("span", { className: "term", tabIndex: 0 }, word), () => [el("div", {}, says)]);

// A text as nodes: heads are buttons that `pick` (layer, head), words of the field are explained.
function prose(text, pick) {
  return text
    .split(NAMED)
    .filter(Boolean)
    .map(part => {
      const head = /^L(\d+)H(\d+)$/.exec(part);
      const show = () => pick(Number(head[1]), Number(head[2]));
      if (head) return el("button", { type: "button", className: "to-head", onclick: show }, part);
      return TERMS[part] ? term(part) : part;
    });
}

// What a run has found out: [[sentence, figures], …], the first one bold.
export function drawFindings(findings, pick) {
  const [first, ...more] = findings.map(([text, figures]) => {
    const line = el("div", {}, ...prose(text, pick));
    return figures ? addTooltip(line, () => [el("div", {}, figures)]) : line;
  });
  $("headline").replaceChildren(
    ...(first
      ? [first]
      : [
          el(
            "p",
            { className: "quiet" },
            "Nothing of what its heads do is clear of its error yet.",
          ),
        ]),
  );
  $("more").replaceChildren(...more, ...(first ? [$("numbers")] : []));
  $("numbers").hidden = !first;
  $("numbers")
    .querySelector("ul")
    .replaceChildren(
      ...findings.map(([text, figures]) =>
        el(
          "li",
          {},
          ...prose(text, pick),
          el("div", { className: "quiet" }, ...prose(figures, pick)),
        ),
      ),
    );
}
