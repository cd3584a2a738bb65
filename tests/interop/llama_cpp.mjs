// Answer a job in llama.cpp: node llama_cpp.mjs JOB.json ANSWER.json, in a folder with node-llama-cpp.
import { readFileSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const path = createRequire(`${process.cwd()}/`).resolve("node-llama-cpp");
const { getLlama, LlamaLogLevel } = await import(pathToFileURL(path));
const [jobFile, answerFile] = process.argv.slice(2);
const job = JSON.parse(readFileSync(jobFile, "utf-8"));
const options = { gpu: false, build: "never", logLevel: LlamaLogLevel.error };
const llama = await getLlama(options);
const model = await llama.loadModel({ modelPath: job.model });
const context = await model.createContext({
  contextSize: job.context,
  experimentalKvCacheKeyType: "F32",
  experimentalKvCacheValueType: "F32",
});
const sequence = context.getSequence();

// Ask for the probabilities of the next token with no other sampling than the softmax
const generateNext = {
  probabilities: true,
  options: { temperature: 1, topK: 0, topP: 1, minP: 0 },
};
const last = job.prompt.length - 1;
const evaluated = await sequence.controlledEvaluate([
  ...job.prompt.slice(0, last),
  [job.prompt[last], { generateNext }],
]);
const probabilities = Object.fromEntries(evaluated[last].next.probabilities);

await sequence.clearHistory();
const greedy = [];
for await (const token of sequence.evaluate(job.prompt, { temperature: 0 })) {
  if (greedy.push(token) >= job.newTokens) break;
}
const tokens = job.texts.map((text) => Array.from(model.tokenize(text, false)));
writeFileSync(answerFile, JSON.stringify({ tokens, probabilities, greedy }));
process.exit(0);
