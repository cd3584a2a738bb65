// Words of the field, explained where they stand; sentences in which heads are buttons. Stands after draw.js.

const TERMS = {
  "nats": "A loss of one nat less: the right token is 2.7 times as likely.",
  "nat": "A loss of one nat less: the right token is 2.7 times as likely.",
  "head": "One of the parts of a layer that look back at earlier tokens, and move what stands there. L2H3 is head 3 of layer 2, counted from 0.",
  "heads": "The parts of a layer that look back at earlier tokens, and move what stands there. L2H3 is head 3 of layer 2, counted from 0.",
  "layer 0": "The layer that reads the tokens themselves: the layers above use what its heads gathered.",
  "score": "A share: 0.6 is 60% of the head's attention, as a mean over 16 texts; ± its standard error.",
  "born": "The first snapshot from which the head's score stayed above its threshold.",
  "keys": "What a token offers to be found by; queries look for it.",
  "queries": "What a token looks for among the keys.",
  "values": "What a head moves from where it looks.",
  "what followed last time": "Where a token came before, the head looks at the token that came after it then: an induction head (Olsson et al. 2022). So the model can repeat what it has seen.",
  "copies": "It raises the chance of the token that it looks at.",
  "fed by": "This head reads what that one wrote: without it, it no longer finds where to look.",
  "the gain": "The repeat gain: how much lower the loss of random tokens is when they come again in the same order than in another.",
  "that gain": "The repeat gain: how much lower the loss of random tokens is when they come again in the same order than in another.",
  "repeat gain": "How much lower the loss of random tokens is when they come again in the same order than in another.",
  "the token just before": "Of its attention most goes to the previous token: what induction heads are made of.",
  "the token itself": "Most of its attention stays where it is: it adds to what is known of this token alone.",
  "validation loss": "In nats per token, on text that was not trained on.",
};
const LONGEST_FIRST = Object.keys(TERMS).sort((a, b) => b.length - a.length);
const NAMED = new RegExp(`(L\\d+H\\d+|\\b(?:${LONGEST_FIRST.join("|")})\\b)`);

// A word with a dotted line under it, and its explanation.
const term = (word, says = TERMS[word]) => telling(el("span", { className: "term", tabIndex: 0 }, word), () => [el("div", {}, says)]);

// A text as nodes: heads are buttons that `pick` (layer, head), words of the field are explained.
function prose(text, pick) {
  return text.split(NAMED).filter(Boolean).map(part => {
    const head = /^L(\d+)H(\d+)$/.exec(part);
    if (head) return el("button", { type: "button", className: "to-head", onclick: () => pick(Number(head[1]), Number(head[2])) }, part);
    return TERMS[part] ? term(part) : part;
  });
}

// What a run has found out: [[sentence, figures], …], the first one bold.
function drawFindings(findings, pick) {
  const [first, ...more] = findings.map(([text, figures]) => {
    const line = el("div", {}, ...prose(text, pick));
    return telling(line, () => [el("div", {}, figures)]);
  });
  $("headline").replaceChildren(...first ? [first] : [el("p", { className: "quiet" },
    "Nothing of what its heads do is clear of its error yet.")]);
  $("more").replaceChildren(...more, ...first ? [$("numbers")] : []);
  $("numbers").hidden = !first;
  $("numbers").querySelector("ul").replaceChildren(...findings.map(([text, figures]) =>
    el("li", {}, ...prose(`${text} ${figures}.`, pick))));
}
