// The worker's modules in a page, where a test reaches them as `engine`.

import { Reading } from "../../report/web/forward.js";
import { ANSWERS, models, read, readingOf, readings, session } from "../../report/web/questions.js";
import { tokenizerOf } from "../../report/web/tokenize.js";

window.engine = { ANSWERS, Reading, models, read, readingOf, readings, session, tokenizerOf };
