// Keeps the live page up to date. The gateway wrote it, and sends new texts for the same places; only if the structure
// has changed, the page is fetched again. So every figure is computed and worded in one place.

import { ask, events, token } from "./frame.js";

const POINTS = 60;
const LONGEST_WAIT_MS = 10_000;
const STATES = { ".": "empty", r: "reserved", R: "running", d: "draining", o: "of another router" };

const main = document.getElementById("main");
const series = new Map(); // The last values of each figure with a curve, by its key.
const nodes = new Map(); // What is in the slots of each node, by the node's key.
let connection = new AbortController();

// The stream.

async function follow() {
  connection.abort();
  if (!main.querySelector(".top")) return; // The page asks for a token: what is being written there must stay.
  const own = (connection = new AbortController());
  for (let waitMs = 500; !own.signal.aborted; waitMs = Math.min(2 * waitMs, LONGEST_WAIT_MS)) {
    try {
      const response = await ask("/live", { signal: own.signal });
      if (response.status === 401) return await reload();
      if (!response.ok) throw new Error(await reason(response));
      for await (const text of events(response)) {
        const view = JSON.parse(text);
        if (view.error?.code === 401) return await reload();
        if (view.error) throw new Error(view.error.message);
        if (own.signal.aborted) return;
        await show(view);
        waitMs = 500;
      }
      if (own.signal.aborted) return;
      showTrouble("The connection to the gateway has ended. Trying again.");
    } catch (error) {
      if (own.signal.aborted) return;
      showTrouble(error instanceof TypeError ? "The gateway does not answer. Trying again." : error.message);
    }
    await new Promise((done) => setTimeout(done, waitMs * (0.75 + Math.random() / 2)));
  }
}

async function reason(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The gateway answers with status ${response.status}. Trying again.`;
  }
}

/** Fetch the page again, and take over what it shows. */
async function reload() {
  main.setAttribute("aria-busy", "true");
  try {
    const response = await ask("/");
    const page = new DOMParser().parseFromString(await response.text(), "text/html");
    const focused = document.activeElement?.closest?.("[data-node]")?.dataset.node;
    main.replaceChildren(...page.getElementById("main").children);
    document.title = page.title;
    nodes.clear();
    if (focused) gridOf(focused)?.querySelector("td")?.focus();
  } finally {
    main.removeAttribute("aria-busy");
  }
}

// What a view shows.

async function show(view) {
  const layout = main.querySelector("[data-layout]")?.dataset.layout;
  if (layout !== view.layout) await reload();
  for (const place of main.querySelectorAll("[data-k]")) {
    const text = view.texts[place.dataset.k] ?? "";
    if (place.textContent !== text) place.textContent = text;
  }
  for (const place of main.querySelectorAll("[data-c]")) colour(place, view.colours[place.dataset.c]);
  const pill = main.querySelector(".top .pill");
  if (pill) colour(pill, view.colours.state);
  main.querySelector('[data-tile="mismatches"]')?.classList.toggle("bad", view.texts.mismatches !== "0");
  showAlerts(view.alerts);
  for (const [key, value] of Object.entries(view.numbers)) draw(key, value);
  for (const [key, slots] of Object.entries(view.slots)) showSlots(key, slots);
  if (shown) showTip(shown);
}

function colour(place, name) {
  for (const each of ["good", "warn", "bad", "draining", "off"]) place.classList.toggle(each, each === name);
}

function showAlerts(alerts) {
  const place = document.getElementById("alerts");
  const texts = JSON.stringify(alerts);
  if (!place || place.dataset.shown === texts) return; // What is said again would be read out again.
  place.dataset.shown = texts;
  place.replaceChildren(
    ...alerts.map(([kind, text]) => {
      const note = document.createElement("p");
      note.className = `note ${kind}`;
      note.textContent = text;
      return note;
    }),
  );
}

function showTrouble(text) {
  showAlerts([["bad", text]]);
  const pill = main.querySelector(".top .pill");
  if (!pill) return;
  colour(pill, "bad");
  pill.querySelector("[data-k]").textContent = "not connected";
}

/** Add a value to a figure's curve. Values that are not known are gaps. */
function draw(key, value) {
  const values = series.get(key) ?? [];
  series.set(key, values);
  values.push(value);
  if (values.length > POINTS) values.shift();
  const picture = main.querySelector(`[data-s="${key}"]`);
  if (!picture) return;
  const most = Math.max(...values.map((each) => each ?? 0), 1e-9);
  const start = POINTS - values.length;
  let curve = "";
  let area = "";
  let last = null;
  values.forEach((each, index) => {
    if (each === null) {
      last = null;
      return;
    }
    const x = start + index;
    const y = (23 - (22 * each) / most).toFixed(2);
    curve += `${last === null ? "M" : "L"}${x} ${y}`;
    if (last !== null) area += `M${last[0]} 24L${last[0]} ${last[1]}L${x} ${y}L${x} 24z`;
    last = [x, y];
  });
  picture.querySelector(".curve").setAttribute("d", curve);
  picture.querySelector(".area").setAttribute("d", area);
}

// Slots.

function gridOf(key) {
  return main.querySelector(`[data-node="${CSS.escape(key)}"]`);
}

function showSlots(key, { cells, line, samples }) {
  const card = gridOf(key);
  if (!card) return;
  const known = nodes.get(key) ?? { places: [...card.querySelectorAll(".grid td")], cells: "", focus: 0 };
  known.samples = new Map(samples.map((each) => [each[0], each]));
  nodes.set(key, known);
  known.places.forEach((place, number) => {
    const letter = cells[number] ?? ".";
    if (known.cells[number] !== letter) {
      place.className = `c ${letter === "." ? "none" : letter}`;
      place.setAttribute("aria-label", nameOf(number, letter));
    }
    const [, , request, , , drawn, most] = known.samples.get(number) ?? [];
    const part = letter === "R" && request !== undefined ? `${Math.round((100 * drawn) / most)}%` : "";
    if (place.dataset.part === part) return;
    place.dataset.part = part;
    if (part) place.style.setProperty("--p", part);
    else place.style.removeProperty("--p");
  });
  if (!known.cells && known.places.length) known.places[known.focus].tabIndex = 0;
  known.cells = cells;
  const places = card.querySelector(".places");
  if (places.dataset.shown !== line) {
    places.dataset.shown = line;
    places.replaceChildren(...[...line].map((letter) => Object.assign(document.createElement("i"), { className: `c ${letter}` })));
  }
  if (card.querySelector("details").open) showTable(card, known);
}

/** Name a slot for those who hear the page. More is said of the one that has the focus. */
function nameOf(number, letter = ".") {
  return `slot ${number}, ${STATES[letter]}`;
}

/** Write the table of a node's samples. It is open, or about to be. */
function showTable(card, known) {
  const all = [...known.samples.values()];
  const rows = all.filter((row) => row.length > 2).sort((a, b) => a[0] - b[0]);
  const untold = all.length - rows.length;
  const body = card.querySelector("tbody:not(.grid tbody)");
  body.replaceChildren(
    ...rows.map((row) => {
      const [place, age, request, index, seed, drawn, most] = row;
      const slots = known.places.length;
      const state = place < slots ? STATES[known.cells[place]] : "in line";
      const where = place < slots ? place : `line ${place - slots}`;
      return rowOf([where, state, sampleName(request, index), `${drawn} of ${most}`, seed, seconds(age)]);
    }),
    ...(untold || !rows.length ? [wideRow(untold ? `${untold} of other clients` : "none")] : []),
  );
}

function rowOf(cells) {
  const row = document.createElement("tr");
  row.append(...cells.map((text) => Object.assign(document.createElement("td"), { textContent: text })));
  return row;
}

function wideRow(text) {
  const row = rowOf([text]);
  row.firstChild.colSpan = 6;
  row.firstChild.className = "dim";
  return row;
}

function sampleName(request, index) {
  return index ? `${request} #${index}` : request;
}

function seconds(ms) {
  return ms < 10_000 ? `${(ms / 1000).toFixed(1)} s` : `${Math.round(ms / 1000)} s`;
}

/** What is in a slot: its state, and pairs of names and values. */
function facts(cell) {
  const key = cell.closest("[data-node]").dataset.node;
  const known = nodes.get(key);
  if (!known) return null;
  const number = known.places.indexOf(cell);
  const [, age, request, index, seed, drawn, most] = known.samples.get(number) ?? [];
  const found = [];
  if (request !== undefined) {
    found.push(["request", sampleName(request, index)], ["tokens", `${drawn} of ${most}`], ["seed", seed]);
  }
  if (age !== undefined) found.push(["age", seconds(age)]);
  return { title: nameOf(number, known.cells[number]), found };
}

// The details of one slot, by pointer or keyboard.

let shown = null;

/** Let the slot of which more was said have its name again: what was said grows old. */
function forget() {
  const told = shown?.isConnected && facts(shown);
  if (told) shown.setAttribute("aria-label", told.title);
  shown = null;
}

function showTip(cell) {
  const tip = document.getElementById("tip");
  if (shown !== cell) forget();
  const told = cell.isConnected && facts(cell);
  shown = told ? cell : null;
  tip.hidden = !told;
  if (!told) return;
  const title = Object.assign(document.createElement("b"), { textContent: told.title });
  const list = document.createElement("dl");
  for (const [name, value] of told.found) {
    list.append(
      Object.assign(document.createElement("dt"), { textContent: name }),
      Object.assign(document.createElement("dd"), { textContent: value }),
    );
  }
  tip.replaceChildren(title, ...(told.found.length ? [list] : []));
  cell.setAttribute("aria-label", [told.title, ...told.found.map((pair) => pair.join(" "))].join(", "));
  const at = cell.getBoundingClientRect();
  const left = Math.min(Math.max(8, at.left), innerWidth - tip.offsetWidth - 8);
  const below = at.bottom + 8 + tip.offsetHeight < innerHeight;
  tip.style.left = `${left}px`;
  tip.style.top = `${below ? at.bottom + 8 : Math.max(8, at.top - 8 - tip.offsetHeight)}px`;
}

function hideTip() {
  forget();
  document.getElementById("tip").hidden = true;
}

function cellOf(event) {
  return event.target.closest?.(".grid td");
}

main.addEventListener("pointerover", (event) => {
  const cell = cellOf(event);
  if (cell) showTip(cell);
  else if (shown && shown !== document.activeElement) hideTip();
});
main.addEventListener("pointerleave", () => shown !== document.activeElement && hideTip());
main.addEventListener("focusin", (event) => {
  const cell = cellOf(event);
  if (cell) showTip(cell);
  else hideTip();
});
main.addEventListener("focusout", hideTip);
addEventListener("scroll", () => shown && showTip(shown), { passive: true });

main.addEventListener("keydown", (event) => {
  const cell = cellOf(event);
  if (!cell) return;
  if (event.key === "Escape") return hideTip();
  const known = nodes.get(cell.closest("[data-node]").dataset.node);
  const columns = cell.parentElement.children.length;
  const last = known ? known.places.length - 1 : 0;
  const number = known ? known.places.indexOf(cell) : 0;
  const moves = {
    ArrowLeft: number - 1, ArrowRight: number + 1, ArrowUp: number - columns, ArrowDown: number + columns,
    Home: event.ctrlKey ? 0 : number - (number % columns), End: event.ctrlKey ? last : number - (number % columns) + columns - 1,
  };
  if (!known || !(event.key in moves)) return;
  event.preventDefault();
  const next = moves[event.key];
  if (next < 0 || next > last) return;
  known.places[known.focus].tabIndex = -1;
  known.focus = next;
  known.places[next].tabIndex = 0;
  known.places[next].focus();
});

main.addEventListener(
  "toggle",
  (event) => {
    const target = event.target;
    if (target.matches("details.samples") && target.open) {
      const card = target.closest("[data-node]");
      const known = nodes.get(card.dataset.node);
      if (known?.samples) showTable(card, known);
    }
  },
  true,
);

// A definition opens beside its name.
main.addEventListener(
  "beforetoggle",
  (event) => {
    const card = event.target;
    if (!card.matches(".definition") || event.newState !== "open" || innerWidth < 620) return;
    const name = main.querySelector(`[popovertarget="${card.id}"]:focus`) ?? main.querySelector(`[popovertarget="${card.id}"]:hover`);
    if (!name) return;
    const at = name.getBoundingClientRect();
    card.style.margin = "0";
    card.style.inset = "auto";
    card.style.left = `${Math.min(at.left, innerWidth - 400)}px`;
    if (at.bottom < innerHeight / 2) card.style.top = `${at.bottom + 8}px`;
    else card.style.bottom = `${innerHeight - at.top + 8}px`;
  },
  true,
);

document.addEventListener("corun:token", () => {
  main.setAttribute("aria-busy", "true");
  reload().then(follow, () => showTrouble("The gateway does not answer. Trying again.")).catch(() => {});
});
document.addEventListener("visibilitychange", () => {
  if (document.hidden) connection.abort(); // Nobody looks: the routers are not asked for this tab.
  else follow();
});

// A page that the server wrote without a token is written again with the one that this tab has.
if (token() && !main.querySelector(".top")) reload().then(follow);
else follow();
