/** The worker's modules in a page, where a test reaches them as `engine`. */

import { withoutFirstToken } from "../../report/web/attention_data.js";
import { floatReader } from "../../report/web/float16.js";
import {
  cachedPass,
  HANDLERS,
  models,
  passes,
  runModel,
  session,
} from "../../report/web/requests.js";
import { createTokenizer } from "../../report/web/tokenizer.js";

window.engine = {
  cachedPass,
  createTokenizer,
  floatReader,
  HANDLERS,
  models,
  passes,
  runModel,
  session,
  withoutFirstToken,
};
