// Text reaches the page through textContent only.
export const byId = (id) => document.getElementById(id);

export function make(name, text = "", attributes = {}) {
  const element = document.createElement(name);
  element.textContent = text;
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

export function row(cells) {
  const line = make("tr");
  for (const cell of cells) {
    if (cell instanceof Node) line.append(cell);
    else line.append(make("td", String(cell)));
  }
  return line;
}

export function fill(body, rows, whenEmpty, width) {
  body.replaceChildren(...(rows.length ? rows : [row([make("td", whenEmpty, { colspan: width })])]));
  rows.forEach(label);
}

// On a phone a row is a card, and each of its cells says what its column would.
export function label(line) {
  const names = line.closest("table").querySelectorAll("th");
  Array.from(line.cells).forEach((cell, place) => {
    if (!cell.querySelector("button")) cell.dataset.label = names[place].textContent;
  });
}

export function bytes(number) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (number >= 1000 && unit < units.length - 1) { number /= 1000; unit += 1; }
  return `${number.toFixed(unit && number < 100 ? 1 : 0)} ${units[unit]}`;
}

export function seconds(number) {
  if (number < 1) return `${Math.round(number * 1000)} ms`;
  if (number < 120) return `${number.toFixed(1)} s`;
  if (number < 7200) return `${Math.round(number / 60)} min`;
  return number < 172800 ? `${Math.round(number / 3600)} h` : `${Math.round(number / 86400)} d`;
}

export const count = (number) => number.toLocaleString("en");

// Who signed in proves with every request that this page asks, and no other.
const token = document.querySelector('meta[name="page-token"]').content;
export const isSignedIn = token !== "";
export const proof = isSignedIn ? { "x-hearth-page-token": token } : {};

export async function ask(method, path) {
  const answer = await fetch(path, { method, headers: proof });
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error?.message ?? `The server answered ${answer.status}.`);
  return body;
}

// Asks again before it does what costs something; the question goes with the focus.
export function confirmed(name, about, question, run) {
  const button = make("button", name, { type: "button", title: `${name} ${about}` });
  const calm = () => {
    if (button.dataset.sure) { delete button.dataset.sure; button.textContent = button.dataset.name; }
  };
  button.addEventListener("blur", calm);
  button.addEventListener("click", () => {
    if (question && !button.dataset.sure) {
      button.dataset.sure = "yes";
      button.dataset.name = button.textContent;
      button.textContent = question;
      return;
    }
    calm();
    run();
  });
  return button;
}

export async function act(note, work) {
  note.textContent = "…";
  try {
    note.textContent = (await work()) ?? "";
  } catch (error) {
    note.textContent = error.message;
  }
}
