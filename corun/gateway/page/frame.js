// What all pages share: the token, calls to the gateway with it, streams of events, and the colour scheme.
//
// The token stays in this tab: it is never part of an address, and it is gone when the tab is closed.

const TOKEN = "corun-token";
const THEMES = ["", "light", "dark"];

/** Return this tab's token; empty if there is none. */
export function token() {
  try {
    return sessionStorage.getItem(TOKEN) ?? "";
  } catch {
    return "";
  }
}

/** Keep a token for this tab, or forget it if it is empty, and tell the page with the event "corun:token". */
export function keepToken(value) {
  try {
    if (value) sessionStorage.setItem(TOKEN, value);
    else sessionStorage.removeItem(TOKEN);
  } catch {
    // Without storage the token would be lost at once; the page goes on to ask for it.
  }
  showToken();
  document.dispatchEvent(new CustomEvent("corun:token"));
}

/** Fetch a path of the gateway with the token, like `fetch`. */
export function ask(path, options = {}) {
  const headers = new Headers(options.headers);
  if (token()) headers.set("Authorization", `Bearer ${token()}`);
  return fetch(path, { cache: "no-store", credentials: "omit", ...options, headers });
}

/** Yield the data of each server-sent event of a response, as text. Comments are skipped. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const lines = part.split("\n").filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Open the dialog that asks for a token. why: what the gateway answered. */
export function signIn(why = "") {
  const dialog = document.getElementById("sign-in");
  dialog.querySelector(".why").textContent = why;
  if (!dialog.open) dialog.showModal();
}

function showToken() {
  document.getElementById("forget").hidden = !token();
}

function showTheme() {
  const theme = document.documentElement.dataset.theme ?? "";
  const names = { "": "system", light: "light", dark: "dark" };
  const button = document.getElementById("theme");
  button.title = `Colours: ${names[theme]}`;
  button.setAttribute("aria-label", `Colours: ${names[theme]}. Change`);
}

function nextTheme() {
  const root = document.documentElement;
  const next = THEMES[(THEMES.indexOf(root.dataset.theme ?? "") + 1) % THEMES.length];
  if (next) root.dataset.theme = next;
  else delete root.dataset.theme;
  try {
    localStorage.setItem("corun-theme", next);
  } catch {
    // The choice holds for this page only.
  }
  showTheme();
}

document.getElementById("theme").addEventListener("click", nextTheme);
document.getElementById("forget").addEventListener("click", () => keepToken(""));
document.addEventListener("submit", (event) => {
  if (!event.target.matches("form.token")) return; // Without JavaScript, the form goes to the gateway itself.
  event.preventDefault();
  const field = event.target.elements.namedItem("token");
  const value = field.value.trim();
  field.value = "";
  document.getElementById("sign-in").close();
  keepToken(value);
});
showTheme();
showToken();
