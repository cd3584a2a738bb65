/** The model continues the reader's text. */

import { $ } from "../base/dom.js";
import { ask, cancel, describeFailure } from "../client/client.js";
import { findHidden, placesRead } from "../engine/decoding.js";
import { data, textLimit } from "../state/page_data.js";
import { chooseProbe, ownText, wantedStep } from "../state/selection.js";
import { encodeTyped, isFieldEmpty, readOwnText, showIds } from "./own_text.js";

const CONTINUED_TOKENS = 20;

let isContinuing = false;

/** Let the model continue the text; if it is doing that, stop it. */
async function continueText() {
  if (isContinuing) {
    cancel("continue");
    return;
  }
  isContinuing = true;
  $("continue").textContent = "Stop";
  chooseProbe(data.probes.indexOf(ownText));
  let isComplete = false;
  try {
    isComplete = await generate();
  } catch (error) {
    $("own-text-status").textContent = describeFailure(error);
  }
  isContinuing = false;
  $("continue").textContent = "Continue";
  await readOwnText();
  if (isComplete) {
    const status = $("own-text-status");
    status.textContent = `The model ended the text. ${status.textContent}`;
  }
}

/** Write tokens of the model after the text, and return whether it ended the text. */
async function generate() {
  const temperature = $("temperature").valueAsNumber || 0;
  const typedIds = await encodeTyped();
  const written = isFieldEmpty() ? [] : typedIds; // an empty text has a token that starts it
  const places = placesRead(typedIds, textLimit, true);
  const hidden = findHidden(ownText.hidden, places);
  const ids = places.map(place => typedIds[place]);
  const input = { ids, step: wantedStep(), hidden, temperature, maxTokens: CONTINUED_TOKENS };
  let shown = Promise.resolve();
  let isComplete = false;
  const onPart = part => {
    isComplete = part.isComplete ?? false;
    const continued = [...written, ...part.ids.slice(ids.length)];
    shown = shown.then(() => show(continued));
  };
  await ask({ request: "continue", ...input }, { onPart });
  await shown;
  return isComplete;
}

async function show(ids) {
  await showIds(ids);
  $("typed").scrollTop = $("typed").scrollHeight;
}

export function setUpContinuing() {
  $("continue").onclick = continueText;
}
