// The playground: reads the form, runs the experiment (experiment.js), and shows its runs side by side.

import { signIn } from "./frame.js";
import { Crowd, Failure, Run, Server, firstDifference, killNodeOf, killRefused } from "./experiment.js";

const KILL_AFTER = 8; // Tokens of the run after which its node is killed.
const RETRY_MS = 3000; // Between looks at whether a node can be killed again.
const STATES = { waiting: "waits", running: "streams", done: "done", failed: "failed", stopped: "stopped" };
const PILLS = { done: "good", failed: "bad", stopped: "warn" };

const at = (id) => document.getElementById(id);
const form = at("experiment");
const runs = {}; // By name: alone, crowd, kill. All others are compared with `alone`.
let running = null; // The AbortController of the experiment that runs.
let crowd = null;

// The form

function settings() {
  return {
    prompt: at("prompt").value,
    seed: at("seed").value.replace(/^0+(?=\d)/, ""),
    maxTokens: at("max-tokens").valueAsNumber,
    temperature: at("temperature").valueAsNumber,
    size: at("size").valueAsNumber,
    kinds: [...form.querySelectorAll("[name=kind]:checked")].map((box) => box.value),
  };
}

function isForeign() {
  return form.elements.namedItem("where").value === "foreign";
}

/** Return the chosen server. Throws Failure where the page's policy would not let the browser call it. */
function server() {
  if (!isForeign()) return new Server();
  let url;
  try {
    url = new URL(at("url").value.trim() || at("url").placeholder);
  } catch {
    throw new Failure("the server's address must be a URL, with /v1 at its end");
  }
  const local = url.protocol === "http:" && ["127.0.0.1", "localhost"].includes(url.hostname);
  if (!local && !form.dataset.origins.split(",").includes(url.origin)) {
    const limit = "must be http on 127.0.0.1 or localhost, or be allowed by the operator (--foreign-origins)";
    throw new Failure(`${url.origin}: the server ${limit}`);
  }
  return new Server(url.origin + url.pathname, at("key").value.trim());
}

function showForm() {
  at("size-shown").value = at("size").value;
  at("foreign").hidden = !isForeign();
  const isRunning = running !== null;
  at("fields").disabled = at("start").disabled = isRunning;
  at("stop").hidden = !isRunning;
  at("again").hidden = runs.alone?.state !== "done";
  at("again").disabled = isRunning;
  showKill();
}

/** Forget the runs: what is shown must be of what the form says. */
function forget() {
  for (const name of Object.keys(runs)) delete runs[name];
  for (const article of document.querySelectorAll(".run")) article.hidden = true;
  at("runs").hidden = at("bits").hidden = true;
  at("bits").querySelector("tbody").replaceChildren();
  showForm();
}

// What the page says. Screen readers hear it as it changes, so it changes a few times in a run and not with each token.

function say(text, kind = "") {
  at("said").className = `note js ${kind}`;
  if (at("said").textContent !== text) at("said").textContent = text;
}

function sayError(error) {
  if (error.status === 401) signIn(error.message);
  say(`${error.message[0].toUpperCase()}${error.message.slice(1)}.`.replace(/\.\.$/, "."), "bad");
}

// The kill

let refused = null; // Why no node can be killed now; null: not known yet.
let killing = null; // The kill that was asked for last, as a promise.

function showKill() {
  const button = at("kill");
  if (button === null) return; // It is never allowed here, and the page says so.
  button.hidden = isForeign();
  button.disabled = running !== null || refused !== "" || runs.alone?.state !== "done";
  const then = `After ${KILL_AFTER} tokens the node that draws them is killed. Other clients’ streams on it move, too.`;
  at("kill-why").textContent = isForeign() ? "Only nodes of this cluster can be killed from here."
    : refused ? `No node can be killed now: ${refused}.`
    : runs.alone?.state === "done" ? then : "To kill a node, first run the prompt alone: its bits are compared.";
}

async function lookAtKill() {
  if (at("kill") === null || document.hidden || isForeign()) return;
  try {
    refused = await killRefused();
  } catch (error) {
    refused = error.status === 401 ? null : error.message; // Without a token there is no sense in asking again.
  }
  showKill();
}

async function killNode(run) {
  run.kill = { at: run.tokens.length, node: "", why: "" };
  try {
    run.kill.node = await killNodeOf(run.requestId);
    run.kill.at = run.tokens.length;
    if (run.state === "running") say(`${run.kill.node} was killed. The stream goes on elsewhere.`);
  } catch (error) {
    run.kill.why = error.message;
  }
  showRun(run);
}

// The experiment

/** Run these runs one after the other, and say what came of it. */
async function experiment(names) {
  const signal = (running = new AbortController()).signal;
  const chosen = settings();
  const pressed = document.activeElement;
  try {
    const where = server();
    if (!chosen.kinds.length) throw new Failure("choose at least one kind of neighbours");
    if (names.includes("alone")) forget();
    showForm();
    if (pressed.disabled) at("stop").focus();
    say("Asking the server for its model.");
    const model = await where.model(signal);
    for (const name of names) await one(name, where, model, chosen, signal);
    sayVerdict(runs[names.at(-1)]);
  } catch (error) {
    if (signal.aborted) say("Stopped.", "warn");
    else sayError(error);
  } finally {
    running = null;
    const wasOnStop = document.activeElement === at("stop");
    showForm();
    if (wasOnStop) (pressed.disabled ? at("start") : pressed).focus();
    lookAtKill();
  }
}

async function one(name, where, model, chosen, signal) {
  const run = (runs[name] = new Run(name));
  clearColumn(name);
  showRun(run);
  try {
    if (name !== "alone") await gather(run, where, model, chosen, signal);
    say(name === "alone" ? "The prompt runs alone." : "The prompt runs in the crowd.");
    const before = crowd?.tokens ?? 0;
    await run.stream(where, model, chosen, signal, (index) => took(run, index, before));
    run.state = "done";
    await killing; // A fast stream may end before its node does.
  } catch (error) {
    run.state = signal.aborted ? "stopped" : "failed";
    run.why = signal.aborted ? "" : error.message;
    throw error;
  } finally {
    crowd?.stop();
    crowd = null;
    showRun(run);
  }
}

async function gather(run, where, model, chosen, signal) {
  say("The crowd gathers.");
  run.beside = { most: 0, tokens: 0 };
  crowd = new Crowd(where, model, chosen, () => {
    if (run.state === "running" && crowd) run.beside.most = Math.max(run.beside.most, crowd.drawing);
    run.beside.error = crowd?.error;
  });
  await crowd.start(signal);
}

function took(run, index, crowdBefore) {
  if (run.beside && crowd) {
    run.beside.tokens = crowd.tokens - crowdBefore;
    run.beside.most = Math.max(run.beside.most, crowd.drawing);
  }
  if (run.name === "kill" && index + 1 === KILL_AFTER) killing = killNode(run);
  showToken(run, index);
  showRun(run);
}

function sayVerdict(run) {
  const reference = runs.alone;
  const different = run === reference ? -1 : firstDifference(reference, run);
  const digests = [reference, run].map((each) => each.receipt?.output_digest);
  if (run === reference) {
    say(`Alone: ${count(run.tokens.length, "token")}.`);
  } else if (different >= 0) {
    const [one, other] = [reference, run].map((each) => each.tokens[different]);
    const shown = (token) => (token ? `${JSON.stringify(token.text)} with ${token.hex}` : "its end");
    follow(rowAt(different));
    say(`They part at token ${different + 1}: alone ${shown(one)}, in the crowd ${shown(other)}.`, "bad");
  } else if (digests[0] !== digests[1]) {
    say("The tokens agree, but the receipts' digests of them do not.", "bad");
  } else if (!run.beside.tokens) {
    say("All bits agree, but no neighbour drew a token meanwhile. Choose more neighbours or more tokens.", "warn");
  } else if (run.kill && !run.kill.node) {
    say(`All bits agree, but no node was killed: ${run.kill.why}.`, "warn");
  } else if (run.kill && run.kill.at >= run.tokens.length) {
    say(`All bits agree, but ${run.kill.node} died too late, after the last token. Choose more tokens.`, "warn");
  } else {
    if (run.kill) follow(rowAt(run.kill.at));
    const both = run.tokens.length;
    const killed = run.kill ? ` ${run.kill.node} was killed after token ${run.kill.at}, and the stream went on.` : "";
    say(`Every bit agrees: ${count(both, "token")} and ${both} log probabilities, alone and beside ` +
      `${count(run.beside.most, "neighbour")} that drew ${count(run.beside.tokens, "token")}.${killed}`, "good");
  }
}

function count(number, what) {
  return `${number} ${what}${number === 1 ? "" : "s"}`;
}

// Cards

function showRun(run) {
  const article = at(`run-${run.name}`);
  at("runs").hidden = article.hidden = false;
  const state = article.querySelector(".state");
  state.textContent = STATES[run.state];
  state.className = `pill state ${PILLS[run.state] ?? ""}`;
  const text = article.querySelector(".text");
  text.textContent = run.text;
  text.scrollTop = text.scrollHeight;
  article.querySelector("dl").replaceChildren(...facts(run).flatMap(([name, value, kind]) => {
    const [term, data] = [document.createElement("dt"), document.createElement("dd")];
    term.textContent = name;
    data.textContent = value;
    data.className = kind ?? "";
    return [term, data];
  }));
}

function facts(run) {
  const found = [["Tokens", run.seconds ? `${run.tokens.length} in ${run.seconds.toFixed(1)} s` : `${run.tokens.length}`]];
  if (run !== runs.alone && runs.alone) {
    const different = firstDifference(runs.alone, run);
    if (different >= 0) found.push(["Bits", `differ from token ${different + 1} on`, "bad"]);
    else if (run.tokens.length) found.push(["Bits", `those of the run alone, ${run.tokens.length} of ${run.tokens.length}`]);
  }
  if (run.beside) {
    found.push(["Beside it", `up to ${count(run.beside.most, "neighbour")}, ${count(run.beside.tokens, "token")}`]);
  }
  if (run.beside?.error) found.push(["Crowd", `some were refused: ${run.beside.error}`]);
  if (run.kill) found.push(["Killed", run.kill.node ? `${run.kill.node}, after token ${run.kill.at}` : `no node: ${run.kill.why || "asked"}`]);
  if (run.receipt) {
    const { prefill_node: prefill, decode_node: decode, output_digest: digest } = run.receipt;
    found.push(["Nodes", `${prefill.node_id} → ${decode.node_id}`], ["Digest", `${digest.slice(0, 16)}…`]);
  }
  if (run.fingerprint) found.push(["Fingerprint", run.fingerprint.length > 16 ? `${run.fingerprint.slice(0, 16)}…` : run.fingerprint]);
  if (run.tokens.some((token) => !token.isFp32)) found.push(["Rounded", "the server sends numbers that are no fp32", "bad"]);
  if (run.why) found.push(["Error", run.why, "bad"]);
  return found;
}

// The table

function showToken(run, index) {
  const token = run.tokens[index];
  const reference = runs.alone?.tokens[index];
  const isOther = run !== runs.alone && (!reference || reference.key !== token.key || reference.hex !== token.hex);
  const kind = run === runs.alone ? "" : isOther ? "other" : "same";
  const isCut = run.kill?.node && run.kill.at === index ? " cut" : "";
  const cell = document.createElement("i");
  cell.className = kind + isCut;
  at(`run-${run.name}`).querySelector(".strip").append(cell);
  at("bits").hidden = false;
  const row = rowAt(index);
  const data = row.querySelector(`[data-run=${run.name}]`);
  data.className = kind + isCut;
  data.textContent = token.hex + (isOther && reference?.key !== token.key ? ` ${visible(token.text)}` : "");
  if (isCut) data.append(label("cut-name", `${run.kill.node} killed`));
  if (kind) data.append(label("vh", isOther ? "other bits" : "same bits"));
  if (run === runs.alone || !reference) nameToken(row, token);
  if (isOther && firstDifference(runs.alone, run) === index) row.classList.add("first");
  showColumns();
  follow(row);
}

/** Keep the newest row in sight. */
function follow(row) {
  const box = at("bits").querySelector(".box");
  box.scrollTop = row.offsetTop - box.clientHeight / 2;
}

function label(kind, text) {
  const made = document.createElement("span");
  made.className = kind;
  made.textContent = text;
  return made;
}

function nameToken(row, token) {
  const cell = row.querySelector(".token");
  cell.textContent = visible(token.text) || "no text yet";
  cell.classList.toggle("empty", !token.text);
  cell.title = `token ${token.key}`;
}

function rowAt(index) {
  const body = at("bits").querySelector("tbody");
  while (body.rows.length <= index) {
    const row = body.insertRow();
    const number = document.createElement("th");
    number.scope = "row";
    number.textContent = body.rows.length;
    row.append(number);
    row.insertCell().className = "token";
    for (const name of ["alone", "crowd", "kill"]) row.insertCell().dataset.run = name;
  }
  return body.rows[index];
}

/** Show the columns of the runs that there are. */
function showColumns() {
  for (const cell of at("bits").querySelectorAll("[data-run]")) cell.hidden = !runs[cell.dataset.run];
}

function clearColumn(name) {
  at(`run-${name}`).querySelector(".strip").replaceChildren();
  for (const cell of at("bits").querySelectorAll(`tbody [data-run=${name}]`)) {
    cell.className = "";
    cell.textContent = "";
  }
  for (const row of at("bits").querySelectorAll("tr.first")) row.classList.remove("first");
}

/** Return a text with pictures of its control characters. */
function visible(text) {
  return [...text].map((char) => (char < " " ? String.fromCodePoint(0x2400 + char.codePointAt(0)) : char)).join("");
}

// The page

let isGreeted = false; // Whether the cluster has answered, or wants a token first.

async function greet() {
  try {
    const model = await new Server().model();
    isGreeted = true;
    if (!running && !runs.alone) say(`Ready: ${model.id}.`);
  } catch (error) {
    isGreeted = error.status === 401;
    if (!running) sayError(error);
  }
  lookAtKill();
}

/** Look again where the cluster does not answer, or no node can be killed. */
function lookAgain() {
  if (running || document.hidden) return;
  if (!isGreeted) greet();
  else if (refused) lookAtKill();
}

form.addEventListener("input", (event) => {
  if (event.target.name !== "kind" && event.target.id !== "size") forget();
  showForm();
});
form.addEventListener("submit", (event) => {
  event.preventDefault();
  if (!running) experiment(["alone", "crowd"]);
});
at("again").addEventListener("click", () => experiment(["crowd"]));
at("kill")?.addEventListener("click", () => experiment(["kill"]));
at("stop").addEventListener("click", () => running?.abort());
addEventListener("pagehide", () => running?.abort()); // A page that the browser keeps must not keep its crowd.
document.addEventListener("corun:token", greet);
setInterval(lookAgain, RETRY_MS);
showForm();
greet();
