/** Modules of the worker and of the page, where a test reaches them as `engine`. */

import { withoutFirstToken } from "../../../glass/page/web/attention_data.js";
import { floatReader } from "../../../glass/page/web/float16.js";
import { readFrames } from "../../../glass/page/web/frames.js";
import { PATCH_HANDLERS } from "../../../glass/page/web/patch_requests.js";
import {
  cachedPass,
  HANDLERS,
  models,
  passes,
  runModel,
  session,
} from "../../../glass/page/web/requests.js";
import { scoredDiagonals } from "../../../glass/page/web/token_effect.js";
import { createTokenizer } from "../../../glass/page/web/tokenizer.js";

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
