/** The worker's modules in a page, where a test reaches them as `engine`. */

import {
  cachedPass,
  HANDLERS,
  models,
  passes,
  runModel,
  session,
} from "../../report/web/requests.js";
import { createTokenizer } from "../../report/web/tokenizer.js";

window.engine = { cachedPass, createTokenizer, HANDLERS, models, passes, runModel, session };
