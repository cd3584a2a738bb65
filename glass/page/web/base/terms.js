/** The glossary of the pages: one sentence for beginners about each term and each score. */

import { button, el } from "./dom.js";
import { parseHead, readableName } from "./format.js";
import { addTooltip } from "./tooltip.js";

/** What the scores of heads mean. @type {Record<string, Score>} */
export const SCORES = {
  current_token: {
    label: "Current token",
    explanation: "Mean attention weight of a token on itself.",
  },
  previous_token: {
    label: "Previous token",
    explanation: "Mean attention weight on the token immediately before.",
  },
  sink: {
    label: "Attention sink",
    explanation:
      "Mean attention weight on the first token, where many heads put attention that they do not need.",
  },
  duplicate_token: {
    label: "Duplicate token",
    explanation: "On repeated random tokens: mean attention weight of a token on its earlier copy.",
  },
  induction: {
    label: "Induction",
    explanation:
      "Prefix-matching score: on repeated random tokens, mean attention weight on the token that followed the " +
      "earlier copy of the current token.",
  },
  entropy: {
    label: "Entropy",
    explanation:
      "How spread out attention is: 0 if all of it is on one token, 1 if all tokens so far get equal weight. A sink " +
      "logit, if the model has them, counts like one more token.",
  },
  distance: {
    label: "Distance",
    unit: "tokens",
    explanation: "How many tokens back the head attends, on average.",
  },
  copying: {
    label: "Copying",
    isSigned: true,
    explanation:
      "How often attending to a token makes it one of the ten likeliest next tokens, minus how often one of the " +
      "ten least likely ones; from −1 to 1.",
  },
  importance: {
    label: "Importance",
    unit: "nats/token",
    explanation:
      "Increase of the validation loss when the head's output is set to zero (zero ablation).",
  },
};

/** Charts of the metrics `task/<name>` of data=synthetic, with the names of their lines. */
export const TASK_CHARTS = [
  {
    title: "Loss in passages (nats/token)",
    explanation:
      "A passage repeats until the sequence is full: its tokens can only be guessed the first time, and copied later.",
    metrics: { first_loss: "first time", repeated_loss: "repeated tokens" },
  },
  {
    title: "Accuracy on repeated tokens",
    explanation:
      "How often the likeliest token is the right one, where it can be copied from earlier in the sequence.",
    metrics: { repeated_accuracy: "repeated tokens" },
  },
  {
    title: "Divergence from strategies (nats)",
    explanation:
      "KL(strategy ‖ model): 0 if the model predicts exactly what a strategy does. Unigrams are the frequencies of " +
      "all states of the sequence so far, bigrams those of the states that follow the current one.",
    metrics: {
      kl_uniform: "all states alike",
      kl_unigram: "in-context unigrams",
      kl_bigram: "in-context bigrams",
    },
  },
  {
    title: "Loss of sums (nats)",
    explanation:
      "Loss of c in a + b = c (mod P), for the pairs a, b that the model is trained on and for held-out pairs.",
    metrics: { train_loss: "training pairs", loss: "held-out pairs" },
  },
  {
    title: "Accuracy of sums",
    explanation: "How often the likeliest c in a + b = c (mod P) is the right one.",
    metrics: { train_accuracy: "training pairs", accuracy: "held-out pairs" },
  },
  {
    title: "Fourier share",
    explanation:
      "Share of the six strongest frequencies in a Fourier transform of the number embeddings over the numbers; near 1 " +
      "if the model represents numbers as angles of a few circles (Nanda et al. 2023).",
    metrics: { fourier_share: "six frequencies" },
  },
  {
    title: "Attention on the task",
    explanation:
      "Mean attention weight on held-out sequences of the task, in the head in which it is largest.",
    metrics: {
      induction: "on what followed earlier copies of the token",
      previous_token: "on the previous token",
      same_state: "on what followed the same state",
    },
  },
  {
    title: "Attention sink of the induction head",
    explanation:
      "Attention weight of the strongest induction head on the first symbol: at tokens that have not occurred before, " +
      "so that there is nothing to find, and at others. A sink logit lets the sum of all weights fall below 1.",
    metrics: {
      sink_nothing_to_find: "nothing to find",
      sink_something_to_find: "something to find",
      attention_sum_nothing_to_find: "sum of all weights, nothing to find",
    },
  },
];

export const scoreLabel = score => SCORES[score]?.label ?? readableName(score);

/** Return the label of a score with its unit: "Distance (tokens)". */
export function scoreTitle(score) {
  const unit = SCORES[score]?.unit;
  return unit ? `${scoreLabel(score)} (${unit})` : scoreLabel(score);
}

const COPYING_GAIN =
  "How much a repetition helps: the loss on random tokens repeated in another order minus the loss on an exact repeat. " +
  "Some heads may keep this difference without the others, although both losses rise.";

const READING = "A head reads from a token in proportion to its attention weight on it.";
const IN_PART =
  "it does so in part unless its score exceeds 0.5, half of its attention, by two standard errors.";
const REPORTED_ABOVE_CONTROL = `Reported from a score of 0.2; ${IN_PART}`;
const REPORTED_ABOVE_UNIFORM = `Reported from a score a quarter of the way from uniform attention to 1; ${IN_PART}`;

/** Explanations of terms. A plural with -s is explained like its singular. */
const TERMS = {
  nat: "A unit of loss: if the loss is one nat lower, the right token is 2.7 times as likely.",
  head:
    "A part of a layer that reads from earlier tokens and writes what it read to the current one. L2H3 is head 3 of " +
    "layer 2; both are counted from 0.",
  "layer 0":
    "The lowest layer, which reads the token embeddings; the layers above use what its heads wrote.",
  "attends to": READING,
  "attend to": READING,
  "attended to": READING,
  score:
    "Scores are between 0 and 1 unless stated; 0.6 means 60% of the head's attention, averaged over 16 texts.",
  "in part":
    "With a score that does not exceed 0.5, half of its attention, by two standard errors.",
  "standard error":
    "The uncertainty of a mean: another sample would most likely differ by less than twice as much.",
  emerged:
    "Its score first passed the threshold in this interval, and was still above it at the next snapshot.",
  ablated:
    "Removed, by setting its output to zero or to its mean, so that the effect can be measured.",
  "reads from":
    "Part of the head's score is lost if what the other one wrote is removed from its queries or keys.",
  queries: "The vectors with which tokens ask for what they want to read (Q).",
  key: "The vector by which queries find a token (K).",
  value: "The vector that a head reads from a token that it attends to (V).",
  "induction head":
    "A head that attends to whatever followed the current token last time, so that the model can continue a " +
    `sequence that it has seen before (Olsson et al. 2022). ${REPORTED_ABOVE_CONTROL}`,
  "previous-token head": `A head that attends to the token immediately before; induction heads can build on it. ${REPORTED_ABOVE_UNIFORM}`,
  "duplicate-token head": `A head that attends to earlier copies of the current token (Wang et al. 2022). ${REPORTED_ABOVE_CONTROL}`,
  "current-token head": `A head that attends to the current token itself. ${REPORTED_ABOVE_UNIFORM}`,
  "attention sink":
    "The first token, where many heads put attention that they do not need (Xiao et al. 2023; Gu et al. 2024).",
  "copying score": SCORES.copying.explanation,
  copying: SCORES.copying.explanation,
  "copying gain": COPYING_GAIN,
  "in-context copying gain": COPYING_GAIN,
  "in-context learning score":
    "How much context helps: loss early in a held-out window (its second sixteenth) minus loss late in it (its last " +
    "sixteenth).",
  "in-context copying":
    "Predicting a sequence that appeared before in the same context by copying it.",
  faithfulness:
    "The share of the copying gain that remains if all other heads are replaced by their means.",
  "sufficient head":
    "Heads that kept at least 90% of the copying gain while the others were replaced by their means, one by one. " +
    "The share is measured on random tokens that were not used to find them.",
  "most important head":
    "The head whose removal (zero ablation) raises the validation loss the most.",
  importance: SCORES.importance.explanation,
  loss: "How badly the model predicts the next token: minus the log of the probability that it gave to it.",
  "training loss": "Mean loss on the batches that the model is trained on.",
  "validation loss": "Mean loss on text that the model was not trained on; lower is better.",
  "bits per byte":
    "Validation loss per byte of text, which is comparable between tokenizers; lower is better.",
  "learning rate": "How far one optimizer step moves the weights.",
  "gradient norm":
    "Length of the gradient before clipping; a sudden peak is a sign of unstable training.",
  throughput: "Tokens that the run trains on per second, on its own machine.",
  "model FLOPs utilization":
    "MFU: the share of the device's peak rate of operations that training reaches.",
  "training time":
    "Time for forward passes, backward passes and updates, without evaluation and saving.",
  parameter: "A trained weight of the model.",
  "KV cache": "Memory for the keys and values of one full context while generating text.",
  "Q-composition": "What an upstream component wrote changes what the head looks for: its queries.",
  "K-composition": "What an upstream component wrote changes what the head finds: its keys.",
  "V-composition": "What an upstream component wrote is what the head moves: its values.",
  "logit lens":
    "The prediction that the model would make if it ended after a given block (nostalgebraist 2020).",
  "direct logit attribution":
    "How much each component adds to a logit directly, without its effect on later layers (Elhage et al. 2021).",
  "activation patching":
    "Copying an activation from the run on one text into the run on another. If a clean activation restores the " +
    "prediction on a corrupted text, it carries what was lost; if a corrupted one breaks the prediction on the clean " +
    "text, the prediction needs it (Meng et al. 2022; Wang et al. 2022; Heimersheim and Nanda 2024).",
  "logit difference":
    "The logit of one token minus that of another: the log of how many times as likely the model finds the one " +
    "(Wang et al. 2022).",
};

const longestFirst = Object.keys(TERMS).sort((a, b) => b.length - a.length);
const TERM = new RegExp(`(L\\d+H\\d+|\\b(?:${longestFirst.join("|")})s?\\b)`, "i");
const explanations = new Map(
  Object.entries(TERMS).map(([name, text]) => [name.toLowerCase(), text]),
);

/** Return the explanation of a term or of its plural; undefined if it has none. */
export function explanationOf(word) {
  const lowerCase = word.toLowerCase();
  return explanations.get(lowerCase) ?? explanations.get(lowerCase.replace(/s$/, ""));
}

/** Create a word with a dotted line under it, whose tooltip explains it. */
export function term(word, explanation = explanationOf(word)) {
  const element = el("span", { className: "term", tabIndex: 0 }, word);
  return addTooltip(element, () => [el("div", {}, explanation)]);
}

/** Return a title as it is, or with a tooltip if it has an explanation. It is not in the tab order. */
export const explainedTitle = (title, explanation) =>
  explanation ? Object.assign(term(title, explanation), { tabIndex: -1 }) : title;

/**
 * Add tooltips to the words of the page that have a `data-explanation`, which may leave the
 * explanation to the glossary. A word that labels an input shows its tooltip also when the keyboard
 * reaches the input.
 */
export function explainTerms() {
  /** @type {NodeListOf<HTMLElement>} */
  const words = document.querySelectorAll("[data-explanation]");
  for (const word of words) {
    const input = word.closest("label")?.querySelector("input");
    const explanation = word.dataset.explanation || explanationOf(word.textContent);
    word.classList.add("term");
    addTooltip(word, () => [el("div", {}, explanation)]);
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

/** Return a text as nodes in which heads are buttons, which choose them, and terms have tooltips. */
export function annotate(text, chooseHead) {
  const parts = text.split(TERM).filter(Boolean);
  return parts.map(part => {
    const head = parseHead(part);
    if (head) return button({ className: "to-head", onclick: () => chooseHead(...head) }, part);
    return explanationOf(part) ? term(part) : part;
  });
}
