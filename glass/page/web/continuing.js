/** The model continues the reader's text. */

import { findHidden, placesRead } from "./decoding.js";
import { $ } from "./dom.js";
import { ask, cancel, describeFailure, send } from "./engine.js";
import { encodeTyped, readOwnText } from "./own_text.js";
import { chooseProbe, data, ownText, textLimit, wantedStep } from "./page_state.js";

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
  const written = $("typed").value ? 0 : 1; // an empty text has a token that starts it
  let ids = await encodeTyped();
  const end = ids.length + MAX_CONTINUED_TOKENS;
  let reading = null;
  let nextReading = 0;
  while (ids.length < end && isContinuing && wantedStep() === step) {
    const places = placesRead(ids, textLimit, true);
    const hidden = findHidden(ownText.hidden, places);
    const input = { ids: places.map(place => ids[place]), step, hidden, temperature };
    let continued = [];
    const onPart = part => {
      continued = part.ids;
    };
    await ask({ request: "continue", ...input, maxTokens: TOKENS_OF_REQUEST }, { onPart });
    if (!continued.length) return;
    ids = [...ids, ...continued.slice(places.length)];
    $("typed").value = await send("decode", { ids: ids.slice(written) });
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
