// What the Node SDKs see of a running server. Prints a JSON object of what each check found.
import Anthropic from "@anthropic-ai/sdk";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, jsonSchema, streamText, tool } from "ai";
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: "unused", maxRetries: 0 });
const anthropic = new Anthropic({ baseURL: url, apiKey: "unused", maxRetries: 0 });
const question = "What is the weather in Zurich?";
const messages = [{ role: "user", content: question }];
const parameters = {
  type: "object",
  properties: { city: { type: "string" }, days: { type: "integer" } },
  required: ["city", "days"],
};
const weather = {
  type: "function",
  function: { name: "get_weather", description: "Get the current weather for a city.", parameters },
};
const found = {};

async function check(name, ask) {
  try {
    found[name] = await ask();
  } catch (error) {
    found[name] = { error: `${error.name}: ${error.message}`.slice(0, 600) };
  }
}

const chat = { model, messages, max_tokens: 60, temperature: 0 };
await check("openai chat", async () => {
  const whole = await openai.chat.completions.create(chat);
  const stream = openai.chat.completions.stream(chat);
  const streamed = await stream.finalChatCompletion();
  return {
    same: whole.choices[0].message.content === streamed.choices[0].message.content,
    reason: streamed.choices[0].finish_reason,
    text: whole.choices[0].message.content,
  };
});
await check("openai tools", async () => {
  const asked = { ...chat, tools: [weather], tool_choice: "required" };
  const stream = openai.chat.completions.stream(asked);
  const [call] = (await stream.finalChatCompletion()).choices[0].message.tool_calls;
  return { name: call.function.name, arguments: JSON.parse(call.function.arguments) };
});
await check("openai responses", async () => {
  const asked = { model, input: question, max_output_tokens: 60, temperature: 0 };
  const whole = await openai.responses.create(asked);
  const streamed = await openai.responses.stream(asked).finalResponse();
  const kept = await openai.responses.retrieve(whole.id);
  const after = await openai.responses.create({ ...asked, previous_response_id: whole.id });
  return {
    same: whole.output_text === streamed.output_text && kept.output_text === whole.output_text,
    status: streamed.status,
    continued: after.usage.input_tokens > whole.usage.input_tokens,
  };
});
await check("openai models", async () => {
  const names = [];
  for await (const one of openai.models.list()) names.push(one.id);
  return { listed: names.includes(model) };
});
const message = { model, messages, max_tokens: 60, temperature: 0 };
const anthropicTool = {
  name: "get_weather",
  description: "Get the current weather for a city.",
  input_schema: parameters,
};
await check("anthropic messages", async () => {
  const whole = await anthropic.messages.create(message);
  const streamed = await anthropic.messages.stream(message).finalMessage();
  const counted = await anthropic.messages.countTokens({ model, messages });
  const usage = whole.usage;
  const read = usage.cache_read_input_tokens + usage.cache_creation_input_tokens;
  return {
    same: JSON.stringify(whole.content) === JSON.stringify(streamed.content),
    reason: streamed.stop_reason,
    exact: counted.input_tokens === usage.input_tokens + read,
  };
});
await check("anthropic tools", async () => {
  const asked = { ...message, tools: [anthropicTool], tool_choice: { type: "any" } };
  const answer = await anthropic.messages.stream(asked).finalMessage();
  const call = answer.content.find((block) => block.type === "tool_use");
  return { name: call.name, input: call.input, reason: answer.stop_reason };
});

const providers = {
  "openai-compatible": createOpenAICompatible({
    name: "hearth",
    baseURL: `${url}/v1`,
    supportsStructuredOutputs: true,
  })(model),
  "openai-chat": createOpenAI({ baseURL: `${url}/v1`, apiKey: "unused" }).chat(model),
  "openai-responses": createOpenAI({ baseURL: `${url}/v1`, apiKey: "unused" }).responses(model),
  anthropic: createAnthropic({ baseURL: `${url}/v1`, apiKey: "unused" })(model),
};
const days = jsonSchema({
  type: "object",
  properties: { days: { type: "integer" }, is_wet: { type: "boolean" } },
  required: ["days", "is_wet"],
  additionalProperties: false,
});
for (const [name, provider] of Object.entries(providers)) {
  const shared = { model: provider, maxRetries: 0, maxOutputTokens: 80, prompt: question };
  await check(`ai text ${name}`, async () => {
    const whole = await generateText(shared);
    const stream = streamText(shared);
    let text = "";
    for await (const piece of stream.textStream) text += piece;
    return { same: whole.text === text, reason: await stream.finishReason };
  });
  await check(`ai tools ${name}`, async () => {
    const tools = {
      get_weather: tool({
        description: "Get the current weather for a city.",
        inputSchema: jsonSchema(parameters),
      }),
    };
    const answer = await generateText({ ...shared, tools, toolChoice: "required" });
    const [call] = answer.toolCalls;
    return { name: call.toolName, input: call.input, invalid: call.invalid ?? false };
  });
  await check(`ai object ${name}`, async () => {
    const answer = await generateObject({ ...shared, schema: days });
    return { object: answer.object };
  });
}
console.log(JSON.stringify(found));
