// The worker that answers the page.

import { ANSWERS, stopped } from "./questions.js";

onmessage = async ({ data: { id, ask, ...given } }) => {
  if (ask === "stop") {
    stopped[given.what] = id;
    return;
  }
  try {
    const answer = await ANSWERS[ask](given, part => postMessage({ id, part }), id);
    postMessage({ id, answer });
  } catch (e) {
    postMessage({ id, error: e.message });
  }
};
