import { ask, byId, bytes, count, fill, isSignedIn, make, proof, row, seconds } from "./dom.js";
import { Charts } from "./charts.js";
import { startChat, showChatModels } from "./chat.js";
import { startConversations } from "./conversations.js";
import { LOADED, showModels } from "./models.js";
import { startTree, showTreeModels } from "./tree.js";

const charts = new Charts();

function tile(name, value) {
  const box = make("div");
  box.append(make("dt", name), make("dd", value));
  return box;
}

function meter(name, used, cap) {
  const box = make("div");
  const id = `meter-${name.toLowerCase()}`;
  const bound = cap === null ? "" : ` of ${bytes(cap)}`;
  box.append(make("label", `${name}: ${bytes(used)}${bound}`, { for: id }));
  const bar = make("meter", "", { id, min: "0", max: String(cap || Math.max(used, 1)) });
  bar.value = used;
  box.append(bar);
  return box;
}

function showGlance(now) {
  const share = (saved) => (saved.hit_rate === null ? "–" : `${(saved.hit_rate * 100).toFixed(1)} %`);
  byId("glance").replaceChildren(
    tile("Hit rate today", share(now.saved_today)),
    tile("Tokens saved today", count(now.saved_today.saved_tokens)),
    tile("Prefill saved today", seconds(now.saved_today.saved_prefill_s)),
    tile("Tokens saved in total", count(now.saved_total.saved_tokens)),
    tile("Prefill saved in total", seconds(now.saved_total.saved_prefill_s)),
    tile("Cache on disk", now.cache),
    tile("Agents and responses", now.history),
  );
  byId("history-message").textContent = now.history_message ?? "";
  const names = { hot: "Hot", warm: "Warm", cold: "Cold" };
  byId("meters").replaceChildren(
    meter("Memory", now.memory.reserved_bytes, now.memory.budget_bytes),
    ...now.tiers.map((tier) => meter(names[tier.tier], tier.used_bytes, tier.cap_bytes)),
  );
}

// A question to a model that is not loaded may make others leave.
function firstModel(now) {
  const loaded = now.models.filter((one) => LOADED.has(one.state)).map((one) => one.id);
  return loaded.includes(now.default_model) ? now.default_model : loaded[0] ?? now.default_model ?? now.known_models[0];
}

function showSnapshot(now) {
  showGlance(now);
  showModels(now);
  fill(byId("requests"), now.requests.map((one) => row([
    one.id, one.model, one.phase, count(one.num_prompt_tokens), count(one.num_cached_tokens), count(one.num_pieces),
  ])), "Nothing is being answered.", 6);
  const first = firstModel(now);
  showChatModels(now.known_models, first);
  showTreeModels(now.known_models, first);
  if (now.sample) charts.add(now.sample);
}

function listen() {
  const feed = new EventSource("/admin/dashboard/events");
  feed.addEventListener("open", () => { byId("connection").textContent = "Live"; });
  feed.addEventListener("error", () => {
    byId("connection").textContent = feed.readyState === EventSource.CLOSED
      ? "No live figures: reload the page, and sign in with the admin key if it asks."
      : "Connection lost, trying again…";
  });
  feed.addEventListener("snapshot", (event) => showSnapshot(JSON.parse(event.data)));
}

async function showCrashes() {
  const { crashes } = await ask("GET", "/admin/crashes");
  const latest = crashes.map((one) => one.id).join();
  if (latest === byId("crashes").dataset.latest) return;
  byId("crashes").dataset.latest = latest;
  fill(byId("crashes"), crashes.map((one) => row([
    new Date(one.at_s * 1000).toLocaleString(), one.model, one.code, one.phase, details(one),
  ])), "No worker was lost.", 5);
}

function howItEnded(one) {
  const end = one.signal ?? (one.exit_status === null ? "" : `exit status ${one.exit_status}`);
  // What its requests were told may be from before the system said how it ended.
  return one.message.includes(end) ? one.message : `${one.message} (${end})`;
}

function details(one) {
  const cell = make("td", "", { class: "words" });
  const fold = make("details"), text = make("pre");
  fold.append(make("summary", howItEnded(one)), text);
  fold.addEventListener("toggle", async () => {
    if (!fold.open || text.textContent) return;
    try {
      const record = await ask("GET", `/admin/crashes/${one.id}`);
      const facts = [`up for ${seconds(record.uptime_s)}, ${record.num_running} requests, step ${record.step}`];
      if (record.was_out_of_memory) facts.push("out of memory");
      text.textContent = [...facts, ...record.stderr, ...record.stacks].join("\n");
    } catch (error) { text.textContent = error.message; }
  });
  cell.append(fold);
  return cell;
}

function startSignOut() {
  byId("sign-out").hidden = !isSignedIn;
  byId("sign-out").addEventListener("click", async () => {
    await fetch("/sign-out", { method: "POST", headers: proof });
    location.assign("/sign-in");
  });
}

async function start() {
  startSignOut();
  startChat();
  listen();
  const steps = [() => charts.start(), startConversations, startTree, showCrashes];
  for (const step of steps) {
    try { await step(); } catch (error) { byId("kept-note").textContent = error.message; }
  }
  setInterval(() => showCrashes().catch(() => {}), 15000);
}

start();
