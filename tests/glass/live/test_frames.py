"""The page reads the frames that glass/live/frames.py writes, however the network splits them."""

import json

import numpy as np
import pytest

from glass.live.frames import encode_frame

READ = """async ([bytes, sizes]) => {
  const stream = new ReadableStream({
    start(controller) {
      let start = 0;
      for (let k = 0; start < bytes.length; k++) {
        const size = sizes[k % sizes.length];
        controller.enqueue(Uint8Array.from(bytes.slice(start, start + size)));
        start += size;
      }
      controller.close();
    },
  });
  const frames = [];
  for await (const frame of engine.readFrames(stream)) frames.push(frame);
  return JSON.stringify(frames, (key, value) =>
    ArrayBuffer.isView(value) ? { type: value.constructor.name, values: [...value] } : value
  );
}"""


@pytest.fixture(scope="module")
def read_frames(engine_tab):
    return lambda data, sizes: json.loads(engine_tab.evaluate(READ, [list(data), sizes]))


def test_the_page_reads_frames_and_drops_one_that_is_incomplete(read_frames):
    halves = np.array([0.5, -65504, 2**-24, 2**-14, 0, 1.0009765625], np.float16)
    words = {"7": " né 日本 😀", "8": "array"}
    part = {"heads": [3, 1], "maps": halves, "empty": np.zeros(0, np.float32)}
    data = encode_frame("part", part)
    data += encode_frame("part", [np.float32([-3]), {"words": words}])
    data += encode_frame("answer", {"losses": np.float32([0.25, 1e-30]), "was": None})
    expected = [
        {
            "part": {
                "heads": [3, 1],
                "maps": {"type": "Float32Array", "values": halves.astype(float).tolist()},
                "empty": {"type": "Float32Array", "values": []},
            }
        },
        {"part": [{"type": "Float32Array", "values": [-3]}, {"words": words}]},
        {
            "answer": {
                "losses": {"type": "Float32Array", "values": np.float32([0.25, 1e-30]).tolist()},
                "was": None,
            }
        },
    ]
    for sizes in ([1], [7, 3, 64], [len(data)]):
        assert read_frames(data, sizes) == expected
    for missing in (1, 9, len(data) // 2):
        cut = read_frames(data[:-missing], [10])
        assert cut == expected[: len(cut)] and len(cut) < len(expected)
