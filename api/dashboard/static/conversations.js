import { ask, byId, confirmed, bytes, count, fill, make, row, seconds } from "./dom.js";

const PATH = "/admin/dashboard/conversations";
const EVERY_MS = 5000;

export async function startConversations() {
  byId("search").addEventListener("input", () => refresh());
  setInterval(() => { if (!byId("kept").contains(document.activeElement)) refresh(); }, EVERY_MS);
  await refresh();
}

async function refresh() {
  const search = byId("search").value.trim();
  try {
    const found = await ask("GET", `${PATH}?search=${encodeURIComponent(search)}`);
    if (search !== byId("search").value.trim()) return;
    show(found);
  } catch (error) {
    byId("kept-note").textContent = error.message;
  }
}

function show(found) {
  const now = Date.now() / 1000;
  fill(byId("kept"), found.conversations.map((one) => {
    const line = row([
      make("td", `${one.id.slice(0, 12)}${one.is_named ? "" : " (unnamed)"}`, { title: one.id }),
      one.model, `${count(one.num_tokens)} (${bytes(one.own_bytes)} own, ${bytes(one.disk_bytes - one.own_bytes)} shared)`,
      make("td", one.tier, { class: `tier-${one.tier}` }),
      `${seconds(Math.max(0, now - one.last_used_s))} ago`,
      one.is_pinned ? "pinned" : one.expires_in_s === null ? "never" : seconds(one.expires_in_s),
      actions(one),
    ]);
    line.dataset.id = one.id;
    return line;
  }), "No conversation is on disk.", 7);
  const more = found.num_found - found.conversations.length;
  byId("kept-note").textContent = `${count(found.num_found)} found${more > 0 ? `, ${count(more)} not shown` : ""}`;
}

function actions(one) {
  const cell = make("td");
  const short = one.id.slice(0, 12);
  const query = `conversation=${encodeURIComponent(one.id)}`;
  const pin = confirmed(one.is_pinned ? "Unpin" : "Pin", short, null,
    () => act("POST", `/admin/cache/pin?${query}&pinned=${!one.is_pinned}`));
  const warm = confirmed("Prewarm", short, null, () => act("POST", `${PATH}/prewarm?${query}`));
  const remove = confirmed("Delete", short, "Really delete?",
    () => act("DELETE", `/admin/cache/conversations?${query}`));
  cell.append(pin, warm, remove);
  return cell;
}

async function act(method, path) {
  let said = "";
  try {
    said = (await ask(method, path)).message ?? "";
  } catch (error) {
    said = error.message;
  }
  await refresh();
  if (said) byId("kept-note").textContent = said;
}
