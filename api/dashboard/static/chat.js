import { act, ask, byId, count, make, proof } from "./dom.js";

let messages = [];
let session = newSession();
let running = null;

function newSession() {
  const bits = crypto.getRandomValues(new Uint8Array(8));
  return `dashboard-${Array.from(bits, (one) => one.toString(16).padStart(2, "0")).join("")}`;
}

export function showChatModels(models, first) { setOptions(byId("chat-model"), models, first); }

// `first` is chosen until somebody chooses.
export function setOptions(select, names, first) {
  const known = Array.from(select.options, (one) => one.value);
  if (known.join("\n") === names.join("\n")) return;
  const chosen = select.value;
  select.replaceChildren(...names.map((name) => make("option", name, { value: name })));
  select.value = names.includes(chosen) ? chosen : first;
}

export function startChat() {
  byId("chat").addEventListener("submit", (event) => { event.preventDefault(); send(); });
  byId("chat-stop").addEventListener("click", () => running?.abort());
  byId("chat-new").addEventListener("click", () => {
    running?.abort();
    messages = [];
    session = newSession();
    byId("chat-log").replaceChildren();
    byId("chat-note").textContent = "";
  });
  byId("chat-keep").addEventListener("click", () => act(byId("chat-note"), keep));
}

// Also while nothing of it is on disk: it is pinned as soon as something is.
async function keep() {
  const query = new URLSearchParams({ conversation: session, model: byId("chat-model").value });
  const kept = await ask("POST", `/admin/cache/pin?${query}`);
  return kept.num_tokens ? `Pinned: ${count(kept.num_tokens)} tokens on disk.` : "Pinned as soon as it is on disk.";
}

async function send() {
  const text = byId("chat-text").value.trim();
  if (!text || running) return;
  const own = new AbortController();
  running = own;
  busy(true);
  const asked = [...messages, { role: "user", content: text }];
  show("You").answer.textContent = text;
  byId("chat-text").value = "";
  const turn = show(byId("chat-model").value);
  try {
    const answer = await stream(asked, turn, own.signal);
    if (own === running && session) messages = [...asked, { role: "assistant", content: answer }];
  } catch (error) {
    turn.note.textContent = error.name === "AbortError" ? "Stopped." : error.message;
    turn.note.classList.add("error");
  } finally {
    running = null;
    busy(false);
  }
}

function busy(is) {
  byId("chat-send").disabled = is;
  byId("chat-stop").disabled = !is;
}

function show(who) {
  const turn = make("article");
  const thoughts = make("details"), reasoning = make("p"), answer = make("p"), note = make("p", "", { class: "note" });
  thoughts.append(make("summary", "Reasoning"), reasoning);
  thoughts.hidden = true;
  turn.append(make("strong", who), thoughts, answer, note);
  byId("chat-log").append(turn);
  return { thoughts, reasoning, answer, note };
}

async function stream(asked, turn, signal) {
  const response = await fetch("/v1/chat/completions", {
    method: "POST", signal, headers: { "content-type": "application/json", ...proof },
    body: JSON.stringify({
      model: byId("chat-model").value, messages: asked, stream: true, session_id: session,
      stream_options: { include_usage: true },
    }),
  });
  if (!response.ok) throw new Error((await response.json()).error?.message ?? `The server answered ${response.status}.`);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return turn.answer.textContent;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) take(block, turn);
  }
}

function take(block, turn) {
  if (!block.startsWith("data: ") || block === "data: [DONE]") return;
  const piece = JSON.parse(block.slice(6));
  if (piece.error) throw new Error(piece.error.message);
  const delta = piece.choices?.[0]?.delta ?? {};
  if (delta.reasoning_content) {
    turn.thoughts.hidden = false;
    turn.reasoning.textContent += delta.reasoning_content;
  }
  if (delta.content) turn.answer.textContent += delta.content;
  if (piece.hearth && piece.usage) turn.note.textContent = reuse(piece.hearth.cache, piece.usage);
}

function reuse(cache, usage) {
  const prompt = count(usage.prompt_tokens), reused = count(cache.cached_tokens);
  const why = cache.reason ? `, no more because: ${cache.reason}` : "";
  return `Reused ${reused} of ${prompt} prompt tokens (${cache.tier})${why}`;
}
