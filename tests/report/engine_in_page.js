/** Modules of the worker and of the page, where a test reaches them as `engine`. */

import { withoutFirstToken } from "../../report/web/attention_data.js";
import { floatReader } from "../../report/web/float16.js";
import { readFrames } from "../../report/web/frames.js";
import { PATCH_HANDLERS } from "../../report/web/patch_requests.js";
import {
  cachedPass,
  HANDLERS,
  models,
  passes,
  runModel,
  session,
} from "../../report/web/requests.js";
import { scoredDiagonals } from "../../report/web/token_effect.js";
import { createTokenizer } from "../../report/web/tokenizer.js";

window.engine = {
  cachedPass,
  createTokenizer,
  floatReader,
  HANDLERS,
  models,
  PATCH_HANDLERS,
  passes,
  readFrames,
  runModel,
  scoredDiagonals,
  session,
  withoutFirstToken,
};
