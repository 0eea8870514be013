import { act, ask, byId, bytes, confirmed, label, make } from "./dom.js";

export const LOADED = new Set(["ready", "busy"]);
const rows = new Map();

export function showModels(now) {
  const known = new Map(now.models.map((one) => [one.id, one]));
  const names = [...known.keys(), ...now.known_models.filter((id) => !known.has(id))];
  for (const [id, row] of rows) if (!names.includes(id)) { row.line.remove(); rows.delete(id); }
  names.forEach((id, place) => {
    if (!rows.has(id)) rows.set(id, build(id));
    const row = rows.get(id);
    if (byId("models").children[place] !== row.line) byId("models").insertBefore(row.line, byId("models").children[place] ?? null);
    if (!row.line.cells[0].dataset.label) label(row.line);
    update(row, known.get(id));
  });
}

// Built once and then only changed, so that neither focus nor a question is lost every second.
function build(id) {
  const line = make("tr"), cells = Array.from({ length: 5 }, () => make("td"));
  line.dataset.id = id;
  const path = `/admin/models/${id.split("/").map(encodeURIComponent).join("/")}`;
  const send = (action) => act(byId("models-note"), async () => {
    const one = await ask("POST", `${path}/${action}`);
    return `${one.id} is ${one.state}${one.pinned ? ", pinned" : ""}.`;
  });
  const load = confirmed("Load", id, "Load? Others may have to leave.", () => send("load"));
  const unload = confirmed("Unload", id, "Unload? Its memory goes.", () => send("unload"));
  const pin = confirmed("Pin", id, null, () => send(pin.dataset.pinned === "yes" ? "unpin" : "pin"));
  const warm = confirmed("Prewarm", id, null, () => act(byId("models-note"), () => prewarm(id)));
  const actions = make("td");
  actions.append(load, unload, pin, warm);
  line.append(...cells, actions);
  return { line, cells, load, unload, pin, warm };
}

function update({ cells, load, unload, pin, warm, line }, one) {
  const state = one?.state ?? "cold";
  const texts = [
    line.dataset.id, one?.error ? `${state}: ${one.error}` : state,
    one ? bytes(one.reserved_bytes) : "–", one?.num_running ?? 0, one?.num_waiting ?? 0,
  ];
  texts.forEach((text, place) => { if (cells[place].textContent !== String(text)) cells[place].textContent = text; });
  const isLoaded = LOADED.has(state);
  load.hidden = isLoaded;
  unload.hidden = warm.hidden = !isLoaded;
  pin.dataset.pinned = one?.pinned ? "yes" : "no";
  pin.textContent = one?.pinned ? "Unpin" : "Pin";
}

// What was used last of this model, as far as it is on disk.
async function prewarm(model) {
  const found = await ask("GET", `/admin/dashboard/conversations?search=${encodeURIComponent(model)}`);
  const mine = found.conversations.filter((one) => one.model === model && one.tier !== "hot").slice(0, 5);
  for (const one of mine) await ask("POST", `/admin/dashboard/conversations/prewarm?conversation=${one.id}`);
  return mine.length ? `${mine.length} conversations of ${model} are on their way into memory.` : `Everything of ${model} that was used last is in memory.`;
}
