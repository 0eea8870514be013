import { ask, byId, bytes, count, make } from "./dom.js";
import { setOptions } from "./chat.js";

const SVG = "http://www.w3.org/2000/svg";
const ROW = 22, WIDTH = 1000;

export function showTreeModels(models, first) {
  const select = byId("tree-model");
  const wasEmpty = select.options.length === 0;
  setOptions(select, models, first);
  if (wasEmpty && models.length) refresh();
}

export async function startTree() {
  byId("tree-model").addEventListener("change", refresh);
  setInterval(refresh, 5000);
  await refresh();
}

async function refresh() {
  const model = byId("tree-model").value;
  if (!model) return;
  try {
    show(await ask("GET", `/admin/dashboard/tree?model=${encodeURIComponent(model)}`));
  } catch (error) {
    byId("tree").replaceChildren(make("p", error.message));
  }
}

// A slot takes as many rows as the leaves below it, so that a trunk is one bar beside its branches.
function layOut(slots) {
  const known = new Map(slots.map((slot) => [slot.id, { slot, children: [], top: 0, rows: 0 }]));
  const roots = [];
  for (const node of known.values()) {
    const parent = known.get(node.slot.parent);
    (parent ? parent.children : roots).push(node);
  }
  const nodes = [...known.values()];
  for (const node of nodes.toReversed()) {
    node.rows = node.children.reduce((sum, child) => sum + child.rows, 0) || 1;
  }
  let next = 0;
  for (const root of roots) { root.top = next; next += root.rows; }
  for (const node of nodes) {
    let top = node.top;
    for (const child of node.children) { child.top = top; top += child.rows; }
  }
  return { nodes, rows: next };
}

function show(tree) {
  if (!tree.slots.length) {
    byId("tree").replaceChildren(make("p", "Nothing of this model is on disk."));
    return;
  }
  const { nodes, rows } = layOut(tree.slots);
  const scale = WIDTH / nodes.reduce((most, node) => Math.max(most, node.slot.end), 1);
  const shared = nodes.filter((node) => node.children.length > 1).length;
  const picture = svg("svg", {
    viewBox: `0 0 ${WIDTH} ${rows * ROW}`, role: "img",
    "aria-label": `${count(tree.num_slots)} slots, ${shared} of them shared by several branches`,
  });
  for (const node of nodes) picture.append(bar(node, scale));
  byId("tree").replaceChildren(picture);
}

function bar({ slot, children, top, rows }, scale) {
  const group = svg("g", { "data-slot": slot.id, "data-children": children.length, "data-rows": rows });
  const width = Math.max((slot.end - slot.start) * scale, 2);
  const box = svg("rect", { x: slot.start * scale, y: top * ROW, width, height: rows * ROW, rx: 3 });
  box.classList.add(slot.tier);
  if (slot.is_pinned) box.classList.add("pinned");
  const title = svg("title", {});
  title.textContent = `tokens ${slot.start}–${slot.end}, ${slot.tier}, ${bytes(slot.disk_bytes)}${slot.num_conversations > 1 ? `, shared by ${count(slot.num_conversations)} conversations` : ""}${slot.is_pinned ? ", pinned" : ""}`;
  group.append(title, box);
  if (width > 90) {
    const label = svg("text", { x: slot.start * scale + 6, y: top * ROW + (rows * ROW) / 2 + 4 });
    label.textContent = `${count(slot.end - slot.start)} tokens`;
    group.append(label);
  }
  return group;
}

function svg(name, attributes) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, String(value));
  return element;
}
