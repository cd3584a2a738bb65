/** The model continues the reader's text. */

import { windowStart } from "./decoding.js";
import { $ } from "./dom.js";
import { ask, cancel, describeFailure, send } from "./engine.js";
import { encodeTyped, firstIds, readOwnText } from "./own_text.js";
import { chooseProbe, data, maxTokens, ownText, wantedStep } from "./page_state.js";

const MAX_CONTINUED_TOKENS = 1000;
const TOKENS_OF_REQUEST = 4; // so that the text is read between two requests
const READING_INTERVAL = 200; // milliseconds between two views of the text

let isContinuing = false;

/** Let the model continue the text; if it is doing that, stop it. */
async function continueText() {
  if (isContinuing) {
    isContinuing = false;
    cancel("continue");
    return;
  }
  isContinuing = true;
  $("continue").textContent = "Stop";
  chooseProbe(data.probes.indexOf(ownText));
  try {
    await generate();
  } catch (error) {
    $("own-text-status").textContent = describeFailure(error);
  }
  isContinuing = false;
  $("continue").textContent = "Continue";
  readOwnText();
}

/** Write tokens of the model until it is stopped, or another step is wanted. */
async function generate() {
  const step = wantedStep();
  const temperature = readTemperature();
  let ids = await encodeTyped();
  if (!ids.length) ids = await firstIds();
  const end = ids.length + MAX_CONTINUED_TOKENS;
  let reading = null;
  let nextReading = 0;
  while (ids.length < end && isContinuing && wantedStep() === step) {
    const start = windowStart(ids.length, maxTokens);
    const hidden = ownText.hidden.map(j => j - start).filter(j => j >= 0);
    const input = { ids: ids.slice(start), step, hidden, temperature };
    let continued = [];
    const onPart = part => {
      continued = part.ids;
    };
    await ask({ request: "continue", ...input, maxTokens: TOKENS_OF_REQUEST }, { onPart });
    if (!continued.length) return;
    ids = [...ids.slice(0, start), ...continued];
    $("typed").value = await send("decode", { ids });
    $("typed").scrollTop = $("typed").scrollHeight;
    if (reading || performance.now() < nextReading) continue;
    nextReading = performance.now() + READING_INTERVAL;
    reading = readOwnText().finally(() => {
      reading = null;
    });
  }
}

/** Return the temperature, and write it into its field as it is used: within the bounds. */
function readTemperature() {
  const { valueAsNumber, defaultValue, min, max } = $("temperature");
  const typed = Number.isFinite(valueAsNumber) ? valueAsNumber : Number(defaultValue);
  const temperature = Math.min(Number(max), Math.max(Number(min), typed));
  $("temperature").value = temperature;
  return temperature;
}

export function setUpContinuing() {
  $("continue").onclick = continueText;
  $("temperature").onchange = readTemperature;
}
