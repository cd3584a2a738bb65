/** The model continues the reader's text. */

import { windowStart } from "./decoding.js";
import { $ } from "./dom.js";
import { askModel, cancel, describeFailure, send } from "./engine.js";
import { encodeTyped, firstIds, readSoon } from "./own_text.js";
import { chooseProbe, data, maxTokens, ownText, wantedStep } from "./page_state.js";

const MAX_CONTINUED_TOKENS = 1000;
const TOKENS_OF_REQUEST = 4; // so that the text is read between two requests

/** Let the model continue the text; if it is doing that, stop it. */
async function continueText() {
  if (ownText.isContinuing) {
    stopContinuing();
    return;
  }
  ownText.isContinuing = true;
  $("continue").textContent = "Stop";
  chooseProbe(data.probes.indexOf(ownText));
  try {
    await generate();
  } catch (error) {
    $("own-text-status").textContent = describeFailure(error);
  }
  stopContinuing();
}

/** Write tokens of the model until it is stopped, or another step is wanted. */
async function generate() {
  const step = wantedStep();
  const temperature = readTemperature();
  let ids = await encodeTyped();
  if (!ids.length) ids = await firstIds();
  const end = ids.length + MAX_CONTINUED_TOKENS;
  while (ids.length < end) {
    const start = windowStart(ids.length, maxTokens);
    const hidden = ownText.hidden.map(j => j - start).filter(j => j >= 0);
    const parameters = { step, hidden, temperature, maxTokens: TOKENS_OF_REQUEST };
    let continued = [];
    await askModel("continue", ids.slice(start), parameters, part => {
      continued = part.ids;
    });
    if (!ownText.isContinuing || wantedStep() !== step || !continued.length) return;
    ids = [...ids.slice(0, start), ...continued];
    $("typed").value = await send("decode", { ids });
    $("typed").scrollTop = $("typed").scrollHeight;
    readSoon();
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

/** Stop continuing the text and read what is there. */
function stopContinuing() {
  if (ownText.isContinuing) cancel("continue");
  ownText.isContinuing = false;
  $("continue").textContent = "Continue";
  readSoon();
}

/** Connect the button and the temperature. */
export function setUpContinuing() {
  $("continue").onclick = continueText;
  $("temperature").onchange = readTemperature;
}
