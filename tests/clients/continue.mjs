// Reads a config.yaml as Continue does, and asks its first model as Continue does.
import { readFileSync } from "node:fs";
import { parseConfigYaml, validateConfigYaml } from "@continuedev/config-yaml";
import { constructLlmApi } from "@continuedev/openai-adapters";

const config = parseConfigYaml(readFileSync(process.argv[2], "utf8"));
const complaints = validateConfigYaml(config);
const [model] = config.models;
const api = constructLlmApi(model);
const messages = [{ role: "user", content: "Hello!" }];
const asked = { model: model.model, messages, max_tokens: 16, stream: true };
let text = "";
for await (const chunk of api.chatCompletionStream(asked, new AbortController().signal)) {
  text += chunk.choices[0]?.delta?.content ?? "";
}
console.log(JSON.stringify({ model, complaints, text }));
