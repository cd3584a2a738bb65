"""Learn a vocabulary: `python -m data.learn SIZE PATTERN`, texts in as lines of JSON, tokens with their ids out."""

import json
import sys
from contextlib import suppress

from data.tokenizer import learn_here

if __name__ == "__main__":
    vocabulary = learn_here(map(json.loads, sys.stdin.buffer), int(sys.argv[1]), sys.argv[2])
    with suppress(BrokenPipeError):  # who asked was killed
        print(json.dumps(vocabulary), flush=True)
